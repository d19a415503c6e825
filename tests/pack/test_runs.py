"""A few runs, passed to the kernel: when a plan has them, what they say, and what the kernel makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spanpack import ColumnSpec, Packer, gather_torch, gather_triton, make_plan
from spanpack.config import DEFAULT_CONFIGS, LaunchConfig
from spanpack.segments import MOST_PASSED, PassedRun
from tests.support.compare import poisoned
from tests.support.plans import assert_runs_are_segments

CONFIGS = (LaunchConfig(64, 1), *DEFAULT_CONFIGS)


def spans(leaf: int, rows: list[int], start: int = 0) -> ColumnSpec:
    counts = np.array(rows)
    return ColumnSpec(leaf, start + np.cumsum(counts) - counts, counts)


def test_the_spans_of_a_step_are_one_run_and_so_are_copies_for_everyone() -> None:
    leaves = [torch.zeros(9, 4), torch.zeros(1, 1, 4), torch.zeros(9, 2, dtype=torch.int8)]
    columns = [spans(0, [3, 1, 4], start=1), ColumnSpec.whole(1, leaves[1], copies=3), spans(2, [1, 8])]
    plan = make_plan(leaves, columns)
    assert plan.passed_runs == (
        PassedRun(leaf=0, source=16, destination=0, nbytes=128, copies=1),
        PassedRun(leaf=1, source=0, destination=128, nbytes=16, copies=3),
        PassedRun(leaf=2, source=0, destination=176, nbytes=18, copies=1),
    )
    assert_runs_are_segments(plan)


@pytest.mark.parametrize("count", [1, MOST_PASSED, MOST_PASSED + 1])
def test_no_more_than_the_kernel_takes(count: int) -> None:
    leaves = [torch.zeros(2, 3) for _ in range(count)]
    apart = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    stacked = make_plan(leaves, [ColumnSpec.stack(range(count), leaves)])
    for plan in (apart, stacked):
        assert plan.passed_runs is None if count > MOST_PASSED else len(plan.passed_runs or ()) == count
        assert_runs_are_segments(plan)


def test_rows_that_stand_apart_are_left_to_the_table_unless_it_is_one_row() -> None:
    strided = torch.zeros(8, 10)[:, :3]
    assert make_plan([strided], [ColumnSpec.whole(0, strided)]).passed_runs is None
    plan = make_plan([strided], [ColumnSpec(0, np.array([2, 6]), np.array([1, 1]))])
    assert plan.passed_runs == (PassedRun(0, 80, 0, 12, 1), PassedRun(0, 240, 12, 12, 1))
    assert_runs_are_segments(plan)


def test_pieces_without_rows_are_no_runs() -> None:
    leaf = torch.zeros(4, 2)
    plan = make_plan([leaf, leaf], [spans(0, [0, 2, 0]), ColumnSpec(1, np.array([3, 3]), np.array([0, 0]))])
    assert plan.passed_runs == (PassedRun(0, 0, 0, 16, 1),)
    assert plan.num_segments == len(plan.segments) == 1


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_odd_runs_and_copies_of_them_leave_the_bytes_that_torch_leaves(
    kernel_device: str, config: LaunchConfig
) -> None:
    base = (torch.arange(1 << 17, device=kernel_device) % 251).to(torch.uint8)
    leaves = [
        base[1:70_000],
        base[16:48],
        base[3:20],
        base[5:6],
        base[64:4160].view(1, 1, 4096),
        base[7:1007].view(10, 100),
    ]
    columns = [
        ColumnSpec.whole(i, leaf, copies)
        for i, (leaf, copies) in enumerate(zip(leaves, [1, 3, 5, 2, 4, 1], strict=True))
    ]
    plan = make_plan(leaves, [*columns, spans(5, [4, 3], start=2)])
    assert plan.passed_runs is not None
    expected, found = (poisoned(plan.device_bytes + 64, torch.device(kernel_device)) for _ in range(2))
    gather_torch(plan, leaves, expected)
    gather_triton(plan, leaves, found, config)
    assert torch.equal(found, expected)


def test_a_packer_of_the_cpu_interprets_the_same_kernel(kernel_device: str) -> None:
    if kernel_device != "cpu":
        pytest.skip("compiled elsewhere")
    leaves = [torch.arange(12.0).view(6, 2), torch.arange(4)]
    plan = make_plan(leaves, [spans(0, [2, 4]), ColumnSpec.whole(1, leaves[1], copies=2)])
    with Packer("cpu", backend="triton") as packer:
        snapshot = packer.run(plan, leaves)
        pieces: list[Tensor] = [*snapshot.split(0), *snapshot.split(1)]
    expected = [*leaves[0].split([2, 4]), leaves[1], leaves[1]]
    assert all(torch.equal(found, wanted) for found, wanted in zip(pieces, expected, strict=True))
