"""Size classes: packs that share a launch configuration, and the heuristic that chooses it."""

from __future__ import annotations

from dataclasses import dataclass

SHORT_SEGMENT_BYTES = 4096  # segments of at most this mean length are scattered rows rather than runs


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the gather is launched.

    Attributes
    ----------
    tile_bytes
        Bytes that one program copies; a power of two, at least 64.
    num_warps
        Warps of one program; a power of two.
    """

    tile_bytes: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.tile_bytes}/{self.num_warps}"


# Small packs are latency bound: short tiles, with 64 bytes per thread, occupy all multiprocessors. Large packs are
# bandwidth bound: 256 bytes per thread keep more loads in flight; more than that would spill registers. Of equally fast
# tile sizes, the longer one needs fewer descriptors.
SMALL, MEDIUM, LARGE = LaunchConfig(4096, 2), LaunchConfig(8192, 1), LaunchConfig(32768, 4)


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Packs that share a launch configuration.

    Attributes
    ----------
    name
        Name in tuned files.
    max_bytes
        Largest `Plan.device_bytes`; None for no limit.
    short_segments
        Whether the mean segment length of its packs is at most `SHORT_SEGMENT_BYTES`.
    default
        Configuration that the heuristic chooses.
    """

    name: str
    max_bytes: int | None
    short_segments: bool
    default: LaunchConfig


# In the order in which they are tried.
SIZE_CLASSES: tuple[SizeClass, ...] = (
    SizeClass("scattered_tiny", 1 << 16, True, SMALL),
    SizeClass("scattered", None, True, SMALL),
    SizeClass("tiny", 1 << 16, False, SMALL),
    SizeClass("small", 1 << 21, False, SMALL),
    SizeClass("medium", 1 << 24, False, MEDIUM),
    SizeClass("large", None, False, LARGE),
)


def size_class(device_bytes: int, num_segments: int) -> SizeClass:
    """The size class of a pack of `device_bytes` bytes in `num_segments` segments."""
    short = device_bytes <= SHORT_SEGMENT_BYTES * num_segments
    return next(
        group
        for group in SIZE_CLASSES
        if group.short_segments == short and (group.max_bytes is None or device_bytes <= group.max_bytes)
    )
