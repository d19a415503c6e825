"""bench/builder.py: it runs, checks what it compares, and writes its results in their form. No times."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni", reason="needs the engine")

from bench import builder


def test_results_have_their_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert builder.main(["--calls", "10", "--requests", "2", "--out", str(tmp_path), "--commit", "abc"]) == 0
    document = json.loads((tmp_path / "cpu" / "builder.json").read_text(encoding="utf-8"))
    assert (document["bench"], document["commit"]) == ("builder", "abc")
    assert {"cpu", "date", "versions", "rows"} <= set(document)
    assert {"torch", "vllm-omni"} <= set(document["versions"])
    measured = [(row["workload"], row["beside"], row["provider"]) for row in document["rows"]]
    workloads, loads, providers = ("thinker", "talker", "tts"), ("alone", "beside a sender"), ("stock", "ours")
    assert measured == [(name, beside, who) for name in workloads for beside in loads for who in providers]
    assert all(
        row["cpu_us"]["p50"] > 0 and row["wall_us"]["p50"] > 0 and row["calls"] >= 10 for row in document["rows"]
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"builder ratio p50: thinker [\d.]+ talker [\d.]+ tts [\d.]+", last)


def test_a_stopped_run_says_that_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_measure", interrupted)
    assert builder.main(["--out", str(tmp_path), "--commit", "abc"]) == 130
    assert capsys.readouterr().err.startswith("stopped; nothing is written")


@pytest.mark.parametrize(
    "wrong", [["--calls", "0"], ["--requests", "-1"], ["--out", __file__]], ids=lambda wrong: wrong[0]
)
def test_what_cannot_be_done_is_refused_in_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        builder.main(wrong)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_differing_outputs_are_not_timed() -> None:
    class Output:
        inter_stage_outputs = None
        multimodal_outputs = None

    other = Output()
    other.inter_stage_outputs = [None]  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="inter_stage_outputs"):
        builder._check(Output(), other)
