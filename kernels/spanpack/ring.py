"""Device slabs: where the gather writes and the copy to the host reads."""

from __future__ import annotations

from ._runtime import TorchRuntime
from .flight import Flight
from .pool import slab_class


class DeviceSlab:
    """One device buffer.

    Attributes
    ----------
    tensor
        ``[capacity] uint8``.
    address, capacity
        In bytes.
    flight
        The last pack that goes through it.
    """

    __slots__ = ("address", "capacity", "flight", "tensor")

    def __init__(self, capacity: int, runtime: TorchRuntime) -> None:
        self.tensor = runtime.empty(capacity)
        self.address = self.tensor.data_ptr()
        self.capacity = capacity
        self.flight: Flight | None = None


class DeviceRing:
    """A few device slabs, reused in turn.

    A slab whose copy has landed is free. When none is, up to `max_slabs` are allocated within `budget_bytes`; past
    that the producing stream waits for the oldest copy. The host never waits.
    """

    def __init__(self, runtime: TorchRuntime, *, max_slabs: int = 4, budget_bytes: int = 1 << 30) -> None:
        self._runtime = runtime
        self._max_slabs = max_slabs
        self._budget_bytes = budget_bytes
        self._slabs: list[DeviceSlab] = []  # oldest use first
        self.nbytes = 0
        self.allocations = 0
        self.stream_waits = 0

    def acquire(self, nbytes: int, stream: int) -> DeviceSlab:
        """A slab that work on `stream` may write from now on. May raise torch's out-of-memory error."""
        oldest: DeviceSlab | None = None
        for slab in self._slabs:
            if slab.capacity < nbytes:
                continue
            flight = slab.flight
            if flight is None or flight.done or flight.is_done():
                return self._to_end(slab)
            oldest = oldest or slab
        size = slab_class(nbytes)
        room = len(self._slabs) < self._max_slabs and self.nbytes + size <= self._budget_bytes
        if oldest is None or room:
            return self._allocate(size)
        assert oldest.flight is not None
        self._runtime.stream_wait(stream, oldest.flight.landed)
        self.stream_waits += 1
        return self._to_end(oldest)

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate ahead, so that later no `acquire` has to."""
        size = slab_class(nbytes)
        while sum(slab.capacity >= size for slab in self._slabs) < min(slabs, self._max_slabs):
            self._allocate(size)

    def detach(self, slab: DeviceSlab) -> None:
        """Take a slab out of the ring: its bytes stay until its owner drops it."""
        self._slabs.remove(slab)
        self.nbytes -= slab.capacity

    def close(self) -> None:
        """Drop every slab; torch frees their memory once the copies are over."""
        self._slabs.clear()
        self.nbytes = 0

    def _to_end(self, slab: DeviceSlab) -> DeviceSlab:
        if slab is not self._slabs[-1]:
            self._slabs.remove(slab)
            self._slabs.append(slab)
        return slab

    def _allocate(self, size: int) -> DeviceSlab:
        """A new slab; at the limit it takes the place of the smallest, which is too small for this pack."""
        slab = DeviceSlab(size, self._runtime)
        if len(self._slabs) >= self._max_slabs:
            self.detach(min(self._slabs, key=lambda old: old.capacity))
        self._slabs.append(slab)
        self.nbytes += size
        self.allocations += 1
        return slab
