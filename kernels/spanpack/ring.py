"""Device slabs: buffers that the gather writes and the copy to the host reads."""

from __future__ import annotations

from ._runtime import TorchRuntime
from .flight import Events, Flight
from .pool import slab_class


class DeviceSlab:
    """One device buffer.

    Attributes
    ----------
    tensor
        ``[capacity] uint8``, zeroed at first: the copy to the host includes the gaps between columns.
    address, capacity
        Device address, and size in bytes; both are 0 once the slab has left its ring.
    flight
        The last pack that goes through it; at first the zeroing, for which other streams must wait.
    turn
        Increases with every use, across all slabs.
    """

    __slots__ = ("address", "capacity", "flight", "tensor", "turn")

    def __init__(self, capacity: int, runtime: TorchRuntime, stream: int) -> None:
        self.tensor = runtime.zeros(capacity)
        self.address = self.tensor.data_ptr()
        self.capacity = capacity
        self.flight = Flight(Events.make(runtime.make_event))
        runtime.mark_landed(self.flight, stream)
        self.turn = 0

    def retire(self) -> None:
        """Drop the memory even if the slab is still referenced; torch frees it once the copies are done."""
        del self.tensor
        self.address = self.capacity = 0


class DeviceRing:
    """A few device slabs, reused in turn.

    A slab whose copy has landed is free. If none is free, up to `max_slabs` are allocated within `budget_bytes`; past
    that the producing stream waits for the oldest copy. The host never waits. A pack for which all slabs are too small
    gets a new one, beyond the budget only if dropping the free slabs is not enough.
    """

    def __init__(self, runtime: TorchRuntime, *, max_slabs: int = 4, budget_bytes: int = 1 << 30) -> None:
        self._runtime = runtime
        self._max_slabs = max_slabs
        self._budget_bytes = budget_bytes
        self._slabs: list[DeviceSlab] = []
        self._latest: DeviceSlab | None = None
        self.nbytes = 0
        self.allocations = 0
        self.stream_waits = 0

    def acquire(self, nbytes: int, stream: int) -> DeviceSlab:
        """A slab that work on `stream` may write from now on; may raise torch's out-of-memory error."""
        latest = self._latest
        if latest is not None and latest.capacity >= nbytes and latest.flight.done:
            return latest
        latest = self._latest = self._choose(nbytes, stream)
        return latest

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate slabs ahead, so that no later `acquire` has to."""
        size = slab_class(nbytes)
        while sum(slab.capacity >= size for slab in self._slabs) < min(slabs, self._max_slabs):
            self._allocate(size, self._runtime.current_stream())

    def close(self) -> None:
        """Drop every slab."""
        for slab in self._slabs:
            slab.retire()
        self._slabs.clear()
        self._latest = None
        self.nbytes = 0

    def _choose(self, nbytes: int, stream: int) -> DeviceSlab:
        oldest: DeviceSlab | None = None
        for slab in self._slabs:
            if slab.capacity < nbytes:
                continue
            if slab.flight.is_done():
                return slab
            if oldest is None or slab.turn < oldest.turn:
                oldest = slab
        size = slab_class(nbytes)
        if oldest is None:  # all are too small
            self._make_room(size)
            return self._allocate(size, stream)
        if self._has_room(nbytes, size):
            return self._allocate(size, stream)
        self._runtime.stream_wait(stream, oldest.flight.landed)
        self.stream_waits += 1
        return oldest

    def _has_room(self, nbytes: int, size: int) -> bool:
        """Whether one more may be allocated; at the maximum number, in place of one that is too small."""
        if len(self._slabs) < self._max_slabs:
            return self.nbytes + size <= self._budget_bytes
        smallest = min(slab.capacity for slab in self._slabs)
        return smallest < nbytes and self.nbytes - smallest + size <= self._budget_bytes

    def _make_room(self, size: int) -> None:
        """Drop slabs that no copy uses, the smallest first, until one more fits in the budget."""
        for slab in sorted(self._slabs, key=lambda slab: slab.capacity):
            if self.nbytes + size <= self._budget_bytes:
                return
            if slab.flight.is_done():
                self._drop(slab)

    def _drop(self, slab: DeviceSlab) -> None:
        self._slabs.remove(slab)
        self.nbytes -= slab.capacity
        slab.retire()

    def _allocate(self, size: int, stream: int) -> DeviceSlab:
        """A new slab; at the maximum number it replaces the smallest, which is too small for this pack."""
        slab = DeviceSlab(size, self._runtime, stream)
        if len(self._slabs) >= self._max_slabs:
            self._drop(min(self._slabs, key=lambda old: old.capacity))
        self._slabs.append(slab)
        self.nbytes += size
        self.allocations += 1
        return slab
