"""Pinned host memory: slabs that go back to work when the last view into them has died."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from contextlib import suppress
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
    """Capacity of the slab that serves a request: a power of two, as torch's pinned allocator rounds to one anyway."""
    return max(SMALLEST_SLAB_BYTES, 1 << (max(nbytes, 1) - 1).bit_length())


class HostSlab:
    """One pinned buffer.

    Attributes
    ----------
    array
        All of it, ``[capacity] uint8``.
    address, capacity
        In bytes.
    events
        For the flights into this slab; None until the first.
    flight
        The last pack whose copy uses this memory; until it is done the memory must not be touched or freed.
    """

    __slots__ = ("_owner", "_watch", "address", "array", "capacity", "events", "flight")

    def __init__(self, capacity: int, owner: HostPool, *, pin: bool) -> None:
        self.flight: Flight | None = None
        _free_landed_orphans()
        tensor = torch.empty(capacity, dtype=torch.uint8, pin_memory=pin)
        self.array: ByteArray = tensor.numpy()  # keeps the tensor alive
        self.address = tensor.data_ptr()
        self.capacity = capacity
        self.events: Events | None = None
        self._owner = owner
        self._watch: weakref.ref[ByteArray] | None = None

    def lease(self, nbytes: int) -> ByteArray:
        """The first `nbytes` as an array; the slab returns to its pool when that array dies.

        Tensors made with `torch.frombuffer` hold the array, so the slab outlives every view into it.
        """
        lease = self.array[:nbytes]
        self._watch = weakref.ref(lease, self._on_death)
        return lease

    def _on_death(self, _: object) -> None:
        self._owner.give_back(self)

    def crowded(self) -> bool:
        """Whether so many slabs of this size are out that views should be copied out of this one."""
        return self._owner.is_crowded(self.capacity)

    def is_idle(self) -> bool:
        """Whether no copy uses the memory any more."""
        flight = self.flight
        return flight is None or flight.done or flight.is_done()

    def __del__(self) -> None:
        """Where the pool was dropped rather than closed, hold the memory back until no copy uses it."""
        flight = self.flight
        if flight is not None and not flight.done:
            _orphans.append((flight, self.array))


# Not looked at in a destructor, which must neither block nor fail: the next slab to be made does it.
_orphans: deque[tuple[Flight, ByteArray]] = deque()


def _free_landed_orphans() -> None:
    for _ in range(len(_orphans)):
        with suppress(IndexError):  # another thread took it
            orphan = _orphans.popleft()
            if not orphan[0].is_done():
                _orphans.append(orphan)


class HostPool:
    """Pinned slabs by size class, within a byte budget.

    Parameters
    ----------
    budget_bytes
        Most pinned memory that the pool ever holds.
    slabs_per_class
        Most slabs of one size. Past half of it, snapshots copy their views out instead of keeping a slab, so that
        pinned memory stays bounded however long consumers keep their payloads.
    pin
        False for ordinary memory: the pool of a packer without a GPU.
    """

    def __init__(self, budget_bytes: int, slabs_per_class: int = 8, *, pin: bool = True) -> None:
        self.budget_bytes = budget_bytes
        self.slabs_per_class = slabs_per_class
        self.pinned_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self.refusal: str | None = None  # set once the system has refused pinned memory
        self.pin = pin
        self._free: defaultdict[int, deque[HostSlab]] = defaultdict(deque)
        self._count: defaultdict[int, int] = defaultdict(int)
        self._slabs: set[HostSlab] = set()  # keeps slabs and their watches alive while views hold only the array
        # Appended to by whichever thread drops the last view, perhaps in the middle of anything: never iterated over.
        self._returned: defaultdict[int, deque[HostSlab]] = defaultdict(deque)
        self._closed = False

    def give_back(self, slab: HostSlab) -> None:
        """Return a slab; safe from any thread, also inside a destructor."""
        if self._closed:  # every copy was waited for
            self._forget(slab)
        else:
            self._returned[slab.capacity].append(slab)

    def acquire(self, nbytes: int) -> HostSlab | None:
        """An idle slab of at least `nbytes`, or None where the budget or the system refuses one."""
        size = slab_class(nbytes)
        free = self._free[size]
        if self._returned[size]:
            self._collect(size)
        for _ in range(len(free)):
            slab = free.popleft()
            if slab.is_idle():
                return slab
            free.append(slab)
        return self._grow(size)

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate ahead, so that later no `acquire` has to."""
        size = slab_class(nbytes)
        self._collect(size)
        while self._count[size] < slabs:
            slab = self._grow(size)
            if slab is None:
                return
            self._free[size].append(slab)

    def is_crowded(self, capacity: int) -> bool:
        """Whether views should be copied out of the next slabs of this capacity.

        So it is once half of the slabs are out; of large ones, whose allocation would hold a step up for
        milliseconds, as soon as none is left for the next pack.
        """
        idle = len(self._free[capacity]) + len(self._returned[capacity])
        if capacity >= LARGE_SLAB_BYTES and idle == 0 and self._count[capacity] > 1:
            return True
        return 2 * (self._count[capacity] - idle) > self.slabs_per_class

    @property
    def in_use(self) -> int:
        """Slabs that a snapshot or a view holds."""
        idle = sum(map(len, (*self._free.values(), *self._returned.values())))
        return sum(tuple(self._count.values())) - idle

    def close(self) -> None:
        """Wait for the copies in flight and drop idle slabs; slabs that views hold go when the views do."""
        for slab in self._slabs:
            if slab.flight is not None:
                slab.flight.wait()
        self._closed = True
        for size in tuple(self._returned):
            self._collect(size)
        for free in self._free.values():
            for slab in free:
                self._forget(slab)
            free.clear()

    def _collect(self, size: int) -> None:
        returned, free = self._returned[size], self._free[size]
        while returned:
            free.append(returned.popleft())  # only here, under the packer's lock

    def _grow(self, size: int) -> HostSlab | None:
        if self._count[size] >= self.slabs_per_class:
            return None
        if self.pinned_bytes + size > self.budget_bytes and not self._trim(size):
            return None
        try:
            slab = HostSlab(size, self, pin=self.pin)
        except RuntimeError as error:  # locked-memory limits of the system or the container
            self.refusal = str(error).splitlines()[0]
            return None
        self._slabs.add(slab)
        self._count[size] += 1
        self.allocations += 1
        self.pinned_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.pinned_bytes)
        return slab

    def _trim(self, size: int) -> bool:
        """Drop idle slabs of other sizes until `size` more bytes fit; whether they do."""
        for other in tuple(self._returned):
            self._collect(other)
        others = [free for other, free in sorted(self._free.items()) if other != size]
        idle_bytes = sum(slab.capacity for free in others for slab in free if slab.is_idle())
        if self.pinned_bytes - idle_bytes + size > self.budget_bytes:
            return False  # dropping all of them would only make later packs pin memory again
        for free in others:
            for _ in range(len(free)):
                if self.pinned_bytes + size <= self.budget_bytes:
                    break
                slab = free.popleft()
                if slab.is_idle():
                    self._forget(slab)
                    del slab  # torch has its memory back before it is asked to release what it caches
                else:
                    free.append(slab)
        if self.pin:
            _release_cached_pinned_memory()
        return True

    def _forget(self, slab: HostSlab) -> None:
        self._slabs.discard(slab)
        self._count[slab.capacity] -= 1
        self.pinned_bytes -= slab.capacity


def _release_cached_pinned_memory() -> None:
    """Make torch give the pinned blocks that nobody uses back to the system."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
