"""Overflow: pageable slabs for what is kept so long that pinned memory would run out."""

from __future__ import annotations

import threading

import numpy as np

from .pool import HostPool

_ANY_NUMBER = 1 << 30


class Overflow:
    """Takes over the bytes of pinned slabs, so that those go back to work. Safe to call from several threads.

    One copy into memory that is used over and over takes a sixth of what copying every piece into memory of its own
    takes (384 pieces of 4 KiB), most of which is the system handing out small blocks and fresh pages. But one piece
    that is kept keeps a whole slab, so the memory is bounded; past that pieces are copied one by one.

    Parameters
    ----------
    budget_bytes
        Most memory that it ever holds.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._pool = HostPool(budget_bytes, _ANY_NUMBER, pin=False, lands_copies=False)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self._pool.held_bytes

    def take_over(self, lease: memoryview) -> memoryview | None:
        """A copy of some bytes, held like a lease of a pinned slab; None where there is no room, or no time to wait."""
        # Not waiting for the lock is what makes this safe within a destructor, a signal handler or a forked child.
        if self._closed or not self._lock.acquire(blocking=False):
            return None
        try:
            slab = self._pool.take(len(lease))
            if slab is None:
                return None
            copy = slab.lease(len(lease))
        finally:
            self._lock.release()
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(lease, np.uint8))  # gives the GIL up
        return copy

    def close(self) -> None:
        """Drop what nobody holds, and take nothing over any more; the rest goes when its views do."""
        with self._lock:
            self._closed = True
            self._pool.close()
