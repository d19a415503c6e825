"""Device slabs: where the gather writes and the copy to the host reads."""

from __future__ import annotations

from ._runtime import TorchRuntime
from .flight import Events, Flight
from .pool import slab_class


class DeviceSlab:
    """One device buffer.

    Attributes
    ----------
    tensor
        ``[capacity] uint8``, zeros at first: the copy to the host takes along the gaps between columns.
    address, capacity
        In bytes. A slab that has left its ring has no capacity.
    flight
        The last pack that goes through it; at first its being zeroed, which another stream must not overtake.
    turn
        Grows from use to use, over all slabs.
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
        """Let the memory go, whoever still knows the slab; torch frees it once the copies are over."""
        del self.tensor
        self.address = self.capacity = 0


class DeviceRing:
    """A few device slabs, reused in turn.

    A slab whose copy has landed is free. When none is, up to `max_slabs` are allocated within `budget_bytes`; past
    that the producing stream waits for the oldest copy. The host never waits. A pack for which all slabs are too small
    gets one beyond the budget only where dropping the free ones is not enough.
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
        """A slab that work on `stream` may write from now on. May raise torch's out-of-memory error."""
        latest = self._latest
        if latest is not None and latest.capacity >= nbytes and latest.flight.done:
            return latest
        latest = self._latest = self._choose(nbytes, stream)
        return latest

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate ahead, so that later no `acquire` has to."""
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
        """Whether one more may be allocated, in place of one that is too small where there are as many as may be."""
        if len(self._slabs) < self._max_slabs:
            return self.nbytes + size <= self._budget_bytes
        smallest = min(slab.capacity for slab in self._slabs)
        return smallest < nbytes and self.nbytes - smallest + size <= self._budget_bytes

    def _make_room(self, size: int) -> None:
        """Drop slabs that no copy uses, the smallest first, until one more keeps to the budget."""
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
        """A new slab; at the limit it takes the place of the smallest, which is too small for this pack."""
        slab = DeviceSlab(size, self._runtime, stream)
        if len(self._slabs) >= self._max_slabs:
            self._drop(min(self._slabs, key=lambda old: old.capacity))
        self._slabs.append(slab)
        self.nbytes += size
        self.allocations += 1
        return slab
