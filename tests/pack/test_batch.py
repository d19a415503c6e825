"""Batches: spans from what the scheduler has, detached from it, and contradictions refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spanpack import Batch, BatchError

IDS = ["a", "b", "c"]


def spans_of(*given: Any, **options: Any) -> tuple[list[int], list[int]]:
    spans = Batch(*given, **options).spans
    return spans.starts.tolist(), spans.rows.tolist()


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda n: np.array(n, np.int32),
        lambda n: torch.tensor(n, dtype=torch.int32),
        lambda n: np.array(n, ">i4"),
        lambda n: np.array(n)[::-1].copy()[::-1],
    ],
    ids=["list", "tuple", "numpy", "torch", "numpy int32", "torch int32", "other byte order", "reversed"],
)
def test_counts_and_starts_in_any_form(kind: Any) -> None:
    assert spans_of(IDS, kind([3, 0, 2])) == ([0, 3, 3], [3, 0, 2])
    assert spans_of(IDS, kind([3, 0, 2]), kind([1, 5, 5, 7])) == ([1, 5, 5], [3, 0, 2])


def test_equal_batches_share_spans_that_nobody_can_change() -> None:
    spans = Batch(IDS, [3, 0, 2]).spans
    for array in (spans.starts, spans.rows, spans.consumer_starts, spans.consumer_rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_per_token_rows_may_be_a_numpy_integer() -> None:
    assert Batch(IDS, [1, 1, 1], per_token_rows=np.int64(8)).spans.per_token_rows == {8}


def test_counts_by_request_id() -> None:
    assert spans_of(IDS, {"c": 2, "a": 3, "b": 0, "other": 9}) == ([0, 3, 3], [3, 0, 2])


def test_entries_behind_the_batch_are_padding() -> None:
    assert spans_of(IDS, [1, 1, 1], [0, 1, 2, 3, 0, -7], per_token_rows=16) == ([0, 1, 2], [1, 1, 1])


def test_starts_need_no_end() -> None:
    assert spans_of(IDS, [1, 1, 1], [0, 4, 8]) == ([0, 4, 8], [1, 1, 1])


def test_consumers_are_in_batch_order_and_by_default_all() -> None:
    assert Batch(IDS, [1, 2, 3]).spans.consumers == (0, 1, 2)
    spans = Batch(IDS, [1, 2, 3], consumers=["c", "a"]).spans
    assert spans.consumers == (0, 2)
    assert (spans.consumer_starts.tolist(), spans.consumer_rows.tolist()) == ([0, 3], [1, 3])
    assert Batch(IDS, [1, 2, 3], consumers=[]).spans.consumers == ()


def test_per_token_rows_default_to_the_end_of_the_last_span() -> None:
    assert Batch(IDS, [1, 2, 3]).spans.per_token_rows == {6}
    assert Batch(IDS, [1, 2, 3], per_token_rows=8).spans.per_token_rows == {8}
    assert Batch(IDS, [1, 2, 3], per_token_rows=[6, 8]).spans.per_token_rows == {6, 8}
    assert Batch([], []).spans.request_ids == ()


def test_equal_batches_share_their_spans_whatever_form_they_came_in() -> None:
    first = Batch(IDS, np.array([1, 2, 3]), np.array([0, 1, 3, 6])).spans
    assert Batch(list(IDS), np.array([1, 2, 3]), np.array([0, 1, 3, 6, 99])).spans is first
    assert Batch(IDS, np.array([1, 2, 2]), np.array([0, 1, 3, 6])).spans is not first


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_arrays_changed_later_do_not_show(kind: Any) -> None:
    counts, starts = kind([1, 2, 3]), kind([0, 1, 3, 6])
    batch = Batch(IDS, counts, starts)
    for i in range(3):
        counts[i] = starts[i] = 77
    assert (batch.spans.starts.tolist(), batch.spans.rows.tolist()) == ([0, 1, 3], [1, 2, 3])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((["a", "b", "a"], [1, 1, 1]), {}, "'a' occurs twice"),
        ((IDS, [1, 1]), {}, "3 request ids but 2 counts"),
        ((IDS, {"a": 1, "c": 1}), {}, "no entry for request 'b'"),
        ((IDS, [1, -2, 1]), {}, "'b' has -2 scheduled tokens"),
        ((IDS, [1, 2, 1], [0, 1]), {}, "2 entries for 3 requests"),
        ((IDS, [1, 1, 1], [-1, 1, 2]), {}, "starts at -1"),
        ((IDS, [1, 1, 1], [0, 4, 2]), {}, "decreases from 4 to 2 at entry 2"),
        ((IDS, [1, 3, 1], [0, 1, 3, 4]), {}, r"'b' has 3 scheduled tokens.*leaves it 2 rows, \[1, 3\)"),
        ((IDS, [1, 1, 5]), {"per_token_rows": 6}, r"'c' has rows \[2, 7\).*at most 6 rows"),
        ((IDS, [1, 1, 1]), {"consumers": ["a", "x"]}, "'x' is not one of the 3 request_ids"),
        ((IDS, [1, 1, 1]), {"consumers": ["b", "b"]}, "'b' is named twice"),
        ((IDS, [1.5, 1, 1]), {}, "num_scheduled_tokens must be integers, given: float64"),
        ((IDS, np.ones(3, "m8[s]")), {}, "num_scheduled_tokens must be integers, given: timedelta64"),
        ((IDS, np.ones(3, object)), {}, "num_scheduled_tokens must be a flat sequence of integers, given: object"),
        ((IDS, np.ones((3, 1), int)), {}, r"flat sequence of integers, given: int64\[3, 1\]"),
        ((IDS, torch.ones(3, dtype=torch.int64, device="meta")), {}, "num_scheduled_tokens is a tensor on meta"),
        ((IDS, [1, 1, 1], torch.arange(4, device="meta")), {}, "query_start_loc is a tensor on meta.*host copy"),
    ],
)
def test_contradictions(given: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Batch(*given, **options)
