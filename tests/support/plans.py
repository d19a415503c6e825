"""Assertions that two plans are the same."""

from __future__ import annotations

import dataclasses

import numpy as np

from spanpack import Plan

# Arrays and objects that contain arrays: compared by their contents. Signatures are tested elsewhere.
_NOT_COMPARED_AS_VALUES = {"parts", "specs", "signature"}


def assert_same_plan(found: Plan, expected: Plan) -> None:
    """Assert the same columns in the same places and bitwise the same segments and runs, whatever their origin."""
    for field in dataclasses.fields(Plan):
        if field.name not in _NOT_COMPARED_AS_VALUES:
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.segments.dtype == expected.segments.dtype == np.int64
    assert np.array_equal(found.segments, expected.segments)
    for plan in (found, expected):
        assert_runs_are_segments(plan)
    assert (found.device_copies, found.host_copies) == (expected.device_copies, expected.host_copies)


def assert_runs_are_segments(plan: Plan) -> None:
    """Assert that the runs passed to the kernel, if there are any, describe the same as the table of segments."""
    runs = plan.passed_runs
    if runs is not None:
        expanded = [
            (run.leaf, run.source, run.destination + copy * run.nbytes, run.nbytes, 0, 0)
            for run in runs
            for copy in range(run.copies)
        ]
        assert sorted(expanded) == sorted(map(tuple, plan.segments.tolist()))
