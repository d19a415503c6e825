"""Pinned slabs and device slabs by themselves: classes, budgets, reuse. No bytes are moved."""

from __future__ import annotations

import gc
import threading
from collections import deque
from random import Random

import pytest
import torch

from spanpack import pool as pool_module
from spanpack.flight import Events, Flight
from spanpack.pool import SMALLEST_SLAB_BYTES, HostPool, HostSlab, Shelf, slab_class
from spanpack.ring import DeviceRing
from tests.support.fake_device import FakeDevice

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "capacity"),
    [(0, 1 << 16), (1, 1 << 16), (1 << 16, 1 << 16), ((1 << 16) + 1, 1 << 17), (MIB, MIB), ((1 << 31) + 1, 1 << 32)],
)
def test_slabs_come_in_powers_of_two(nbytes: int, capacity: int) -> None:
    assert slab_class(nbytes) == capacity


def test_a_slab_returns_when_the_last_view_into_it_dies() -> None:
    pool = HostPool(MIB, pin=False)
    slab = pool.acquire(100)
    assert slab is not None
    lease = slab.lease(100)
    view = torch.frombuffer(lease, dtype=torch.uint8, count=10, offset=50)[3:5]
    del lease
    gc.collect()
    assert pool.in_use == 1
    other = pool.acquire(100)
    assert other is not slab
    del view
    gc.collect()
    assert pool.in_use == 1  # `other`, which was never leased
    assert pool.acquire(100) is slab


def test_10_000_leases_of_random_sizes_stay_within_the_budget() -> None:
    """1 KiB to 64 MiB, as many small as large ones, up to four at a time."""
    budget = 256 * MIB
    pool = HostPool(budget, pin=False)
    source = Random(1)
    held: list[object] = []
    refused = 0
    for _ in range(10_000):
        nbytes = int(1024 * 2 ** source.uniform(0, 16))
        slab = pool.acquire(nbytes)
        if slab is None:
            refused += 1
        else:
            assert slab.capacity >= nbytes
            held.append(slab.lease(nbytes))
        if len(held) > source.randrange(4):
            del held[source.randrange(len(held))]
    assert pool.peak_bytes <= budget
    assert refused < 100
    held.clear()
    gc.collect()
    assert pool.in_use == 0


def test_reserved_slabs_are_there_when_asked_for() -> None:
    pool = HostPool(64 * MIB, pin=False)
    pool.reserve(MIB, slabs=3)
    assert (pool.allocations, pool.held_bytes) == (3, 3 * MIB)
    leases = [slab.lease(MIB) for slab in (pool.acquire(MIB) for _ in range(3)) if slab is not None]
    assert (len(leases), pool.allocations) == (3, 3)
    pool.reserve(MIB, slabs=3)
    assert pool.allocations == 3


def test_a_large_pack_takes_an_idle_larger_slab_rather_than_pin_one() -> None:
    pool = HostPool(1 << 30, pin=False)
    pool.reserve(1 << 26, 3)
    borrowed = [pool.acquire(1 << 23), pool.acquire(1 << 25)]
    leases = [slab.lease(1 << 23) for slab in borrowed if slab is not None]
    assert [slab and slab.capacity for slab in borrowed] == [1 << 26, 1 << 26]
    own, small = pool.acquire(1 << 23), pool.acquire(1 << 20)
    assert own is not None
    assert own.capacity == 1 << 23  # the last large one is left to large packs
    assert small is not None
    assert small.capacity == 1 << 20  # pinned in no time
    assert pool.allocations == 5
    leases.clear()
    assert {pool.acquire(1 << 26) for _ in range(3)} > set(borrowed)
    assert pool.allocations == 5


def test_borrowing_leaves_slabs_uncrowded() -> None:
    """Two sizes in turn, each alive while it is read."""
    pool = HostPool(1 << 30, pin=False)
    pool.reserve(1 << 24, 2)
    kept: deque[memoryview] = deque(maxlen=2)
    crowded = 0
    for step in range(20):
        slab = pool.acquire(5 << 20 if step % 2 else 1 << 24)
        assert slab is not None
        kept.append(slab.lease(5 << 20))
        crowded += slab.crowded()
    assert crowded == 0
    assert pool.allocations == 4


def test_a_reservation_ends_at_the_budget() -> None:
    pool = HostPool(2 * MIB, pin=False)
    pool.reserve(MIB, slabs=5)
    assert (pool.allocations, pool.held_bytes) == (2, 2 * MIB)


def test_idle_slabs_of_other_sizes_make_room() -> None:
    pool = HostPool(4 * MIB, pin=False)
    pool.reserve(MIB, slabs=4)
    slab = pool.acquire(2 * MIB)
    assert slab is not None
    assert pool.held_bytes == 4 * MIB
    lease = slab.lease(1)
    assert pool.acquire(4 * MIB) is None  # half of the budget is out
    del lease
    gc.collect()
    assert pool.acquire(4 * MIB) is not None


class TestRefusal:
    """Pinning that fails takes milliseconds: it is not tried at every pack."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Sizes that the system was asked for; it refuses all above 64 KiB."""
        asked: list[int] = []

        def make(shelf: Shelf, *, pin: bool) -> HostSlab:
            asked.append(shelf.capacity)
            if shelf.capacity > SMALLEST_SLAB_BYTES:
                raise RuntimeError("simulated")
            return HostSlab(shelf, pin=pin)

        monkeypatch.setattr(pool_module, "HostSlab", make)
        return asked

    def test_neither_this_size_nor_larger_ones_are_asked_for_again(self, asked: list[int]) -> None:
        pool = HostPool(64 * MIB, pin=False)
        for nbytes in (MIB, MIB, 2 * MIB, MIB, 1, MIB // 2, MIB // 2, MIB):
            pool.acquire(nbytes)
        assert asked == [MIB, SMALLEST_SLAB_BYTES, MIB // 2]
        assert pool.refusal == "simulated"

    def test_until_so_many_were_turned_down(self, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(HostPool, "RETRY_AFTER", 10)
        pool = HostPool(64 * MIB, pin=False)
        for _ in range(25):
            assert pool.acquire(MIB) is None
        assert asked == [MIB] * 3

    def test_until_pinned_memory_was_given_up(self, asked: list[int]) -> None:
        pool = HostPool(2 * MIB, pin=False)
        pool.reserve(1, slabs=4)
        for _ in range(5):
            assert pool.acquire(MIB) is None
        assert asked[4:] == [MIB]
        pool._forget(pool.shelf(1).idle[0])  # as making room for another size does
        assert pool.refusal is None
        assert pool.acquire(MIB) is None
        assert asked[4:] == [MIB, MIB]

    def test_once_it_works_again_the_refusal_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> HostSlab:
            raise RuntimeError("simulated")

        monkeypatch.setattr(HostPool, "RETRY_AFTER", 1)
        pool = HostPool(64 * MIB, pin=False)
        with monkeypatch.context() as patched:
            patched.setattr(pool_module, "HostSlab", refuse)
            assert pool.acquire(MIB) is None
        assert pool.acquire(MIB) is None
        assert pool.acquire(MIB) is not None
        assert pool.refusal is None


def test_crowding_is_counted_by_size() -> None:
    pool = HostPool(64 * MIB, slabs_per_class=4, pin=False)
    small, large = pool.shelf(1), pool.shelf(MIB)
    leases: list[memoryview] = []

    def lease() -> bool:
        slab = pool.acquire(1)
        if slab is not None:
            leases.append(slab.lease(1))
        return slab is not None

    assert [lease(), lease()] == [True, True]
    assert not small.is_crowded()
    assert lease()
    assert small.is_crowded()
    assert not large.is_crowded()
    assert [lease(), lease()] == [True, False]


def test_views_that_die_in_other_threads_give_their_slabs_back() -> None:
    pool = HostPool(64 * MIB, slabs_per_class=8, pin=False)
    queue: list[object] = []
    done = threading.Event()

    def drop() -> None:
        while not done.is_set() or queue:
            if queue:
                queue.pop()

    droppers = [threading.Thread(target=drop) for _ in range(3)]
    for dropper in droppers:
        dropper.start()
    for _ in range(2000):
        slab = pool.acquire(1)
        if slab is not None:
            queue.append(slab.lease(1))
            del slab
        assert pool.in_use <= 8
        pool.shelf(1).is_crowded()
    done.set()
    for dropper in droppers:
        dropper.join()
    gc.collect()
    assert pool.in_use == 0
    assert pool.allocations <= 8


def test_slabs_held_at_closing_go_with_their_views() -> None:
    pool = HostPool(64 * MIB, pin=False)
    slab = pool.acquire(1)
    assert slab is not None
    lease = slab.lease(1)
    pool.reserve(MIB, slabs=1)
    pool.close()
    assert pool.held_bytes == SMALLEST_SLAB_BYTES
    del lease
    gc.collect()
    assert pool.held_bytes == 0


class TestLostSlabs:
    """Slabs that an interrupt from the keyboard kept from being leased, after they were taken."""

    @pytest.fixture
    def pool(self) -> HostPool:
        return HostPool(3 * SMALLEST_SLAB_BYTES, slabs_per_class=2, pin=False)

    @pytest.mark.parametrize("leased_before", [False, True], ids=["new", "used"])
    def test_they_are_found_before_a_pack_goes_without(self, pool: HostPool, leased_before: bool) -> None:
        lost = pool.acquire(1)
        assert lost is not None
        if leased_before:
            lost.lease(1)
            assert pool.acquire(1) is lost
        other = pool.acquire(1)
        assert other is not None
        lease = other.lease(1)
        assert pool.acquire(1) is lost
        kept = lost.lease(1)
        assert pool.acquire(1) is None  # both are held
        assert pool.in_use == 2
        del lease, kept
        gc.collect()
        assert pool.in_use == 0

    def test_they_make_room_for_another_size(self, pool: HostPool) -> None:
        assert pool.acquire(1) is not None
        assert pool.acquire(1) is not None
        assert pool.acquire(2 * SMALLEST_SLAB_BYTES) is not None
        assert pool.held_bytes == 3 * SMALLEST_SLAB_BYTES

    def test_a_copy_that_still_writes_them_is_awaited(self, pool: HostPool) -> None:
        device = FakeDevice()
        for _ in range(2):
            slab = pool.acquire(1)
            assert slab is not None
            slab.flight = Flight(Events.make(device.make_event))  # type: ignore[arg-type]
            device.mark_landed(slab.flight, stream=1)
        assert pool.acquire(1) is None
        device.run()
        assert pool.acquire(1) is not None

    def test_one_whose_lease_is_seen_to_die_too_late_is_not_handed_out_twice(self, pool: HostPool) -> None:
        """As the garbage collector may have it, which clears all weak references before it calls what they call."""
        first = pool.acquire(1)
        assert first is not None
        lease = first.lease(1)
        watch = first._watch
        del lease
        first.shelf.returned.clear()
        other = pool.acquire(1)
        assert other is not None
        kept = [other.lease(1)]
        assert pool.acquire(1) is first
        kept.append(first.lease(1))
        first.shelf.returned.append(watch)  # type: ignore[arg-type]
        assert pool.acquire(1) is None
        first.shelf.returned.append(watch)  # type: ignore[arg-type]
        first.shelf.collect()
        assert not first.shelf.idle

    def test_they_go_when_the_pool_is_closed(self, pool: HostPool) -> None:
        assert pool.acquire(1) is not None
        pool.close()
        assert pool.held_bytes == 0


def test_what_a_broken_device_raises_is_no_refusal_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr(pool_module, "_free_landed_orphans", fail)
    pool = HostPool(MIB, pin=False)
    with pytest.raises(RuntimeError, match="simulated"):
        pool.acquire(1)
    assert pool.refusal is None


class TestDeviceRing:
    """Device slabs."""

    @pytest.fixture
    def ring(self) -> DeviceRing:
        return DeviceRing(FakeDevice(), max_slabs=3, budget_bytes=8 * MIB)  # type: ignore[arg-type]

    def test_an_idle_slab_is_used_again(self, ring: DeviceRing) -> None:
        first = ring.acquire(100, stream=1)
        ring._runtime.run()  # type: ignore[attr-defined]  # it is zeroed first
        assert ring.acquire(200, stream=1) is first
        assert (ring.allocations, ring.nbytes) == (1, 1 << 16)

    def test_a_larger_pack_takes_the_place_of_the_smallest_slab(self, ring: DeviceRing) -> None:
        for nbytes in (1, MIB // 2, MIB, 2 * MIB):
            assert ring.acquire(nbytes, stream=1).capacity >= nbytes
        assert ring.nbytes == MIB // 2 + MIB + 2 * MIB

    def test_one_pack_beyond_the_budget_is_served(self, ring: DeviceRing) -> None:
        assert ring.acquire(9 * MIB, stream=1).capacity == 16 * MIB

    @pytest.mark.parametrize("max_slabs", [2, 3, 9], ids="at most {}".format)
    def test_idle_slabs_that_are_too_small_make_room_within_the_budget(self, max_slabs: int) -> None:
        device = FakeDevice()
        ring = DeviceRing(device, max_slabs=max_slabs, budget_bytes=8 * MIB)  # type: ignore[arg-type]
        for nbytes in (MIB, 2 * MIB, 4 * MIB, 8 * MIB):
            assert ring.acquire(nbytes, stream=1).capacity == nbytes
            device.run()
            assert ring.nbytes <= 8 * MIB
        assert ring.acquire(9 * MIB, stream=1).capacity == 16 * MIB
        assert ring.nbytes == 16 * MIB  # alone

    def test_no_more_idle_slabs_go_than_have_to(self, ring: DeviceRing) -> None:
        for nbytes in (MIB, 4 * MIB):
            ring.acquire(nbytes, stream=1)
        ring._runtime.run()  # type: ignore[attr-defined]
        ring._budget_bytes = 12 * MIB
        ring.acquire(8 * MIB, stream=1)
        assert sorted(slab.capacity for slab in ring._slabs) == [4 * MIB, 8 * MIB]

    def test_slabs_in_use_stay_and_the_pack_is_served(self, ring: DeviceRing) -> None:
        busy = ring.acquire(MIB, stream=1)
        assert ring.acquire(8 * MIB, stream=1).capacity == 8 * MIB
        assert busy.capacity == MIB
        assert ring.nbytes == 9 * MIB

    def test_large_packs_behind_many_small_ones_get_slabs_of_their_own(self) -> None:
        device = FakeDevice()
        ring = DeviceRing(device)  # type: ignore[arg-type]
        for nbytes in [1] * 4 + [MIB] * 4:
            slab = ring.acquire(nbytes, stream=1)
            slab.flight = Flight(Events.make(device.make_event))  # type: ignore[arg-type]
            device.mark_landed(slab.flight, stream=1)
        assert [slab.capacity for slab in ring._slabs] == [MIB] * 4
        assert ring.stream_waits == 0
        ring.acquire(MIB, stream=1)
        assert (ring.stream_waits, ring.nbytes) == (1, 4 * MIB)

    def test_reserving_ends_at_the_most_slabs(self, ring: DeviceRing) -> None:
        ring.reserve(MIB, slabs=10)
        assert (ring.allocations, ring.nbytes) == (3, 3 * MIB)

    def test_of_busy_slabs_the_one_used_first_is_waited_for(self, ring: DeviceRing) -> None:
        device = FakeDevice()
        for turn in (2, 0, 1):
            slab = ring.acquire(MIB, stream=1)
            slab.flight, slab.turn = Flight(Events.make(device.make_event)), turn
            device.mark_landed(slab.flight, stream=1)
        assert ring.acquire(MIB, stream=1).turn == 0
        assert (ring.allocations, ring.stream_waits) == (3, 1)

    def test_a_slab_that_was_replaced_lets_its_memory_go(self, ring: DeviceRing) -> None:
        slabs = [ring.acquire(nbytes, stream=1) for nbytes in (1, MIB // 2, MIB, 2 * MIB)]
        assert [slab.capacity for slab in slabs] == [0, MIB // 2, MIB, 2 * MIB]
        assert not hasattr(slabs[0], "tensor")

    def test_closing_drops_everything(self, ring: DeviceRing) -> None:
        ring.reserve(MIB, slabs=2)
        ring.close()
        assert ring.nbytes == 0
