"""Engine steps that are made from row counts."""

from __future__ import annotations

import numpy as np

from omni_runner.step import StepContext, make_step


def step_of(
    rows: list[int],
    consumers: list[int] | None = None,
    *,
    scheduled: int | None = None,
    sparse: list[int] | None = None,
) -> StepContext:
    """Make a step of requests ``r0``, ``r1``, ... with the given numbers of rows.

    Parameters
    ----------
    rows
        Scheduled tokens of each request.
    consumers
        Batch indices of the requests that get a payload; by default all.
    scheduled
        Tokens of the whole step; by default the sum of `rows`.
    sparse
        Batch indices in the order of sparse lists; makes the step a sparse one.
    """
    ids = [f"r{i}" for i in range(len(rows))]
    chosen = sparse if sparse is not None else consumers
    return make_step(
        request_ids=ids,
        num_scheduled_tokens=rows,
        query_start_loc=[0, *np.cumsum(rows).tolist()],
        scheduled_tokens=sum(rows) if scheduled is None else scheduled,
        consumer_ids=ids if chosen is None else [ids[i] for i in chosen],
        sparse_index=None if sparse is None else {ids[i]: place for place, i in enumerate(sparse)},
        is_sparse=sparse is not None,
    )
