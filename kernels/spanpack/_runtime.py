"""Device operations of the hot path: streams as raw handles, events, copies.

`TorchRuntime` uses torch's own objects and works wherever torch does. `NativeRuntime` makes the same calls directly to
the CUDA or HIP runtime library through `ctypes.PyDLL`. This avoids the stream context manager (9 us) and keeps the GIL:
none of the calls blocks unless about a thousand launches are queued, and when other threads are busy, releasing and
reacquiring the GIL costs more than the call.
Tests replace both with a simulated device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from .errors import DeviceError
from .flight import Flight
from .prepared import pointer, prepare_function, size

_COPY_PRIORITY = -1  # the higher of torch's two stream priorities
_DEVICE_TO_HOST, _HOST_TO_DEVICE = 2, 1  # cudaMemcpyKind; hipMemcpyKind has the same numbers


class TorchRuntime:
    """One CUDA or ROCm device and the stream for copies to the host.

    Parameters
    ----------
    device
        The device, with its index.
    copy_stream
        Stream for the copies; by default a new one.

    Attributes
    ----------
    current_stream
        Takes no arguments, returns the raw handle of this device's current stream.
    current_device
        Takes no arguments, returns the index of the calling thread's current device.
    """

    def __init__(self, device: torch.device, copy_stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        # Torch reuses 32 streams of each priority; at the default priority this one could also be a producing stream.
        self.copy_stream = copy_stream or torch.cuda.Stream(device, priority=_COPY_PRIORITY)
        self.current_stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._streams = {0: torch.cuda.default_stream(device)}

    def as_current(self) -> AbstractContextManager[Any]:
        """A context in which this device is the calling thread's current one."""
        return torch.cuda.device(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """A context in which `stream` is the current one, and its device the current device."""
        return torch.cuda.stream(stream)

    def make_event(self, *, blocking: bool) -> torch.cuda.Event:
        """An event that has a handle: torch makes it at the first record, so the event is recorded once here."""
        event = torch.cuda.Event(blocking=blocking)
        event.record(self.copy_stream)
        return event

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device bytes; once freed, they are not reused before the copy stream has read them."""
        with torch.inference_mode(False):  # an inference tensor can't be written outside of that mode
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self.copy_stream)
        return buffer

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Like `empty`, but zeroed on the current stream."""
        return self.empty(nbytes).zero_()

    def copy_to_host(self, flight: Flight, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy to the host on the copy stream, after the work queued on `stream`; records the flight's events."""
        self.record(flight.events.packed, stream)
        self.copy_stream.wait_event(flight.events.packed)
        with torch.cuda.stream(self.copy_stream):
            _host_bytes(destination, nbytes).copy_(self._device_bytes(source, nbytes), non_blocking=True)
        flight.events.landed.record(self.copy_stream)

    def mark_landed(self, flight: Flight, stream: int) -> None:
        """Record `landed` on `stream`, without a copy: the bytes are there once the work queued so far is done."""
        self.record(flight.events.landed, stream)

    def upload(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy pinned host memory to the device on `stream`."""
        with torch.cuda.stream(self._stream(stream)):
            self._device_bytes(destination, nbytes).copy_(_host_bytes(source, nbytes), non_blocking=True)

    def upload_pageable(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pageable host memory to the device on the current stream; the source has been read when this returns."""
        target.copy_(source, non_blocking=True)

    def record(self, event: torch.cuda.Event, stream: int) -> None:
        """Record an event on a stream."""
        event.record(self._stream(stream))

    def stream_wait(self, stream: int, event: torch.cuda.Event) -> None:
        """Let later work on `stream` wait for an event; the host does not wait."""
        self._stream(stream).wait_event(event)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy device bytes to pageable host memory on the copy stream; blocks until they are there."""
        with torch.cuda.stream(self.copy_stream):
            target.copy_(source)

    def hold(self, *buffers: torch.Tensor) -> None:
        """Keep the memory of freed buffers from being reused before the current stream is done with it."""
        stream = torch.cuda.current_stream(self.device)
        for buffer in buffers:
            buffer.record_stream(stream)

    def synchronize(self) -> None:
        """Block until every copy to the host is done."""
        self.copy_stream.synchronize()

    def synchronize_current(self) -> None:
        """Block until the work on the current stream is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def _stream(self, handle: int) -> torch.cuda.Stream:
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.ExternalStream(handle, device=self.device)
        return stream

    def _device_bytes(self, address: int, nbytes: int) -> torch.Tensor:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        holder = type("DeviceBytes", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(holder, device=self.device)


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class NativeEvent(torch.cuda.Event):
    """An event whose `synchronize` calls the runtime library rather than torch.

    A thread that still waits when the interpreter exits is terminated when it tries to reacquire the GIL. With torch's
    C++ frames on its stack this aborts the process; with the C frames of `ctypes` it does not.
    """

    synchronize_handle: Callable[[Any], int]

    def synchronize(self) -> None:
        """Sleep, or spin if the event is not a blocking one, until the recorded work is done."""
        _check(self.synchronize_handle(pointer(self.cuda_event)))


class NativeRuntime(TorchRuntime):
    """A `TorchRuntime` that directly calls the runtime library loaded by torch."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        prefix: str,
        device: torch.device,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(device, copy_stream)
        self._side = pointer(self.copy_stream.cuda_stream)
        waits = ctypes.CDLL(library._name)  # releases the GIL, because this call blocks
        self._synchronize = prepare_function(waits, f"{prefix}EventSynchronize")
        self._record = prepare_function(library, f"{prefix}EventRecord")
        self._wait = prepare_function(library, f"{prefix}StreamWaitEvent")
        self._copy = prepare_function(library, f"{prefix}MemcpyAsync")

    def make_event(self, *, blocking: bool) -> torch.cuda.Event:
        event = NativeEvent(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self.copy_stream)
        event.synchronize_handle = self._synchronize
        return event

    def copy_to_host(self, flight: Flight, destination: int, source: int, nbytes: int, stream: int) -> None:
        side, (_, _, packed, landed) = self._side, flight.events
        code = (
            self._record(packed, pointer(stream))
            or self._wait(side, packed, 0)
            or self._copy(pointer(destination), pointer(source), size(nbytes), _DEVICE_TO_HOST, side)
            or self._record(landed, side)
        )
        if code:
            _check(code)

    def mark_landed(self, flight: Flight, stream: int) -> None:
        _check(self._record(flight.events.landed_handle, pointer(stream)))

    def upload(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        code = self._copy(pointer(destination), pointer(source), size(nbytes), _HOST_TO_DEVICE, pointer(stream))
        _check(code)

    def record(self, event: torch.cuda.Event, stream: int) -> None:
        _check(self._record(pointer(event.cuda_event), pointer(stream)))

    def stream_wait(self, stream: int, event: torch.cuda.Event) -> None:
        if event.cuda_event:  # no handle before the first record: nothing to wait for
            _check(self._wait(pointer(stream), pointer(event.cuda_event), 0))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"a runtime call failed with error {code}; see the error enumeration of the GPU's runtime")


def load_runtime(device: torch.device, copy_stream: torch.cuda.Stream | None = None) -> TorchRuntime:
    """The fastest runtime that works here.

    Raises
    ------
    DeviceError
        The device is not a CUDA or ROCm device, so it has no streams to copy on.
    """
    if device.type != "cuda":
        raise DeviceError(
            f"device {str(device)!r} has no streams to copy on; give a CUDA or ROCm device, such as 'cuda:0'"
        )
    if torch.version.hip:
        names, prefix = ["libamdhip64.so"], "hip"
    else:
        major = (torch.version.cuda or "").split(".")[0]
        names, prefix = [f"libcudart.so.{major}", "libcudart.so"], "cuda"
    for name in names:
        try:
            return NativeRuntime(ctypes.PyDLL(name), prefix, device, copy_stream)
        except (OSError, AttributeError):
            continue
    return TorchRuntime(device, copy_stream)
