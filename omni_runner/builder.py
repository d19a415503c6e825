"""Build the per-request payload dicts of one step from packed columns.

Everything here works on whole columns: a key is routed once, one split yields the tensors of all requests and of all
keys that share a column, and the dicts are filled key by key. The number of torch calls does not depend on the number
of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from omni_runner.lowering import KeyRecipe, PlainElements, fill_template, pick_elements
from omni_runner.packing import PackedStep
from omni_runner.step import StepContext
from omni_runner.untrack import DICTS_COME_BACK, untrack

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

Channel: TypeAlias = list[dict[str, Tensor] | None] | None


@dataclass(frozen=True, slots=True)
class ChannelRules:
    """Which channels of the output a stage fills, according to the engine's configuration.

    Attributes
    ----------
    partitions
        Whether client keys go to the client's channel and the rest to the next stage's; if not, both get all keys.
    client_keys
        If not empty, the keys that the model declares for its client, regardless of `partitions`.
    is_text
        Whether the output is text; then no channel is filled, unless `client_keys` is set.
    crosses_processes
        Whether payloads will be pickled; each tensor then gets its own storage, so that the bytes of the others are
        not pickled with it. Costs about twice as much.
    untracks
        Whether accumulating payloads are excluded from cyclic garbage collection, see `untrack`.
    shares_channel
        Whether the engine puts the same list object into both fields if the channels do not differ.
    """

    partitions: bool
    client_keys: tuple[str, ...] = ()
    is_text: bool = False
    crosses_processes: bool = False
    untracks: bool = True
    shares_channel: bool = True


class ChannelBuilder:
    """Builds the payload channels of one stage's steps.

    Parameters
    ----------
    upstream
        The resolved engine names, which supply the partitioning and value rules.
    rules
        How the stage is configured.
    """

    def __init__(self, upstream: Upstream, rules: ChannelRules) -> None:
        self._upstream = upstream
        self._rules = rules
        self._one_list = rules.shares_channel and not rules.partitions and not rules.client_keys
        self._routes: dict[str, tuple[bool, bool]] = {}

    def build(self, packed: PackedStep) -> tuple[Channel, Channel]:
        """Build the inter-stage and the client channel of one step; waits for the bytes.

        Parameters
        ----------
        packed
            The step, packed in columns.

        Returns
        -------
        inter_stage_outputs, multimodal_outputs
            One entry per request, None for those without a payload; a channel without any payload is None, not a list.
            Every payload owns its tensors: changing one in place does not affect other requests.
        """
        rules = self._rules
        if packed.lowering is None or (rules.is_text and not rules.client_keys):
            return None, None
        columns = _split_columns(packed, packed.lowering.payload_columns, own_storages=rules.crosses_processes)
        inter: list[_Column] = []
        client: list[_Column] = []
        for recipe in packed.lowering.recipes:
            to_inter, to_client = self._routes.get(recipe.key) or self._route(recipe.key)
            plain = _plain_values(recipe, packed)
            if plain is None:
                continue
            tensors = _tensors(recipe, columns, len(packed.step.consumers))
            if to_inter:
                inter.append(self._column(recipe.key, tensors, plain))
            if to_client:
                client.append(self._column(recipe.key, tensors, plain))
        untracks = rules.untracks and packed.snapshot is not None and packed.snapshot.copies_out
        if untracks:
            for column in (*inter, *client):
                untrack(column.items)
        inter_channel = _zip_channel(inter, packed.step, untracks=untracks)
        return inter_channel, inter_channel if self._one_list else _zip_channel(client, packed.step, untracks=untracks)

    def _route(self, key: str) -> tuple[bool, bool]:
        """Whether a key goes to the next stage and whether to the client; asks the engine once per key."""
        inter = client = True
        if self._rules.partitions:
            for_inter, for_client = self._upstream.partition_flat_payload({key: None})
            inter, client = key in for_inter, key in for_client
        if self._rules.client_keys:
            client = key in self._rules.client_keys
        elif self._one_list:
            client = False
        self._routes[key] = inter, client
        return inter, client

    def _column(self, key: str, tensors: Sequence[Tensor | None], plain: _PlainValues) -> _Column:
        """Merge a key's tensors with its plain values, which are converted to tensors for this channel only."""
        if not plain.owners:
            return _Column(key, tensors, complete=True)
        items: list[Tensor | None] = list(tensors) if tensors else [None] * len(plain.owners)
        for owner, item in zip(plain.owners, self._wrap(key, plain.values), strict=True):
            items[owner] = item
        return _Column(key, items, complete=all(item is not None for item in items))

    def _wrap(self, key: str, values: list[Any]) -> Sequence[Tensor | None]:
        """Convert plain values to tensors; None for those that the engine drops.

        Numbers of one type, or flat lists of them, take two torch calls in all, unless each needs its own storage. All
        other values, and those that torch rejects, go one by one to the engine's function, for its warnings and errors.
        """
        try:
            together = None if self._rules.crosses_processes else _wrap_numbers(values)
        except (RuntimeError, ValueError, TypeError, OverflowError):  # a number that no dtype can hold
            together = None
        if together is not None:
            return together
        return [self._upstream.ensure_tensor_values({key: value}).get(key) for value in values]


@dataclass(frozen=True, slots=True)
class _PlainValues:
    """Plain values of one key and the consumers that get them."""

    owners: Sequence[int] = ()
    values: list[Any] = field(default_factory=list)


_NO_VALUES = _PlainValues()


class _Column(NamedTuple):
    """One key's items, one per consumer; None for a value that the engine drops."""

    key: str
    items: Sequence[Tensor | None]
    complete: bool


def _split_columns(packed: PackedStep, count: int, *, own_storages: bool) -> list[Sequence[Tensor]]:
    """Split the first `count` packed columns into their pieces."""
    snapshot = packed.snapshot
    if snapshot is None:
        return []
    split = snapshot.pieces if own_storages else snapshot.split
    return [split(i) for i in range(count)]


def _tensors(recipe: KeyRecipe, columns: list[Sequence[Tensor]], num_consumers: int) -> Sequence[Tensor | None]:
    """Return a key's packed tensors, one per consumer, None where it gets a plain value; empty if the key has none."""
    if not recipe.pieces:
        return ()
    pieces = recipe.pieces[0]
    if pieces.owners is None:
        return columns[pieces.column][pieces.first : pieces.end]
    items: list[Tensor | None] = [None] * num_consumers
    for pieces in recipe.pieces:
        found = columns[pieces.column][pieces.first : pieces.end]
        for owner, tensor in zip(pieces.owners or (), found, strict=True):
            items[owner] = tensor
    return items


def _plain_values(recipe: KeyRecipe, packed: PackedStep) -> _PlainValues | None:
    """Return a key's plain values in this step; None if the engine omits the key for every request."""
    plain = recipe.plain
    if plain is None:
        return _NO_VALUES
    if isinstance(plain, PlainElements):
        return _PlainValues(plain.owners, [fill_template(template, packed.values) for template in plain.templates])
    value = packed.values[plain.index]
    if value is None:
        return None
    owners = range(len(packed.step.consumers))
    if isinstance(value, list):
        return _PlainValues(owners, pick_elements(recipe.key, value, packed.step))
    return _PlainValues(owners, [value] * len(owners))


_NUMBERS = ({int}, {float}, {bool})  # exact types: torch gives subclasses, such as NumPy's, other dtypes


def _wrap_numbers(values: list[Any]) -> Sequence[Tensor] | None:
    """Convert numbers of one type, or non-empty flat lists of them, to tensors; None for anything else."""
    kinds = set(map(type, values))
    if kinds in _NUMBERS:
        return torch.tensor(values).unbind()
    if kinds in ({list}, {tuple}) and all(values):
        items = list(chain.from_iterable(values))
        if set(map(type, items)) in _NUMBERS:
            return torch.tensor(items).split_with_sizes(list(map(len, values)))
    return None


def _zip_channel(columns: list[_Column], step: StepContext, *, untracks: bool) -> Channel:
    if not columns:
        return None
    payloads = _zip_payloads(columns, len(step.consumers))
    if untracks and DICTS_COME_BACK:
        untrack(payloads)
    if step.everyone_consumes:
        return payloads
    channel: list[Any] = [None] * len(step.request_ids)
    for position, payload in zip(step.consumers, payloads, strict=True):
        channel[position] = payload
    return channel


def _zip_payloads(columns: list[_Column], count: int) -> list[Any]:
    """Fill the dicts of all consumers column by column, which is faster than dict by dict."""
    payloads: list[Any] = [{} for _ in range(count)]
    for key, items, complete in columns:
        if complete:
            for payload, item in zip(payloads, items, strict=True):
                payload[key] = item
        else:
            for payload, item in zip(payloads, items, strict=True):
                if item is not None:
                    payload[key] = item
    return payloads
