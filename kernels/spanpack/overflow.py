"""Overflow: pageable slabs for payloads that are kept so long that pinned memory would run out."""

from __future__ import annotations

import threading

import numpy as np

from .pool import HostPool

_ANY_NUMBER = 1 << 30


class Overflow:
    """Copies bytes out of pinned slabs, so that these can be reused. Safe to call from several threads.

    One copy into reused memory takes a sixth of the time of copying every piece into its own memory (384 pieces of
    4 KiB), most of which goes to the system's allocation of small blocks and fresh pages. But one kept piece keeps a
    whole slab alive, so the memory is bounded; past the bound, pieces are copied one by one.

    Parameters
    ----------
    budget_bytes
        Maximum memory held.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._pool = HostPool(budget_bytes, _ANY_NUMBER, pin=False, lands_copies=False)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._pool.held_bytes

    def take_over(self, lease: memoryview) -> memoryview | None:
        """A copy of the lease's bytes, itself a lease; None if there is no room or the lock is taken."""
        # Not waiting for the lock makes this safe in a destructor, a signal handler or a forked child.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            slab = None if self._closed else self._pool.take(len(lease))
            if slab is None:
                return None
            copy = slab.lease(len(lease))
        finally:
            self._lock.release()
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(lease, np.uint8))  # releases the GIL
        return copy

    def close(self) -> None:
        """Free unused slabs and refuse further copies; slabs in use are freed when their views die."""
        with self._lock:
            self._closed = True
            self._pool.close()
