"""The hot path on a simulated device: what is queued, in which order, and which memory it may touch."""

from __future__ import annotations

import threading

import pytest
import torch

from spanpack import ColumnSpec, cuda, gather, make_plan
from spanpack.config import ConfigTable
from tests.support import fake_device
from tests.support.compare import assert_same
from tests.support.fake_device import SIDE
from tests.support.rig import Rig, numbers, rows, whole, with_descriptors


def test_one_launch_one_copy_and_the_host_never_waits(rig: Rig) -> None:
    leaf = numbers(1)
    plan = whole(leaf)
    for _ in range(5):
        rig.pack(leaf, plan)
    assert (rig.device.launches, rig.device.copies) == (5, 5)
    assert rig.device.uploads == (rig.way != "runs passed")  # of tiles, once
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
    expected = {"runs passed": 0, "addresses passed": 1, "all stored": len(leaves)}
    assert rig.device.uploads == expected[rig.way]


def test_views_asked_for_before_landing_wait(rig: Rig) -> None:
    rig.device.block(rig.device.stream)
    leaf = numbers(1)
    snapshot = rig.pack(leaf)
    rig.device.enqueue(lambda: leaf.copy_(numbers(2)))
    assert not snapshot.done()
    rig.device.unblock(rig.device.stream)
    (view,) = snapshot.split(0)
    assert rig.device.host_waits == 1
    assert_same(view, numbers(1))
    snapshot.wait()
    assert rig.device.host_waits == 1  # landed once, never asked again


@with_descriptors
def test_one_plan_on_two_streams_orders_its_descriptors(rig: Rig) -> None:
    leaves = [numbers(1), numbers(2)]
    plan = whole(leaves[0])
    rig.device.block(1)
    first = rig.pack(leaves[0], plan, stream=1)
    second = rig.pack(leaves[1], plan, stream=2)
    rig.device.run()
    assert not second.done()  # its addresses would overwrite those that the first launch has yet to read
    rig.device.unblock(1)
    assert_same(first.column(0), leaves[0])
    assert_same(second.column(0), leaves[1])
    assert rig.device.host_waits == 2
    assert len(rig.device.held) == 1  # the descriptors' memory, used on a stream that it was not allocated on


def test_streams_in_turn_keep_their_steps_apart() -> None:
    rig = Rig(slabs_per_class=32)
    leaves = [numbers(0), numbers(0)]
    plan = whole(leaves[0])
    snapshots = []
    for step in range(30):
        stream, leaf = 1 + step % 2, leaves[step % 2]
        rig.device.block(1 + (step + 1) % 2) if step % 3 else rig.device.unblock(stream)
        rig.device.enqueue(lambda leaf=leaf, step=step: leaf.copy_(numbers(step)), stream)
        snapshots.append(rig.pack(leaf, plan, stream=stream))
        rig.device.run()
    rig.device.unblock(1)
    rig.device.unblock(2)
    for step, snapshot in enumerate(snapshots):
        assert_same(snapshot.column(0), numbers(step))


def test_direct_store_needs_no_copy_and_no_device_slab() -> None:
    rig = Rig(configs=ConfigTable(direct_store_bytes=1 << 20))
    leaf = numbers(0)
    plan = whole(leaf)
    snapshots = []
    for step in range(6):
        rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)))
        snapshots.append(rig.pack(leaf, plan))
    assert (rig.device.launches, rig.device.copies, rig.engine.ring.allocations) == (6, 0, 0)
    for step, snapshot in enumerate(snapshots):
        assert_same(snapshot.column(0), numbers(step))


def test_leaves_that_can_not_be_moved_as_bytes_come_along(rig: Rig) -> None:
    leaf, mask = numbers(1), torch.eye(4).to_sparse()
    plan = make_plan([leaf, mask], [ColumnSpec.whole(0, leaf), ColumnSpec.whole(1, mask, copies=2)])
    snapshot = rig.engine.run(plan, [leaf, mask])
    mask._values().fill_(7)
    first, second = snapshot.split(1)
    assert_same(first, torch.eye(4).to_sparse())
    assert_same(second, torch.eye(4).to_sparse())
    assert first is not second
    assert_same(snapshot.column(0), numbers(1))
    assert rig.device.launches == 1


def test_leaves_on_the_host_are_copied_at_once(rig: Rig) -> None:
    leaf, on_host = numbers(1), torch.arange(7)
    columns = [ColumnSpec.whole(0, on_host, copies=2), ColumnSpec.whole(1, leaf)]
    plan = make_plan([on_host, leaf.to("meta")], columns)  # for a leaf on the host and one on some device
    rig.device.block(rig.device.stream)
    snapshot = rig.engine.run(plan, [on_host, leaf])
    on_host.zero_()
    rig.device.unblock(rig.device.stream)
    assert snapshot.column(0).tolist() == [*range(7), *range(7)]
    assert_same(snapshot.column(1), numbers(1))
    assert rig.engine.copied_bytes == plan.device_bytes == leaf.nbytes


def test_strided_leaves_are_made_contiguous_first_and_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[object] = []  # a real allocator frees in the order of the stream
    monkeypatch.setattr(cuda, "stage", lambda *given: staged.append(gather.stage(*given)) or staged[-1])
    leaf = numbers(1).t()
    snapshot = rig.pack(leaf)
    assert_same(snapshot.column(0), leaf)
    assert rig.fallbacks.counts() == {"strided": 1}
    assert (rig.device.launches, rig.device.copies) == (1, 1)


@with_descriptors
def test_after_an_upload_that_fails_the_descriptors_are_sent_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("simulated")

    leaf = numbers(1)
    plan = whole(leaf)
    with monkeypatch.context() as patched:
        patched.setattr(rig.device, "upload", fail)
        for _ in range(20):
            with pytest.raises(RuntimeError, match="simulated"):
                rig.pack(leaf, plan)
            rig.device.run()
    assert_same(rig.pack(leaf, plan).column(0), leaf)
    assert rig.engine.staging.in_use == 0


def test_a_launch_that_fails_leaves_later_packs_right(rig: Rig) -> None:
    """Its descriptors are still on their way when their staging memory is asked for again."""
    leaf, other = numbers(1), torch.arange(11)
    plans = [whole(leaf), whole(other)]
    rig.device.block(rig.device.stream)
    rig.launcher.fail = RuntimeError("simulated")
    with pytest.raises(RuntimeError, match="simulated"):
        rig.pack(leaf, plans[0])
    snapshots = [rig.pack(other, plans[1]), rig.pack(leaf, plans[0])]
    rig.device.unblock(rig.device.stream)
    assert_same(snapshots[0].column(0), other)
    assert_same(snapshots[1].column(0), leaf)


def test_a_launch_that_fails_leaves_the_slab_to_the_copy_that_reads_it() -> None:
    """The pack that failed had let its own stream wait for that copy; the next one is on another stream."""
    rig = Rig(slabs_per_class=16)
    leaf = numbers(0)
    plan = whole(leaf)
    rig.pack(leaf, plan).wait()
    rig.device.block(SIDE)
    snapshots = []
    for step in range(4):
        rig.device.enqueue(lambda step=step: leaf.copy_(numbers(step)), 1)
        snapshots.append(rig.pack(leaf, plan))
        rig.device.run()
    rig.launcher.fail = RuntimeError("simulated")
    with pytest.raises(RuntimeError, match="simulated"):
        rig.pack(leaf, plan)
    other = numbers(9)
    snapshots.append(rig.pack(other, whole(other), stream=2))
    rig.device.run()
    rig.device.unblock(SIDE)
    for step, snapshot in zip([*range(4), 9], snapshots, strict=True):
        assert_same(snapshot.column(0), numbers(step))


@with_descriptors
def test_after_an_interrupt_from_the_keyboard_the_descriptors_are_sent_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    leaf = numbers(1)
    plan = whole(leaf)
    with monkeypatch.context() as patched:
        patched.setattr(rig.device, "upload", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.pack(leaf, plan)
    assert_same(rig.pack(leaf, plan).column(0), leaf)


def test_a_direct_store_that_fails_leaves_later_packs_right() -> None:
    rig = Rig(configs=ConfigTable(direct_store_bytes=1 << 20))
    leaf = numbers(2)
    plan = whole(leaf)
    rig.launcher.fail = RuntimeError("simulated")
    with pytest.raises(RuntimeError, match="simulated"):
        rig.pack(leaf, plan)
    assert_same(rig.pack(leaf, plan).column(0), leaf)


def test_without_a_kernel_nothing_is_stored_directly() -> None:
    """Torch would store leaf by leaf, and the host would wait for each."""
    configs = ConfigTable(direct_store_bytes=1 << 20)
    fakes = Rig(configs=configs)
    engine = cuda.CudaEngine(fakes.device, fakes.pool, fakes.fallbacks, None, configs)  # type: ignore[arg-type]
    leaf = numbers(1)
    plan = whole(leaf)
    assert_same(engine.run(plan, [leaf]).column(0), leaf)
    assert (engine.direct_stores, engine.copies) == (0, 1)


class TestWarmingUp:
    """What serving meets is met before, and what does not work is given up with one warning."""

    CONFIGS = ConfigTable(direct_store_bytes=1 << 20)

    def test_every_configuration_is_launched_and_brought_home_and_one_stored_directly(self) -> None:
        rig = Rig(configs=self.CONFIGS)
        rig.engine.warmup()
        assert rig.launcher.configs == set(self.CONFIGS.configs)
        assert rig.device.copies == 3 * len(self.CONFIGS.configs)  # one for each way to tell the kernel what to copy
        assert rig.device.launches == rig.device.copies + 2
        assert (rig.engine.launches, rig.engine.copies, rig.pool.in_use) == (0, 0, 0)
        assert rig.fallbacks.counts() == {}

    def test_wrong_bytes_give_the_kernel_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig(configs=self.CONFIGS)
        monkeypatch.setattr(fake_device, "_gather", lambda *_: None)
        rig.engine.warmup()
        assert rig.engine.launcher is None
        assert rig.engine.configs.direct_store_bytes == 0
        assert rig.fallbacks.counts() == {"triton failed": 1}

    def test_a_direct_store_that_stores_nothing_is_turned_off_and_the_kernel_kept(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig = Rig(configs=self.CONFIGS)
        gather_tiles = fake_device._gather

        def into_device_memory_only(count: int, tiles: int, addresses: int, slab: int, tile_bytes: int) -> None:
            if all(slab != host.address for host in rig.pool._slabs):
                gather_tiles(count, tiles, addresses, slab, tile_bytes)

        monkeypatch.setattr(fake_device, "_gather", into_device_memory_only)
        rig.engine.warmup()
        assert rig.fallbacks.counts() == {"direct store failed": 1}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        leaf = numbers(3)
        assert_same(rig.pack(leaf).column(0), leaf)
        assert (rig.engine.launches, rig.engine.copies, rig.engine.direct_stores) == (1, 1, 0)

    def test_without_pinned_memory_the_kernel_is_checked_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig(budget_bytes=0, configs=self.CONFIGS)
        rig.engine.warmup()
        assert rig.fallbacks.counts() == {}
        assert rig.device.launches == 3 * len(self.CONFIGS.configs)
        monkeypatch.setattr(fake_device, "_gather", lambda *_: None)
        rig.engine.warmup()
        assert rig.fallbacks.counts() == {"triton failed": 1}


def test_gaps_between_columns_reach_the_host_as_zeros(rig: Rig) -> None:
    """Never what some other program left in the device's memory; the fake device fills new memory with a pattern."""
    leaves = [torch.full((3,), 7, dtype=torch.uint8), torch.full((5,), 7, dtype=torch.uint8)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    for stream in (1, 2):
        rig.device.block(stream)
        rig.device.stream = stream
        snapshot = rig.engine.run(plan, leaves)
        rig.device.unblock(stream)
        snapshot.wait()
        found = torch.frombuffer(snapshot._bytes(), dtype=torch.uint8)
        assert found.tolist() == [7] * 3 + [0] * 13 + [7] * 5 + [0] * 11


def test_reserved_slabs_are_filled_before_another_stream_may_use_them(rig: Rig) -> None:
    leaf = numbers(1)
    rig.device.enqueue(lambda: None, 1)
    rig.engine.reserve(leaf.nbytes, slabs=2)
    rig.device.block(1)
    rig.device.block(SIDE)
    snapshot = rig.pack(leaf, stream=2)
    rig.device.run()
    rig.device.unblock(1)  # whatever was left there comes between the gather and the copy
    rig.device.run()
    rig.device.unblock(SIDE)
    assert_same(snapshot.column(0), leaf)
    assert rig.engine.ring.allocations == 2


def test_several_threads_wait_for_one_snapshot(rig: Rig) -> None:
    leaf = numbers(4)
    snapshot = rig.pack(leaf)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(snapshot.column(0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(column, leaf) for column in found)
    waits = rig.device.host_waits
    snapshot.wait()
    assert rig.device.host_waits == waits


def test_many_plans_take_turns_in_little_device_memory(rig: Rig) -> None:
    leaf = torch.arange(200)
    plans = [rows(leaf, [start], [1 + start % 3]) for start in range(190)]
    for _ in range(2):
        snapshots = [(plan, rig.pack(leaf, plan)) for plan in plans[:4]]
        for start, plan in enumerate(plans):
            assert rig.pack(leaf, plan).column(0).tolist() == list(range(start, start + 1 + start % 3))
        for start, (_, snapshot) in enumerate(snapshots):
            assert snapshot.column(0)[0] == start
    assert len(rig.engine.residents) <= 128
