"""Reading pipelines and model flags from the engine's source."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from omni_runner.pipelines import EngineSource, Pipeline, PipelineStage

PIPELINE = """
_ARCH = "SpeakerModel"
SPEAKER = PipelineConfig(
    model_type="speaker",
    model_arch=_ARCH,
    default_deploy_config_name="speaker.yaml",
    stages=(
        StagePipelineConfig(stage_id=0, model_stage="talker"),
        StagePipelineConfig(
            stage_id=1,
            model_stage="wave",
            execution_type=StageExecutionType.LLM_GENERATION,
            model_arch="WaveModel",
        ),
        StagePipelineConfig(stage_id=2, model_stage="paint", execution_type=StageExecutionType.DIFFUSION),
    ),
)
COMPUTED = PipelineConfig(model_type=name(), stages=stages())
PARTLY = PipelineConfig(model_type="partly", stages=(StagePipelineConfig(stage_id=0), more()))
"""

MODEL = """
from vllm_omni.model_executor.models.speaker.base import Base

class SpeakerModel(Base):
    has_postprocess = True

    def __init__(self):
        self.use_async_omni_output = False
        other.has_postprocess = False
        if vllm_config.model_config.model_stage == "talker":
            self.use_async_omni_output = True
        elif self.model_stage in ("wave", "paint"):
            self.has_postprocess = False
        else:
            self.use_async_omni_output = unknowable()
"""

BASE = """
class Base:
    eager_omni_postprocess_before_async_output: bool = True
    has_postprocess = False

    def __init__(self):
        if large:
            self.eager_omni_postprocess_before_async_output = False
"""


@pytest.fixture
def source(tmp_path: Path) -> EngineSource:
    """A small engine."""
    models = tmp_path / "model_executor" / "models"
    (models / "speaker").mkdir(parents=True)
    (models / "speaker" / "pipeline.py").write_text(PIPELINE)
    (models / "speaker" / "speaker.py").write_text(MODEL)
    (models / "speaker" / "base.py").write_text(BASE)
    (models / "registry.py").write_text('_OMNI_MODELS = {"SpeakerModel": ("speaker", "speaker", "SpeakerModel")}')
    return EngineSource(tmp_path)


def test_pipelines(source: EngineSource) -> None:
    stages = (
        PipelineStage(0, "talker", "ar", "SpeakerModel"),
        PipelineStage(1, "wave", "generation", "WaveModel"),
        PipelineStage(2, "paint", "diffusion", "SpeakerModel"),
    )
    assert source.pipelines() == {"speaker": Pipeline("speaker", "speaker.yaml", stages)}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("talker", [True, True, None]),  # opted in; whether the postprocess is eager depends on more than the stage
        ("wave", [False, False, None]),
        ("other", [None, True, None]),
    ],
)
def test_model_flags(source: EngineSource, stage: str, expected: list[bool | None]) -> None:
    assert list(source.model_flags("SpeakerModel", stage).values()) == expected


def test_models_of_vllm_itself_have_no_flags(source: EngineSource) -> None:
    assert set(source.model_flags("LlamaForCausalLM", "talker").values()) == {False}


def test_without_an_architecture_nothing_is_known(source: EngineSource) -> None:
    assert set(source.model_flags("", "talker").values()) == {None}


def test_the_installed_engine() -> None:
    spec = importlib.util.find_spec("vllm_omni")
    if spec is None or spec.origin is None:
        pytest.skip("vllm-omni is not installed")
    source = EngineSource(Path(spec.origin).parent)
    omni = source.pipelines()["qwen3_omni_moe"]
    assert [(stage.stage_id, stage.name, stage.kind) for stage in omni.stages] == [
        (0, "thinker", "ar"),
        (1, "talker", "ar"),
        (2, "code2wav", "generation"),
    ]
    thinker, talker, _ = omni.stages
    assert list(source.model_flags(thinker.architecture, "thinker").values()) == [True, False, False]
    assert list(source.model_flags(talker.architecture, "talker").values()) == [True, True, True]
    assert [stage.kind for stage in source.pipelines()["qwen3_tts"].stages] == ["ar", "generation"]
