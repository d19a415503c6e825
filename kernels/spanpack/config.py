"""Launch configurations: tile size, warps and transport by size class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the gather is launched.

    Attributes
    ----------
    tile_bytes
        Bytes that one program copies; a power of two, at least 64.
    num_warps
        Warps of one program.
    """

    tile_bytes: int
    num_warps: int


SMALL, MEDIUM, LARGE = LaunchConfig(4096, 2), LaunchConfig(8192, 4), LaunchConfig(16384, 4)
DEFAULT_CONFIGS: tuple[LaunchConfig, ...] = (SMALL, MEDIUM, LARGE)


def choose_config(device_bytes: int, num_segments: int) -> LaunchConfig:
    """The default configuration for a pack of so many bytes in so many segments.

    Small packs are latency bound: short tiles spread them over all multiprocessors. Large ones are bandwidth bound:
    long tiles keep more loads in flight per program.
    """
    if device_bytes <= 1 << 21 or device_bytes // max(num_segments, 1) <= 4096:
        return SMALL
    return MEDIUM if device_bytes <= 1 << 24 else LARGE
