"""Helpers for the GPU tests: kernels of a given duration, and counts of the work that the device did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch

from spanpack import Packer
from spanpack.config import ConfigTable

MakePacker = Callable[..., Packer]  # see the fixture make_packer


@lru_cache(maxsize=1)
def _cycles_per_ms() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(50_000_000)  # loads the kernel and raises the clock
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return float(20_000_000 / begin.elapsed_time(end))


def sleep_cycles(ms: float) -> int:
    """Cycles for which `torch.cuda._sleep` takes at least `ms`, unless the clock rises meanwhile."""
    return int(ms * _cycles_per_ms())


def hold_up(ms: float, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Keep a stream, by default the current one, busy for about `ms`; returns an event at the end without waiting."""
    cycles = sleep_cycles(ms)
    over = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        over.record()
    return over


def copy_stream(packer: Packer) -> torch.cuda.Stream:
    """The side stream of a packer."""
    assert packer._engine is not None
    return packer._engine.runtime.copy_stream


@contextmanager
def device_work() -> Iterator[Counter[str]]:
    """Count by name the device's kernels and copies as torch's profiler sees them; filled when the block ends.

    Skips the test if the profiler sees no device activity, as in containers that forbid it.
    """
    work: Counter[str] = Counter()
    control = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield work
        control.cpu()
        torch.cuda.synchronize()
    on_device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [name for name in on_device if "Sync" not in name and "Wait" not in name]
    if not any("DtoH" in name for name in names):
        pytest.skip("torch's profiler sees no device activity here")
    work.update(names)
    work.subtract([next(name for name in reversed(names) if "DtoH" in name)])  # the control copy


def count(work: Counter[str], part: str) -> int:
    """How often work whose name contains `part` was done."""
    return sum(times for name, times in work.items() if part in name)


def pinned_memory() -> dict[str, int]:
    """Blocks and bytes of pinned memory in torch's allocator, under the names that this torch release gives them."""
    stats = torch.cuda.host_memory_stats()
    found = {name: n for name, n in stats.items() if name.startswith("num_host") or name.endswith("bytes.current")}
    assert found, list(stats)
    return found


COPY_ENGINE = ConfigTable()
DIRECT_STORE = ConfigTable(direct_store_bytes=1 << 20)  # more than the tests that use it pack


def kernels_compiled(packer: Packer) -> int:
    """Kernel variants that exist in this process: the packer's own and all of Triton's for the gather."""
    from spanpack._kernels import gather_runs, gather_tiles

    engine = packer._engine
    assert engine is not None
    own = len(engine.launcher._loaded) if engine.launcher is not None else 0
    caches: list[Any] = [gather_runs.device_caches, gather_tiles.device_caches]  # device -> (kernels by key, ...)
    return own + sum(len(cache[0]) for of_kernel in caches for cache in of_kernel.values())
