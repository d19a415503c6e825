"""The machine as the measuring loops use it: a producing stream, a way to keep it busy, and counters."""

from __future__ import annotations

import gc
import platform
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.command_line import UsageError

_SLEEP_CYCLES = 2_000_000  # for the calibration
_EMPTY_PAIRS = 200


class Machine(Protocol):
    """A device with one producing stream, which is torch's current stream.

    Attributes
    ----------
    device : torch.device
        Where the payloads are.
    compute : torch.cuda.Stream or None
        The producing stream; None on the CPU.
    copy_stream : torch.cuda.Stream or None
        The stream of the baselines' copies; None on the CPU.
    """

    device: torch.device
    compute: torch.cuda.Stream | None
    copy_stream: torch.cuda.Stream | None

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def release_cached(self) -> None:
        """Wait until the device is idle, then give its unused memory back."""

    def occupy(self, duration_us: float) -> None:
        """Keep the producing stream busy from now on."""

    def mark_start(self) -> None:
        """Record the start time stamp on the producing stream."""

    def mark_end(self) -> bool:
        """Record the end time stamp; returns whether the device has yet to reach the start one."""

    def marked_us(self) -> float | None:
        """GPU time between the time stamps, less that of an empty pair; the device must be idle. None on the CPU."""

    def pinned_allocations(self) -> int | None:
        """How often torch has asked the system for pinned memory; None where torch does not count it."""


class CudaMachine:
    """One CUDA device. Avoids the legacy stream: the engine uses its own, and batched copies refuse the legacy one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self.compute: torch.cuda.Stream | None = torch.cuda.Stream(device)
        self.copy_stream: torch.cuda.Stream | None = torch.cuda.Stream(device)
        torch.cuda.set_stream(self.compute)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._empty_us = 0.0
        self._warm_up()
        self._cycles_per_us = self._calibrate()
        self._empty_us = self._measure_empty_pair()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release_cached(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()

    def occupy(self, duration_us: float) -> None:
        torch.cuda._sleep(int(duration_us * self._cycles_per_us))

    def mark_start(self) -> None:
        self._start.record(self.compute)

    def mark_end(self) -> bool:
        self._end.record(self.compute)
        return not self._start.query()

    def marked_us(self) -> float | None:
        return float(self._start.elapsed_time(self._end)) * 1000 - self._empty_us

    def pinned_allocations(self) -> int | None:
        return torch.cuda.host_memory_stats().get("num_host_alloc")

    def _warm_up(self) -> None:
        """Raise the clock rate, so that a cycle is as long in the calibration as in the measurements."""
        matrix = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        for _ in range(300):
            matrix @ matrix
        torch.cuda._sleep(1000)
        self.synchronize()

    def _calibrate(self) -> float:
        self.mark_start()
        torch.cuda._sleep(_SLEEP_CYCLES)
        self.mark_end()
        self.synchronize()
        return _SLEEP_CYCLES / (float(self._start.elapsed_time(self._end)) * 1000)

    def _measure_empty_pair(self) -> float:
        found = []
        for _ in range(_EMPTY_PAIRS):
            self.occupy(30)
            self.mark_start()
            self.mark_end()
            self.synchronize()
            found.append(self._start.elapsed_time(self._end) * 1000)
        return float(np.median(found))


class CpuMachine:
    """A machine without a GPU, for trying the program; its figures mean nothing."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute: torch.cuda.Stream | None = None
        self.copy_stream: torch.cuda.Stream | None = None

    def synchronize(self) -> None:
        pass

    def release_cached(self) -> None:
        pass

    def occupy(self, duration_us: float) -> None:
        pass

    def mark_start(self) -> None:
        pass

    def mark_end(self) -> bool:
        return False

    def marked_us(self) -> float | None:
        return None

    def pinned_allocations(self) -> int | None:
        return 0


def check_device(device: str) -> None:
    """Check that `open_machine` can use a device, without touching the device.

    Raises
    ------
    UsageError
        `device` is none of ``"cuda"``, ``"cuda:N"`` and ``"cpu"``, or there is no such GPU.
    """
    form = re.fullmatch(r"cpu|cuda(?::(\d+))?", device, re.ASCII)
    if form is None:
        raise UsageError(f"--device: given {device!r}, expected cuda, cuda:N or cpu")
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError("needs a CUDA GPU, torch sees none; `--device cpu` tries the program")
    if int(form[1] or 0) >= count:
        raise UsageError(f"--device: given {device!r}, the last GPU that torch sees is cuda:{count - 1}")


def open_machine(device: str) -> Machine:
    """Open the machine for ``"cuda"``, ``"cuda:1"`` or ``"cpu"``."""
    torch.set_num_threads(1)  # as in the engine's worker processes
    if torch.device(device).type == "cpu":
        return CpuMachine()
    index = torch.device(device).index
    return CudaMachine(torch.device("cuda", torch.cuda.current_device() if index is None else index))


class CompileCounter:
    """Counts what Triton compiles or loads from its disk cache; a kernel already in memory does not count."""

    def __init__(self) -> None:
        self.count: int | None = 0
        try:
            import triton  # noqa: PLC0415  absent on some machines, where nothing can be compiled

            triton.knobs.compilation.listener = self._on_compile
        except (ImportError, AttributeError):
            self.count = None

    def _on_compile(self, **_: Any) -> None:
        self.count = (self.count or 0) + 1


class CollectionCounter:
    """Counts garbage collections in its `with` block, of every generation and on every thread."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CollectionCounter:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        del info
        self.count += phase == "start"


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def host_facts() -> dict[str, Any]:
    """Processor, number of cores and kernel of the host."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{len(models)} x {models[0]}" if models else cpu
    return {"cpu": cpu, "system": f"{platform.system()} {platform.release()}"}
