"""Memory of the hot path on the simulated device: reused when it may be, bounded, and done without where refused."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from queue import SimpleQueue
from random import Random

import pytest
import torch

from spanpack import ClosedError, ColumnSpec, Snapshot, make_plan, pool
from spanpack.late import MOST_WAITING
from tests.support.compare import assert_same
from tests.support.fake_device import SIDE
from tests.support.rig import ROWS, WIDTH, Rig, numbers, whole, with_descriptors


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


def test_past_the_budget_the_bytes_come_in_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(budget_bytes=1 << 16)
    leaves = [numbers(step) for step in range(5)]
    plan = whole(leaves[0])
    snapshots = [rig.pack(leaf, plan) for leaf in leaves]
    for leaf, snapshot in zip(leaves, snapshots, strict=True):
        assert torch.equal(snapshot.column(0), leaf)
    assert rig.fallbacks.counts()["pinned memory"] >= 4
    assert sum("pageable" in record.message for record in caplog.records) == 1
    assert rig.pool.held_bytes <= 1 << 16


@with_descriptors
def test_out_of_device_memory_copies_leaf_by_leaf(rig: Rig) -> None:
    rig.device.refuse_memory = True
    leaf = numbers(4)
    snapshot = rig.pack(leaf)
    assert torch.equal(snapshot.column(0), leaf)
    assert rig.fallbacks.counts() == {"descriptors": 1, "device memory": 1}


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


@pytest.mark.parametrize("device_refuses", [False, True], ids=["device memory", "no device memory either"])
def test_refused_pinned_memory_means_pageable_memory_and_one_warning(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device_refuses: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(pool, "HostSlab", refuse)
    rig.device.refuse_memory = device_refuses
    leaf = numbers(0)
    plan = whole(leaf)
    for step in range(5):
        leaf.copy_(numbers(step))
        assert_same(rig.pack(leaf, plan).column(0), numbers(step))
    assert rig.fallbacks.counts()["pinned memory"] == 5
    warnings = [record.message for record in caplog.records if "pinned memory refused" in record.message]
    assert warnings == [
        "spanpack: pinned memory refused by the system (CUDA error: out of memory); "
        "using pageable memory, filled when the snapshot is waited for"
    ]


@with_descriptors
def test_a_pageable_snapshot_can_be_dropped_before_its_kernel_ran(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.pool, "acquire", lambda nbytes: None)
    rig.device.block(2)
    rig.pack(numbers(1), stream=2)
    assert rig.device.allocated_on == [2, 2]  # descriptors and slab: freed in the order of the stream that writes them
    rig.device.unblock(2)
    rig.device.run()


def test_a_slow_path_snapshot_is_done_without_being_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.pool, "acquire", lambda nbytes: None)
    snapshot = rig.pack(numbers(1))
    assert not snapshot.done()
    rig.device.run()
    assert snapshot.done()


def test_a_slab_whose_copy_is_under_way_is_neither_written_nor_freed(rig: Rig) -> None:
    """The host writes CPU leaves at once: into a slab of a dropped snapshot, an older copy would land over them."""
    leaf, on_host = numbers(1), torch.arange(ROWS * WIDTH, dtype=torch.int32)
    rig.device.block(SIDE)
    large = torch.cat([leaf, leaf])
    rig.pack(large)  # dropped at once
    columns = [ColumnSpec.whole(0, leaf), ColumnSpec.whole(1, on_host)]
    plan = make_plan([leaf.to("meta"), on_host], columns)  # for a leaf on some device and one on the host
    snapshot = rig.engine.run(plan, [leaf, on_host])
    rig.device.unblock(SIDE)
    assert_same(snapshot.column(1), on_host)
    waits = rig.device.host_waits
    rig.device.block(SIDE)
    rig.pack(large)
    rig.device.unblock(SIDE)
    rig.pool.close()
    assert rig.device.host_waits == waits + 1


@with_descriptors
def test_dropped_without_being_closed_memory_outlives_the_copies_that_use_it(rig: Rig) -> None:
    device = rig.device
    device.block(1)
    device.block(SIDE)
    rig.pack(numbers(1))
    slabs = [*rig.pool._slabs, *rig.engine.staging._slabs]
    memory = [weakref.ref(slab.array) for slab in slabs]
    rig.pool, rig.engine = Rig().pool, Rig().engine
    slabs.clear()
    gc.collect()
    rig.pool.acquire(1)
    assert len(memory) == 2
    assert all(array() is not None for array in memory)
    device.unblock(1)
    device.unblock(SIDE)
    device.run()
    rig.pool.acquire(1)  # making a slab lets go of what has landed
    assert all(array() is None for array in memory)


def test_pageable_descriptors_serve_inside_and_outside_inference_mode(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.engine.staging, "acquire", lambda nbytes: None)
    leaves = [numbers(1), numbers(2)]
    plan = whole(leaves[0])
    with torch.inference_mode():
        rig.pack(leaves[0], plan).wait()
    assert_same(rig.pack(leaves[1], plan).column(0), leaves[1])


def test_a_pack_larger_than_the_budget_drops_no_slabs_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr(pool, "_release_cached_pinned_memory", lambda: released.append(True))
    rig = Rig(budget_bytes=1 << 17)
    small, large = torch.arange(100), torch.zeros(1 << 18, dtype=torch.uint8)
    plans = whole(small), whole(large)
    rig.pack(small, plans[0]).wait()
    rig.pool.pin = True  # as if: giving cached memory back to the system stalls the device
    for _ in range(10):
        rig.pack(large, plans[1]).wait()
        rig.pack(small, plans[0]).wait()
    assert rig.pool.allocations == 1
    assert not released


def test_slabs_exhausted_by_kept_snapshots_fall_back_and_recover() -> None:
    rig = Rig(slabs_per_class=2)
    leaf = numbers(0)
    plan = whole(leaf)
    kept = []
    for step in range(6):
        rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)))
        kept.append(rig.pack(leaf, plan))
    for step, snapshot in enumerate(kept):
        assert_same(snapshot.column(0), numbers(step))
    assert rig.fallbacks.counts() == {"pinned memory": 4}
    del snapshot
    kept.clear()
    rig.pack(leaf, plan).wait()
    assert rig.fallbacks.counts() == {"pinned memory": 4}


class TestLatePacks:
    """Packs without a pinned slab: bounded on the device, and never lost."""

    @pytest.fixture
    def rig(self) -> Rig:
        return Rig(budget_bytes=0)

    def test_more_than_the_bound_bring_the_oldest_home_at_once(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        leaf = numbers(0)
        plan = whole(leaf)
        snapshots = []
        for step in range(MOST_WAITING + 3):
            rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)))
            snapshots.append(rig.pack(leaf, plan))
            assert rig.device.host_waits == max(0, step + 1 - MOST_WAITING)
            assert rig.engine.late.device_bytes == leaf.nbytes * min(step + 1, MOST_WAITING)
        for step, snapshot in enumerate(snapshots):
            assert_same(snapshot.column(0), numbers(step))
        assert rig.engine.late.device_bytes == 0
        assert rig.fallbacks.counts() == {"pinned memory": MOST_WAITING + 3, "late packs": 3}
        assert sum("copying the oldest at once" in record.message for record in caplog.records) == 1

    def test_dropped_released_and_waited_for_snapshots_do_not_count(self, rig: Rig) -> None:
        leaf = numbers(1)
        plan = whole(leaf)
        for _ in range(MOST_WAITING):
            rig.pack(leaf, plan)  # dropped at once
        waited_for = [rig.pack(leaf, plan) for _ in range(MOST_WAITING - 1)]
        for snapshot in waited_for:
            snapshot.wait()
        released = [rig.pack(leaf, plan) for _ in range(MOST_WAITING - 1)]
        for snapshot in released:
            snapshot.release()
        kept = [rig.pack(leaf, plan) for _ in range(MOST_WAITING)]
        assert "late packs" not in rig.fallbacks.counts()
        for snapshot in kept:
            assert_same(snapshot.column(0), leaf)

    def test_waiting_in_other_threads_meanwhile(self, rig: Rig) -> None:
        leaf = torch.arange(50_000, dtype=torch.int32)
        plan = whole(leaf)
        queue: SimpleQueue[tuple[int, Snapshot] | None] = SimpleQueue()
        wrong: list[int] = []

        def wait() -> None:
            while (item := queue.get()) is not None:
                step, snapshot = item
                if snapshot.column(0)[0] != step:
                    wrong.append(step)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(300):
            rig.device.enqueue(lambda step=step: leaf.fill_(step))
            snapshot = rig.pack(leaf, plan)
            for _ in range(1 + step % 2):  # some are waited for twice
                queue.put((step, snapshot))
            assert rig.engine.late.device_bytes <= MOST_WAITING * plan.device_bytes
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_released_while_others_wait_it_stays_released(self, rig: Rig) -> None:
        snapshot = rig.pack(numbers(1))
        assert snapshot._rest is not None
        threads = [threading.Thread(target=call) for call in (snapshot.release, snapshot.wait, snapshot.wait)]
        with snapshot._rest.lock:
            for thread in threads:
                thread.start()
                time.sleep(0.02)  # one after the other, they come to the lock
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        with pytest.raises(ClosedError):
            snapshot.column(0)


def test_1_000_packs_of_random_sizes_stay_within_the_budget() -> None:
    rig = Rig(budget_bytes=1 << 18)
    source = Random(5)
    base = torch.arange(1 << 15, dtype=torch.int32)  # 128 KiB: slabs of two sizes
    flying = []
    for _ in range(1000):
        leaf = base[: source.randrange(1, len(base))]
        flying.append((len(leaf), rig.pack(leaf)))
        if len(flying) > source.randrange(4):
            length, snapshot = flying.pop(0)
            assert_same(snapshot.column(0), base[:length])
    assert rig.pool.peak_bytes <= 1 << 18
    assert rig.engine.ring.nbytes <= 4 << 17


def test_closing_waits_for_copies_and_views_outlive_it(rig: Rig) -> None:
    leaf = numbers(3)
    plan = whole(leaf)
    view = rig.pack(leaf, plan).split(0)[0]
    flying = rig.pack(leaf, plan)
    rig.engine.close()
    rig.pool.close()
    assert flying.done()
    assert rig.pool.in_use == 2
    assert_same(view, numbers(3))
    assert_same(flying.column(0), numbers(3))
    del view, flying
    gc.collect()
    assert (rig.pool.in_use, rig.pool.held_bytes, len(rig.engine.residents)) == (0, 0, 0)
