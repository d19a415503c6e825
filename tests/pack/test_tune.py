"""The tuner: what it picks, what it rejects, and what is left after Ctrl-C. A fake stands for the GPU."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import spanpack
from spanpack import tune
from spanpack._size_classes import SIZE_CLASSES, LaunchConfig, size_class
from spanpack._tune_report import Machine, chart, table
from spanpack._tune_results import COPY_ENGINE, CallTimes, Findings, Transport
from spanpack._tune_search import Search, TuneError, candidates
from spanpack._tune_workloads import Workload, awkward_workload, default_workloads, uniform_workload
from spanpack._tuned_file import read_tuned
from spanpack.plan import Route
from spanpack.tiles import make_tiles
from spanpack.tune import Job, ProgressBar, most_frequent

MACHINE = Machine("NVIDIA H200", "3.6.0", "2.11.0", "2026-11-29")
SIZES = [uniform_workload(nbytes) for nbytes in (1 << 12, 1 << 16, 1 << 20)]
CPU = torch.device("cpu")


@dataclass
class FakeMeasurer:
    """A GPU on which the time of a pack is whatever a test says."""

    us: Callable[[str, LaunchConfig, bool], float] = lambda name, config, busy: 10.0
    landed_us: Callable[[int, Transport, bool], float] = lambda nbytes, transport, busy: 50.0
    stream_us: Callable[[Transport], float] = lambda transport: 2.0
    wrong: set[tuple[str, LaunchConfig]] = field(default_factory=set)
    wrong_transports: set[Transport] = field(default_factory=set)
    broken: set[LaunchConfig] = field(default_factory=set)
    too_large: set[str] = field(default_factory=set)
    interrupt_after: int = 10**9
    measured: list[tuple[str, LaunchConfig]] = field(default_factory=list)

    def prepare(self, workload: Workload) -> FakeBench:
        if workload.name in self.too_large:
            raise torch.cuda.OutOfMemoryError
        return FakeBench(self, workload)


@dataclass
class FakeBench:
    owner: FakeMeasurer
    workload: Workload

    def is_correct(self, config: LaunchConfig, transport: Transport = COPY_ENGINE) -> bool:
        if config in self.owner.broken:
            raise RuntimeError("too many registers\nmore of it")
        return (self.workload.name, config) not in self.owner.wrong and transport not in self.owner.wrong_transports

    def stream_us(self, config: LaunchConfig, transport: Transport = COPY_ENGINE, *, busy: bool) -> float:
        if len(self.owner.measured) >= self.owner.interrupt_after:
            raise KeyboardInterrupt
        self.owner.measured.append((self.workload.name, config))
        if transport != COPY_ENGINE or self.workload.name.startswith("16 leaves"):
            return self.owner.stream_us(transport)
        return self.owner.us(self.workload.name, config, busy)

    def call_us(self, config: LaunchConfig, transport: Transport, *, busy: bool) -> CallTimes:
        host_us = 6.0 if transport.direct or transport.addresses == "mapped" else 10.0
        return CallTimes(host_us, self.owner.landed_us(self.workload.device_bytes, transport, busy))


def search(measurer: FakeMeasurer, workloads: list[Workload] | None = None, sizes: list[Workload] = SIZES) -> Findings:
    chosen = default_workloads(quick=True) if workloads is None else workloads
    return Search(measurer, chosen, sizes, awkward_workload(), candidates(), lambda *_: None).run()


def faster(config: LaunchConfig, us: float, name: str = "") -> Callable[[str, LaunchConfig, bool], float]:
    return lambda workload, tried, busy: us if tried == config and name in workload else 10.0


def test_where_nothing_is_faster_the_defaults_stay() -> None:
    findings = search(FakeMeasurer())
    assert findings.complete
    assert list(findings.classes) == [group.name for group in SIZE_CLASSES]
    assert all(result.config == result.group.default for result in findings.classes.values())
    assert all(result.gain == 0 for result in findings.classes.values())
    assert "Tuning gains nothing" in table(findings)


def test_the_fastest_wins_in_its_class_only() -> None:
    best = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=faster(best, 8.0, "thinker_decode_64")))
    assert {name for name, result in findings.classes.items() if result.config == best} == {"small"}
    assert findings.classes["small"].gain == pytest.approx(0.2)
    assert "up to 20.0%, in 1 of 6" in table(findings)


def test_less_than_three_percent_is_noise() -> None:
    findings = search(FakeMeasurer(us=faster(LaunchConfig(16384, 8), 9.8)))
    assert all(result.config == result.group.default for result in findings.classes.values())


def test_of_equally_fast_ones_the_longest_tile_wins() -> None:
    fast = {LaunchConfig(1024, 1): 8.0, LaunchConfig(8192, 4): 8.05, LaunchConfig(16384, 8): 8.4}
    findings = search(FakeMeasurer(us=lambda _, config, busy: fast.get(config, 10.0)))
    assert findings.classes["small"].config == LaunchConfig(8192, 4)


def test_the_busy_gpu_counts_as_much_as_the_idle_one() -> None:
    quiet = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=lambda _, config, busy: (20.0 if busy else 8.0) if config == quiet else 10.0))
    assert findings.classes["small"].config == findings.classes["small"].group.default


def test_luck_in_the_first_round_does_not_decide() -> None:
    lucky = LaunchConfig(16384, 8)
    measurer = FakeMeasurer()
    measurer.us = lambda name, config, _: (
        5.0 if config == lucky and measurer.measured.count((name, config)) <= 2 else 10.0
    )
    assert search(measurer).classes["small"].config != lucky


def test_who_is_not_faster_every_time_is_not_faster() -> None:
    shaky = LaunchConfig(16384, 8)
    measurer = FakeMeasurer()

    def us(name: str, config: LaunchConfig, busy: bool) -> float:
        if config != shaky:
            return 10.0
        return 10.5 if measurer.measured.count((name, config)) in (7, 8) else 5.0  # the third round of five

    measurer.us = us
    assert search(measurer).classes["small"].config != shaky


@pytest.mark.parametrize("name", ["awkward", "thinker_decode_64"])
def test_wrong_bytes_are_rejected_however_fast(name: str) -> None:
    bad = LaunchConfig(16384, 8)
    findings = search(FakeMeasurer(us=faster(bad, 1.0), wrong={(name, bad)}))
    assert findings.rejected == {bad: "wrong bytes"}
    assert bad not in {result.config for result in findings.classes.values()}  # nor where it had won before
    assert "16384/8 rejected: wrong bytes" in table(findings)


def test_what_does_not_compile_is_rejected() -> None:
    bad = LaunchConfig(16384, 8)
    measurer = FakeMeasurer(us=faster(bad, 1.0), broken={bad})
    assert search(measurer).rejected == {bad: "RuntimeError: too many registers"}
    assert bad not in {config for _, config in measurer.measured}


def test_a_default_that_does_not_work_ends_the_tuning() -> None:
    default = SIZE_CLASSES[-1].default
    with pytest.raises(TuneError, match=f"{default} does not work here: wrong bytes"):
        search(FakeMeasurer(wrong={("awkward", default)}))


def test_a_default_that_fails_on_one_workload_loses_its_class_only() -> None:
    group = next(group for group in SIZE_CLASSES if group.name == "large")
    findings = search(FakeMeasurer(wrong={("thinker_prefill_8k", group.default)}))
    assert "large" not in findings.classes
    assert findings.skipped == {"large": "the default: wrong bytes"}
    assert len(findings.classes) == 5


def test_what_does_not_fit_in_the_memory_is_skipped() -> None:
    findings = search(FakeMeasurer(too_large={"thinker_prefill_8k", SIZES[0].name}))
    assert set(findings.classes) == {group.name for group in SIZE_CLASSES} - {"large"}
    assert findings.skipped["thinker_prefill_8k"] == "not enough memory"
    assert findings.complete


def sooner_up_to(limit: int) -> Callable[[int, Transport, bool], float]:
    return lambda nbytes, transport, busy: 30.0 if transport.direct and nbytes <= limit else 50.0


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1 << 12, 1 << 12), (1 << 16, 1 << 16), (1 << 30, 1 << 20)])
def test_direct_stores_up_to_where_they_land_sooner(limit: int, expected: int) -> None:
    findings = search(FakeMeasurer(landed_us=sooner_up_to(limit)))
    assert findings.threshold("direct_store") == expected
    assert findings.threshold("mapped_addresses") == 0


def test_mapped_addresses_have_a_threshold_of_their_own() -> None:
    findings = search(
        FakeMeasurer(landed_us=lambda nbytes, transport, busy: 30.0 if transport.addresses == "mapped" else 50.0)
    )
    assert (findings.threshold("direct_store"), findings.threshold("mapped_addresses")) == (0, 1 << 20)


def test_the_producing_stream_may_not_lose_more_than_the_host_saves() -> None:
    saved_us = 4.0
    for extra_us, expected in ((saved_us - 0.1, 1 << 20), (saved_us + 0.1, 0)):
        measurer = FakeMeasurer(
            landed_us=sooner_up_to(1 << 30), stream_us=lambda t, extra=extra_us: 2.0 + extra * t.direct
        )
        assert search(measurer).threshold("direct_store") == expected


def test_direct_stores_that_land_later_on_a_busy_gpu_are_out() -> None:
    findings = search(
        FakeMeasurer(landed_us=lambda _, transport, busy: (60.0 if busy else 30.0) if transport.direct else 50.0)
    )
    assert findings.threshold("direct_store") == 0


def test_a_transport_with_wrong_bytes_is_out() -> None:
    direct = Transport(direct=True)
    findings = search(FakeMeasurer(landed_us=sooner_up_to(1 << 30), wrong_transports={direct}))
    assert findings.threshold("direct_store") == 0
    assert findings.unusable == {"direct_store": "wrong bytes"}
    assert findings.complete


def test_ctrl_c_keeps_the_thresholds_so_far() -> None:
    def landed_us(nbytes: int, transport: Transport, busy: bool) -> float:
        if nbytes == SIZES[1].device_bytes:
            raise KeyboardInterrupt
        return sooner_up_to(1 << 30)(nbytes, transport, busy)

    findings = search(FakeMeasurer(landed_us=landed_us))
    assert findings.threshold("direct_store") == SIZES[0].device_bytes
    assert len(findings.classes) == len(SIZE_CLASSES)
    assert not findings.complete


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


def test_candidates_are_launchable_and_different() -> None:
    for quick in (False, True):
        configs = candidates(quick=quick)
        assert len(set(configs)) == len(configs)
        assert all(32 <= config.tile_bytes // (32 * config.num_warps) <= 256 for config in configs)


def test_the_workloads_cover_every_size_class() -> None:
    for workloads in (default_workloads(quick=True), default_workloads()):
        groups = {size_class(w.device_bytes, len(w.plan.segments)) for w in workloads}
        assert groups == set(SIZE_CLASSES)
        assert len({w.name for w in workloads}) == len(workloads)
        assert all(route is Route.KERNEL for w in workloads for route in w.plan.use.routes)


@pytest.mark.parametrize("config", [LaunchConfig(1024, 1), LaunchConfig(8192, 1)], ids=str)
def test_the_awkward_workload_meets_every_branch_of_the_kernel(config: LaunchConfig) -> None:
    workload = awkward_workload()
    leaves = workload.make_leaves(CPU)
    base = leaves[0].data_ptr()
    assert base % 16 == 0
    source, destination, row_bytes = (make_tiles(workload.plan.segments, config.tile_bytes)[:, i] for i in (1, 2, 4))
    leaf = make_tiles(workload.plan.segments, config.tile_bytes)[:, 0]
    source = source + np.array([tensor.data_ptr() - base for tensor in leaves])[leaf]
    runs = row_bytes == 0
    aligned16 = (source - destination) % 16 == 0
    aligned4 = (source % 4 == 0) & (destination % 4 == 0)
    assert (runs & aligned16).any()
    assert (runs & ~aligned16 & aligned4).any()
    assert (runs & ~aligned16 & ~aligned4).any()
    assert (~runs & ((source | destination | row_bytes) % 8 == 0)).any()
    assert (~runs & ((source | destination | row_bytes) % 8 == 4)).any()
    assert (~runs & ((source | destination | row_bytes) % 4 != 0)).any()


def test_the_awkward_workload_packs_alike_with_the_kernel() -> None:
    if not spanpack.gather.interpreted():
        pytest.skip("the kernel is compiled here; the GPU tests run it")
    workload = awkward_workload()
    leaves = workload.make_leaves(CPU)
    expected, found = (torch.full((workload.device_bytes + 64,), 0xA5, dtype=torch.uint8) for _ in range(2))
    spanpack.gather_torch(workload.plan, leaves, expected)
    spanpack.gather_triton(workload.plan, leaves, found, LaunchConfig(8192, 1))
    assert torch.equal(found, expected)


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
