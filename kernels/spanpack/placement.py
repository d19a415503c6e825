"""Placement: which rows of a leaf belong to which request."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from .batch import Spans
from .columns import ColumnSpec
from .errors import InputError, PlacementError
from .tree import Node


class Placement(Enum):
    """How a leaf, or a list of leaves, is divided among the requests."""

    __hash__ = object.__hash__  # Enum's own hashes the name in Python, in every lookup of a plan

    PER_TOKEN = "per-token"
    """A tensor whose rows are those of the batch: each request gets its span."""
    PER_REQUEST = "per-request"
    """A list with one tensor per request of the batch: each request gets its own."""
    INVARIANT = "invariant"
    """The same for every request: each gets a copy of its own, which it may change."""
    SHARED = "shared"
    """The same for every request, and all get the same view: read only by agreement."""


@dataclass(frozen=True)
class RowMap:
    """Explicit rows: request id -> (first row, number of rows). Requests that are not named do not get the leaf.

    Attributes
    ----------
    rows
        ``(first row, number of rows)`` by request id.
    """

    rows: Mapping[str, tuple[int, int]]
    key: tuple[tuple[str, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        try:
            rows = {name: (operator.index(start), operator.index(count)) for name, (start, count) in self.rows.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise PlacementError(
                f"a RowMap maps request ids to (first row, number of rows), given: {self.rows!r:.80}"
            ) from error
        object.__setattr__(self, "rows", MappingProxyType(rows))  # the caller's mapping may change
        object.__setattr__(self, "key", tuple((name, *span) for name, span in rows.items()))

    def __hash__(self) -> int:
        return hash(self.key)


_MOST_PATHS = 50  # paths named in an error message

Rule = Placement | RowMap
Rules = Mapping[str, Rule] | Callable[[str], Rule | None]


def key_of(rules: Mapping[str, Rule]) -> Hashable:
    """A hashable key that identifies a mapping of rules.

    Raises
    ------
    InputError
        `rules` is not a mapping to rules.
    """
    try:
        key = tuple(rules.items())
        hash(key)
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"rules are {rules!r:.80}; give a mapping from path to Placement or RowMap, or a function"
        ) from error
    return key


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """One node of a payload, lowered to columns.

    Attributes
    ----------
    sources
        For each consumer, in order: None if it does not get the node, else a (column, piece) pair for each leaf that it
        sees.
    is_list
        Whether consumers see a list of tensors rather than one tensor.
    """

    node: Node
    sources: tuple[tuple[tuple[int, int], ...] | None, ...]
    is_list: bool


def lower(
    found: Sequence[Node], leaves: Sequence[Tensor], spans: Spans, rules: Rules | None
) -> tuple[list[ColumnSpec], list[Placed]]:
    """Lower the nodes of a payload to columns, according to their placement.

    Raises
    ------
    InputError
        The rules are a class: calling it would make an object, not choose a rule.
    PlacementError
        A node fits no rule, a rule does not fit its node, or a rule names no node; the message names the path.
    """
    if isinstance(rules, type):
        raise InputError(
            f"rules are the class {rules.__name__}; give a mapping from path to Placement or RowMap, or a function"
        )
    if rules is not None and not callable(rules):
        _check_paths(rules, found)
    columns: list[ColumnSpec] = []
    placed = [_lower_node(node, leaves, spans, _rule_for(node, rules), columns) for node in found]
    return columns, placed


def _check_paths(rules: Mapping[str, Rule], found: Sequence[Node]) -> None:
    paths = [node.path for node in found]
    for path in rules:
        if path not in paths:
            there = ", ".join(map(repr, paths[:_MOST_PATHS])) or "no tensors"
            more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
            raise PlacementError(f"there is a rule for {path!r}, but no such leaf; this payload has {there}{more}")


def _rule_for(node: Node, rules: Rules | None) -> Rule | None:
    if rules is None:
        return None
    rule = rules(node.path) if callable(rules) else rules.get(node.path)
    if rule is not None and not isinstance(rule, (Placement, RowMap)):
        raise PlacementError(f"the rule for {node.path!r} is {rule!r}; give a Placement or a RowMap")
    return rule


def _lower_node(
    node: Node, leaves: Sequence[Tensor], spans: Spans, rule: Rule | None, columns: list[ColumnSpec]
) -> Placed:
    tensors = [leaves[index] for index in node.leaves]
    rule = rule or _infer(node, tensors, spans)
    if rule is Placement.PER_REQUEST:
        return _per_request(node, tensors, spans, columns)
    if rule is Placement.INVARIANT or rule is Placement.SHARED:
        return _whole(node, tensors, spans, columns, shared=rule is Placement.SHARED)
    if node.is_list:
        raise PlacementError(
            f"{node.path!r} is a list of {len(tensors)} tensors; {_name(rule)} takes one tensor. Concatenate them, or "
            "declare the list Placement.INVARIANT or, with one tensor per request, Placement.PER_REQUEST"
        )
    tensor = tensors[0]
    if tensor.dim() == 0:
        raise PlacementError(
            f"{node.path!r} is 0-dimensional; {_name(rule)} takes a tensor with rows. Declare it Placement.INVARIANT "
            "or Placement.SHARED"
        )
    if _is_opaque(tensor):
        raise PlacementError(
            f"{node.path!r} is sparse or quantized and can only be packed whole; {_name(rule)} takes rows of it. "
            "Declare it Placement.INVARIANT or Placement.SHARED"
        )
    if isinstance(rule, RowMap):
        return _row_map(node, tensor, spans, rule, columns)
    _check_rows(node, tensor, spans)
    if not spans.consumers:
        return Placed(node, (), False)
    columns.append(ColumnSpec(node.leaves[0], spans.consumer_starts, spans.consumer_rows))
    return Placed(node, tuple(((len(columns) - 1, piece),) for piece in range(len(spans.consumers))), False)


def _infer(node: Node, tensors: Sequence[Tensor], spans: Spans) -> Placement:
    if node.is_list:
        if len(tensors) == len(spans.request_ids):
            return Placement.PER_REQUEST
        raise PlacementError(
            f"{node.path!r} is a list of {len(tensors)} tensors, the batch has {len(spans.request_ids)} requests; "
            "say what it is, e.g. rules={" + repr(node.path) + ": Placement.INVARIANT}"
        )
    shape = list(tensors[0].shape)
    if shape and shape[0] in spans.per_token_rows:
        return Placement.PER_TOKEN
    raise PlacementError(
        f"{node.path!r} has shape {shape}; per-token leaves have {_rows_in_words(spans)} rows. Say what it is, "
        "e.g. rules={" + repr(node.path) + ": Placement.INVARIANT}, or add its rows to per_token_rows"
    )


def _check_rows(node: Node, tensor: Tensor, spans: Spans) -> None:
    ends = spans.consumer_starts + spans.consumer_rows
    if len(ends) and int(ends.max()) > tensor.shape[0]:
        worst = int(np.argmax(ends))
        request = spans.request_ids[spans.consumers[worst]]
        raise PlacementError(
            f"{node.path!r} has {tensor.shape[0]} rows, but request {request!r} has rows "
            f"[{int(spans.consumer_starts[worst])}, {int(ends[worst])}). Give all rows of the batch, or say by a "
            "RowMap which rows are whose"
        )


def _per_request(node: Node, tensors: Sequence[Tensor], spans: Spans, columns: list[ColumnSpec]) -> Placed:
    if not node.is_list or len(tensors) != len(spans.request_ids):
        given = f"a list of {len(tensors)} tensors" if node.is_list else "one tensor"
        raise PlacementError(
            f"{node.path!r} is {given}; {_name(Placement.PER_REQUEST)} takes a list of {len(spans.request_ids)}, "
            "one per request of the batch. Give such a list, or declare it Placement.INVARIANT, the same for all"
        )
    groups: dict[object, list[int]] = {}  # consumers whose tensors can share a column
    for consumer, request in enumerate(spans.consumers):
        groups.setdefault(_column_key(tensors[request]), []).append(consumer)
    sources: list[tuple[tuple[int, int], ...] | None] = [None] * len(spans.consumers)
    for group in groups.values():
        chosen = [spans.consumers[consumer] for consumer in group]
        columns.append(ColumnSpec.stack([node.leaves[i] for i in chosen], [tensors[i] for i in chosen]))
        for piece, consumer in enumerate(group):
            sources[consumer] = ((len(columns) - 1, piece),)
    return Placed(node, tuple(sources), False)


def _column_key(tensor: Tensor) -> object:
    """Tensors with equal keys can share a column; an opaque tensor gets a unique key."""
    if _is_opaque(tensor):
        return object()
    return tensor.dtype, tensor.dim() == 0, tensor.shape[1:], tensor.device


def _is_opaque(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.is_quantized


def _whole(node: Node, tensors: Sequence[Tensor], spans: Spans, columns: list[ColumnSpec], *, shared: bool) -> Placed:
    first = len(columns)
    consumers = len(spans.consumers)
    if consumers:
        copies = 1 if shared else consumers
        columns.extend(
            ColumnSpec.whole(leaf, tensor, copies) for leaf, tensor in zip(node.leaves, tensors, strict=True)
        )
    return Placed(
        node,
        tuple(
            tuple((first + item, 0 if shared else consumer) for item in range(len(tensors)))
            for consumer in range(consumers)
        ),
        node.is_list,
    )


def _row_map(node: Node, tensor: Tensor, spans: Spans, rule: RowMap, columns: list[ColumnSpec]) -> Placed:
    for request, (start, rows) in rule.rows.items():
        if request not in spans.request_ids:
            raise PlacementError(
                f"the row map of {node.path!r} names {request!r}, which is not in the batch; leave it out, or add the "
                "request to the batch"
            )
        if start < 0 or rows < 0 or start + rows > tensor.shape[0]:
            raise PlacementError(
                f"the row map of {node.path!r} gives request {request!r} rows [{start}, {start + rows}) "
                f"of {tensor.shape[0]}; give a first row and a number of rows within them"
            )
    named = [consumer for consumer, i in enumerate(spans.consumers) if spans.request_ids[i] in rule.rows]
    if not named:
        return Placed(node, (None,) * len(spans.consumers), False)
    picked = [rule.rows[spans.request_ids[spans.consumers[consumer]]] for consumer in named]
    first, count = (np.array(part, dtype=np.int64) for part in zip(*picked, strict=True))
    columns.append(ColumnSpec(node.leaves[0], first, count))
    piece_of = {consumer: piece for piece, consumer in enumerate(named)}
    column = len(columns) - 1
    return Placed(
        node,
        tuple(((column, piece_of[c]),) if c in piece_of else None for c in range(len(spans.consumers))),
        False,
    )


def _rows_in_words(spans: Spans) -> str:
    return " or ".join(map(str, sorted(spans.per_token_rows)))


def _name(rule: Rule) -> str:
    return f"Placement.{rule.name}" if isinstance(rule, Placement) else "a RowMap"
