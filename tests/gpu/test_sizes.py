"""Sizes at which 32-bit arithmetic or one descriptor too many would show."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from spanpack import ColumnSpec, gather_triton, make_plan
from tests.support.compare import POISON, assert_same, poisoned
from tests.support.gpu import MakePacker

GIB = 1 << 30


@pytest.fixture(autouse=True)
def room(cuda_device: torch.device) -> Iterator[None]:
    """Skip where the GPU is too small or too full, and leave it as it was."""
    if torch.cuda.mem_get_info(cuda_device)[0] < 16 * GIB:
        pytest.skip("needs 16 GiB of free GPU memory")
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pattern(nbytes: int) -> torch.Tensor:
    """Bytes of which any 64 KiB differ from the 64 KiB before, ``[nbytes] uint8``."""
    words = torch.arange(-(-nbytes // 8), dtype=torch.int64, device="cuda")
    return words.mul_(0x9E3779B97F4A7C15 - (1 << 64)).view(torch.uint8)[:nbytes]


@pytest.mark.parametrize("budget_bytes", [8 * GIB, GIB], ids=["pinned", "past the budget"])
def test_2_2_gib_in_one_pack(make_packer: MakePacker, budget_bytes: int) -> None:
    packer = make_packer(pinned_budget_bytes=budget_bytes)
    big = pattern(int(2.2 * GIB) + 3)
    small = torch.arange(7, device="cuda")
    plan = make_plan([big, small], [ColumnSpec.whole(0, big), ColumnSpec.whole(1, small, copies=2)])
    snapshot = packer.run(plan, [big, small])
    found = snapshot.column(0)
    assert found.shape == big.shape
    assert torch.equal(found.to("cuda"), big)
    assert snapshot.column(1).tolist() == [*range(7), *range(7)]  # its destination lies past 2^31
    stats = packer.stats()
    assert (stats.launches, stats.copies) == (1, 1)
    assert bool(stats.fallbacks) == (budget_bytes == GIB)


def test_100_000_segments_in_one_pack(make_packer: MakePacker) -> None:
    packer = make_packer()
    leaf = pattern(200_000 * 3).view(200_000, 3)
    starts = np.arange(0, 200_000, 2)
    plan = make_plan([leaf], [ColumnSpec(0, starts, np.ones_like(starts))])
    assert len(plan.segments) == 100_000
    assert_same(packer.run(plan, [leaf]).column(0), leaf[::2])
    assert packer.stats().launches == 1


@pytest.mark.parametrize("row_bytes", [1024, 7], ids=["aligned rows", "odd rows"])
def test_rows_past_2_31_bytes_of_their_leaf(make_packer: MakePacker, row_bytes: int) -> None:
    packer = make_packer()
    rows = 3 * GIB // row_bytes
    leaf = pattern(rows * row_bytes).view(rows, row_bytes)
    starts = np.array([rows - 1, rows - 70, 0, (1 << 31) // row_bytes, (1 << 32) // row_bytes % rows])
    counts = np.array([1, 64, 3, 9, 2])
    plan = make_plan([leaf], [ColumnSpec(0, starts, counts)])
    expected = torch.cat([leaf[start : start + count] for start, count in zip(starts, counts, strict=True)])
    assert_same(packer.run(plan, [leaf]).column(0), expected)


def test_row_strides_past_2_31_bytes(make_packer: MakePacker) -> None:
    packer = make_packer()
    leaf = pattern(5 * GIB).view(2, 5 * GIB // 2)[:, 5:1005]
    plan = make_plan([leaf], [ColumnSpec.whole(0, leaf)])
    assert_same(packer.run(plan, [leaf]).column(0), leaf)


def test_destinations_past_2_31_bytes_of_the_slab(cuda_device: torch.device) -> None:
    big, odd = pattern(2 * GIB + 48), pattern(1001)[1:]
    plan = make_plan([big, odd], [ColumnSpec.whole(0, big), ColumnSpec.whole(1, odd, copies=3)])
    slab = poisoned(plan.device_bytes + 64, cuda_device)
    gather_triton(plan, [big, odd], slab)
    column = plan.columns[1]
    found = slab[column.offset_bytes : column.offset_bytes + column.nbytes]
    assert torch.equal(found, odd.repeat(3))
    assert (slab[column.offset_bytes + column.nbytes :] == POISON).all()
