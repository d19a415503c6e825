"""Pack the steps of a trace again, to check the bytes and to measure the cost on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

import spanpack
from omni_runner.builder import ChannelBuilder, ChannelRules
from omni_runner.difference import difference
from omni_runner.packing import StepPacker
from omni_runner.reference import (
    SPARSE_PROTOCOL_KEYS,
    Payloads,
    as_tensor,
    flatten_payload,
    reference_payloads,
)
from omni_runner.step import NotCovered, StepContext, make_step
from omni_runner.trace import Trace, TraceStep

_MOST_DIFFERENCES = 20


@dataclass(frozen=True)
class Replay:
    """Result of replaying one trace.

    Attributes
    ----------
    stage : str
        Stage of the trace.
    backend, device : str
        Backend and device of the packer.
    steps, payloads : int
        Steps packed; per-request payloads made and compared.
    whole_steps : int
        Steps that the columns do not cover, packed as whole tensors for the engine's builder.
    payload_bytes : int
        Bytes of all payloads.
    packs, launches, copies : int
        Of the compared pass: packs made, kernel launches, device-to-host copies.
    direct_stores : int
        Packs that the kernel stored directly into pinned memory: small ones, if the GPU is tuned for that.
    host_us, landed_us, ready_us : float
        Medians over the steps of the timed passes: until the pack call returns, until the bytes are on the
        host, until the per-request payloads exist.
    differences : tuple of str
        Differences from the reference; empty if all bytes agree.
    """

    stage: str
    backend: str
    device: str
    steps: int
    payloads: int
    whole_steps: int
    payload_bytes: int
    packs: int
    launches: int
    copies: int
    direct_stores: int
    host_us: float
    landed_us: float
    ready_us: float
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every byte agrees with the reference."""
        return not self.differences


def default_device() -> str:
    """Return the current GPU, or the CPU if there is none."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def replay(trace: Trace, packer: spanpack.Packer, *, timed_passes: int = 20) -> Replay:
    """Pack every step of a trace and compare each request's payload with the reference.

    Parameters
    ----------
    trace : Trace
        Loaded onto the packer's device.
    packer : spanpack.Packer
        Does the packing; its counters give the launches and copies.
    timed_passes : int
        Number of timed passes over the trace, after the compared pass and one warm-up pass.
    """
    replayer = _Replayer(packer)
    before = packer.stats()
    differences: list[str] = []
    payload_bytes = payloads = whole_steps = 0
    for number, step in enumerate(trace.steps):
        found, was_whole = replayer.payloads(step)
        expected = reference_payloads(step)
        whole_steps += was_whole
        payloads += sum(payload is not None for payload in expected)
        payload_bytes += sum(tensor.nbytes for payload in expected if payload for tensor in payload.values())
        differences += [f"step {number}, {text}" for text in compare_payloads(step.request_ids, expected, found)]
    after = packer.stats()
    timings = replayer.timings(trace.steps, timed_passes)
    return Replay(
        stage=trace.stage,
        backend=packer.backend,
        device=str(packer.device),
        steps=len(trace.steps),
        payloads=payloads,
        whole_steps=whole_steps,
        payload_bytes=payload_bytes,
        packs=after.packs - before.packs,
        launches=after.launches - before.launches,
        copies=after.copies - before.copies,
        direct_stores=after.direct_stores - before.direct_stores,
        host_us=timings.median("host_us"),
        landed_us=timings.median("landed_us"),
        ready_us=timings.median("ready_us"),
        differences=tuple(differences),
    )


@dataclass
class _Timings:
    """Microseconds from the start of the pack call, one entry per step."""

    host_us: list[float] = field(default_factory=list)
    landed_us: list[float] = field(default_factory=list)
    ready_us: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name) or [0.0])


class _Replayer:
    def __init__(self, packer: spanpack.Packer) -> None:
        rules = cast(Any, _EngineRules())
        self._packer = StepPacker(packer, rules)
        self._builder = ChannelBuilder(rules, ChannelRules(partitions=False))
        self._on_gpu = packer.device.type == "cuda"

    def payloads(self, step: TraceStep) -> tuple[Payloads, bool]:
        """Return one step's payloads after packing, and whether the step had to be packed as whole tensors."""
        hidden = step.hidden_states if step.include_hidden else None
        try:
            packed = self._packer.pack(_context(step), hidden_states=hidden, multimodal_outputs=step.multimodal_outputs)
        except NotCovered:
            tree = self._packer.pack_whole((hidden, step.multimodal_outputs)).payload()
            on_host = replace(step, hidden_states=tree[0], multimodal_outputs=tree[1])
            return reference_payloads(on_host), True
        channel, _ = self._builder.build(packed)
        packed.release()
        return channel or [None] * len(step.request_ids), False

    def timings(self, steps: Sequence[TraceStep], passes: int) -> _Timings:
        timings = _Timings()
        prepared = [(_context(step), step) for step in steps]
        for number in range(passes + 1 if passes else 0):
            for context, step in prepared:
                self._time(context, step, timings if number else _Timings())
        return timings

    def _time(self, context: StepContext, step: TraceStep, timings: _Timings) -> None:
        hidden = step.hidden_states if step.include_hidden else None
        if self._on_gpu:
            torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        try:
            packed = self._packer.pack(context, hidden_states=hidden, multimodal_outputs=step.multimodal_outputs)
        except NotCovered:
            return
        host_ns = time.perf_counter_ns()
        packed.wait()
        landed_ns = time.perf_counter_ns()
        self._builder.build(packed)
        ready_ns = time.perf_counter_ns()
        packed.release()
        timings.host_us.append((host_ns - start_ns) / 1000)
        timings.landed_us.append((landed_ns - start_ns) / 1000)
        timings.ready_us.append((ready_ns - start_ns) / 1000)


def _context(step: TraceStep) -> StepContext:
    elements = step.elements or ()
    return make_step(
        request_ids=step.request_ids,
        num_scheduled_tokens=step.num_scheduled_tokens,
        query_start_loc=step.query_start_loc,
        scheduled_tokens=sum(step.num_scheduled_tokens),
        consumer_ids=step.needs_payload,
        sparse_index=dict(zip(step.needs_payload, elements, strict=True)) if elements else None,
        is_sparse=step.elements is not None,
    )


def compare_payloads(request_ids: Sequence[str], expected: Payloads, found: Payloads) -> list[str]:
    """List the differences between two steps' payloads by request and key; compares dtype, shape and bytes."""
    return [
        f"request {request}{text}"
        for request, left, right in zip(request_ids, expected, found, strict=True)
        for text in _compare_payload(left, right)
    ][:_MOST_DIFFERENCES]


def _compare_payload(expected: dict[str, Tensor] | None, found: dict[str, Tensor] | None) -> Iterator[str]:
    if expected is None or found is None:
        if expected is not found:
            yield f": {'no payload' if found is None else 'a payload'}, which the reference has not"
        return
    for key in expected | found:
        problem = difference(expected.get(key), found.get(key))
        if problem:
            yield f", {key}: {problem}"


class _EngineRules:
    """The part of `omni_runner.compat.Upstream` that is used here, for machines without an engine."""

    sparse_protocol_keys = SPARSE_PROTOCOL_KEYS

    @staticmethod
    def flatten_payload(payload: dict[str, Any]) -> dict[str, Any]:
        return flatten_payload(payload)

    @staticmethod
    def ensure_tensor_values(payload: dict[str, Any]) -> dict[str, Tensor]:
        wrapped = {key: value if isinstance(value, Tensor) else as_tensor(value) for key, value in payload.items()}
        return {key: value for key, value in wrapped.items() if value is not None}
