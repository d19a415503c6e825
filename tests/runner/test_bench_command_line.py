"""The command lines of bench/: what can't be done is refused in one line, before anything is measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="steps are made in the form of traces")
pytest.importorskip("bench.snapshot", reason="the benchmarks are in a checkout only")

import torch

from bench import snapshot, snapshot_report
from bench._snapshot import results
from bench.engine import plot as plot_module
from bench.engine import report as report_module
from bench.engine import run as run_module

Main = Callable[[Sequence[str]], int]
Refusal = Callable[..., str]
ON_CPU = ["--device", "cpu", "--commit", "abc"]
QUICK = [*ON_CPU, "--calls", "1", "--seconds", "0.001", "--providers", "torch_cat"]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The one line with which a program refuses its arguments."""

    def refused(main: Main, *arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        assert caught.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err.strip()

    return refused


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def written(file: Path, content: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


class TestSnapshot:
    @pytest.fixture(autouse=True)
    def _nothing_is_measured(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if "refusal" in request.fixturenames:
            monkeypatch.setattr(snapshot, "open_machine", lambda device: pytest.fail(f"opened {device}"))

    @pytest.mark.usefixtures("no_gpu")
    @pytest.mark.parametrize("device", [[], ["--device", "cuda"], ["--device", "cuda:1"]], ids=" ".join)
    def test_without_a_gpu(self, device: list[str], refusal: Refusal, tmp_path: Path) -> None:
        line = refusal(snapshot.main, *device, "--out", tmp_path / "out")
        assert line.endswith("needs a CUDA GPU, torch sees none; `--device cpu` tries the program")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("device", ["foo", "cuda:", "cuda:x", "mps", ""])
    def test_other_devices(self, device: str, refusal: Refusal) -> None:
        assert f"given {device!r}, expected cuda, cuda:N or cpu" in refusal(snapshot.main, "--device", device)

    def test_a_gpu_too_many(self, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert "given 'cuda:2', the last GPU that torch sees is cuda:1" in refusal(snapshot.main, "--device", "cuda:2")

    def test_traces(self, refusal: Refusal, tmp_path: Path) -> None:
        for path in ("nope", written(tmp_path / "trace.json", {"format": 1, "steps": []})):
            line = refusal(snapshot.main, *ON_CPU, "--trace", path)
            assert "--trace: " in line
            assert Path(path).stem in line

    def test_out(self, refusal: Refusal, tmp_path: Path) -> None:
        file = written(tmp_path / "file", "")
        assert f"cannot write to {file / 'cpu'}" in refusal(snapshot.main, *ON_CPU, "--out", file)
        taken = written(tmp_path / "cpu", "")
        assert f"{taken} is a file, expected a folder" in refusal(snapshot.main, *ON_CPU, "--out", tmp_path)
        folder = tmp_path / "other" / "cpu" / "snapshot.json"
        folder.mkdir(parents=True)
        assert "is a folder" in refusal(snapshot.main, *ON_CPU, "--out", tmp_path / "other")

    def test_a_wheel_that_is_missing(self, refusal: Refusal, tmp_path: Path) -> None:
        assert "no.whl" in refusal(snapshot.main, *ON_CPU, "--out", tmp_path, "--stock-wheel", "no.whl")

    @pytest.mark.parametrize(
        "wrong",
        [
            *("--calls 0", "--calls -1", "--calls 1.5", "--total 0", "--total -1", "--total soon"),
            *("--seconds 0", "--seconds -5", "--seconds nan", "--seconds inf"),
        ],
    )
    def test_amounts(self, wrong: str, refusal: Refusal) -> None:
        option, value = wrong.split()
        line = refusal(snapshot.main, *ON_CPU, option, value)
        assert f"{option}: given {value!r}, expected a " in line
        assert line.endswith(" number greater than 0")

    def test_nothing_to_measure(self, refusal: Refusal) -> None:
        assert "nothing to measure" in refusal(snapshot.main, *ON_CPU, "--scenarios", ",")

    def test_scenarios_without_time_are_skipped_and_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make = snapshot.make_scenario

        def slowly(name: str, device: torch.device) -> Any:
            monkeypatch.setattr(snapshot, "_STARTED", time.perf_counter() - 100)
            return make(name, device)

        monkeypatch.setattr(snapshot, "make_scenario", slowly)
        monkeypatch.setattr(snapshot, "_STARTED", time.perf_counter())
        names = ["--scenarios", "few_leaves,talker_decode_64", "--total", "100"]
        assert snapshot.main([*QUICK, *names, "--out", str(tmp_path)]) == 0
        document = json.loads((tmp_path / "cpu" / "snapshot.json").read_text())
        assert list(document["scenarios"]) == ["few_leaves"]
        assert capsys.readouterr().out.endswith("skipped, no time was left of --total 100: talker_decode_64\n")

    def test_a_run_without_any_time_measures_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "_STARTED", time.perf_counter() - 10)
        status = snapshot.main([*QUICK, "--scenarios", "few_leaves", "--total", "1", "--out", str(tmp_path)])
        assert status == 1
        assert capsys.readouterr().out.endswith("skipped, no time was left of --total 1: few_leaves\n")
        assert not (tmp_path / "cpu" / "snapshot.json").exists()

    def test_the_cpu_has_no_targets(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*QUICK, "--scenarios", "few_leaves", "--out", str(tmp_path)]
        assert snapshot.main(arguments) == 0
        assert snapshot_report.main([str(tmp_path / "cpu" / "snapshot.json")]) == 0
        out = capsys.readouterr().out
        assert out.count("no targets: this was measured on the CPU") == 2
        assert ">= " not in out

    @pytest.mark.parametrize("finished", [0, 1])
    def test_a_stopped_run_says_what_it_leaves(
        self, finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def until_stopped(*_: object) -> list[Any]:
            if file.exists() == bool(finished):
                raise KeyboardInterrupt
            return []

        file = tmp_path / "cpu" / "snapshot.json"
        monkeypatch.setattr(snapshot, "_measure", until_stopped)
        arguments = [*QUICK, "--scenarios", "few_leaves,talker_decode_64", "--out", str(tmp_path)]
        assert snapshot.main(arguments) == 130
        left = f"1 of 2 scenarios are in {file}" if finished else "no scenario is measured yet, nothing is written"
        assert capsys.readouterr().err == f"stopped; {left}\n"
        assert file.exists() == bool(finished)


def snapshot_result(*scenarios: str, gpu: str = "G") -> dict[str, Any]:
    row = {"provider": "ours", "payload_bytes": 8}
    row |= dict.fromkeys(("compute_stream_us", "d2h_bytes", "pinned_allocations", "compilations"))
    return {
        "bench": "snapshot",
        "gpu": gpu,
        "date": "2026-01-01",
        "commit": "c",
        "versions": {},
        "scenarios": {name: {"leaves": 1} for name in scenarios},
        "rows": [{"scenario": name, **row} for name in scenarios],
    }


NOT_RESULTS = {
    "missing": (None, "cannot read"),
    "half": ("{", "is not JSON"),
    "empty": ({}, "is None"),
    "list": ([], "is None"),
    "incomplete": ({"bench": "BENCH"}, "lacks gpu"),
    "another": ({"bench": "builder"}, "is 'builder'"),
}


class TestSnapshotReport:
    @pytest.mark.parametrize("kind", NOT_RESULTS)
    def test_what_are_no_results(self, kind: str, refusal: Refusal, tmp_path: Path) -> None:
        content, message = NOT_RESULTS[kind]
        file = tmp_path / "snapshot.json"
        if content is not None:
            written(file, {"bench": "snapshot"} if kind == "incomplete" else content)
        line = refusal(snapshot_report.main, file)
        assert message in line
        assert str(file) in line

    def test_a_folder(self, refusal: Refusal, tmp_path: Path) -> None:
        assert f"cannot read {tmp_path}: Is a directory" in refusal(snapshot_report.main, tmp_path)

    def test_results_that_do_not_go_together(self, refusal: Refusal, tmp_path: Path) -> None:
        merged = ["--merged", tmp_path / "merged.json"]
        one = written(tmp_path / "one.json", snapshot_result("a", "b"))
        again = written(tmp_path / "again.json", snapshot_result("b", "c"))
        other = written(tmp_path / "other.json", snapshot_result("d", gpu="H"))
        assert "expected each file once" in refusal(snapshot_report.main, one, one, *merged)
        assert "more than one file has b:" in refusal(snapshot_report.main, one, again, *merged)
        assert "gpu differs: G and H" in refusal(snapshot_report.main, one, other, *merged)
        assert not (tmp_path / "merged.json").exists()

    def test_parts_are_merged(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        parts = [written(tmp_path / f"{name}.json", snapshot_result(name)) for name in "ab"]
        merged = tmp_path / "new" / "merged.json"
        assert snapshot_report.main([*map(str, parts), "--merged", str(merged)]) == 0
        assert list(json.loads(merged.read_text())["scenarios"]) == ["a", "b"]
        assert "not measured" in capsys.readouterr().out

    def test_charts(self, refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = written(tmp_path / "snapshot.json", snapshot_result("a"))
        assert "ends in .svg or .png" in refusal(snapshot_report.main, file, "--chart", tmp_path / "x.jpeg")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        line = refusal(snapshot_report.main, file, "--chart", tmp_path / "x.svg")
        assert line.endswith("needs matplotlib: pip install -r requirements/bench.txt")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        assert "cannot write" in refusal(snapshot_report.main, file, "--chart", file / "below" / "x.svg")


ENGINE_RESULT: dict[str, Any] = {
    "bench": "engine",
    "gpu": "G",
    "commit": "c",
    "versions": {},
    **{name: [] for name in ("rows", "consumed", "verify", "backlog", "errors", "skipped")},
}


class TestEngineReports:
    @pytest.mark.parametrize("main", [report_module.main, plot_module.main], ids=["report", "plot"])
    @pytest.mark.parametrize("kind", NOT_RESULTS)
    def test_what_are_no_results(self, kind: str, main: Main, refusal: Refusal, tmp_path: Path) -> None:
        into = ["--into", tmp_path / "into"]
        content, message = NOT_RESULTS[kind]
        for name, bench in (("engine.json", "engine"), ("gap.json", "engine_gap")):
            folder = tmp_path / name
            written(folder / "engine.json", ENGINE_RESULT)
            file = folder / name
            if content is None:
                file.unlink(missing_ok=True)
                if name == "gap.json":
                    continue  # may be missing
            else:
                written(file, {"bench": bench} if kind == "incomplete" else content)
            line = refusal(main, folder, *into)
            assert message in line
            assert str(file) in line
        assert not (tmp_path / "into").exists()

    @pytest.mark.parametrize("main", [report_module.main, plot_module.main], ids=["report", "plot"])
    def test_into_a_file(self, main: Main, refusal: Refusal, tmp_path: Path) -> None:
        written(tmp_path / "engine.json", ENGINE_RESULT)
        file = written(tmp_path / "file", "")
        assert f"{file} is a file, expected a folder" in refusal(main, tmp_path, "--into", file)

    def test_without_timelines_the_tables_are_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        written(tmp_path / "engine.json", ENGINE_RESULT)
        assert report_module.main([str(tmp_path), "--into", str(tmp_path / "into")]) == 0
        assert "Hashed passes compared with stock's: 0" in capsys.readouterr().out
        assert report_module.main([str(tmp_path / "into")]) == 0
        assert json.loads((tmp_path / "into" / "gap.json").read_text())["stages"] == {}


class TestEngineRun:
    @pytest.fixture(autouse=True)
    def _nothing_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))

    @pytest.mark.usefixtures("no_gpu")
    def test_without_a_gpu(self, refusal: Refusal, tmp_path: Path) -> None:
        line = refusal(run_module.main, "--out", tmp_path / "out")
        assert line.endswith("needs a CUDA GPU, torch sees none")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("wrong", ["--seconds nan", "--seconds -5", "--rounds 0", "--requests 65"])
    def test_amounts(self, wrong: str, refusal: Refusal, tmp_path: Path) -> None:
        assert "given" in refusal(run_module.main, "--out", tmp_path, *wrong.split())

    def test_folders(self, refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        file = written(tmp_path / "file", "")
        assert f"{file} is a file" in refusal(run_module.main, "--out", file)
        assert f"given {tmp_path}" in refusal(run_module.main, "--out", tmp_path, "--engine", tmp_path)


def test_results_of_a_gpu_have_targets() -> None:
    assert ">= 15 x" in results.report(snapshot_result("a"))
