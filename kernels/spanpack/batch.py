"""Batches: which request owns which rows of the per-token leaves, and who consumes them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from .columns import MOST_ROWS, Int64Array
from .errors import BatchError


@dataclass(frozen=True, eq=False, slots=True)
class Spans:
    """Checked spans of a batch.

    Attributes
    ----------
    request_ids
        In the order of the rows.
    starts, rows
        First row and number of rows of each request, ``[num_requests] int64``.
    consumers
        Batch indices of the requests that need a payload, in batch order.
    consumer_starts, consumer_rows
        `starts` and `rows` of the consumers, ``[num_consumers] int64``.
    per_token_rows
        Sizes of dimension 0 that mark a leaf as per-token.
    """

    request_ids: tuple[str, ...]
    starts: Int64Array
    rows: Int64Array
    consumers: tuple[int, ...]
    consumer_starts: Int64Array
    consumer_rows: Int64Array
    per_token_rows: frozenset[int]


class Batch:
    """Spans of a batch of requests, copied from the arrays that they are given in.

    Parameters
    ----------
    request_ids
        One id per request, without duplicates, in the order of the rows.
    num_scheduled_tokens
        Rows of each request: a sequence, NumPy array or CPU tensor in batch order, or a mapping by request id.
    query_start_loc
        First row of each request, at least one entry per request; entries after the first num_requests + 1 are
        padding. By default the requests follow each other without gaps.
    consumers
        Ids of the requests that need a payload; by default all. Rows of the others are neither gathered nor copied.
    per_token_rows
        Size of dimension 0, or several sizes, that mark a leaf as per-token. Needed if buffers have more rows than
        the batch, such as the output buffers of a CUDA graph. By default the end of the last span.

    Raises
    ------
    BatchError
        Duplicate or unknown request ids; lengths that differ; negative counts; negative or decreasing
        `query_start_loc`; spans that overlap or end beyond the largest of `per_token_rows`; a tensor on a device,
        since reading it would synchronise with the device.

    Examples
    --------
    >>> batch = Batch(["a", "b"], [3, 1], consumers=["b"])
    >>> batch.spans.consumer_starts.tolist(), batch.spans.consumer_rows.tolist()
    ([3], [1])
    """

    __slots__ = ("spans",)

    def __init__(
        self,
        request_ids: Iterable[str],
        num_scheduled_tokens: Sequence[int] | Mapping[str, int] | np.ndarray[Any, Any] | Tensor,
        query_start_loc: Sequence[int] | np.ndarray[Any, Any] | Tensor | None = None,
        consumers: Iterable[str] | None = None,
        per_token_rows: int | Iterable[int] | None = None,
    ) -> None:
        ids = _names("request_ids", request_ids)
        if isinstance(num_scheduled_tokens, Mapping):
            num_scheduled_tokens = _in_order(ids, num_scheduled_tokens)
        if per_token_rows is not None:
            per_token_rows = _row_counts(per_token_rows)
        # Checked once: equal batches share one `Spans` object, which is thus a cheap key for plans.
        self.spans: Spans = _check(
            ids,
            _freeze("num_scheduled_tokens", num_scheduled_tokens),
            None if query_start_loc is None else _freeze("query_start_loc", query_start_loc, len(ids) + 1),
            None if consumers is None else _names("consumers", consumers),
            per_token_rows,
        )


def _names(name: str, values: Any) -> tuple[str, ...]:
    try:
        names = tuple(values)
        hash(names)
    except TypeError as error:
        raise BatchError(f"{name} must be a sequence of request ids, given: {values!r:.80}") from error
    if isinstance(values, str):
        raise BatchError(f"{name} must be a sequence of request ids, given one string: {values!r:.80}")
    return names


def _row_counts(values: Any) -> tuple[int, ...]:
    try:
        return (operator.index(values),)
    except TypeError:
        pass
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise BatchError(f"per_token_rows must be an integer or several, given: {values!r:.80}") from error


def _in_order(ids: tuple[str, ...], counts: Mapping[str, int]) -> list[int]:
    missing = [request for request in ids if request not in counts]
    if missing:
        raise BatchError(f"num_scheduled_tokens has no entry for request {missing[0]!r}; give one for every request")
    return [counts[request] for request in ids]


_Frozen = tuple[bytes, np.dtype[Any]]  # a 1-dimensional array as a hashable key


def _freeze(name: str, values: Any, limit: int | None = None) -> _Frozen:
    """A hashable copy of the first `limit` numbers."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise BatchError(
                f"{name} is a tensor on {values.device}; reading it would stall the device. "
                "Give the host copy that the scheduler has"
            )
        values = values.detach()
    if not isinstance(values, np.ndarray):
        try:
            values = np.asarray(values)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, sparse, of a dtype that NumPy lacks
            raise BatchError(f"{name} must be a flat sequence of integers, given a {type(values).__name__}") from error
    if values.ndim != 1 or values.dtype.hasobject:
        raise BatchError(f"{name} must be a flat sequence of integers, given: {values.dtype}{list(values.shape)}")
    return values[:limit].tobytes(), values.dtype


def _thaw(name: str, frozen: _Frozen) -> Int64Array:
    array: np.ndarray[Any, Any] = np.frombuffer(*frozen)
    if array.size and array.dtype.kind not in "iu":
        raise BatchError(f"{name} must be integers, given: {array.dtype}{list(array.shape)}")
    if array.size and max(abs(int(array.min())), abs(int(array.max()))) >= MOST_ROWS:
        raise BatchError(f"{name} has numbers of {MOST_ROWS} and more; no tensor has so many rows")
    return array.astype(np.int64)


@lru_cache(maxsize=256)
def _check(
    ids: tuple[str, ...],
    frozen_rows: _Frozen,
    frozen_starts: _Frozen | None,
    consumers: tuple[str, ...] | None,
    per_token_rows: tuple[int, ...] | None,
) -> Spans:
    rows = _thaw("num_scheduled_tokens", frozen_rows)
    if len(rows) != len(ids):
        raise BatchError(f"{len(ids)} request ids but {len(rows)} counts in num_scheduled_tokens; give one per request")
    position = {request: index for index, request in enumerate(ids)}
    if len(position) != len(ids):
        twice = next(request for index, request in enumerate(ids) if position[request] != index)
        raise BatchError(f"request id {twice!r} occurs twice; every request of a batch has an id of its own")
    if (rows < 0).any():
        worst = int(np.argmin(rows))
        raise BatchError(f"request {ids[worst]!r} has {int(rows[worst])} scheduled tokens; counts can't be negative")
    starts = np.cumsum(rows) - rows if frozen_starts is None else _check_starts(ids, rows, frozen_starts)
    end = int((starts + rows).max()) if len(ids) else 0
    allowed = frozenset(per_token_rows) if per_token_rows is not None else frozenset((end,))
    if len(ids) and end > max(allowed, default=0):
        last = int(np.argmax(starts + rows))
        raise BatchError(
            f"request {ids[last]!r} has rows [{int(starts[last])}, {end}), but per-token leaves have at most "
            f"{max(allowed, default=0)} rows (per_token_rows)"
        )
    chosen = _check_consumers(ids, position, consumers)
    index = np.asarray(chosen, dtype=np.int64)
    arrays = starts, rows, starts[index], rows[index]
    for array in arrays:
        array.setflags(write=False)  # equal batches share them, and plans are made from them
    return Spans(ids, arrays[0], arrays[1], chosen, arrays[2], arrays[3], allowed)


def _check_starts(ids: tuple[str, ...], rows: Int64Array, frozen: _Frozen) -> Int64Array:
    given = _thaw("query_start_loc", frozen)
    if len(given) < len(ids):
        raise BatchError(f"query_start_loc has {len(given)} entries for {len(ids)} requests; give at least one each")
    if len(given) and given[0] < 0:
        raise BatchError(f"query_start_loc starts at {int(given[0])}; rows are counted from 0")
    falls = np.flatnonzero(np.diff(given) < 0)
    if len(falls):
        at = int(falls[0])
        raise BatchError(
            f"query_start_loc decreases from {int(given[at])} to {int(given[at + 1])} at entry {at + 1}; "
            "requests stand in the order of their rows"
        )
    starts = given[: len(ids)]
    room = np.diff(given)[: len(rows)]
    crowded = np.flatnonzero(rows[: len(room)] > room)
    if len(crowded):
        at = int(crowded[0])
        raise BatchError(
            f"request {ids[at]!r} has {int(rows[at])} scheduled tokens, but query_start_loc leaves it "
            f"{int(room[at])} rows, [{int(given[at])}, {int(given[at + 1])})"
        )
    return starts


def _check_consumers(
    ids: tuple[str, ...], position: dict[str, int], consumers: tuple[str, ...] | None
) -> tuple[int, ...]:
    if consumers is None:
        return tuple(range(len(ids)))
    for request in consumers:
        if request not in position:
            raise BatchError(
                f"consumer {request!r} is not one of the {len(ids)} request_ids; name requests of this batch"
            )
    if len(set(consumers)) != len(consumers):
        twice = next(request for request in consumers if consumers.count(request) > 1)
        raise BatchError(f"consumer {twice!r} is named twice; name each once")
    return tuple(sorted(position[request] for request in consumers))
