"""What a deploy YAML makes of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_runner.deploy import EngineTraits, StageVerdict, check_bases, check_form, find_pipeline, judge_stages
from omni_runner.errors import SettingsError
from omni_runner.pipelines import MODEL_FLAGS, EngineSource, Pipeline, PipelineStage

PACKED = "omni_runner.PackedGPUARWorker"
OMNI = Pipeline(
    "omni",
    "omni.yaml",
    (
        PipelineStage(0, "thinker", "ar", "Omni"),
        PipelineStage(1, "talker", "ar", "Omni"),
        PipelineStage(2, "wave", "generation", "Wave"),
    ),
)
TRAITS = EngineTraits(has_v2_runner=True, prefix_cache_excludes_async=False)


class Source(EngineSource):
    """Models that opt in, unless told otherwise."""

    __slots__ = ("flags",)

    def __init__(self, **flags: bool | None) -> None:
        super().__init__(Path())
        # EngineSource is frozen.
        object.__setattr__(self, "flags", {**dict.fromkeys(MODEL_FLAGS, False), MODEL_FLAGS[0]: True, **flags})

    def model_flags(self, architecture: str, stage_name: str) -> dict[str, bool | None]:
        flags: dict[str, bool | None] = self.flags
        return flags


def judge(
    deploy: dict[str, Any],
    pipeline: Pipeline | None = OMNI,
    traits: EngineTraits = TRAITS,
    *,
    on: bool = True,
    platform: str = "cuda",
    **flags: bool | None,
) -> list[StageVerdict]:
    return judge_stages(deploy, pipeline, Source(**flags), traits, platform=platform, switched_on=on)


def test_switched_on_by_the_variable() -> None:
    thinker, talker, wave = judge({"stages": [{"stage_id": 0}]})
    assert (thinker.packed, thinker.why) == (True, ("by OMNI_RUNNER",))
    assert talker.packed
    assert (wave.packed, wave.why) == (False, ("generation stages are left alone",))


def test_switched_on_by_the_worker_class() -> None:
    stages = [{"stage_id": 0, "worker_cls": PACKED}, {"stage_id": 1, "engine_args": {"worker_cls": PACKED}}]
    thinker, talker, _ = judge({"stages": stages}, on=False)
    assert thinker.why == talker.why == ("by its worker_cls",)


def test_not_switched_on() -> None:
    thinker, *_ = judge({"stages": []}, on=False)
    assert not thinker.packed
    assert thinker.why == (f"not switched on: set OMNI_RUNNER=1 or worker_cls: {PACKED}",)


def test_a_worker_class_of_somebody_else() -> None:
    thinker, *_ = judge({"stages": [{"stage_id": 0, "worker_cls": "mine.Worker"}]})
    assert thinker.why == ("its worker_cls is mine.Worker",)


def test_our_worker_class_on_a_generation_stage_is_a_mistake() -> None:
    *_, wave = judge({"stages": [{"stage_id": 2, "worker_cls": PACKED}]})
    assert wave.is_mistake
    assert "remove its worker_cls" in wave.why[0]


@pytest.mark.parametrize(
    ("worker_cls", "message"),
    [
        ("omni_runner.PackedGPUArWorker", "omni_runner has no worker PackedGPUArWorker; is PackedGPUARWorker meant?"),
        ("omni_runner.worker.Packed", "omni_runner has no worker worker.Packed; is PackedGPUARWorker meant?"),
        (5, f"its worker_cls is 5, expected a dotted name such as {PACKED}"),
        ("", f"its worker_cls is '', expected a dotted name such as {PACKED}"),
        ("PackedGPUARWorker", f"its worker_cls is 'PackedGPUARWorker', expected a dotted name such as {PACKED}"),
        ("omni-runner.Worker", f"its worker_cls is 'omni-runner.Worker', expected a dotted name such as {PACKED}"),
    ],
)
@pytest.mark.parametrize("stage_id", [0, 2])
def test_a_worker_class_that_cannot_be(stage_id: int, worker_cls: object, message: str) -> None:
    verdict = judge({"stages": [{"stage_id": stage_id, "worker_cls": worker_cls}]})[stage_id]
    assert (verdict.packed, verdict.why, verdict.is_mistake) == (False, (message,), True)


def test_a_stage_that_the_pipeline_does_not_have() -> None:
    *_, ours, other = judge({"stages": [{"stage_id": 7, "worker_cls": PACKED}, {"stage_id": 8}]})
    assert (ours.stage_id, other.stage_id) == (7, 8)
    assert ours.why == other.why == ("pipeline omni has only stages 0, 1, 2",)
    assert not ours.packed and not other.packed
    assert (ours.is_mistake, other.is_mistake) == (True, False)  # the engine passes over what it does not know


@pytest.mark.parametrize(
    ("deploy", "words"),
    [
        ({"async_chunk": False}, "async_chunk is off"),
        ({"model_runner": "v2"}, "Model Runner V2"),
        ({"platforms": {"cuda": {"model_runner": "v2"}}}, "Model Runner V2"),
        ({"stages": [{"stage_id": 0, "async_chunk": False}]}, "async_chunk is off"),
        ({"stages": [{"stage_id": 0, "async_scheduling": False}]}, "async_scheduling is off"),
        ({"stages": [{"stage_id": 0, "engine_extras": {"speculative_config": {}}}]}, "speculative decoding"),
        ({"stages": [{"stage_id": 0, "enable_return_routed_experts": True}]}, "routed experts"),
        (
            {
                "stages": [{"stage_id": 0}],
                "platforms": {"cuda": {"stages": [{"stage_id": 0, "async_scheduling": False}]}},
            },
            "async_scheduling is off",
        ),
    ],
)
def test_settings_that_stand_in_the_way(deploy: dict[str, Any], words: str) -> None:
    thinker, *_ = judge(deploy)
    assert not thinker.packed
    assert words in thinker.why[0]


def test_settings_for_another_platform_do_not_count() -> None:
    section = {"model_runner": "v2", "stages": [{"stage_id": 0, "async_scheduling": False}]}
    thinker, *_ = judge({"stages": [{"stage_id": 0}], "platforms": {"npu": section}})
    assert thinker.packed


def test_a_platform_may_opt_out_of_v2() -> None:
    deploy = {"model_runner": "v2", "platforms": {"rocm": {"model_runner": "v1"}}}
    assert judge(deploy, platform="rocm")[0].packed
    assert not judge(deploy)[0].packed


def test_prefix_caching_matters_where_the_version_keeps_it_apart() -> None:
    apart = EngineTraits(has_v2_runner=False, prefix_cache_excludes_async=True)
    on_by_default = {"stages": [{"stage_id": 0}, {"stage_id": 1, "enable_prefix_caching": False}]}
    thinker, talker, _ = judge(on_by_default, traits=apart)
    assert "prefix caching is on" in thinker.why[0]
    assert talker.packed
    assert judge(on_by_default)[0].packed


def test_versions_without_v2_ignore_it() -> None:
    assert judge({"model_runner": "v2"}, traits=EngineTraits(has_v2_runner=False, prefix_cache_excludes_async=False))[
        0
    ].packed


def test_a_single_stage_sends_no_chunks() -> None:
    (only,) = judge({}, Pipeline("solo", "", OMNI.stages[:1]))
    assert only.why == ("async_chunk is off",)


def test_models() -> None:
    assert "does not opt in" in judge({}, use_async_omni_output=False)[0].why[0]
    assert "postprocess is not eager" in judge({}, has_postprocess=True)[0].why[0]
    assert judge({}, has_postprocess=True, eager_omni_postprocess_before_async_output=True)[0].packed


def test_what_cannot_be_told() -> None:
    unknown = dict.fromkeys(MODEL_FLAGS)
    verdicts = judge({"stages": [{"stage_id": 0}, {"stage_id": 1}]}, None, **unknown)
    assert [(verdict.name, verdict.kind, verdict.packed) for verdict in verdicts] == [("?", "?", True)] * 2
    assert verdicts[0].why[1] == "if it is an AR stage and the model opts in, which cannot be told here"
    (only,) = judge({"stages": [{"stage_id": 0}]}, None)
    assert only.why[1] == "if it is an AR stage and its pipeline has other stages, which cannot be told here"
    assert judge({"stages": [{"stage_id": 0, "async_chunk": False}]}, None)[0].why == ("async_chunk is off",)
    assert judge({}, **unknown)[0].why[1] == "if the model opts in, which cannot be told here"


@pytest.mark.parametrize(
    ("deploy", "file", "wanted", "found"),
    [
        ({}, "anything.yaml", "omni", "omni"),
        ({"pipeline": "omni_thinker"}, "omni.yaml", None, "omni_thinker"),
        ({}, "omni.yaml", None, "omni"),
        ({}, "omni-two-gpus.yaml", None, "omni"),
        ({}, "omni_thinker_large.yaml", None, "omni_thinker"),
        ({}, "mine.yaml", None, None),
        ({}, "omni.yaml", "missing", None),
    ],
)
def test_which_pipeline(deploy: dict[str, Any], file: str, wanted: str | None, found: str | None) -> None:
    pipelines = {"omni": OMNI, "omni_thinker": Pipeline("omni_thinker", "", OMNI.stages[:1])}
    pipeline = find_pipeline(pipelines, deploy, Path("somewhere", file), wanted)
    assert (pipeline.name if pipeline else None) == found


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        ([], "the document is not a mapping: []"),
        ({"pipeline": ["a"]}, "pipeline is not a text: ['a']"),
        ({"stages": 7}, "stages is not a list: 7"),
        ({"stages": [7]}, "stages[0] is not a mapping: 7"),
        ({"stages": [{}]}, "stages[0].stage_id is not a number: None"),
        ({"stages": [{"stage_id": 0}, {"stage_id": "x"}]}, "stages[1].stage_id is not a number: 'x'"),
        ({"stages": [{"stage_id": 0, "engine_args": 7}]}, "stages[0].engine_args is not a mapping: 7"),
        ({"platforms": 7}, "platforms is not a mapping: 7"),
        ({"platforms": {"npu": "x"}}, "platforms.npu is not a mapping: 'x'"),
        ({"platforms": {"npu": {"stages": ["x"]}}}, "platforms.npu.stages[0] is not a mapping: 'x'"),
    ],
)
def test_of_another_form(deploy: Any, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        check_form(deploy)
    assert str(error.value) == message


@pytest.mark.parametrize("deploy", [None, {}, {"stages": None, "platforms": None}, {"stages": [{"stage_id": "1"}]}])
def test_of_the_right_form(deploy: Any) -> None:
    check_form(deploy)


class TestBases:
    @pytest.fixture(autouse=True)
    def _needs_yaml(self) -> None:
        pytest.importorskip("yaml")

    def test_a_chain(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("base_config: b.yaml")
        (tmp_path / "b.yaml").write_text("stages: []")
        check_bases(tmp_path / "a.yaml")

    @pytest.mark.parametrize("text", ["", "- a", "base_config:", "base_config: ${oc.env:X}", "a: ["])
    def test_what_is_left_to_the_engine(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "a.yaml").write_text(text)
        check_bases(tmp_path / "a.yaml")

    @pytest.mark.parametrize("names", ["a", "ab", "abc"])
    def test_a_circle(self, tmp_path: Path, names: str) -> None:
        files = [tmp_path / f"{name}.yaml" for name in names]
        for file, base in zip(files, [*files[1:], files[0]], strict=True):
            file.write_text(f"base_config: {base.name}")
        with pytest.raises(SettingsError) as error:
            check_bases(files[0])
        assert str(error.value) == f"base_config goes in a circle: {' -> '.join(map(str, [*files, files[0]]))}"

    @pytest.mark.parametrize(
        ("base", "words"), [("none.yaml", "none.yaml is not there"), (".", "is a folder"), ("5", "is not a text: 5")]
    )
    def test_one_that_is_not_there(self, tmp_path: Path, base: str, words: str) -> None:
        (tmp_path / "a.yaml").write_text("base_config: b.yaml")
        (tmp_path / "b.yaml").write_text(f"base_config: {base}")
        with pytest.raises(SettingsError, match="base_config") as error:
            check_bases(tmp_path / "a.yaml")
        assert str(error.value).startswith(f"{tmp_path / 'b.yaml'}: ")
        assert words in str(error.value)
