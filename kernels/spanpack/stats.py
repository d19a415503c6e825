"""Counters of a packer."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("spanpack")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a packer since it was made.

    Attributes
    ----------
    packs, launches, copies, uploads
        Packs made; kernel launches; device-to-host copies; host-to-device copies of descriptors.
    direct_stores
        Packs that the kernel stored straight into the pinned slab, without a copy.
    payload_bytes, copied_bytes
        Bytes of all pieces; bytes that device-to-host copies brought over (alignment gaps included).
    plans_resident
        Plans that are ready to be launched again, with descriptors on the device where they need any.
    pinned_bytes, pinned_peak_bytes, pinned_allocations
        Pinned memory of the pool, now and at its peak; how often it was allocated.
    overflow_bytes
        Pageable memory for payloads that are kept long, in use or idle.
    device_bytes, device_allocations
        Memory of the device slabs and of late packs, see `Packer`; how often device slabs were allocated.
    slabs_in_use
        Pinned slabs that a snapshot or a view holds.
    stream_waits
        How often the producing stream had to wait for an earlier copy.
    fallbacks
        How often a slower path was taken, by reason.
    """

    packs: int = 0
    launches: int = 0
    copies: int = 0
    direct_stores: int = 0
    uploads: int = 0
    payload_bytes: int = 0
    copied_bytes: int = 0
    plans_resident: int = 0
    pinned_bytes: int = 0
    pinned_peak_bytes: int = 0
    pinned_allocations: int = 0
    overflow_bytes: int = 0
    device_bytes: int = 0
    device_allocations: int = 0
    slabs_in_use: int = 0
    stream_waits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Fallbacks:
    """Counts the slower paths taken, and logs each reason once."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, reason: str, message: str) -> None:
        """Count one fallback; the first for each reason is logged as a warning."""
        if reason not in self._counts:
            logger.warning("spanpack: %s", message)
        self._counts[reason] += 1

    def counts(self) -> dict[str, int]:
        """How often each slower path was taken."""
        return dict(self._counts)
