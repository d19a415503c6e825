"""Copies of single tensors to the host, for data that must not wait behind a payload: one copy each, no gather."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch
from torch import Tensor

from ._runtime import TorchRuntime, load_runtime
from .backends import resolve_device
from .errors import ClosedError, LeafError
from .flight import Fetched, Flight
from .leaf_memory import SUSPECT_ADDRESS, why_unpackable
from .pool import HostPool

_BUDGET_BYTES = 1 << 24


class Fetcher:
    """Copies whole tensors to pinned memory on a copy stream, after the work queued on the current stream.

    Does what ``tensor.to("cpu", non_blocking=True)`` on another stream does, in a tenth of its host time: no stream
    context, no new event, no pinned allocation once the slabs exist. Safe to call from several threads.

    Parameters
    ----------
    device
        Where the tensors are: a CUDA or ROCm device.
    copy_stream
        Stream for the copies; by default a new one.
    slabs
        Maximum number of fetched tensors of one size class (64 KiB, 128 KiB and so on) alive at a time.

    Raises
    ------
    DeviceError
        The device can't be served, or does not exist.
    """

    def __init__(
        self, device: torch.device | str | int, copy_stream: torch.cuda.Stream | None = None, *, slabs: int = 8
    ) -> None:
        resolved = resolve_device(device)
        self._runtime: TorchRuntime = load_runtime(resolved, copy_stream)
        self._pool = HostPool(_BUDGET_BYTES, slabs, pin=resolved.type == "cuda")
        self._lock = threading.Lock()
        self._closed = False

    def fetch(self, source: Tensor) -> Fetched | None:
        """Queue the copy of one tensor and return at once.

        Parameters
        ----------
        source
            Contiguous, not empty, on the fetcher's device. Keep it alive and unchanged until `Fetched.landed`: its
            memory is read on another stream.

        Returns
        -------
        Fetched or None
            None if no slab is free: too many fetched tensors are alive, or pinned memory was refused.

        Raises
        ------
        LeafError
            `source` is not such a tensor.
        ClosedError
            The fetcher was closed.
        """
        runtime = self._runtime
        if runtime.current_device() != runtime.device.index:  # handle 0 stands for the current device's default stream
            with runtime.as_current():
                return self.fetch(source)
        if not _is_plain(source, runtime.device):
            why_not = why_unpackable(source) if isinstance(source, Tensor) else None
            which = f", which {why_not}" if why_not else ""
            raise LeafError(
                f"given {_describe(source)}{which}; expected a contiguous tensor with elements on {runtime.device}, "
                "neither sparse nor quantized, and with conjugation and negation resolved"
            )
        nbytes = source.nbytes
        with self._lock:
            if self._closed:
                raise ClosedError("this fetcher was closed; make a new one")
            slab = self._pool.acquire(nbytes)
            if slab is None:
                return None
            lease = slab.lease(nbytes)  # from here on an error returns the slab to its shelf
            flight = slab.flight = Flight(slab.events or slab.make_events(runtime.make_event))
            copy = flight, slab.address, source.data_ptr(), nbytes, runtime.current_stream()
            try:
                runtime.copy_to_host(*copy)
            except BaseException:
                with suppress(RuntimeError):  # queued work may still write: the flight must end after it
                    runtime.copy_to_host(*copy)
                raise
        host = torch.frombuffer(lease, dtype=source.dtype).view(source.shape)
        return Fetched(host, flight.landed)

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory held, in bytes."""
        return self._pool.held_bytes

    def close(self) -> None:
        """Wait for the copies in flight and free the memory; fetched tensors stay valid. May be called repeatedly."""
        with self._lock:
            self._closed = True
            self._pool.close()


def _is_plain(source: Tensor, device: torch.device) -> bool:
    """Whether a tensor is one run of memory that holds exactly the tensor's values."""
    return (
        isinstance(source, Tensor)
        and source.device == device
        and source.layout is torch.strided
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg() or source.is_quantized or source.is_nested)
        and source.numel() > 0
        and (source.data_ptr() >= SUSPECT_ADDRESS or why_unpackable(source) is None)
    )


def _describe(source: object) -> str:
    if not isinstance(source, Tensor):
        return f"a {type(source).__name__}"
    lazy = ", lazily conjugated or negated" if source.is_conj() or source.is_neg() else ""
    strides = f" with strides {source.stride()}" if source.layout is torch.strided and not source.is_nested else ""
    return f"{str(source.dtype).removeprefix('torch.')}{list(source.shape)}{strides} on {source.device}{lazy}"
