"""Pinned slabs and device slabs by themselves: classes, budgets, reuse. No bytes are moved."""

from __future__ import annotations

import gc
import threading
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
    assert (pool.allocations, pool.pinned_bytes) == (3, 3 * MIB)
    leases = [slab.lease(MIB) for slab in (pool.acquire(MIB) for _ in range(3)) if slab is not None]
    assert (len(leases), pool.allocations) == (3, 3)
    pool.reserve(MIB, slabs=3)
    assert pool.allocations == 3


def test_a_reservation_ends_at_the_budget() -> None:
    pool = HostPool(2 * MIB, pin=False)
    pool.reserve(MIB, slabs=5)
    assert (pool.allocations, pool.pinned_bytes) == (2, 2 * MIB)


def test_idle_slabs_of_other_sizes_make_room() -> None:
    pool = HostPool(4 * MIB, pin=False)
    pool.reserve(MIB, slabs=4)
    slab = pool.acquire(2 * MIB)
    assert slab is not None
    assert pool.pinned_bytes == 4 * MIB
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
        slabs = [pool.acquire(1) for _ in range(4)]
        for _ in range(5):
            assert pool.acquire(MIB) is None
        assert asked[4:] == [MIB]
        for slab in slabs:
            assert slab is not None
            pool.give_back(slab)
        pool._forget(slabs[0])  # type: ignore[arg-type] # as making room for another size does
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
    slabs = [pool.acquire(1) for _ in range(2)]
    assert not small.is_crowded()
    slabs.append(pool.acquire(1))
    assert small.is_crowded()
    assert not large.is_crowded()
    assert [slab is not None for slab in (*slabs, pool.acquire(1), pool.acquire(1))] == [True] * 4 + [False]


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
    assert pool.pinned_bytes == SMALLEST_SLAB_BYTES
    del lease
    gc.collect()
    assert pool.pinned_bytes == 0


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
