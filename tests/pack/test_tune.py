"""The tuner's program: the file, the chart, progress, Ctrl-C, the command line; and measuring on a GPU."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from spanpack import tune
from spanpack._size_classes import SIZE_CLASSES, LaunchConfig
from spanpack._tune_report import chart
from spanpack._tune_results import COPY_ENGINE
from spanpack._tune_search import Search, candidates
from spanpack._tune_workloads import Workload, awkward_workload, default_workloads, uniform_workload
from spanpack._tuned_file import read_tuned
from spanpack.tiles import make_tiles
from spanpack.tune import Job, ProgressBar, most_frequent
from tests.support.fake_measurer import MACHINE, SIZES, FakeMeasurer, faster, search


def run(job: Job, measurer: FakeMeasurer) -> tuple[int, str]:
    stream = io.StringIO()
    return tune.tune(job, measurer, MACHINE, stream), stream.getvalue()


def test_the_file_and_the_chart(tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    best = LaunchConfig(16384, 8)
    status, text = run(Job(default_workloads(quick=True), out), FakeMeasurer(us=faster(best, 8.0)))
    assert status == 0
    tuned = read_tuned(out)
    assert set(tuned.classes) == {group.name for group in SIZE_CLASSES}
    assert set(tuned.classes.values()) == {best}
    document = json.loads(out.read_text())
    assert document["classes"]["small"]["gain"] == pytest.approx(0.2)
    assert {key: document[key] for key in ("gpu", "triton", "torch", "date")} == asdict(MACHINE)
    picture = ElementTree.fromstring(out.with_suffix(".svg").read_text())
    assert sum(node.text == "+20.0% alone" for node in picture.iter()) == len(SIZE_CLASSES)
    assert f"SPANPACK_TUNED={out}" in text


@pytest.mark.parametrize("after", [40, 100, 200])
def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path, after: int) -> None:
    out = tmp_path / "h200.json"
    best = LaunchConfig(16384, 8)
    measurer = FakeMeasurer(us=faster(best, 8.0), interrupt_after=after)
    status, text = run(Job(default_workloads(quick=True), out), measurer)
    assert status == 130
    tuned = read_tuned(out)
    assert 1 <= len(tuned.classes) < len(SIZE_CLASSES)
    assert next(iter(tuned.classes.values())) == best
    assert tuned.direct_store_bytes is None
    assert json.loads(out.read_text())["complete"] is False
    assert "Interrupted" in text


def test_ctrl_c_before_anything_was_measured_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    assert run(Job(default_workloads(quick=True), out), FakeMeasurer(interrupt_after=0))[0] == 130
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_by_default_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measurer = FakeMeasurer(wrong={("awkward", SIZE_CLASSES[0].default)})
    assert run(Job(default_workloads(quick=True), tmp_path / "h200.json"), measurer)[0] == 1
    assert "wrong bytes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_progress_is_redrawn_on_a_terminal_and_a_line_per_stage_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (io.StringIO(), Terminal()):
        bar = ProgressBar(stream)
        for done, text in enumerate(["small: 2048/1", "small: 4096/2", "large: 2048/1"]):
            bar.show(done, 3, text)
        bar.end()
        lines, redraws = stream.getvalue().count("\n"), stream.getvalue().count("\r[")
        assert (lines, redraws) == ((0, 3) if stream.isatty() else (2, 0))


def test_progress_never_runs_over() -> None:
    seen: list[tuple[int, int]] = []
    Search(
        FakeMeasurer(broken={LaunchConfig(16384, 8)}),
        default_workloads(),
        SIZES,
        awkward_workload(),
        candidates(),
        lambda done, total, _: seen.append((done, total)),
    ).run()
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert {total for _, total in seen} == {len(seen)}


def test_a_trace_is_tuned_for_by_its_most_frequent_steps() -> None:
    same = [Workload(str(i), default_workloads(quick=True)[0].plan, lambda _: []) for i in range(5)]
    other = default_workloads(quick=True)[-1]
    assert most_frequent([*same, other], 3) == [*same[:3], other]


def test_the_chart_shows_losses_too() -> None:
    best = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=lambda _, c, busy: (10.5 if busy else 5.0) if c == best else 10.0))
    picture = chart(MACHINE, findings)
    ElementTree.fromstring(picture)
    assert "-5.0% busy" in picture
    assert "+50.0% alone" in picture


class TestCommandLine:
    """`python -m spanpack.tune`."""

    def test_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert tune.main(["--quick"]) == 2
        assert "needs a GPU" in capsys.readouterr().err

    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Fake(FakeMeasurer):
            def close(self) -> None:
                pass

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: MACHINE.gpu)
        monkeypatch.setattr(tune, "triton_available", lambda: True)
        monkeypatch.setattr(tune, "CudaMeasurer", lambda device: Fake())

    @pytest.mark.usefixtures("gpu")
    def test_the_file_is_named_after_the_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert tune.main(["--quick"]) == 0
        assert {path.name for path in tmp_path.iterdir()} == {"nvidia_h200.json", "nvidia_h200.svg"}

    @pytest.mark.usefixtures("gpu")
    def test_for_a_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--out", str(tmp_path / "own.json"), "--trace", "steps"]
        assert tune.main(arguments) == 2
        assert "omni-runner tune --trace steps" in capsys.readouterr().err
        read: list[tuple[str, torch.device]] = []

        def read_trace(path: str, device: torch.device) -> list[Workload]:
            read.append((path, device))
            return [uniform_workload(1 << 20)]

        assert tune.main(arguments, read_trace=read_trace) == 0
        assert read == [("steps", torch.device("cuda", 0))]
        assert set(read_tuned(tmp_path / "own.json").classes) == {"small"}

    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--device", "1"], "no GPU 1"),
            (["--out", "tuned.txt"], "ends in .json"),
            (["--out", "folder.json"], "can't be written"),
            (["--trace", "absent"], "can't read the trace absent"),
        ],
    )
    def test_wrong_usage(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        def read_trace(path: str, device: torch.device) -> list[Workload]:
            raise ValueError("no such file")

        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder.json").mkdir()
        assert tune.main(arguments, read_trace=read_trace) == 2
        assert message in capsys.readouterr().err


def test_measuring_on_the_gpu(cuda_device: torch.device) -> None:
    from spanpack._tune_measure import CudaMeasurer
    from spanpack._tune_results import DIRECT_STORE, MAPPED, UPLOAD

    measurer = CudaMeasurer(cuda_device)
    config = LaunchConfig(4096, 2)
    for workload in (awkward_workload(), uniform_workload(1 << 16)):
        bench = measurer.prepare(workload)
        for transport in (COPY_ENGINE, DIRECT_STORE, UPLOAD, MAPPED):
            assert bench.is_correct(config, transport)
            for busy in (False, True):
                assert 0 < bench.stream_us(config, transport, busy=busy) < 10_000
                calls = bench.call_us(config, transport, busy=busy)
                assert 0 < calls.host_us <= calls.landed_us < 100_000
    measurer.close()


def test_wrong_bytes_are_seen_on_the_gpu(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanpack._tune_measure import CudaMeasurer

    measurer = CudaMeasurer(cuda_device)
    workload = uniform_workload(1 << 16)
    bench = measurer.prepare(workload)
    good = LaunchConfig(4096, 2)
    monkeypatch.setattr(
        "spanpack._tune_measure.make_tiles", lambda segments, tile_bytes: make_tiles(segments, tile_bytes)[:-1]
    )
    assert not bench.is_correct(good)  # the last tile is missing
    measurer.close()
