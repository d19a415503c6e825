"""bench/snapshot.py: its scenarios, its providers where there is no GPU, the form of its results. No times."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="steps are made in the form of traces")
pytest.importorskip("bench.snapshot", reason="the benchmarks are in a checkout only")

import torch

from bench import snapshot
from bench._snapshot import measure, results
from bench._snapshot.baselines import ForeachCopy, TorchCat
from bench._snapshot.check import WrongBytes, check
from bench._snapshot.engine_source import EngineSource
from bench._snapshot.machine import CpuMachine
from bench._snapshot.ours import Ours, OursStandalone
from bench._snapshot.provider import Provider, StepInput, Unavailable
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
    for field in ("host_us", "landed_us", "ready_us"):
        assert ours[field].keys() == PERCENTILES
        assert ours["calls"][field] >= 4
    assert ours["d2h_bytes"] == ours["payload_bytes"] == 64 * 16 * 8
    assert ours["pinned_allocations"] == 0
    assert rows["talker_decode_64", "torch_cat"]["ready_us"] is None
    assert rows["talker_decode_64", "one_copy"]["host_us"] is None
    assert "CUDA" in rows["talker_decode_64", "one_copy"]["note"]
    assert not [row for row in document["rows"] if "error" in row]
    assert "thinker_decode_1" in results.table(document)
    assert "thinker_decode 256 / 1" in results.targets_table(document)


def made_up_document(scenario: str, host_us: float) -> results.Document:
    row = {"scenario": scenario, "provider": "ours", "host_us": {"p50": host_us, "p90": host_us, "p999": 2 * host_us}}
    return {"bench": "snapshot", "gpu": "g", "commit": "c", "versions": {}, "scenarios": {scenario: {}}, "rows": [row]}


def test_merging_takes_the_last_run_of_a_scenario() -> None:
    merged = results.merge([made_up_document("a", 1), made_up_document("b", 2), made_up_document("a", 3)])
    assert [(row["scenario"], row["host_us"]["p50"]) for row in merged["rows"]] == [("a", 3), ("b", 2)]
    with pytest.raises(ValueError, match="commit"):
        results.merge([made_up_document("a", 1), {**made_up_document("b", 1), "commit": "d"}])


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
