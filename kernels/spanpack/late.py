"""Late copies: packs without a pinned slab, a bounded number of which stay on the device until waited for."""

from __future__ import annotations

import threading
import weakref

import torch

from ._runtime import TorchRuntime
from .flight import Flight
from .pool import ByteArray

MOST_WAITING = 8


class LateCopy:
    """The device part of one pack, in its own device memory; copied to pageable memory on demand.

    Parameters
    ----------
    runtime
        Makes the copy.
    array
        Destination, pageable, ``[slab_bytes] uint8``.
    packed
        Device memory, ``[device_bytes] uint8``, that the gather has written once `flight` is done.
    flight
        Flight of the gather.
    """

    __slots__ = ("__weakref__", "_array", "_flight", "_lock", "_packed", "_runtime")

    def __init__(self, runtime: TorchRuntime, array: ByteArray, packed: torch.Tensor, flight: Flight) -> None:
        self._runtime = runtime
        self._array = array
        self._packed: torch.Tensor | None = packed
        self._flight = flight
        self._lock = threading.Lock()

    @property
    def device_bytes(self) -> int:
        """Device memory still held, in bytes."""
        packed = self._packed
        return 0 if packed is None else packed.nbytes

    def fetch(self) -> memoryview:
        """The bytes on the host; the first call copies them and frees the device memory. Safe from any thread."""
        with self._lock:
            packed = self._packed
            if packed is not None:
                self._flight.wait()
                self._runtime.fetch(torch.from_numpy(self._array)[: packed.numel()], packed)
                self._packed = None
        return self._array.data


class LateCopies:
    """Bounds the device memory of late copies: of those still referenced, at most `most` wait at a time."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: tuple[weakref.ref[LateCopy], ...] = ()  # oldest first; dropped snapshots do not count

    def make_room(self) -> bool:
        """If the bound is reached, copy the oldest to the host, which blocks; returns whether it was reached."""
        waiting = [copy for copy in self._alive() if copy.device_bytes]
        full = len(waiting) >= self._most
        if full:
            waiting.pop(0).fetch()
        self._waiting = tuple(map(weakref.ref, waiting))
        return full

    def add(self, copy: LateCopy) -> None:
        """Add a late copy to those that wait."""
        self._waiting = (*self._waiting, weakref.ref(copy))

    @property
    def device_bytes(self) -> int:
        """Device memory of all late copies, in bytes."""
        return sum(copy.device_bytes for copy in self._alive())

    def _alive(self) -> list[LateCopy]:
        return [copy for ref in self._waiting if (copy := ref()) is not None]
