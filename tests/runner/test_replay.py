"""Replaying traces: the packed payloads of recorded steps against plain slicing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="traces are read with safetensors")

import torch

import omni_runner.replay as replaying
import spanpack
from omni_runner.demo.report import traces_report
from omni_runner.demo.traces import shipped_traces
from omni_runner.reference import reference_payloads
from omni_runner.replay import replay
from omni_runner.trace import Trace, TraceStep, load_trace
from spanpack import gather

TRACES = pytest.mark.parametrize("path", shipped_traces(), ids=lambda path: path.name)


def trace_of(**changes: Any) -> Trace:
    """One small step of three requests, changed."""
    step = TraceStep(
        request_ids=("a", "b", "c"),
        num_scheduled_tokens=(4, 1, 2),
        query_start_loc=(0, 4, 5, 7, 7),
        needs_payload=("a", "c"),
        include_hidden=True,
        hidden_states=torch.randn(8, 6),  # one row of padding
        staged_hidden_states_cpu=None,
        multimodal_outputs={
            "hidden_states": {"layers": {0: torch.randn(7, 6), 24: torch.randn(6, 7).T}},
            "codes": {"audio": [torch.arange(3), torch.zeros(0, dtype=torch.int64), torch.arange(5)]},
            "embed": {"bos": [torch.ones(1, 1, 6)]},
            "meta": {"rate": 24000, "name": "dropped"},
        },
    )
    return Trace({"stage": "test"}, (replace(step, **changes),))


@TRACES
def test_shipped_traces_are_packed_byte_for_byte(path: Path) -> None:
    trace = load_trace(path)
    result = replay(trace, spanpack.Packer("cpu"), timed_passes=1)
    assert result.identical, result.differences
    assert result.whole_steps == 0
    assert (result.steps, result.packs) == (len(trace.steps), len(trace.steps))
    assert result.payloads == sum(len(step.request_ids) for step in trace.steps)
    assert 0 < result.host_us <= result.landed_us <= result.ready_us


@TRACES
@pytest.mark.gpu
def test_shipped_traces_on_a_gpu(path: Path, cuda_device: torch.device) -> None:
    trace = load_trace(path, cuda_device)
    result = replay(trace, spanpack.Packer(cuda_device), timed_passes=2)
    assert result.identical, result.differences
    assert result.backend == "triton"
    assert (result.packs, result.launches, result.copies + result.direct_stores) == (result.steps,) * 3


@TRACES
def test_some_consumers_only(path: Path) -> None:
    trace = load_trace(path)
    steps = [replace(step, needs_payload=step.request_ids[::2]) for step in trace.steps]
    result = replay(replace(trace, steps=tuple(steps)), spanpack.Packer("cpu"), timed_passes=0)
    assert result.identical, result.differences
    assert result.payloads == sum(len(step.needs_payload) for step in steps)
    assert result.host_us == 0


def test_the_interpreted_kernel_on_a_recorded_step() -> None:
    if not gather.interpreted():
        pytest.skip("TRITON_INTERPRET was not set before spanpack was imported")
    talker = load_trace(shipped_traces()[1])
    result = replay(replace(talker, steps=talker.steps[2:3]), spanpack.Packer("cpu", backend="triton"), timed_passes=0)
    assert result.identical, result.differences
    assert (result.backend, result.launches) == ("triton", 1)


SPARSE = {
    "needs_payload": ("c", "a"),
    "elements": (0, 1),
    "multimodal_outputs": {"audio": [torch.ones(3), torch.ones(2)]},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"needs_payload": ()}, id="nobody"),
        pytest.param({"needs_payload": ("a", "b", "c")}, id="everybody"),
        pytest.param({"include_hidden": False}, id="no hidden rows wanted"),
        pytest.param({"hidden_states": None}, id="no hidden rows"),
        pytest.param({"multimodal_outputs": None}, id="hidden rows only"),
        pytest.param(SPARSE, id="sparse audio"),
    ],
)
def test_kinds_of_steps(changes: dict[str, Any]) -> None:
    result = replay(trace_of(**changes), spanpack.Packer("cpu"), timed_passes=1)
    assert result.identical, result.differences
    assert result.whole_steps == 0


def test_a_step_that_columns_do_not_cover_is_packed_whole() -> None:
    payload = {"loose": {"inner": torch.randn(7, 2)}, "scalar": torch.tensor(3.0)}
    result = replay(trace_of(multimodal_outputs=payload), spanpack.Packer("cpu"), timed_passes=1)
    assert result.identical, result.differences
    assert (result.whole_steps, result.packs) == (1, 1)
    assert result.host_us == 0


def test_a_wrong_byte_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def almost(step: TraceStep) -> Any:
        payloads = reference_payloads(step)
        assert payloads[2] is not None
        payloads[2]["codes.audio"][3] ^= 1 << 8
        return payloads

    monkeypatch.setattr(replaying, "reference_payloads", almost)
    result = replay(trace_of(), spanpack.Packer("cpu"), timed_passes=0)
    assert not result.identical
    assert result.differences == ("step 0, request c, codes.audio: 1 of 40 bytes differ, the first at 25",)
    report = traces_report([("test", result)])
    assert "DIFFERENT" in report
    assert "request c, codes.audio" in report


def test_reference_slices_what_the_engine_slices() -> None:
    trace = trace_of()
    step = trace.steps[0]
    first, nobody, last = reference_payloads(step)
    assert nobody is None
    assert first is not None
    assert last is not None
    assert list(last) == [
        "hidden",
        "hidden_states.layer_0",
        "hidden_states.layer_24",
        "codes.audio",
        "embed.bos",
        "meta.rate",
    ]
    assert torch.equal(last["hidden"], step.hidden_states[5:7])  # type: ignore[index]
    assert torch.equal(last["hidden_states.layer_24"], step.multimodal_outputs["hidden_states"]["layers"][24][5:7])
    assert torch.equal(last["codes.audio"], torch.arange(5))
    assert first["embed.bos"].shape == (1, 1, 6)
    assert first["meta.rate"].item() == 24000
