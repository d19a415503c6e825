"""The demo: its comparison finds what differs, and the real engine gives the same with both runners."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="the demo's payloads are written with safetensors")

import torch

import spanpack
from omni_runner.demo import __main__ as demo
from omni_runner.demo import parts, runs
from omni_runner.demo.payload_log import PayloadLog, Run, compare
from omni_runner.demo.report import engine_report, human_bytes, table
from omni_runner.replay import replay
from omni_runner.trace import load_trace

COUNTERS = {"columns": 2, "whole": {}, "empty": 0, "stock": {}, "pack": {"packs": 2, "launches": 0, "copies": 0}}


def output(*payloads: dict[str, torch.Tensor] | None, **changes: Any) -> SimpleNamespace:
    """A step's output as the engine gets it, the same list in both channels."""
    names = [f"r{place}" for place in range(len(payloads))]
    channel = list(payloads)
    fields = {
        "req_ids": names,
        "req_id_to_index": {name: place for place, name in enumerate(names)},
        "sampled_token_ids": [[7]] * len(names),
        "inter_stage_outputs": channel,
        "multimodal_outputs": channel,
    }
    return SimpleNamespace(**(fields | changes))


def run_of(tmp_path: Path, name: str, *outputs: SimpleNamespace, **counters: Any) -> Run:
    log = PayloadLog(hold=1)
    for step in outputs:
        log.add(step)
    log.save(tmp_path / name, {"builder_us": [1.0, 2.0], "prefix_rows": 0, "counters": COUNTERS | counters})
    return Run.load(tmp_path / name)


def payload(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((2, 3), value), "codes.audio": torch.arange(4)}


def test_equal_runs(tmp_path: Path) -> None:
    steps = [output(payload(), None), output(payload(2.0), payload(float("nan")))]
    stock, packed = run_of(tmp_path, "a", *steps), run_of(tmp_path, "b", *steps)
    comparison = compare(stock, packed)
    assert comparison.differences == []
    assert (comparison.tensors, comparison.nbytes) == (6, 3 * (24 + 32))
    assert (stock.requests, stock.payloads, stock.payload_bytes) == (2, 3, comparison.nbytes)
    report = engine_report(stock, packed, comparison)
    assert "identical: all tokens, and 6 payload tensors of 168 B, byte for byte" in report


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (output(payload(-0.0)), "request r0, hidden: 6 of 24 bytes differ, the first at 3"),
        (output({"hidden": torch.zeros(2, 3)}), "request r0, codes.audio: only stock has it"),
        (output({**payload(0.0), "more": torch.ones(1)}), "request r0, more: only packed has it"),
        (output({**payload(0.0), "hidden": torch.zeros(3, 2)}), "float32[2, 3] against float32[3, 2]"),
        (output(None), "request r0, no payload: only packed has it"),
        (output(payload(0.0), sampled_token_ids=[[8]]), "tokens: stock [[7]], packed [[8]]"),
        (output(payload(0.0), multimodal_outputs=[payload(0.0)]), "one_channel: stock True, packed False"),
        (output(payload(0.0), inter_stage_outputs=None, multimodal_outputs=None), "no list: only packed has it"),
    ],
)
def test_differences_are_found_and_named(tmp_path: Path, other: SimpleNamespace, message: str) -> None:
    stock, packed = run_of(tmp_path, "a", output(payload(0.0))), run_of(tmp_path, "b", other)
    comparison = compare(stock, packed)
    assert any(text.startswith("step 0, ") and text.endswith(message) for text in comparison.differences)
    assert "DIFFERENT" in engine_report(stock, packed, comparison)


def test_a_missing_step_is_a_difference(tmp_path: Path) -> None:
    stock, packed = (
        run_of(tmp_path, "a", output(payload()), output(payload())),
        run_of(tmp_path, "b", output(payload())),
    )
    assert compare(stock, packed).differences == ["stock took 2 steps, packed 1"]


def test_a_run_that_was_not_packed_proves_nothing(tmp_path: Path) -> None:
    stock = run_of(tmp_path, "a", output(payload()))
    packed = run_of(tmp_path, "b", output(payload()), stock={"some failure": 1})
    assert "some failure" in compare(stock, packed).differences[0]


def test_payloads_are_read_late(tmp_path: Path) -> None:
    """A payload whose memory is overwritten while its consumer may still hold it."""
    log = PayloadLog(hold=2)
    steps = [output(payload(value)) for value in (1.0, 2.0, 3.0)]
    for step in steps:
        log.add(step)
        steps[0].inter_stage_outputs[0]["hidden"].fill_(9.0)
    log.save(tmp_path / "log", {})
    assert Run.load(tmp_path / "log").tensors["0/inter_stage_outputs/0/hidden"].unique().tolist() == [9.0]


def test_table_and_sizes() -> None:
    assert table([("", "a"), ("label", "100")]) == "           a\n  label  100"
    assert [human_bytes(size) for size in (0, 168, 2048, 3 << 20)] == ["0 B", "168 B", "2.0 KiB", "3.00 MiB"]


def test_without_an_engine_the_traces_are_packed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "missing_engine", lambda: "vllm-omni is not installed here")
    assert demo.main([]) == 0
    shown = capsys.readouterr().out
    assert "The real engine: skipped, vllm-omni is not installed here\n" in shown
    assert shown.count("identical") == 4


def test_a_run_that_fails_is_one_line_that_names_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(parts, "missing_engine", lambda: None)
    monkeypatch.setattr(runs, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit('the reason')"])
    assert demo.main(["--only", "engine"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("the stock run failed: ended with status 1; its log: ")
    assert "\n" not in error
    assert Path(error.rpartition(" ")[2]).read_text() == "the reason\n"


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(runs, "_command", lambda *_: ["sleep", "60"])
    with pytest.raises(runs.RunFailed, match=r"the stock run failed: no result after 0\.2 s"):
        runs.run_both(tmp_path, [])


def test_what_a_run_reports_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = json.dumps({"error": "ValueError: a\n long story"})
    monkeypatch.setattr(runs, "_command", lambda *_: ["echo", message])
    with pytest.raises(runs.RunFailed, match=r"the stock run failed: ValueError: a long story; its log: "):
        runs.run_both(tmp_path, [])


@pytest.mark.parametrize(
    ("options", "whole_path"),
    [
        pytest.param([], False, id="as make demo runs it"),
        pytest.param(["--only", "engine", "--prefix-caching", "--chunked-prefill"], True, id="prefix caching, chunks"),
    ],
)
def test_the_real_engine(
    options: list[str],
    whole_path: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Half a minute: two engines start, serve with the stock and with the packed runner, every byte is compared."""
    reason = runs.missing_engine()
    if reason:
        pytest.skip(reason)
    environment = {**runs._environment(), "OMNI_RUNNER_TRACE": str(tmp_path), "OMNI_RUNNER_TRACE_STEPS": "20"}
    monkeypatch.setattr(runs, "_environment", lambda: environment)
    status = demo.main(options)
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    lines = {line.rsplit(maxsplit=2)[0].strip(): line.split()[-1] for line in shown.out.splitlines() if line.strip()}
    assert int(lines["packs"]) > 50
    assert lines["packs"] == lines["steps packed whole" if whole_path else "steps packed by column"]
    assert lines["steps packed by column" if whole_path else "steps packed whole"] == "0"
    assert int(lines["steps without consumer"]) > 0
    assert ("rows from the prefix cache" in lines) == whole_path
    assert "byte for byte" in shown.out
    assert shown.err == ""
    (recorded,) = tmp_path.glob("thinker-*.json")
    trace = load_trace(recorded)
    assert len(trace.steps) == 20
    assert replay(trace, spanpack.Packer("cpu"), timed_passes=0).identical
