"""Pack one step's payload: only what its consumers need, or every tensor whole for the engine's own builder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

import spanpack
from omni_runner.lowering import Lowerer, Lowering, ValueRef, make_template, pick_elements, with_tokens_bytes
from omni_runner.step import NotCovered, StepContext
from spanpack.tree import TreeSpec

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

logger = logging.getLogger("vllm.omni_runner")

_NO_ROWS = torch.empty((0, 0))  # hidden rows of a step that needs none


class PackedPayload:
    """Replaces the engine's snapshot object, and is its own `multimodal_outputs` and `async_payload`.

    This takes one allocation instead of three in every step of the decode thread.

    Attributes
    ----------
    hidden_states
        A host tensor without rows; the rows are in the pack.
    multimodal_outputs
        The pack, which our builder recognizes.
    async_payload
        What the builder thread waits for before it builds the output.
    snapshot
        The pack; None if there was no tensor to pack.
    """

    __slots__ = ("snapshot",)

    hidden_states: Tensor
    staged_hidden_states_cpu = None  # the fourth field of the engine's snapshot object
    snapshot: spanpack.Snapshot | None

    @property
    def multimodal_outputs(self) -> PackedPayload:
        """The object itself."""
        return self

    @property
    def async_payload(self) -> PackedPayload:
        """The object itself."""
        return self

    def wait(self) -> None:
        """Sleep until the bytes are on the host or the transfer has failed; errors are left to `arrive`.

        The engine calls this where no code cleans up after a failure. Our builder does, and calls `arrive`.
        """
        try:
            self.arrive()
        except Exception:  # `arrive` raises it again where it can be handled
            logger.debug("omni_runner: waiting for a pack failed", exc_info=True)

    def arrive(self) -> None:
        """Sleep until the bytes are on the host. Further calls return at once."""
        if self.snapshot is not None:
            self.snapshot.wait()

    def release(self) -> None:
        """Release this object's reference to the slab; tensors made from the slab keep theirs."""
        if self.snapshot is not None:
            self.snapshot.release()


class PackedStep(PackedPayload):
    """A step in transit to the host, packed as columns; `builder.ChannelBuilder` reads it.

    Attributes
    ----------
    step
        The step's host metadata.
    lowering
        How to read the columns; None if no payload is built.
    values
        The payload's plain values, as they were when the step was packed.
    made_tokens
        Result of `tokens`; None before its first call.
    """

    __slots__ = ("lowering", "made_tokens", "step", "values")

    hidden_states = _NO_ROWS

    def __init__(
        self,
        step: StepContext,
        lowering: Lowering | None = None,
        values: Sequence[Any] = (),
        snapshot: spanpack.Snapshot | None = None,
    ) -> None:
        self.step = step
        self.lowering = lowering
        self.values = values
        self.snapshot = snapshot
        self.made_tokens: Tensor | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the step's sampled tokens are in the pack."""
        return self.snapshot is not None and self.lowering is not None and self.lowering.tokens is not None

    def tokens(self) -> Tensor:
        """Return the step's sampled tokens on the host, waiting for the bytes; the tensor outlives `release`."""
        if self.made_tokens is None:
            assert self.snapshot is not None
            assert self.lowering is not None
            assert self.lowering.tokens is not None
            try:
                self.made_tokens = self.snapshot.column(self.lowering.tokens)
            except spanpack.ClosedError:  # released meanwhile by the builder, which makes the tokens first
                if self.made_tokens is None:
                    raise
        return self.made_tokens


class PackedWhole(PackedPayload):
    """A whole payload tree in transit to the host."""

    __slots__ = ("_spec", "_values", "hidden_states")

    def __init__(
        self, spec: TreeSpec, values: Sequence[Any], snapshot: spanpack.Snapshot | None, no_rows: Tensor
    ) -> None:
        self._spec = spec
        self._values = values
        self.snapshot = snapshot
        self.hidden_states = no_rows

    def payload(self) -> Any:
        """Return the tree that was packed, with its tensors on the host; waits for the bytes.

        The tensors are views into one slab. The engine's builder only reads them: it slices and copies them.
        """
        snapshot = self.snapshot
        leaves = [] if snapshot is None else [snapshot.split(i)[0] for i in range(len(snapshot.plan.columns))]
        return spanpack.unflatten(self._spec, leaves, self._values)


class _Refusal(Enum):
    TOKENS = "this payload and the step's tokens do not go together"


_REFUSED: Final = _Refusal.TOKENS
_Found: TypeAlias = Lowering | str | _Refusal  # result of lowering a payload; str: why columns can't express it

# Offering tokens to a payload that refuses them costs a second look-up, and a second lowering if it was never seen.
# After `_REFUSALS` refusals (two acceptances cancel one), no tokens are offered for `_REST_STEPS` steps.
_REFUSALS, _REST_STEPS = 8, 1000


@dataclass(slots=True)
class _Trials:
    """Results of offering tokens of one kind, awaited or not."""

    refusals: float = 0.0
    resting: int = 0  # remaining steps in which tokens are not offered

    def taken(self) -> None:
        """Count an acceptance of tokens."""
        self.refusals = max(0.0, self.refusals - 0.5)

    def refused(self) -> None:
        """Count a refusal of tokens."""
        self.refusals += 1
        if self.refusals >= _REFUSALS:
            self.refusals, self.resting = 0.0, _REST_STEPS


class StepPacker:
    """Packs steps and caches the plans: a step that looks like an earlier one needs no planning.

    Parameters
    ----------
    packer
        Does the copying.
    upstream
        The resolved engine names, whose flattening and routing rules apply.
    fills_channels
        False for a stage whose output has no payload at all (text): its steps are checked, but nothing is packed.
    cache_capacity
        How many kinds of steps to cache for each mode.
    """

    def __init__(
        self,
        packer: spanpack.Packer,
        upstream: Upstream,
        *,
        fills_channels: bool = True,
        cache_capacity: int = 64,
    ) -> None:
        self._packer = packer
        self._lowerer = Lowerer(upstream, cache_capacity)
        self._fills_channels = fills_channels
        # One cache for each combination of (has hidden rows, has tokens, tokens awaited): their leaves may look alike.
        self._lowerings = {
            beside: spanpack.PlanCache[_Found](cache_capacity) for beside in product((False, True), repeat=3)
        }
        self._trials = {awaited: _Trials() for awaited in (False, True)}
        self._whole_plans: spanpack.PlanCache[_Whole] = spanpack.PlanCache(cache_capacity)

    def pack(
        self,
        step: StepContext,
        *,
        hidden_states: Tensor | None,
        multimodal_outputs: Any,
        tokens: Tensor | None = None,
        tokens_awaited: bool = False,
    ) -> PackedStep:
        """Pack what the step's consumers get, as columns that `builder.ChannelBuilder` reads.

        Parameters
        ----------
        step
            The step's host metadata.
        hidden_states
            ``[hidden_rows, ...]``, the stage's own hidden rows; None if the model omits them from its payloads.
        multimodal_outputs
            The payload as the model returned it.
        tokens
            The step's sampled tokens, packed along with the payload if possible, see `PackedStep.tokens`.
        tokens_awaited
            Whether anything besides the step's output waits for them; then only a small payload takes them along.

        Raises
        ------
        NotCovered
            Columns can't express the payload; nothing was packed. Use `pack_whole` and the engine's own builder.
        """
        if not step.consumers:
            return PackedStep(step)
        if multimodal_outputs is None:
            multimodal_outputs = {}
        elif not isinstance(multimodal_outputs, dict):
            raise NotCovered(f"the payload is a {type(multimodal_outputs).__name__}")
        if tokens is not None:
            trials = self._trials[tokens_awaited]
            if trials.resting:
                trials.resting -= 1
            elif step.is_decode or _may_take_tokens(step, hidden_states, awaited=tokens_awaited):
                packed = self._pack(step, hidden_states, multimodal_outputs, tokens, tokens_awaited)
                if packed is not None:
                    if trials.refusals:
                        trials.taken()
                    return packed
                trials.refused()
        packed = self._pack(step, hidden_states, multimodal_outputs, None, False)
        assert packed is not None
        return packed

    def _pack(
        self,
        step: StepContext,
        hidden_states: Tensor | None,
        multimodal_outputs: dict[Any, Any],
        tokens: Tensor | None,
        tokens_awaited: bool,
    ) -> PackedStep | None:
        """Pack the step; returns None, without packing anything, if the payload refuses the tokens."""
        extra = tuple([leaf for leaf in (hidden_states, tokens) if leaf is not None])
        beside = hidden_states is not None, tokens is not None, tokens_awaited
        lowerings = self._lowerings[beside]
        seen = lowerings.look(multimodal_outputs, step.key, extra)
        lowering = seen.entry
        if lowering is None:
            lowering = self._lower(seen, step, *beside)
            plan = lowering.plan if isinstance(lowering, Lowering) else None
            lowerings.keep(seen, step.key, lowering, None if plan is None else plan.signature)
        if lowering is _REFUSED:
            return None
        if isinstance(lowering, str):
            raise NotCovered(lowering)
        if step.is_sparse:
            _check_plain_lists(lowering, seen.values, step)
        if not self._fills_channels:
            return PackedStep(step)
        plan = lowering.plan
        snapshot = self._packer.run(plan, seen.leaves, validate=False) if plan is not None else None
        return PackedStep(step, lowering, seen.values, snapshot)

    def _lower(
        self,
        seen: spanpack.Sighting[_Found],
        step: StepContext,
        has_hidden: bool,
        has_tokens: bool,
        tokens_awaited: bool,
    ) -> _Found:
        try:
            found = self._lowerer.lower(
                step,
                seen.spec,
                len(seen.values),
                seen.leaves,
                has_hidden=has_hidden,
                has_tokens=has_tokens,
                tokens_awaited=tokens_awaited,
            )
        except NotCovered as reason:
            return str(reason)
        return _REFUSED if found is None else found

    def pack_whole(self, tree: Any, no_rows: Tensor = _NO_ROWS) -> PackedWhole:
        """Pack every tensor of a payload tree whole.

        Parameters
        ----------
        tree
            What the engine's own snapshot would copy to the host.
        no_rows
            ``[0, ...]``, used in place of the stage's hidden rows.

        Raises
        ------
        NotCovered
            The tree holds containers that the engine does not look into.
        """
        seen = self._whole_plans.look(tree, key=None)
        whole = seen.entry
        if whole is None:
            make_template(seen.spec, len(seen.leaves), len(seen.values))
            columns = [spanpack.ColumnSpec.whole(i, leaf) for i, leaf in enumerate(seen.leaves)]
            plan = spanpack.make_plan(seen.leaves, columns) if columns else None
            whole = _Whole(seen.spec, plan)
            self._whole_plans.keep(seen, None, whole, None if plan is None else plan.signature)
        snapshot = None if whole.plan is None else self._packer.run(whole.plan, seen.leaves, validate=False)
        return PackedWhole(whole.spec, seen.values, snapshot, no_rows)


def _may_take_tokens(step: StepContext, hidden_states: Tensor | None, *, awaited: bool) -> bool:
    """Return False, without lowering the payload, if its prefills' hidden rows alone make it too large."""
    if hidden_states is None or not step.everyone_consumes:
        return True
    row_bytes = hidden_states.nbytes // max(1, hidden_states.shape[0])
    return step.scheduled_tokens * row_bytes <= with_tokens_bytes(awaited=awaited)


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """How to pack a whole tree; the plan is None if the tree has no tensors."""

    spec: TreeSpec
    plan: spanpack.Plan | None


def _check_plain_lists(lowering: Lowering, values: Sequence[Any], step: StepContext) -> None:
    """Raise `NotCovered` if a list is too short for sparse routing, so that the engine itself reports it."""
    for recipe in lowering.recipes:
        if isinstance(recipe.plain, ValueRef) and isinstance(values[recipe.plain.index], list):
            pick_elements(recipe.key, values[recipe.plain.index], step)
