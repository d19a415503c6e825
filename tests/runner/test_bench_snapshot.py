"""bench/snapshot.py: its scenarios, its providers where there is no GPU, the form of its results. No times."""

from __future__ import annotations

import json
import re
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="steps are made in the form of traces")
pytest.importorskip("bench.snapshot", reason="the benchmarks are in a checkout only")

import torch

from bench import snapshot
from bench._snapshot import measure, results
from bench._snapshot.baselines import ForeachCopy, TorchCat
from bench._snapshot.check import WrongBytes, check
from bench._snapshot.engine_source import EngineSource
from bench._snapshot.machine import CompileCounter, CpuMachine
from bench._snapshot.ours import Ours, OursStandalone
from bench._snapshot.provider import Provider, StepInput, Unavailable, Work
from bench._snapshot.scenarios import SCENARIO_NAMES, Scenario, make_scenario, tensors_of, tree_tensors
from bench._snapshot.stock import StockV1, StockV2

CPU = torch.device("cpu")
SMALL = [name for name in SCENARIO_NAMES if name not in ("thinker_prefill_8k", "thinker_prefill_32k", "thinker_subset")]
BASELINES = (TorchCat, ForeachCopy)
PERCENTILES = {"p50", "p90", "p999"}


def engine_source() -> EngineSource:
    try:
        source = EngineSource.installed()
    except Unavailable as reason:
        pytest.skip(str(reason))
    if not source.version.startswith("0.30"):
        pytest.skip(f"vllm-omni {source.version}")
    return source


@pytest.mark.parametrize("name", SMALL)
def test_scenarios_say_what_they_hold(name: str) -> None:
    scenario = make_scenario(name, CPU)
    about = scenario.about()
    assert about["leaves"] == len(tensors_of(scenario.steps[0]))
    assert 0 < scenario.payload_bytes == int(scenario.payload_bytes)
    assert about["tokens"] == sum(scenario.steps[0].num_scheduled_tokens)


def test_figures_of_the_thinker() -> None:
    scenario = make_scenario("thinker_decode_64", CPU)
    assert scenario.payload_bytes == 64 * 6 * 2048 * 2
    assert scenario.about()["leaves"] == 6
    padded = make_scenario("thinker_padded", CPU)
    assert padded.payload_bytes == 48 * 6 * 2048 * 2
    assert tensors_of(padded.steps[0])[0].shape == (64, 2048)


def test_no_two_steps_of_the_changing_thinker_are_alike() -> None:
    scenario = make_scenario("thinker_changing", CPU)
    assert len({step.num_scheduled_tokens for step in scenario.steps}) == len(scenario.steps) > 15 * 256
    assert sum(scenario.steps[0].num_scheduled_tokens) == max(sum(step.num_scheduled_tokens) for step in scenario.steps)
    assert len(scenario.distinct_steps) == 8
    storages = {leaf.untyped_storage().data_ptr() for step in scenario.steps for leaf in tensors_of(step)}
    assert len(storages) == 4  # hidden rows, two layers, and what the embeddings are views of
    assert tensors_of(scenario.steps[1])[0].shape == (sum(scenario.steps[1].num_scheduled_tokens), 2048)


@pytest.mark.parametrize("kind", [TorchCat, ForeachCopy], ids=lambda kind: kind.name)
def test_what_prepares_for_one_shape_cannot_change(kind: type[Provider]) -> None:
    with pytest.raises(Unavailable, match="different shapes"):
        kind(CpuMachine(), make_scenario("thinker_changing", CPU))


def test_every_step_has_objects_of_its_own() -> None:
    scenario = make_scenario("tts_decode_64", CPU)
    first, again, second = scenario.step(0), scenario.step(len(scenario.steps)), scenario.step(1)
    assert first.multimodal_outputs is not again.multimodal_outputs
    for left, right, other in zip(*map(tensors_of, (first, again, second)), strict=True):
        assert left is not right
        assert left.data_ptr() == right.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    "name", ["thinker_decode_8", "thinker_padded", "talker_decode_64", "tts_decode_64", "few_leaves"]
)
@pytest.mark.parametrize("kind", [Ours, OursStandalone, *BASELINES], ids=lambda kind: kind.name)
def test_providers_deliver_the_reference(kind: type[Provider], name: str) -> None:
    scenario, machine = make_scenario(name, CPU), CpuMachine()
    provider = kind(machine, scenario)
    try:
        checked = check(provider, machine, scenario)
    finally:
        provider.close()
    assert checked.d2h_bytes > 0
    if kind not in BASELINES:
        assert 0 <= checked.d2h_bytes - scenario.payload_bytes < 16 * len(tensors_of(scenario.steps[0]))


@pytest.mark.parametrize("name", ["thinker_decode_8", "thinker_padded", "talker_decode_64", "tts_decode_64"])
@pytest.mark.parametrize("kind", [StockV1, StockV2], ids=lambda kind: kind.name)
def test_stock_providers_deliver_the_reference(kind: type[StockV1 | StockV2], name: str) -> None:
    scenario, machine = make_scenario(name, CPU), CpuMachine()
    provider = kind(machine, scenario, engine_source())
    try:
        checked = check(provider, machine, scenario)
    finally:
        provider.close()
    assert checked.d2h_bytes == sum(leaf.nbytes for leaf in tensors_of(scenario.steps[0]))


class _Late(TorchCat):
    """Reads its sources only when it is asked for the bytes."""

    def take(self, step: StepInput) -> object:
        self._step = step
        return super().take(step)

    def leaf_bytes(self, taken: object) -> list[torch.Tensor]:
        return [leaf.reshape(-1).view(torch.uint8) for leaf in tensors_of(self._step.trace)]


def test_a_provider_that_reads_too_late_is_found() -> None:
    scenario, machine = make_scenario("talker_decode_64", CPU), CpuMachine()
    with pytest.raises(WrongBytes, match="talker_decode_64"):
        check(_Late(machine, scenario), machine, scenario)


def test_results_have_the_agreed_form(tmp_path: Path) -> None:
    status = snapshot.main(
        "--device cpu --calls 4 --seconds 0.1 --scenarios talker_decode_64,thinker_decode_1 "
        f"--providers ours,torch_cat,one_copy,device_copy --commit abc --out {tmp_path}".split()
    )
    document = json.loads((tmp_path / "cpu" / "snapshot.json").read_text())
    assert status == 0
    assert {"bench", "gpu", "date", "commit", "versions", "rows"} <= document.keys()
    assert (document["bench"], document["commit"]) == ("snapshot", "abc")
    rows = {(row["scenario"], row["provider"]): row for row in document["rows"]}
    assert len(rows) == 8
    ours = rows["talker_decode_64", "ours"]
    for field in ("host_us", "host_steady_us", "landed_us", "ready_us"):
        assert ours[field].keys() == PERCENTILES
        assert ours["calls"][field] >= 4
    assert ours["d2h_bytes"] == ours["payload_bytes"] == 64 * 16 * 8
    assert ours["pinned_allocations"] == 0
    assert rows["talker_decode_64", "torch_cat"]["ready_us"] is None
    assert rows["talker_decode_64", "one_copy"]["host_us"] is None
    assert rows["talker_decode_64", "torch_cat"]["host_steady_us"].keys() == PERCENTILES
    assert rows["talker_decode_64", "device_copy"]["host_steady_us"] is None
    assert document["scenarios"]["talker_decode_64"]["seconds"].keys() == {"set_up", "measured", "total"}
    assert "CUDA" in rows["talker_decode_64", "one_copy"]["note"]
    assert not [row for row in document["rows"] if "error" in row]
    assert "thinker_decode_1" in results.table(document)
    assert "thinker_decode 256 / 1" in results.targets_table(document)


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_the_chart_is_drawn_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_matplotlib: bool
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(snapshot.chart, "draw", lambda document, file: drawn.append(file))
    found = ModuleType("matplotlib")
    found.__spec__ = ModuleSpec("matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib", found if has_matplotlib else None)
    options = ["--device", "cpu", "--scenarios", "few_leaves", "--providers", "torch_cat", "--seconds", "0.01"]
    assert snapshot.main([*options, "--calls", "1", "--out", str(tmp_path)]) == 0
    file = tmp_path / "cpu" / "snapshot.svg"
    assert drawn == [file] * has_matplotlib
    assert capsys.readouterr().out.splitlines()[-1].startswith(str(file) if has_matplotlib else "no chart: it needs")


class _Noting(TorchCat):
    """Notes whether the work of the call before was over when a call began, and what was made of its inputs."""

    def __init__(self, machine: CpuMachine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        self.last: Work | None = None
        self.early = 0
        self.fails_at = -1
        self.calls = 0

    def take(self, step: StepInput) -> Any:
        self.early += self.last is not None and not self.last.ready_ns
        self.calls += 1
        return super().take(step)

    def hand_over(self, step: StepInput, taken: Any, *, only_wait: bool) -> Work:
        def build() -> None:
            time.sleep(0.0005)
            if self.calls == self.fails_at:
                raise RuntimeError("the builder failed")

        self.last = Work(build).on_thread(self._thread)
        return self.last


class TestSteadyCalls:
    @pytest.fixture
    def provider(self) -> Iterator[_Noting]:
        provider = _Noting(CpuMachine(), make_scenario("talker_decode_64", CPU))
        yield provider
        provider.close()

    @staticmethod
    def bench(provider: _Noting) -> measure.Bench:
        return measure.Bench(provider.machine, provider.scenario, [provider], CompileCounter())

    def test_each_begins_when_the_work_of_the_last_is_over(self, provider: _Noting) -> None:
        samples = measure.Samples()
        self.bench(provider)._steady_block(provider, samples, 10)
        assert len(samples.host_steady) == 10
        assert provider.calls == 12  # the first two of a block don't count
        assert provider.early == 0

    def test_what_a_builder_raises_is_not_waited_for(self, provider: _Noting) -> None:
        provider.fails_at = 5
        bench = self.bench(provider)
        bench.run(measure.Budget(calls=20, seconds=0.2))
        assert "the builder failed" in bench.failures["torch_cat"]

        provider.fails_at = provider.calls + 5
        with pytest.raises(RuntimeError, match="the builder failed"):
            bench._steady_block(provider, measure.Samples(), 10)


def test_without_time_every_provider_makes_the_fewest_calls(tmp_path: Path) -> None:
    snapshot.main(
        "--device cpu --seconds 0.001 --calls 100000 --scenarios talker_decode_64,few_leaves "
        f"--providers ours,torch_cat --commit abc --out {tmp_path}".split()
    )
    rows = json.loads((tmp_path / "cpu" / "snapshot.json").read_text())["rows"]
    assert {row["calls"]["host_us"] for row in rows} == {measure.FEWEST_CALLS}


class _OneBitWrong(TorchCat):
    def leaf_bytes(self, taken: Any) -> list[torch.Tensor]:
        leaves = [leaf.clone() for leaf in super().leaf_bytes(taken)]
        leaves[-1][-1] ^= 1
        return leaves


@pytest.mark.parametrize("name", ["talker_decode_64", "thinker_decode_8"])
def test_one_wrong_bit_is_found(name: str) -> None:
    scenario, machine = make_scenario(name, CPU), CpuMachine()
    provider = _OneBitWrong(machine, scenario)
    try:
        with pytest.raises(WrongBytes, match=r"1 of \d+ bytes differ"):
            check(provider, machine, scenario)
    finally:
        provider.close()


def figures(p50: float, p999: float | None = None) -> dict[str, float]:
    return {"p50": p50, "p90": p50, "p999": p999 or p50}


def test_every_target_is_judged() -> None:
    made = {"ours": 10.0, "stock_v1": 120.0, "stock_v2": 90.0, "memcpy_batch": 9.0, "torch_cat": 11.0}
    made |= {"one_copy": 9.5, "device_copy": 9.9}
    scenarios = {name: {"leaves": {"many_leaves": 128}.get(name, 2)} for name in SCENARIO_NAMES}
    rows = [
        {
            "scenario": scenario,
            "provider": provider,
            "host_us": figures(host, 4 * host),
            "host_steady_us": figures(host / (4 if provider == "ours" else 2)),
            "landed_us": figures(host),
            "ready_us": figures(host),
            "compute_stream_us": host,
            "d2h_bytes": 1000,
            "payload_bytes": 990,
            "pinned_allocations": 0,
            "compilations": 0,
        }
        for scenario in scenarios
        for provider, host in made.items()
    ]
    table = results.targets_table({"scenarios": scenarios, "rows": rows})
    assert "not measured" not in table
    found = {what: entry for what, *entry in (re.split(r"\s{2,}", line) for line in table.splitlines())}
    assert found["host, thinker_decode_64: stock V1 / ours"] == ["12.00 x", ">= 15 x", "NO"]
    assert found["host, steady, thinker_decode_64: stock V1 / ours"] == ["24.00 x", ">= 15 x", "yes"]
    assert found["host, closest scenario: memcpy_batch / ours"][:3] == ["0.90 x", ">= 1 x", "NO"]
    assert found["host p99.9 / p50, worst scenario"][:3] == ["4.00 x", "<= 3 x", "NO"]
    assert found["landed, thinker_prefill_32k: ours / one copy"] == ["1.05 x", "<= 1.04 x", "NO"]
    assert found["stream, thinker_prefill_32k: ours / device copy"] == ["1.01 x", "<= 1.05 x", "yes"]
    assert found["stream, thinker_decode_64"] == ["10.00 us", "<= 4 us", "NO"]
    assert found["d2h beyond the payload, per leaf, thinker_subset"][:3] == ["5.00 B", "<= 16 B", "yes"]
    assert found["host, growth: per leaf from 2 to 128"] == ["0.00 us", "<= 0.5 us", "yes"]
    assert found["pinned allocations while measured, worst scenario"][:3] == ["0.00", "<= 0", "yes"]


def made_up_document(scenario: str, host_us: float) -> results.Document:
    row = {"scenario": scenario, "provider": "ours", "host_us": {"p50": host_us, "p90": host_us, "p999": 2 * host_us}}
    return {"bench": "snapshot", "gpu": "g", "commit": "c", "versions": {}, "scenarios": {scenario: {}}, "rows": [row]}


def test_merging_takes_each_scenario_from_one_run() -> None:
    merged = results.merge([made_up_document("a", 1), made_up_document("b", 2)])
    assert [(row["scenario"], row["host_us"]["p50"]) for row in merged["rows"]] == [("a", 1), ("b", 2)]
    with pytest.raises(ValueError, match="more than one file has a:"):
        results.merge([made_up_document("a", 1), made_up_document("b", 2), made_up_document("a", 3)])
    with pytest.raises(ValueError, match="gpu"):
        results.merge([made_up_document("a", 1), {**made_up_document("b", 1), "gpu": "h"}])


def test_merged_rows_say_which_commit_they_are_of() -> None:
    merged = results.merge([made_up_document("a", 1), {**made_up_document("b", 1), "commit": "d"}])
    assert [row["commit"] for row in merged["rows"]] == ["c", "d"]
    assert [row["commit"] for row in results.merge([merged, made_up_document("e", 1)])["rows"]] == ["c", "d", "c"]


def test_slow_providers_give_up_calls_first() -> None:
    calls = measure.share_calls({"fast": 0.001, "slow": 0.1}, seconds=12, most=2000)
    assert calls == {"fast": 2000, "slow": 100}


def test_percentiles_by_nearest_rank() -> None:
    assert measure.percentiles_us([1000 * n for n in range(1, 2001)]) == {"p50": 1000, "p90": 1800, "p999": 1998}
    assert measure.percentiles_us([]) is None


def test_engine_source_takes_what_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_omni-0.30.0-py3-none-any.whl"
    module = (
        "from vllm.missing import helper\nimport math\nLIMIT = helper\n"
        "def area(r: Unknown): return math.pi * r * r\n"
        "class Runner(Base):\n    def keep(self): return area(1)\n    def leave(self): return missing\n"
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_omni/__init__.py", "raise ImportError")
        archive.writestr("vllm_omni/worker/shapes.py", module)
        archive.writestr("vllm_omni-0.30.0.dist-info/METADATA", "")
    source = EngineSource.from_wheel(wheel)
    assert source.version == "0.30.0"
    namespace: dict[str, object] = {}
    source.take(namespace, "worker.shapes", ("area",), {"Runner": ("keep",)})
    runner = namespace["Runner"]
    assert runner().keep() == pytest.approx(3.14159, abs=1e-4)  # type: ignore[operator]
    assert not hasattr(runner, "leave")
    with pytest.raises(Unavailable, match="volume"):
        source.take({}, "worker.shapes", ("volume",))
    with pytest.raises(Unavailable, match="no wheel"):
        EngineSource.from_wheel(_wheel_of_another(tmp_path))


def _wheel_of_another(folder: Path) -> Path:
    wheel = folder / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other-1.0.dist-info/METADATA", "")
    return wheel


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        snapshot.main(["--scenarios", "nothing"])
    assert "thinker_decode_64" in capsys.readouterr().err


def test_tree_tensors_come_in_walking_order() -> None:
    one, two, three = (torch.tensor(n) for n in range(3))
    assert tree_tensors({"a": [one, {"b": (two,)}], "c": 3, "d": three}) == [one, two, three]


def test_trace_scenarios_take_every_recorded_step() -> None:
    from bench._snapshot.scenarios import trace_scenario
    from omni_runner.trace import Trace

    step = make_scenario("talker_decode_64", CPU).steps[0]
    scenario = trace_scenario(Trace({"stage": "talker"}, (step, step), "somewhere/mine"))
    assert isinstance(scenario, Scenario)
    assert (scenario.name, len(scenario.distinct_steps)) == ("trace_mine", 2)
