"""Measure packs on a CUDA or ROCm device, alone and while matmuls run on another stream."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ._runtime import load_runtime
from ._size_classes import LaunchConfig
from ._tune_results import COPY_ENGINE, Bench, CallTimes, Transport
from ._tune_workloads import Workload
from .flight import Events, Flight
from .gather import addresses_of, gather_torch, stage
from .launcher import Launcher
from .segments import MOST_PASSED
from .tiles import make_tiles

POISON = 0xA5
GUARD_BYTES = 4096  # after the slab; nothing may be written there
GRAPH_ROUNDS = 10
CALLS = 100
_MOST_BACKLOG_US = 400_000.0

ResultT = TypeVar("ResultT")


class CudaMeasurer:
    """Makes benches on one device; holds a few hundred MB of device memory as long as it exists.

    Parameters
    ----------
    device
        The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)  # stands for the producing stream
            self.runtime = load_runtime(device)
            self.launcher = Launcher(device)
            self.flight = Flight(Events.make(self.runtime.make_event))
            self.backlog = _Backlog(device)

    def prepare(self, workload: Workload) -> Bench:
        """Allocate and fill what a workload needs; may raise torch's out-of-memory error."""
        with torch.cuda.device(self.device):
            return CudaBench(self, workload)

    def close(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)


class CudaBench:
    """One workload on the device.

    Parameters
    ----------
    owner
        Provides streams, events and the compiled kernels.
    workload
        What to pack.
    """

    def __init__(self, owner: CudaMeasurer, workload: Workload) -> None:
        plan = workload.plan
        device = owner.device
        self._owner = owner
        self._plan = plan
        self._handle = owner.stream.cuda_stream
        leaves = workload.make_leaves(device)
        self._leaves = stage(plan, leaves)  # held: the kernel reads them by address
        self._addresses = addresses_of(plan, self._leaves)
        table = torch.tensor(self._addresses, dtype=torch.int64)
        self._pinned_table = table.pin_memory()
        self._table = table.to(device)
        self._slab = torch.empty(plan.device_bytes + GUARD_BYTES, dtype=torch.uint8, device=device)
        self._expected = torch.full_like(self._slab, POISON)
        gather_torch(plan, leaves, self._expected)
        self._host_slab: Tensor | None = None
        self._tiles: dict[LaunchConfig, Tensor] = {}
        self._graphs: dict[tuple[LaunchConfig, Transport], torch.cuda.CUDAGraph] = {}
        self._alone_us: dict[tuple[LaunchConfig, Transport], float] = {}
        self._repeats = max(4, min(64, (64 << 20) // max(plan.device_bytes, 1)))
        torch.cuda.synchronize(device)

    def is_correct(self, config: LaunchConfig, transport: Transport = COPY_ENGINE) -> bool:
        """Whether the kernel writes the plan's columns and nothing else, with the bytes of the torch reference."""
        with torch.cuda.device(self._owner.device):
            slab = self._pinned() if transport.direct else self._slab
            slab.fill_(POISON)
            torch.cuda.synchronize()
            self._gather(config, transport)()
            torch.cuda.synchronize()
            return torch.equal(slab.to(self._owner.device), self._expected)

    def stream_us(self, config: LaunchConfig, transport: Transport = COPY_ENGINE, *, busy: bool) -> float:
        """Median time of one pack on the producing stream, from replays of a CUDA graph of many packs."""
        key = config, transport
        with torch.cuda.device(self._owner.device):
            if key not in self._graphs:
                self._graphs[key] = self._capture(self._gather(config, transport))
            graph = self._graphs[key]
            if not busy or key not in self._alone_us:
                self._alone_us[key] = self._replay_us(graph)
            if not busy:
                return self._alone_us[key]
            expected_us = (self._alone_us[key] + self._owner.backlog.matmul_us) * self._repeats * GRAPH_ROUNDS
            return self._owner.backlog.during(lambda: self._replay_us(graph), expected_us)

    def call_us(self, config: LaunchConfig, transport: Transport, *, busy: bool) -> CallTimes:
        """Median times of one pack, measured on the host."""
        with torch.cuda.device(self._owner.device):
            call = self._call(config, transport)
            alone = self._time_calls(call)
            if not busy:
                return alone
            expected_us = (alone.landed_us + self._owner.backlog.matmul_us) * CALLS
            return self._owner.backlog.during(lambda: self._time_calls(call), expected_us)

    def _gather(self, config: LaunchConfig, transport: Transport) -> Callable[[], None]:
        """A function that queues one pack on the producing stream: the descriptor upload, if any, and the launch."""
        launcher, runs, addresses = self._owner.launcher, self._plan.passed_runs, self._addresses
        slab = (self._pinned() if transport.direct else self._slab).data_ptr()
        handle = self._handle
        if transport.addresses == "resident" and runs is not None:
            launch = launcher.bind_runs(config, runs)
            return lambda: launch(slab, handle, addresses)
        tiles = self._tiles.get(config)
        if tiles is None:
            table = torch.from_numpy(make_tiles(self._plan.segments, config.tile_bytes))
            tiles = self._tiles[config] = table.to(self._owner.device)
        mapped, resident = self._pinned_table.data_ptr(), self._table.data_ptr()
        read: int | None = mapped if transport.addresses == "mapped" else resident
        if transport.addresses == "resident" and len(addresses) <= MOST_PASSED:
            read = None  # passed to the kernel, as the packer does
        launch = launcher.bind(config, len(tiles), tiles.data_ptr(), read)
        if transport.addresses != "upload":
            return lambda: launch(slab, handle, addresses)
        upload, nbytes = self._owner.runtime.upload, self._table.nbytes

        def upload_and_launch() -> None:
            upload(resident, mapped, nbytes, handle)
            launch(slab, handle, addresses)

        return upload_and_launch

    def _call(self, config: LaunchConfig, transport: Transport) -> Callable[[], None]:
        """A function that does the host's work for one pack, as the packer does it."""
        gather = self._gather(config, transport)
        runtime, flight, handle = self._owner.runtime, self._owner.flight, self._handle
        host, slab, nbytes = self._pinned().data_ptr(), self._slab.data_ptr(), self._plan.device_bytes

        def store_directly() -> None:
            gather()
            runtime.record(flight.landed, handle)

        def copy_to_host() -> None:
            gather()
            runtime.copy_to_host(flight, host, slab, nbytes, handle)

        return store_directly if transport.direct else copy_to_host

    def _pinned(self) -> Tensor:
        if self._host_slab is None:
            self._host_slab = torch.empty(self._slab.shape, dtype=torch.uint8, pin_memory=True)
        return self._host_slab

    def _capture(self, gather: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = self._owner.stream
        with torch.cuda.stream(stream):
            gather()
            torch.cuda.synchronize()
            # Not `torch.cuda.graph`, which runs the garbage collector and empties torch's cache in every capture.
            graph.capture_begin()
            try:
                for _ in range(self._repeats):
                    gather()
            finally:
                graph.capture_end()
        return graph

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        with torch.cuda.stream(self._owner.stream):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(GRAPH_ROUNDS + 1)]
            graph.replay()  # lets the host run ahead of the device
            for event in events[:-1]:
                event.record()
                graph.replay()
            events[-1].record()
        self._owner.stream.synchronize()
        rounds_ms = [float(start.elapsed_time(end)) for start, end in pairwise(events)]
        return statistics.median(rounds_ms) * 1000 / self._repeats

    def _time_calls(self, call: Callable[[], None]) -> CallTimes:
        landed = self._owner.flight.landed
        times_ns = np.empty((CALLS, 2), dtype=np.int64)  # until the call returns, until the bytes have landed
        clock = time.perf_counter_ns
        with _no_garbage_collection():
            for row in range(CALLS):
                start = clock()
                call()
                returned = clock()
                while not landed.query():  # spins: the wake-up of a sleeping thread would add noise
                    pass
                times_ns[row] = returned - start, clock() - start
        host_us, landed_us = np.median(times_ns, axis=0) / 1000
        return CallTimes(float(host_us), float(landed_us))


class _Backlog:
    """Matmuls as in a decode step (64 rows, a weight of 64 MB) that keep a separate stream busy.

    Attributes
    ----------
    matmul_us
        Time of one matmul.
    """

    _ROWS, _INNER, _OUTER = 64, 4096, 8192
    _IN_A_GRAPH = 32

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._last = torch.cuda.Event()
        rows, weight, out = (
            torch.zeros(shape, dtype=torch.float16, device=device)
            for shape in ((self._ROWS, self._INNER), (self._INNER, self._OUTER), (self._ROWS, self._OUTER))
        )
        self._buffers = rows, weight, out  # held: the graph reads and writes them
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._stream):
            for _ in range(3):  # lets libraries load and choose their kernels before the capture
                torch.mm(rows, weight, out=out)
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            try:
                for _ in range(self._IN_A_GRAPH):
                    torch.mm(rows, weight, out=out)
            finally:
                self._graph.capture_end()
        self.matmul_us = 10.0
        self.matmul_us = self._measure()

    def during(self, measure: Callable[[], ResultT], expected_us: float) -> ResultT:
        """Call `measure` while matmuls run; repeat with twice as many if they end before it does.

        If the matmuls leave no room on the GPU, `measure` always ends after them; the last of its results then counts.
        """
        while True:
            self._fill(expected_us)
            result = measure()
            outlasted = not self._last.query()
            self._stream.synchronize()
            if outlasted or expected_us >= _MOST_BACKLOG_US:
                return result
            expected_us *= 2

    def _fill(self, us: float) -> None:
        """Queue matmuls that take about `us` microseconds, or `_MOST_BACKLOG_US` if that is less."""
        count = max(2, round(min(us, _MOST_BACKLOG_US) / (self.matmul_us * self._IN_A_GRAPH)) + 1)
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                self._graph.replay()
            self._last.record()

    def _measure(self) -> float:
        """Time of one matmul, measured after others that raise the GPU's clocks."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._fill(100_000)
            start.record()
            for _ in range(8):
                self._graph.replay()
            end.record()
        self._stream.synchronize()
        return max(float(start.elapsed_time(end)) * 1000 / (8 * self._IN_A_GRAPH), 1.0)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
