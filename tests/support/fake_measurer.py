"""A simulated GPU for the tuner, on which a pack takes as long as a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from spanpack._size_classes import LaunchConfig
from spanpack._tune_report import Machine
from spanpack._tune_results import COPY_ENGINE, CallTimes, Findings, Transport
from spanpack._tune_search import Search, candidates
from spanpack._tune_workloads import Workload, awkward_workload, default_workloads, uniform_workload

MACHINE = Machine("NVIDIA H200", "3.6.0", "2.11.0", "2026-11-29")


SIZES = [uniform_workload(nbytes) for nbytes in (1 << 12, 1 << 16, 1 << 20)]


CPU = torch.device("cpu")


@dataclass
class FakeMeasurer:
    """A simulated GPU on which a pack takes as long as a test says."""

    us: Callable[[str, LaunchConfig, bool], float] = lambda name, config, busy: 10.0
    landed_us: Callable[[int, Transport, bool], float] = lambda nbytes, transport, busy: 50.0
    stream_us: Callable[[Transport], float] = lambda transport: 2.0
    wrong: set[tuple[str, LaunchConfig]] = field(default_factory=set)
    wrong_transports: set[Transport] = field(default_factory=set)
    broken: set[LaunchConfig] = field(default_factory=set)
    too_large: set[str] = field(default_factory=set)
    interrupt_after: int = 10**9
    measured: list[tuple[str, LaunchConfig]] = field(default_factory=list)

    def prepare(self, workload: Workload) -> FakeBench:
        if workload.name in self.too_large:
            raise torch.cuda.OutOfMemoryError
        return FakeBench(self, workload)


@dataclass
class FakeBench:
    owner: FakeMeasurer
    workload: Workload

    def is_correct(self, config: LaunchConfig, transport: Transport = COPY_ENGINE) -> bool:
        if config in self.owner.broken:
            raise RuntimeError("too many registers\nmore of it")
        return (self.workload.name, config) not in self.owner.wrong and transport not in self.owner.wrong_transports

    def stream_us(self, config: LaunchConfig, transport: Transport = COPY_ENGINE, *, busy: bool) -> float:
        if len(self.owner.measured) >= self.owner.interrupt_after:
            raise KeyboardInterrupt
        self.owner.measured.append((self.workload.name, config))
        if transport != COPY_ENGINE or self.workload.name.startswith("16 leaves"):
            return self.owner.stream_us(transport)
        return self.owner.us(self.workload.name, config, busy)

    def call_us(self, config: LaunchConfig, transport: Transport, *, busy: bool) -> CallTimes:
        host_us = 6.0 if transport.direct or transport.addresses == "mapped" else 10.0
        return CallTimes(host_us, self.owner.landed_us(self.workload.device_bytes, transport, busy))


def search(measurer: FakeMeasurer, workloads: list[Workload] | None = None, sizes: list[Workload] = SIZES) -> Findings:
    chosen = default_workloads(quick=True) if workloads is None else workloads
    return Search(measurer, chosen, sizes, awkward_workload(), candidates(), lambda *_: None).run()


def faster(config: LaunchConfig, us: float, name: str = "") -> Callable[[str, LaunchConfig, bool], float]:
    return lambda workload, tried, busy: us if tried == config and name in workload else 10.0
