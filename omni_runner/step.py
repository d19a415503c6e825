"""The host metadata of one step, detached from the engine's live state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

Int64Array = npt.NDArray[np.int64]


class NotCovered(Exception):
    """A step that packed columns can't express; it goes through the engine's own builder instead.

    A signal within this package, not an error: the runner catches it and counts its reason, and neither the engine
    nor the user ever sees it.
    """


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """The requests of a step, their rows, and which of them get a payload.

    Attributes
    ----------
    request_ids
        In the order of the step's output. A request's position here is also its index in the batch.
    starts, rows
        Each request's span in a per-token leaf, ``[num_requests] int64``.
    scheduled_tokens
        Tokens of the whole step, as the scheduler counts them.
    consumers
        Positions, in ascending order, of the requests that get a payload, after sparse routing.
    elements
        For each consumer, the index of its element in a per-request list: its position, or under sparse audio routing
        its index among the requests that have output.
    is_sparse
        Whether sparse audio routing applies.
    key
        Equal for steps with the same token counts, spans, consumers and elements.
    """

    request_ids: tuple[str, ...]
    starts: Int64Array  # [num_requests]
    rows: Int64Array  # [num_requests]
    scheduled_tokens: int
    consumers: tuple[int, ...]
    elements: tuple[int, ...]
    is_sparse: bool
    key: Hashable

    @property
    def everyone_consumes(self) -> bool:
        """Whether every request of the step gets a payload."""
        return len(self.consumers) == len(self.request_ids)

    @property
    def is_decode(self) -> bool:
        """Whether the step has no more scheduled tokens than requests."""
        return self.scheduled_tokens <= len(self.request_ids)


def make_step(
    *,
    request_ids: Sequence[str],
    num_scheduled_tokens: npt.ArrayLike,
    query_start_loc: Any,
    scheduled_tokens: int,
    consumer_ids: Sequence[str],
    sparse_index: Mapping[str, int] | None = None,
    is_sparse: bool = False,
) -> StepContext:
    """Copy a step's metadata into a `StepContext`.

    Parameters
    ----------
    request_ids
        Requests of the batch, in batch order.
    num_scheduled_tokens
        Tokens of each request, ``[>= num_requests]``.
    query_start_loc
        First token of each request, ``[>= num_requests]``: a CPU tensor, an array or a list.
    scheduled_tokens
        Tokens of the whole step.
    consumer_ids
        Requests that get a payload, a subset of `request_ids` in any order.
    sparse_index, is_sparse
        Results of the engine's sparse audio routing.

    Raises
    ------
    NotCovered
        The metadata has other types or does not cover every request.
    """
    count = len(request_ids)
    starts = _first(query_start_loc, count, "query_start_loc")
    rows = _first(num_scheduled_tokens, count, "num_scheduled_tokens")
    consumers: tuple[int, ...]
    if len(consumer_ids) == count:
        consumers = tuple(range(count))
    else:
        chosen = set(consumer_ids)
        consumers = tuple(i for i, request_id in enumerate(request_ids) if request_id in chosen)
    elements = consumers
    if is_sparse:
        index = sparse_index or {}
        elements = tuple(index[request_ids[position]] for position in consumers)
    return StepContext(
        request_ids=tuple(request_ids),
        starts=starts,
        rows=rows,
        scheduled_tokens=scheduled_tokens,
        consumers=consumers,
        elements=elements,
        is_sparse=is_sparse,
        key=(scheduled_tokens, count, starts.tobytes(), rows.tobytes(), consumers, is_sparse, elements),
    )


class StepReader:
    """Asks the engine which requests get a payload, and recognizes a step that repeats the last one.

    In a decode loop the same requests take one token each, step after step. Such a step reuses the `StepContext` of
    the step before it, without asking the engine again.

    Parameters
    ----------
    upstream
        The resolved engine names.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._last: _Reading | None = None

    def read(
        self,
        runner: Any,
        *,
        scheduler_output: Any,
        request_ids: Sequence[str],
        num_scheduled_tokens: npt.ArrayLike,
        query_start_loc: Any,
        multimodal_outputs: Any,
    ) -> StepContext:
        """Read one step; call it on the main thread, before the engine's state changes.

        Parameters
        ----------
        runner
            The engine's runner.
        scheduler_output
            The scheduler's output for this step.
        request_ids, num_scheduled_tokens, query_start_loc
            As for `make_step`.
        multimodal_outputs
            The payload, still on its device. Only its sparse audio marker is read.

        Raises
        ------
        NotCovered
            The sparse audio marker has an unexpected type. Some engine versions read such a marker element by element,
            which would wait for the device here; the engine's own builder handles it on host tensors.
        """
        tokens = scheduler_output.total_num_scheduled_tokens
        last = self._last
        sparse = _declares_sparse(multimodal_outputs)
        if (
            last is not None
            and not sparse
            and last.request_ids == request_ids
            and last.tokens == tokens
            and last.settled == list(map(runner._downstream_payload_cache.get, request_ids))
            and type(num_scheduled_tokens) is np.ndarray
            and last.counts == num_scheduled_tokens.tobytes()
        ):
            return last.step
        if sparse:
            _check_sparse_marker(multimodal_outputs)
        ids = list(request_ids)
        output_type, consumer_ids = runner._resolve_pooler_payload_req_ids(ids)
        consumer_ids, sparse_index, is_sparse = self._upstream.resolve_sparse_routing(
            runner, output_type, ids, consumer_ids, multimodal_outputs
        )
        step = make_step(
            request_ids=ids,
            num_scheduled_tokens=num_scheduled_tokens,
            query_start_loc=query_start_loc,
            scheduled_tokens=int(tokens),
            consumer_ids=consumer_ids,
            sparse_index=sparse_index,
            is_sparse=is_sparse,
        )
        self._last = None
        settled = list(map(runner._downstream_payload_cache.get, ids))
        if (
            ids
            and not sparse
            and None not in settled
            and isinstance(num_scheduled_tokens, np.ndarray)
            and np.array_equal(step.starts, step.rows.cumsum() - step.rows)
        ):
            self._last = _Reading(ids, tokens, settled, num_scheduled_tokens.tobytes(), step)
        return step


class _Reading(NamedTuple):
    """A step that was read, and all the inputs that it was read from.

    The rows of its requests follow one another without gaps, so that the counts determine the starts.
    """

    request_ids: list[str]
    tokens: int
    settled: list[bool]  # for every request, the engine's final decision whether it gets a payload
    counts: bytes  # the bytes of `num_scheduled_tokens`
    step: StepContext


def _declares_sparse(multimodal_outputs: Any) -> bool:
    """Whether a payload has a sparse audio marker."""
    if not isinstance(multimodal_outputs, dict):
        return False
    meta = multimodal_outputs.get("meta")
    nested = isinstance(meta, dict) and "sparse_audio" in meta
    return nested or "meta.sparse_audio" in multimodal_outputs


def _first(values: Any, count: int, name: str) -> Int64Array:
    """Copy the first `count` of some host numbers."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise NotCovered(f"{name} is on {values.device}")
        values = values.numpy()
    elif not isinstance(values, list | tuple | np.ndarray):
        raise NotCovered(f"{name} is a {type(values).__name__}")
    found = np.array(values[:count], dtype=np.int64)
    if found.shape != (count,):
        raise NotCovered(f"{name} has shape {found.shape} for {count} requests")
    return found


def _check_sparse_marker(multimodal_outputs: dict[str, Any]) -> None:
    meta = multimodal_outputs.get("meta")
    nested = meta.get("sparse_audio") if isinstance(meta, dict) else None
    for marker in (nested, multimodal_outputs.get("meta.sparse_audio")):
        if marker is None or isinstance(marker, str):
            continue
        if not isinstance(marker, list) or not all(isinstance(item, str) for item in marker):
            raise NotCovered(f"sparse audio marker of type {type(marker).__name__}")
