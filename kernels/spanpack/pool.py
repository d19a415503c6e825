"""Host memory, pinned or not: slabs that are reused once the last view into them has died."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .flight import Events, Flight

ByteArray = npt.NDArray[np.uint8]
SMALLEST_SLAB_BYTES = 1 << 16
LARGE_SLAB_BYTES = 1 << 22  # pinning this much takes 3 ms


@lru_cache(maxsize=1024)
def slab_class(nbytes: int) -> int:
    """Capacity of the slab that serves a request: a power of two, to which torch's pinned allocator rounds anyway."""
    return max(SMALLEST_SLAB_BYTES, 1 << (max(nbytes, 1) - 1).bit_length())


class _Watch(weakref.ref[memoryview]):
    """A weak reference to a lease that knows the slab behind it."""

    __slots__ = ("slab",)
    slab: HostSlab


class Shelf:
    """The slabs of one size class.

    Attributes
    ----------
    capacity
        Bytes of each slab.
    most
        Maximum number of slabs.
    count
        Current number of slabs.
    idle
        Slabs that nobody holds. A copy into them may still be in flight.
    returned
        Watches of slabs whose last view has died and which are not in `idle` yet. A weak reference's callback appends
        to it, in whichever thread drops the view and at any point of its work. So the callback is ``deque.append``,
        which runs no Python code, and the deque is never iterated over.
    """

    __slots__ = ("capacity", "count", "idle", "most", "returned")

    def __init__(self, capacity: int, most: int) -> None:
        self.capacity = capacity
        self.most = most
        self.count = 0
        self.idle: deque[HostSlab] = deque()
        self.returned: deque[_Watch] = deque()

    def take(self) -> HostSlab | None:
        """A slab that neither a view nor a copy uses, if there is one."""
        returned, idle = self.returned, self.idle
        while returned:
            watch = returned.popleft()
            slab = watch.slab
            if slab._watch is not watch:
                continue  # it was reclaimed before its watch was processed
            flight = slab.flight
            if flight is None or flight.done or flight.is_done():
                return slab
            idle.append(slab)
        for _ in range(len(idle)):
            slab = idle.popleft()
            if slab.is_idle():
                return slab
            idle.append(slab)
        return None

    def collect(self) -> None:
        """Move the returned slabs to `idle`."""
        while self.returned:
            watch = self.returned.popleft()
            if watch.slab._watch is watch:  # else it was reclaimed before
                self.idle.append(watch.slab)

    def unheld(self) -> int:
        """Number of slabs that nobody holds."""
        return len(self.idle) + len(self.returned)

    def is_crowded(self) -> bool:
        """Whether the next snapshots should copy their bytes out of the slab.

        True once more than half of the permitted slabs are held. For large slabs, also true as soon as none is left for
        the next pack, since pinning one more would delay a step by milliseconds.
        """
        unheld = self.unheld()
        if self.capacity >= LARGE_SLAB_BYTES and unheld == 0 and self.count > 1:
            return True
        return 2 * (self.count - unheld) > self.most


class HostSlab:
    """One host buffer.

    Attributes
    ----------
    array, view
        The whole buffer, ``[capacity] uint8``; slicing and `torch.frombuffer` are faster on the view than on the array.
    address, capacity
        Host address, and size in bytes.
    shelf
        The shelf that it belongs to.
    events
        Events of the flights into this slab; None until the first.
    flight
        The last pack whose copy uses this memory; until it is done the memory must not be touched or freed.
    """

    __slots__ = ("_watch", "address", "array", "capacity", "events", "flight", "shelf", "view")

    def __init__(self, shelf: Shelf, *, pin: bool) -> None:
        self.flight: Flight | None = None
        self.shelf = shelf
        self.capacity = shelf.capacity
        tensor = torch.empty(self.capacity, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self.array: ByteArray = tensor.numpy()  # keeps the tensor alive
        self.address = tensor.data_ptr()
        self.events: Events | None = None
        self.view = self.array.data
        self._watch: weakref.ref[memoryview] | None = None

    def lease(self, nbytes: int) -> memoryview:
        """Lease the first `nbytes`; the slab returns to its shelf when this memoryview dies.

        Tensors made with `torch.frombuffer` hold it, so the slab outlives every view into it.
        """
        lease = self.view[:nbytes]
        self._watch = watch = _Watch(lease, self.shelf.returned.append)
        watch.slab = self
        return lease

    def call_on_death(self, forget: Callable[[HostSlab], None]) -> None:
        """Have `forget` called with this slab when its lease dies, instead of returning the slab to its shelf."""
        lease = self._watch() if self._watch is not None else None
        if lease is not None:  # else it is on the shelf already
            self._watch = weakref.ref(lease, lambda _: forget(self))

    def unwatch(self) -> None:
        """Drop the watch, which refers back to this slab: without the cycle, freeing needs no garbage collector."""
        self._watch = None

    def is_leased(self) -> bool:
        """Whether a lease of this slab is alive."""
        return self._watch is not None and self._watch() is not None

    def make_events(self, make_event: Callable[..., torch.cuda.Event]) -> Events:
        """Make the events of this slab, which had none."""
        self.events = Events.make(make_event)
        return self.events

    def crowded(self) -> bool:
        """Whether so many slabs of this size are held that bytes should be copied out of this one."""
        return self.shelf.is_crowded()

    def is_idle(self) -> bool:
        """Whether no copy uses the memory any more."""
        flight = self.flight
        return flight is None or flight.done or flight.is_done()

    def __del__(self) -> None:
        """If the pool was dropped rather than closed, keep the memory until no copy uses it."""
        flight = getattr(self, "flight", None)  # an interrupt may have come before it was set
        if flight is not None and not flight.done:
            _orphans.append((flight, self.array))


# Freed when the next slab is made, not in a destructor, which must neither block nor fail.
_orphans: deque[tuple[Flight, ByteArray]] = deque()


def _free_landed_orphans() -> None:
    for _ in range(len(_orphans)):
        with suppress(IndexError):  # another thread took it
            orphan = _orphans.popleft()
            landed = False
            try:
                landed = orphan[0].is_done()
            finally:  # also if a broken device raises
                if not landed:
                    _orphans.append(orphan)


class HostPool:
    """Slabs by size class, within a byte budget.

    After the system has refused memory, it is not asked for that much or more, since asking takes milliseconds, until
    memory of this pool has been freed or `RETRY_AFTER` such requests have been rejected.

    Parameters
    ----------
    budget_bytes
        Maximum memory that the pool holds.
    slabs_per_class
        Maximum number of slabs of one size. Past half of it, snapshots copy their bytes out instead of keeping a slab,
        so that pinned memory stays bounded however long consumers keep their payloads.
    pin
        Whether the memory is pinned; pageable memory is enough if no GPU copies into it.
    lands_copies
        Whether copies from a device land here. If so, an idle larger slab is used where pinning one of the right size
        would take milliseconds, and making a slab frees slabs of pools that were dropped with copies in flight.
    """

    RETRY_AFTER = 1000

    def __init__(
        self, budget_bytes: int, slabs_per_class: int = 8, *, pin: bool = True, lands_copies: bool = True
    ) -> None:
        self.budget_bytes = budget_bytes
        self.slabs_per_class = slabs_per_class
        self.held_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self.pin = pin
        self.lands_copies = lands_copies
        self._refusal: _Refusal | None = None
        self._shelves: dict[int, Shelf] = {}
        self._slabs: set[HostSlab] = set()  # keeps slabs and their watches alive while views hold only the array

    @property
    def refusal(self) -> str | None:
        """The system's message when it last refused pinned memory; None once the refusal no longer applies."""
        return self._refusal.message if self._refusal is not None else None

    def shelf(self, nbytes: int) -> Shelf:
        """The shelf of the slabs for `nbytes`."""
        capacity = slab_class(nbytes)
        shelf = self._shelves.get(capacity)
        if shelf is None:
            shelf = self._shelves[capacity] = Shelf(capacity, self.slabs_per_class)
        return shelf

    def acquire(self, nbytes: int) -> HostSlab | None:
        """An idle slab of at least `nbytes`, or None if the budget or the system refuses one."""
        slab = self.take(nbytes)
        return self.take(nbytes) if slab is None and self._bring_back_lost() else slab

    def take(self, nbytes: int) -> HostSlab | None:
        """Like `acquire`, without a search for slabs that an interrupt has left on no shelf."""
        shelf = self.shelf(nbytes)
        return shelf.take() or self._borrow(shelf) or self._grow(shelf)

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate slabs ahead, so that no later `acquire` has to."""
        shelf = self.shelf(nbytes)
        while shelf.count < slabs:
            slab = self._grow(shelf)
            if slab is None:
                return
            shelf.idle.append(slab)

    @property
    def in_use(self) -> int:
        """Number of slabs that a snapshot or a view holds."""
        return sum(shelf.count - shelf.unheld() for shelf in tuple(self._shelves.values()))

    def close(self) -> None:
        """Wait for the copies in flight and free idle slabs; slabs that views hold are freed when the views die."""
        self._bring_back_lost()
        for slab in tuple(self._slabs):
            if slab.flight is not None:
                slab.flight.wait()
            slab.call_on_death(self._forget)
        for shelf in self._shelves.values():
            shelf.collect()
            while shelf.idle:
                self._forget(shelf.idle.popleft())

    def _borrow(self, shelf: Shelf) -> HostSlab | None:
        """An idle slab from a shelf of larger ones, to which it returns; never the last idle one there.

        Without it, larger packs would have to pin another slab, and would find their shelf crowded.
        """
        if not self.lands_copies or shelf.capacity < LARGE_SLAB_BYTES:
            return None
        for capacity, other in sorted(self._shelves.items()):
            slab = other.take() if capacity > shelf.capacity and other.unheld() > 1 else None
            if slab is not None:
                return slab
        return None

    def _grow(self, shelf: Shelf) -> HostSlab | None:
        size = shelf.capacity
        if shelf.count >= shelf.most or self._is_refused(size):
            return None
        if self.held_bytes + size > self.budget_bytes and not self._trim(shelf):
            return None
        if self.lands_copies:
            _free_landed_orphans()  # outside of the try: an error of a broken device is no refusal
        try:
            slab = HostSlab(shelf, pin=self.pin)
        except RuntimeError as error:  # locked-memory limits of the system or the container
            self._refusal = _Refusal(size, str(error).splitlines()[0], self.RETRY_AFTER)
            return None
        if self._refusal is not None and size >= self._refusal.size_bytes:
            self._refusal = None
        self._slabs.add(slab)
        shelf.count += 1
        self.allocations += 1
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return slab

    def _bring_back_lost(self) -> bool:
        """Return slabs to their shelf that an interrupt left taken but not leased; returns whether there were any.

        The caller must not hold a slab that is not leased.
        """
        unleased = [slab for slab in tuple(self._slabs) if not slab.is_leased()]
        for shelf in self._shelves.values():  # after the check, so that leases that died since are collected here
            shelf.collect()
        idle = {slab for shelf in self._shelves.values() for slab in shelf.idle}
        lost = [slab for slab in unleased if slab not in idle]
        for slab in lost:
            slab.unwatch()  # if the watch of its last lease is returned later, it is ignored
            slab.shelf.idle.append(slab)
        return bool(lost)

    def _is_refused(self, size: int) -> bool:
        """Whether the system's last refusal still stands for slabs of this size."""
        refusal = self._refusal
        if refusal is None or size < refusal.size_bytes:
            return False
        refusal.requests_left -= 1
        return refusal.requests_left >= 0

    def _trim(self, shelf: Shelf) -> bool:
        """Free idle slabs of other sizes until there is room for one more of this size; returns whether there is."""
        others = [other for _, other in sorted(self._shelves.items()) if other is not shelf]
        for other in others:
            other.collect()
        idle_bytes = sum(slab.capacity for other in others for slab in other.idle if slab.is_idle())
        if self.held_bytes - idle_bytes + shelf.capacity > self.budget_bytes:
            return False  # freeing all of them is not enough, and later packs would pin memory again
        for other in others:
            for _ in range(len(other.idle)):
                if self.held_bytes + shelf.capacity <= self.budget_bytes:
                    break
                slab = other.idle.popleft()
                if slab.is_idle():
                    self._forget(slab)
                    del slab  # returns its memory to torch before torch is asked to release its cache
                else:
                    other.idle.append(slab)
        if self.pin:
            _release_cached_pinned_memory()
        return True

    def _forget(self, slab: HostSlab) -> None:
        self._slabs.discard(slab)
        slab.unwatch()
        slab.shelf.count -= 1
        self.held_bytes -= slab.capacity
        self._refusal = None


@dataclass(slots=True)
class _Refusal:
    """The system refused to pin `size_bytes`; `requests_left` more requests are rejected without asking it."""

    size_bytes: int
    message: str
    requests_left: int


def _release_cached_pinned_memory() -> None:
    """Make torch return unused pinned blocks to the system."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
