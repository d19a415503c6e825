"""A simulated device: streams run only when a test lets them, so every order of events can be staged on the CPU.

Stands in for `TorchRuntime` and `Launcher`. Memory is host memory. A launch reads its tables and its leaves when it is
*run*, not when it is queued, as a GPU does.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from spanpack.config import LaunchConfig
from spanpack.launcher import Launch
from spanpack.segments import PassedRun
from tests.support.compare import POISON

SIDE = 7  # handle of the copy stream


class FakeEvent:
    """Reached once the work queued before its last record has run."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.cuda_event = id(self)
        self.issued = 0
        self.reached = 0

    def query(self) -> bool:
        return self.reached >= self.issued

    def synchronize(self) -> None:
        self._device.host_waits += 1
        self._device.run(until=self.query)
        assert self.query(), "the host waits for a stream that this test holds up: it would wait forever"


class FakeStream:
    """A stream as a caller of the packer has it."""

    def __init__(self, handle: int, device: torch.device | None = None) -> None:
        self.handle = handle
        self.device = device or torch.device("cpu")


class FakeDevice:
    """The runtime of a device that runs queued work only when told to.

    Attributes
    ----------
    stream
        Handle of the current stream.
    current
        Index of the calling thread's current device; None, the index of the CPU, is this device's own. Nothing may be
        queued while another one is current: a handle of 0 would be another device's default stream.
    launches, copies, uploads, stream_waits, host_waits
        How often each has been requested.
    held
        Buffers whose memory was held back for the current stream.
    allocated_on
        The stream that was current, for each allocation.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.stream = 1
        self.current: int | None = None
        self.launches = self.copies = self.uploads = self.stream_waits = self.host_waits = self.events_made = 0
        self.refuse_memory = False
        self.held: list[torch.Tensor] = []
        self.allocated_on: list[int] = []
        self._memory: list[torch.Tensor] = []  # kept until all work has run: a real allocator frees in stream order
        self._queues: defaultdict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = defaultdict(deque)
        self._blocked: set[int] = set()
        self._running = threading.RLock()

    def current_stream(self) -> int:
        return self.stream

    def current_device(self) -> int | None:
        return self.current

    @contextmanager
    def as_current(self) -> Iterator[None]:
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream.handle
        try:
            yield
        finally:
            self.stream = before

    def make_event(self, *, blocking: bool) -> FakeEvent:
        del blocking
        self.events_made += 1
        return FakeEvent(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.refuse_memory:
            raise torch.cuda.OutOfMemoryError("simulated")
        self.allocated_on.append(self.stream)
        self._memory.append(torch.full((nbytes,), POISON, dtype=torch.uint8))
        return self._memory[-1]

    def zeros(self, nbytes: int) -> torch.Tensor:
        buffer = self.empty(nbytes)
        if self.stream in self._blocked or self._queues[self.stream]:
            self._queue(self.stream, buffer.zero_)
        else:  # immediately, as torch's own gather also writes immediately here
            buffer.zero_()
        return buffer

    def copy_to_host(self, flight: Any, destination: int, source: int, nbytes: int, stream: int) -> None:
        self.record(flight.events.packed, stream)
        self.stream_wait(SIDE, flight.events.packed)
        self.stream_waits -= 1  # counts only waits of producing streams
        self._queue(SIDE, lambda: ctypes.memmove(destination, source, nbytes))
        self.record(flight.events.landed, SIDE)
        self.copies += 1

    def mark_landed(self, flight: Any, stream: int) -> None:
        self.record(flight.events.landed, stream)

    def upload(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._queue(stream, lambda: ctypes.memmove(destination, source, nbytes))
        self.uploads += 1

    def upload_pageable(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert torch.is_inference_mode_enabled() or not target.is_inference()  # torch refuses the opposite
        taken, destination = source.clone(), target.data_ptr()
        self._queue(self.stream, lambda: ctypes.memmove(destination, taken.data_ptr(), taken.numel()))

    def record(self, event: FakeEvent, stream: int) -> None:
        event.issued += 1
        generation = event.issued

        def reach() -> None:
            event.reached = max(event.reached, generation)

        self._queue(stream, reach)

    def stream_wait(self, stream: int, event: FakeEvent) -> None:
        generation = event.issued
        self._queue(stream, lambda: None, ready=lambda: event.reached >= generation)
        self.stream_waits += 1

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def hold(self, *buffers: torch.Tensor) -> None:
        self.held.extend(buffers)

    def synchronize(self) -> None:
        self.run()

    def synchronize_current(self) -> None:
        queue = self._queues[self.stream]
        self.run(until=lambda: not queue)

    def enqueue(self, work: Callable[[], Any], stream: int | None = None) -> None:
        """Queue work of the test's own, such as overwriting a source as the next step's graph does."""
        self._queue(self.stream if stream is None else stream, work)

    def block(self, stream: int) -> None:
        """Block a stream, as a long kernel does."""
        self._blocked.add(stream)

    def unblock(self, stream: int) -> None:
        self._blocked.discard(stream)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run queued work, stream by stream, as far as it can go. Safe to call from several threads."""
        with self._running:
            self._run(until)

    def _run(self, until: Callable[[], bool]) -> None:
        moved = True
        while moved and not until():
            moved = False
            for stream, queue in list(self._queues.items()):
                while queue and stream not in self._blocked and queue[0][0]() and not until():
                    queue.popleft()[1]()
                    moved = True
        if self.idle:
            self._memory.clear()

    @property
    def idle(self) -> bool:
        """Whether no work is queued."""
        return not any(self._queues.values())

    def _queue(self, stream: int, work: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        assert self.current is None, "queued while another device is current"
        self._queues[stream].append((ready, work))


class FakeLauncher:
    """Queues the gather on a fake device; `fail` makes the next launch raise."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.configs: set[LaunchConfig] = set()
        self.fail: Exception | None = None
        self._tables: list[np.ndarray[Any, np.dtype[np.int64]]] = []  # bound launches read them

    def bind(self, config: LaunchConfig, num_tiles: int, tiles: int, table: int | None) -> Launch:
        self.configs.add(config)

        def launch(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
            if self.fail is not None:
                failure, self.fail = self.fail, None
                raise failure
            passed = (ctypes.c_int64 * len(addresses))(*addresses)

            def gather() -> None:
                read = ctypes.addressof(passed) if table is None else table
                _gather(num_tiles, tiles, read, slab, config.tile_bytes)

            self._device.enqueue(gather, stream)
            self._device.launches += 1

        return launch

    def bind_runs(self, config: LaunchConfig, runs: Sequence[PassedRun]) -> Launch:
        tiles = [
            (
                run.leaf,
                run.source + done,
                run.destination + copy * run.nbytes + done,
                min(config.tile_bytes, run.nbytes - done),
                0,
                0,
            )
            for run in runs
            for copy in range(run.copies)
            for done in range(0, run.nbytes, config.tile_bytes)
        ]
        table = np.array(tiles, dtype=np.int64)
        launch = self.bind(config, len(tiles), table.ctypes.data, None)
        self._tables.append(table)
        return launch


def _gather(num_tiles: int, tiles: int, addresses: int, slab: int, tile_bytes: int) -> None:
    table = np.ctypeslib.as_array((ctypes.c_int64 * (6 * num_tiles)).from_address(tiles)).reshape(-1, 6)
    for leaf, source, destination, length, row_bytes, row_stride in table.tolist():
        assert 0 < length <= tile_bytes
        base = ctypes.c_int64.from_address(addresses + 8 * leaf).value + source
        for done in range(0, length, row_bytes or length):
            row = done // (row_bytes or length)
            ctypes.memmove(slab + destination + done, base + row * row_stride, row_bytes or length)
