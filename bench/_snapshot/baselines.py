"""Baselines that use only torch or the CUDA runtime, and ceilings.

The three baselines copy every tensor once, as a whole, into one buffer: `torch.cat`, `torch._foreach_copy_` and
`cudaMemcpyBatchAsync` know nothing of requests. Buffers, events and streams are prepared before the steps. The
hand-over is the same as ours, the queue of a waiting thread; the baselines make no per-request payloads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench._snapshot.machine import Machine
from bench._snapshot.provider import Provider, StepInput, Unavailable, Work
from bench._snapshot.scenarios import Scenario, tensors_of
from omni_runner.builder_thread import BuilderThread
from omni_runner.trace import TraceStep

_SLOTS = 2  # steps do not overlap, so one slot would do, but it would stay in the device's cache
_LARGE_BYTES = 64 << 20  # larger than any cache; pinning this much takes 50 ms
_ALIGNMENT_BYTES = 16


class _NoEvent:
    """Replaces an event on the CPU, where a copy is complete when the call returns."""

    def record(self, stream: torch.cuda.Stream | None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(slots=True)
class _Slot:
    device: Tensor  # [nbytes] uint8
    host: Tensor  # [nbytes] uint8, pinned
    packed: Any  # torch.cuda.Event, or _NoEvent
    landed: Any
    views: list[Tensor]


class _OneBuffer(Provider):
    """Gathers into one device buffer on the producing stream, then makes one copy to the host on the copy stream."""

    builds = False

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        self._all_on_device = all(
            leaf.device == machine.device for step in scenario.distinct_steps for leaf in tensors_of(step)
        )
        self._sizes = self._leaf_sizes(scenario)
        self._offsets = self._place(self._sizes)
        self._nbytes = self._offsets[-1]
        self._slots = [self._make_slot() for _ in range(_SLOTS if self._nbytes < _LARGE_BYTES else 1)]
        self._next = 0
        self._thread = BuilderThread(f"bench-{self.name}")

    def _leaf_sizes(self, scenario: Scenario) -> list[int]:
        looks = {tuple((leaf.dtype, leaf.shape) for leaf in self._leaves(step)) for step in scenario.distinct_steps}
        if len(looks) > 1:
            raise Unavailable("steps of different shapes; what it prepares is for one")
        return [leaf.nbytes for leaf in self._leaves(scenario.steps[0])]

    def _leaves(self, step: TraceStep) -> list[Tensor]:
        leaves = tensors_of(step)
        if self._all_on_device:
            return leaves
        return [leaf for leaf in leaves if leaf.device == self.machine.device]

    def _place(self, sizes: Sequence[int]) -> list[int]:
        """Byte offset of each leaf, followed by the total size in bytes."""
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return offsets

    def _make_slot(self) -> _Slot:
        on_gpu = self.machine.compute is not None
        make_event: Any = torch.cuda.Event if on_gpu else _NoEvent
        return _Slot(
            device=torch.empty(self._nbytes, dtype=torch.uint8, device=self.machine.device),
            host=torch.empty(self._nbytes if self.lands else 0, dtype=torch.uint8, pin_memory=on_gpu),
            packed=make_event(),
            landed=make_event(blocking=True) if on_gpu else make_event(),
            views=[],
        )

    def _take_slot(self) -> _Slot:
        self._next = (self._next + 1) % len(self._slots)
        return self._slots[self._next]

    def _copy_out(self, slot: _Slot) -> None:
        copy_stream = self.machine.copy_stream
        if copy_stream is None:
            slot.host.copy_(slot.device)
            return
        slot.packed.record(self.machine.compute)
        copy_stream.wait_event(slot.packed)
        with torch.cuda.stream(copy_stream):
            slot.host.copy_(slot.device, non_blocking=True)
        slot.landed.record(copy_stream)

    def is_landed(self, taken: _Slot) -> bool:
        return taken.landed.query()

    def d2h_bytes(self, taken: _Slot) -> int:
        return self._nbytes

    def hand_over(self, step: StepInput, taken: _Slot, *, only_wait: bool) -> Work:
        return Work(taken.landed.synchronize).on_thread(self._thread)

    def leaf_bytes(self, taken: _Slot) -> list[Tensor]:
        pairs = zip(self._offsets, self._sizes, strict=False)
        return [taken.host[offset : offset + size] for offset, size in pairs]

    def close(self) -> None:
        self._thread.close()


class TorchCat(_OneBuffer):
    """`torch.cat` of byte views into a prepared buffer."""

    name = "torch_cat"

    def _place(self, sizes: Sequence[int]) -> list[int]:
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        return offsets

    def take(self, step: StepInput) -> _Slot:
        slot = self._take_slot()
        torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in self._leaves(step.trace)], out=slot.device)
        self._copy_out(slot)
        return slot


class ForeachCopy(_OneBuffer):
    """`torch._foreach_copy_` of byte views into prepared views of one buffer.

    Without byte views the copy is not exact: the bf16 kernel turns signaling NaNs into quiet ones.
    """

    name = "foreach_copy"

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        leaves = self._leaves(scenario.steps[0])
        for slot in self._slots:
            slot.views = [
                slot.device[offset : offset + leaf.nbytes].view(leaf.view(torch.uint8).shape)
                for offset, leaf in zip(self._offsets, leaves, strict=False)
            ]

    def take(self, step: StepInput) -> _Slot:
        slot = self._take_slot()
        torch._foreach_copy_(slot.views, [leaf.view(torch.uint8) for leaf in self._leaves(step.trace)])
        self._copy_out(slot)
        return slot


def _load_runtime() -> Any:
    try:
        from cuda.bindings import runtime  # noqa: PLC0415  CUDA machines only
    except ImportError as error:
        raise Unavailable(f"cuda.bindings can't be imported ({error}); pip install cuda-bindings") from error
    return runtime


class _RawCopies(_OneBuffer):
    """Uses CUDA runtime calls instead of torch's copies and stream contexts."""

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        if machine.compute is None or machine.copy_stream is None:
            raise Unavailable("needs a CUDA device")
        self._runtime = _load_runtime()
        self._to_host = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        super().__init__(machine, scenario)
        self._compute_stream, self._copy_stream = machine.compute, machine.copy_stream
        self._copy_handle = machine.copy_stream.cuda_stream
        self._addresses = [(slot.device.data_ptr(), slot.host.data_ptr()) for slot in self._slots]

    def _copy_out(self, slot: _Slot) -> None:
        device, host = self._addresses[self._next]
        slot.packed.record(self._compute_stream)
        self._copy_stream.wait_event(slot.packed)
        _check(self._runtime.cudaMemcpyAsync(host, device, self._nbytes, self._to_host, self._copy_handle))
        slot.landed.record(self._copy_stream)


def _check(result: tuple[Any, ...]) -> None:
    if result[0].value:
        raise RuntimeError(f"the CUDA runtime said {result[0].name}")


class MemcpyBatch(_RawCopies):
    """`cudaMemcpyBatchAsync`, device to device in stream order. Only the source addresses are collected per step."""

    name = "memcpy_batch"

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        if not hasattr(self._runtime, "cudaMemcpyBatchAsync"):
            raise Unavailable("this cuda.bindings has no cudaMemcpyBatchAsync; it came with CUDA 12.8")
        runtime = self._runtime
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]
        offsets = self._offsets[: len(self._sizes)]
        self._targets = [[device + offset for offset in offsets] for device, _ in self._addresses]
        self._compute_handle = self._compute_stream.cuda_stream

    def take(self, step: StepInput) -> _Slot:
        slot = self._take_slot()
        sources = [leaf.data_ptr() for leaf in self._leaves(step.trace)]
        _check(
            self._runtime.cudaMemcpyBatchAsync(
                self._targets[self._next],
                sources,
                self._sizes,
                len(sources),
                self._attributes,
                [0],
                1,
                self._compute_handle,
            )
        )
        self._copy_out(slot)
        return slot


def _all_in_one(self: _OneBuffer, scenario: Scenario) -> list[int]:
    return [math.ceil(scenario.payload_bytes)]


class OneCopy(_RawCopies):
    """A ceiling: one copy to the host of as many bytes as the payload has. Gathers and hands over nothing."""

    name = "one_copy"
    owns_bytes = False
    hands_over = False

    _leaf_sizes = _all_in_one

    def take(self, step: StepInput) -> _Slot:
        slot = self._take_slot()
        self._copy_out(slot)
        return slot

    def hand_over(self, step: StepInput, taken: _Slot, *, only_wait: bool) -> Work:
        return Work(taken.landed.synchronize, join=taken.landed.synchronize)

    def leaf_bytes(self, taken: _Slot) -> list[Tensor]:
        return []


class DeviceCopy(_OneBuffer):
    """A ceiling: one device-to-device copy of the payload's bytes on the producing stream, and nothing else."""

    name = "device_copy"
    owns_bytes = False
    lands = False
    hands_over = False

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        self._source = torch.empty(self._nbytes, dtype=torch.uint8, device=machine.device)

    _leaf_sizes = _all_in_one

    def take(self, step: StepInput) -> _Slot:
        slot = self._take_slot()
        slot.device.copy_(self._source)
        return slot

    def hand_over(self, step: StepInput, taken: _Slot, *, only_wait: bool) -> Work:
        return Work(lambda: None)

    def leaf_bytes(self, taken: _Slot) -> list[Tensor]:
        return []
