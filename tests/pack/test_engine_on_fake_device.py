"""The hot path on a simulated device: what is queued, in which order, and which memory it may touch."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from spanpack import ColumnSpec, Plan, make_plan
from spanpack.cuda import CudaEngine
from spanpack.pool import HostPool
from spanpack.stats import Fallbacks
from tests.support.fake_device import SIDE, FakeDevice, FakeLauncher

ROWS, WIDTH = 6, 40


class Rig:
    """An engine on a simulated device."""

    def __init__(self, budget_bytes: int = 1 << 30, slabs_per_class: int = 8) -> None:
        self.device = FakeDevice()
        self.launcher = FakeLauncher(self.device)
        self.pool = HostPool(budget_bytes, slabs_per_class, pin=False)
        self.fallbacks = Fallbacks()
        self.engine = CudaEngine(self.device, self.pool, self.fallbacks, self.launcher)  # type: ignore[arg-type]

    def pack(self, leaf: torch.Tensor, plan: Plan | None = None):  # type: ignore[no-untyped-def]
        return self.engine.run(plan or whole(leaf), [leaf])


def whole(leaf: torch.Tensor) -> Plan:
    return make_plan([leaf], [ColumnSpec.whole(0, leaf)])


def rows(leaf: torch.Tensor, starts: list[int], counts: list[int]) -> Plan:
    return make_plan([leaf], [ColumnSpec(0, np.array(starts), np.array(counts))])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def numbers(seed: int) -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.int32).reshape(ROWS, WIDTH) + 1000 * seed


def test_one_launch_one_copy_and_the_host_never_waits(rig: Rig) -> None:
    leaf = numbers(1)
    plan = whole(leaf)
    for _ in range(5):
        rig.pack(leaf, plan)
    assert (rig.device.launches, rig.device.copies, rig.device.uploads) == (5, 5, 1)
    assert rig.device.host_waits == 0


def test_overwritten_right_after_the_pack_every_snapshot_has_its_own_step(rig: Rig) -> None:
    leaf = numbers(0)
    plan = whole(leaf)
    snapshots = []
    for step in range(20):
        rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)))
        snapshots.append(rig.pack(leaf, plan))
    for step, snapshot in enumerate(snapshots):
        assert torch.equal(snapshot.column(0), numbers(step))


def test_the_copy_waits_for_a_held_up_producer(rig: Rig) -> None:
    rig.device.block(rig.device.stream)
    leaf = numbers(3)
    snapshot = rig.pack(leaf)
    rig.device.run()
    assert not snapshot.done()
    rig.device.unblock(rig.device.stream)
    assert torch.equal(snapshot.column(0), leaf)


def test_more_packs_than_device_slabs_wait_on_the_device(rig: Rig) -> None:
    rig.device.block(SIDE)
    leaf = numbers(0)
    plan = whole(leaf)
    snapshots = []
    for step in range(7):
        rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)))
        snapshots.append(rig.pack(leaf, plan))
        rig.device.run()
    assert rig.device.stream_waits >= 3
    assert rig.device.host_waits == 0
    rig.device.unblock(SIDE)
    for step, snapshot in enumerate(snapshots):
        assert torch.equal(snapshot.column(0), numbers(step))


def test_different_spans_back_to_back_behind_a_slow_kernel_keep_their_descriptors(rig: Rig) -> None:
    leaf = numbers(5)
    plans = [rows(leaf, [0, 4], [2, 1]), rows(leaf, [1, 3], [1, 2])]
    rig.device.block(rig.device.stream)
    snapshots = [rig.pack(leaf, plan) for plan in plans for _ in range(3)]
    rig.device.unblock(rig.device.stream)
    for index, snapshot in enumerate(snapshots):
        expected = leaf[[0, 1, 4]] if index < 3 else leaf[[1, 3, 4]]
        assert torch.equal(snapshot.column(0), expected)


def test_addresses_that_change_every_step_reach_the_device_in_order(rig: Rig) -> None:
    leaves = [numbers(step) for step in range(6)]
    plan = whole(leaves[0])
    rig.device.block(rig.device.stream)
    snapshots = [rig.pack(leaf, plan) for leaf in leaves]
    rig.device.unblock(rig.device.stream)
    for leaf, snapshot in zip(leaves, snapshots, strict=True):
        assert torch.equal(snapshot.column(0), leaf)
    assert rig.device.uploads == len(leaves)


def test_a_dropped_snapshot_keeps_its_slab_until_the_copy_is_over(rig: Rig) -> None:
    first, second, third = numbers(1), numbers(2), numbers(3)
    rig.device.block(SIDE)
    plan = whole(first)
    rig.pack(first, plan)  # dropped at once
    kept = rig.pack(second, plan)
    late = rig.pack(third, plan)
    rig.device.unblock(SIDE)
    assert torch.equal(kept.column(0), second)
    assert torch.equal(late.column(0), third)


def test_a_slab_is_reused_only_after_its_last_view_died(rig: Rig) -> None:
    leaf = numbers(0)
    plan = whole(leaf)
    view = rig.pack(leaf, plan).split(0)[0][2:3]
    for step in range(1, 30):
        rig.pack(numbers(step), plan).wait()
    assert torch.equal(view, numbers(0)[2:3])
    before = rig.pool.in_use
    del view
    gc.collect()
    assert rig.pool.in_use == before - 1


def test_steady_state_allocates_nothing(rig: Rig) -> None:
    leaf = numbers(0)
    plan = whole(leaf)
    for _ in range(10):
        rig.pack(leaf, plan).column(0)
    before = rig.pool.allocations, rig.engine.ring.allocations, rig.device.events_made
    for _ in range(1000):
        rig.pack(leaf, plan).column(0)
    assert (rig.pool.allocations, rig.engine.ring.allocations, rig.device.events_made) == before


def test_views_kept_for_long_are_copied_out_and_pinned_memory_stays_bounded() -> None:
    rig = Rig(slabs_per_class=4)
    leaf = numbers(0)
    plan = rows(leaf, [0, 1, 2, 3, 4, 5], [1] * 6)
    kept = []
    for step in range(200):
        leaf.copy_(numbers(step))
        kept.append(rig.pack(leaf, plan).split(0)[3])
    assert rig.pool.peak_bytes <= 4 * (1 << 16) + (1 << 16)
    for step, view in enumerate(kept):
        assert torch.equal(view, numbers(step)[3:4])
    assert kept[-1].untyped_storage().nbytes() == WIDTH * 4  # only its own bytes


def test_past_the_budget_the_bytes_come_in_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(budget_bytes=1 << 16)
    leaves = [numbers(step) for step in range(5)]
    plan = whole(leaves[0])
    snapshots = [rig.pack(leaf, plan) for leaf in leaves]
    for leaf, snapshot in zip(leaves, snapshots, strict=True):
        assert torch.equal(snapshot.column(0), leaf)
    assert rig.fallbacks.counts()["pinned memory"] >= 4
    assert sum("pageable" in record.message for record in caplog.records) == 1
    assert rig.pool.pinned_bytes <= 1 << 16


def test_out_of_device_memory_copies_leaf_by_leaf(rig: Rig) -> None:
    rig.device.refuse_memory = True
    leaf = numbers(4)
    snapshot = rig.pack(leaf)
    assert torch.equal(snapshot.column(0), leaf)
    assert rig.fallbacks.counts() == {"device memory": 1}


def test_an_error_in_the_gather_leaks_nothing(rig: Rig) -> None:
    leaf = numbers(1)
    plan = whole(leaf)
    rig.pack(leaf, plan).wait()
    for _ in range(20):
        rig.launcher.fail = RuntimeError("simulated")
        with pytest.raises(RuntimeError, match="simulated"):
            rig.pack(leaf, plan)
    gc.collect()
    assert rig.pool.in_use == 0
    assert torch.equal(rig.pack(leaf, plan).column(0), leaf)
