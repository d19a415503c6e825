"""The example deploy YAMLs and docs/deploy.md: the engine reads them, and they say the same."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from omni_runner.platforms import PACKED_AR_WORKER
from omni_runner.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    # file: module and name of the engine's pipeline, AR stages, generation stages
    "qwen3_omni_moe.yaml": ("qwen3_omni", "QWEN3_OMNI_PIPELINE", {0, 1}, {2}),
    "qwen3_tts.yaml": ("qwen3_tts", "QWEN3_TTS_PIPELINE", {0}, {1}),
}
DOCUMENT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_document_shows_the_files(name: str) -> None:
    assert (ROOT / "examples" / "deploy" / name).read_text(encoding="utf-8") in blocks("yaml")


def test_the_document_lists_every_variable() -> None:
    rows = dict(re.findall(r"^\| `(OMNI_RUNNER\w*)` \| .* \| (.*) \|$", DOCUMENT, re.MULTILINE))
    assert {name: text.strip("`") for name, text in rows.items()} == {
        name: default for name, (_, default) in VARIABLES.items()
    }


def test_the_documented_pinned_default_is_the_packers() -> None:
    from spanpack import Packer

    default = inspect.signature(Packer).parameters["pinned_budget_bytes"].default
    assert default == int(VARIABLES["OMNI_RUNNER_PINNED_MIB"][1]) << 20


@pytest.fixture
def stage_config() -> Any:
    """The engine's own loader."""
    pytest.importorskip("vllm_omni")
    return importlib.import_module("vllm_omni.config.stage_config")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_engine_takes_the_example(name: str, stage_config: Any) -> None:
    folder, variable, ar_stages, generation_stages = EXAMPLES[name]
    pipeline = getattr(importlib.import_module(f"vllm_omni.model_executor.models.{folder}.pipeline"), variable)
    deploy = stage_config.load_deploy_config(ROOT / "examples" / "deploy" / name)
    assert {stage.stage_id for stage in deploy.stages} == ar_stages | generation_stages
    merged = {stage.stage_id: stage for stage in stage_config.merge_pipeline_deploy(pipeline, deploy)}
    for stage_id in ar_stages:
        arguments = merged[stage_id].yaml_engine_args
        assert merged[stage_id].worker_type == "ar"
        assert arguments["worker_cls"] == PACKED_AR_WORKER
        assert arguments["async_chunk"] is True
        assert arguments["async_scheduling"] is True
        assert not arguments.get("use_v2_model_runner", False)
    for stage_id in generation_stages:
        assert merged[stage_id].worker_type == "generation"
        assert "worker_cls" not in merged[stage_id].yaml_engine_args


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_engine_hands_the_worker_on(name: str, stage_config: Any) -> None:
    omni_config = importlib.import_module("vllm_omni.config.omni_config")
    if "worker_cls" not in inspect.get_annotations(omni_config.OmniStageRuntimeConfig):
        pytest.skip("this version starts stages from the merged arguments")
    folder, variable, ar_stages, _ = EXAMPLES[name]
    pipeline = getattr(importlib.import_module(f"vllm_omni.model_executor.models.{folder}.pipeline"), variable)
    deploy = stage_config.load_deploy_config(ROOT / "examples" / "deploy" / name)
    config = omni_config.VllmOmniConfig.from_pipeline_config(pipeline, user_deploy_config=deploy)
    workers = {stage.stage_id: stage.runtime_config.worker_cls for stage in config.stage_configs}
    assert {stage_id for stage_id, worker in workers.items() if worker == PACKED_AR_WORKER} == ar_stages


def test_the_documented_overlay(stage_config: Any, tmp_path: Path) -> None:
    (overlay,) = [block for block in blocks("yaml") if "base_config" in block]
    bundled = Path(stage_config.__file__).parents[1] / "deploy" / "qwen3_omni_moe.yaml"
    file = tmp_path / "overlay.yaml"
    file.write_text(re.sub(r"(?<=base_config: ).*", str(bundled), overlay), encoding="utf-8")
    stages = stage_config.resolve_deploy_yaml(file)["stages"]
    assert [stage.get("worker_cls") for stage in stages] == [PACKED_AR_WORKER, PACKED_AR_WORKER, None]
    assert all("devices" in stage for stage in stages)
