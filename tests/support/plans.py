"""Are two plans the same?"""

from __future__ import annotations

import dataclasses

import numpy as np

from spanpack import Plan

# Arrays and objects with arrays in them: compared by what they say. Signatures are asked elsewhere.
_NOT_COMPARED_AS_VALUES = {"segments", "specs", "signature"}


def assert_same_plan(found: Plan, expected: Plan) -> None:
    """Same columns in the same places, same segments and runs bit for bit, whatever they were made from."""
    for field in dataclasses.fields(Plan):
        if field.name not in _NOT_COMPARED_AS_VALUES:
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.segments.dtype == expected.segments.dtype == np.int64
    assert np.array_equal(found.segments, expected.segments)
    assert (found.device_runs, found.host_runs) == (expected.device_runs, expected.host_runs)
