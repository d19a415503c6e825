"""Data types of the tuner (transports, times, findings), and the protocols that a measurer implements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ._size_classes import LaunchConfig, SizeClass
from ._tune_workloads import Workload

MIN_GAIN = 0.03  # smaller gains are noise and do not justify deviating from the default

TransportKind = Literal["direct_store", "mapped_addresses"]


@dataclass(frozen=True, slots=True)
class Transport:
    """How descriptors reach the kernel and the packed bytes reach the host.

    Attributes
    ----------
    direct
        Whether the kernel stores into mapped pinned memory rather than into a device slab that is then copied.
    addresses
        Source of the leaves' addresses. ``"resident"``: kernel arguments or, for many leaves, a table already on the
        device; ``"upload"``: a table copied there before the launch; ``"mapped"``: mapped pinned memory.
    """

    direct: bool = False
    addresses: Literal["resident", "upload", "mapped"] = "resident"


COPY_ENGINE = Transport()
DIRECT_STORE = Transport(direct=True)
UPLOAD = Transport(addresses="upload")
MAPPED = Transport(addresses="mapped")


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Median times of repeated packs, in microseconds: until the call returns, until the bytes have landed."""

    host_us: float
    landed_us: float


class Bench(Protocol):
    """One workload, ready to be measured; `busy` means while matmuls run on another stream."""

    def is_correct(self, config: LaunchConfig, transport: Transport = COPY_ENGINE) -> bool:
        """Whether the kernel writes the plan's columns and nothing else, with the bytes of the torch reference."""

    def stream_us(self, config: LaunchConfig, transport: Transport = COPY_ENGINE, *, busy: bool) -> float:
        """Time of one pack on the producing stream."""

    def call_us(self, config: LaunchConfig, transport: Transport, *, busy: bool) -> CallTimes:
        """Times of one pack, measured on the host."""


class Measurer(Protocol):
    """Makes benches."""

    def prepare(self, workload: Workload) -> Bench:
        """Make the bench of a workload; may raise torch's out-of-memory error."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds on the producing stream, one entry per workload."""

    alone_us: tuple[float, ...]
    busy_us: tuple[float, ...]

    def relative_to(self, base: Times) -> float:
        """Geometric mean of the times relative to `base`, with equal weights for the idle and the busy GPU."""
        return geometric_mean(
            own / other for own, other in zip(self.alone_us + self.busy_us, base.alone_us + base.busy_us, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Result of tuning one size class; `gain` is the fraction of the default's time that is saved."""

    group: SizeClass
    config: LaunchConfig
    times: Times
    default_times: Times
    workloads: tuple[str, ...]

    @property
    def gain(self) -> float:
        return 1 - self.times.relative_to(self.default_times)


@dataclass(frozen=True, slots=True)
class TransportTimes:
    """Times of one transport: on the host, and on the producing stream."""

    alone: CallTimes
    busy: CallTimes
    stream_us: float


@dataclass(frozen=True, slots=True)
class TransportResult:
    """Comparison of one transport with the usual one, for packs of one size."""

    kind: TransportKind
    device_bytes: int
    config: LaunchConfig
    usual: TransportTimes
    other: TransportTimes

    @property
    def is_better(self) -> bool:
        """Whether the bytes land sooner, and the producing stream does not lose more than the host saves.

        A kernel that waits for the host link delays the model's next kernels, which matters where the GPU is the
        bottleneck; the time that the host saves matters where the host is the bottleneck.
        """
        lands_sooner = self.other.alone.landed_us <= self.usual.alone.landed_us * (1 - MIN_GAIN)
        not_later_when_busy = self.other.busy.landed_us <= self.usual.busy.landed_us * (1 + MIN_GAIN)
        stream_loses = self.other.stream_us - self.usual.stream_us
        host_saves = self.usual.alone.host_us - self.other.alone.host_us
        return lands_sooner and not_later_when_busy and stream_loses <= max(host_saves, 0.0)


@dataclass(slots=True)
class Findings:
    """All that a search has found so far.

    Attributes
    ----------
    classes
        By name of the size class.
    rejected
        Configurations that were rejected, and why.
    unusable
        Transports that can't be used, and why.
    skipped
        Workloads that could not be measured, and why.
    transports
        Comparisons of transports, for each kind by increasing size, up to the first size where it is not better.
    complete
        Whether the search ran to its end.
    """

    classes: dict[str, ClassResult] = field(default_factory=dict)
    rejected: dict[LaunchConfig, str] = field(default_factory=dict)
    unusable: dict[TransportKind, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    transports: list[TransportResult] = field(default_factory=list)
    complete: bool = False

    def reject(self, config: LaunchConfig, why: str) -> None:
        """Rule a configuration out, and drop the results of size classes in which it has already won."""
        self.rejected[config] = why
        self.classes = {name: result for name, result in self.classes.items() if result.config != config}

    def threshold(self, kind: TransportKind) -> int | None:
        """Device bytes up to which a transport is better; None if the search ended before comparing it."""
        if kind in self.unusable:
            return 0
        results = [result for result in self.transports if result.kind == kind]
        return max((result.device_bytes * result.is_better for result in results), default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
