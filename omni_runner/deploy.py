"""Determine from a deploy YAML which worker and runner each stage gets, and whether that is the packed one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_runner.eligibility import StageFacts, reasons_against
from omni_runner.errors import SettingsError
from omni_runner.pipelines import EngineSource, Pipeline, PipelineStage
from omni_runner.platforms import PACKED_AR_WORKER

# Keys of a stage whose values are mappings of further stage settings.
_NESTED = ("engine_args", "engine_extras")
# Top-level keys of a deploy YAML that are not settings for all stages.
_SECTIONS = ("stages", "platforms", "connectors")
_KINDS: dict[type[Any], str] = {dict: "mapping", list: "list", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Differences between engine versions that affect which path a stage takes.

    Attributes
    ----------
    has_v2_runner : bool
        The engine reads `model_runner` in a deploy YAML.
    prefix_cache_excludes_async : bool
        See :class:`~omni_runner.eligibility.StageFacts`.
    """

    has_v2_runner: bool
    prefix_cache_excludes_async: bool


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """Which path one stage takes, and why.

    Attributes
    ----------
    stage_id : int
        Number in the deploy YAML.
    name, kind : str
        As in :class:`~omni_runner.pipelines.PipelineStage`; "?" where no pipeline is known.
    packed : bool
        Whether its payloads will be packed.
    why : tuple of str
        Reasons for the engine's own path, or remarks on the packed one.
    is_mistake : bool
        Whether the entry is a mistake: the stage would not start, or the pipeline has no such stage.
    """

    stage_id: int
    name: str
    kind: str
    packed: bool
    why: tuple[str, ...]
    is_mistake: bool = False


def check_form(deploy: Any) -> None:
    """Check that the entries of a deploy YAML that are read here are well-formed.

    Raises
    ------
    SettingsError
        An entry is malformed; the message names it.
    """
    entries = _expect(deploy, "the document", dict)
    _expect(entries.get("pipeline"), "pipeline", str)
    _check_stages(entries, "stages")
    for name, section in _expect(entries.get("platforms"), "platforms", dict).items():
        _check_stages(_expect(section, f"platforms.{name}", dict), f"platforms.{name}.stages")


def _check_stages(section: dict[str, Any], where: str) -> None:
    for number, entry in enumerate(_expect(section.get("stages"), where, list)):
        stage = _expect(entry, f"{where}[{number}]", dict)
        if not str(stage.get("stage_id")).isdecimal():
            raise SettingsError(f"{where}[{number}].stage_id is not a number: {stage.get('stage_id')!r}")
        for name in _NESTED:
            _expect(stage.get(name), f"{where}[{number}].{name}", dict)


def _expect(value: Any, where: str, kind: type[Any]) -> Any:
    """Return the value, or an empty one for None."""
    if value is not None and not isinstance(value, kind):
        raise SettingsError(f"{where} is not a {_KINDS[kind]}: {value!r}")
    return kind() if value is None else value


def check_bases(path: Path) -> None:
    """Follow ``base_config`` from a deploy YAML to the files that it builds on.

    Raises
    ------
    SettingsError
        A file is missing, or the files refer to each other in a cycle; the message names them.
    """
    import yaml  # noqa: PLC0415  comes with the engine

    files = [path]
    while True:
        try:
            document = yaml.safe_load(files[-1].read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError, yaml.YAMLError):
            return  # the engine reports what is wrong with it
        base = document.get("base_config") if isinstance(document, dict) else None
        base = _expect(base, f"{files[-1]}: base_config", str)
        if not base or "${" in base:  # the engine expands it
            return
        file = files[-1].parent / base
        if not os.path.isfile(file):
            problem = "is a folder" if os.path.isdir(file) else "is not there"
            raise SettingsError(
                f"{files[-1]}: its base_config {file} {problem}; the path starts at the YAML's own folder"
            )
        is_known = any(file.samefile(earlier) for earlier in files)
        files.append(file)
        if is_known:
            raise SettingsError(f"base_config goes in a circle: {' -> '.join(map(str, files))}")


def find_pipeline(
    pipelines: Mapping[str, Pipeline], deploy: Mapping[str, Any], path: Path, wanted: str | None
) -> Pipeline | None:
    """Return the pipeline that a deploy YAML belongs to, None if it cannot be determined.

    The first that applies: the one named `wanted`, the one in the YAML's own ``pipeline`` entry, the one whose
    bundled deploy YAML has this file's name, the one with the longest name that this file's name begins with.
    """
    name = wanted or deploy.get("pipeline")
    if name is not None:
        return pipelines.get(name)
    for pipeline in pipelines.values():
        if pipeline.deploy_name == path.name:
            return pipeline
    stem = path.stem.replace("-", "_")
    return max(
        (pipeline for pipeline in pipelines.values() if stem.startswith(pipeline.name)),
        key=lambda pipeline: len(pipeline.name),
        default=None,
    )


def judge_stages(
    deploy: Mapping[str, Any],
    pipeline: Pipeline | None,
    source: EngineSource,
    traits: EngineTraits,
    *,
    platform: str,
    switched_on: bool,
) -> list[StageVerdict]:
    """Determine for each stage of a deployment which path it takes.

    Parameters
    ----------
    deploy : mapping
        The deploy YAML, with inheritance resolved.
    pipeline : Pipeline or None
        See :func:`find_pipeline`.
    source : EngineSource
        Provides the models' flags.
    traits : EngineTraits
        Traits of the installed engine.
    platform : str
        The platform, as returned by :func:`~omni_runner.platforms.platform_name`.
    switched_on : bool
        Whether ``OMNI_RUNNER`` switches AR stages over.
    """
    known = {stage.stage_id: stage for stage in pipeline.stages} if pipeline else {}
    written = {int(entry["stage_id"]): entry for entry in deploy.get("stages") or ()}
    verdicts = []
    for stage_id in sorted({*known, *written}):
        stage = known.get(stage_id, PipelineStage(stage_id, "?", "?", ""))
        settings = _stage_settings(deploy, written.get(stage_id, {}), platform)
        if pipeline and stage_id not in known:
            why = f"pipeline {pipeline.name} has only stages {', '.join(map(str, sorted(known)))}"
            # The engine ignores the entry. A deploy YAML may list more stages, but our worker here has no effect.
            is_mistake = settings.get("worker_cls") == PACKED_AR_WORKER
            verdicts.append(StageVerdict(stage_id, stage.name, stage.kind, False, (why,), is_mistake))
            continue
        # The YAML need not list every stage of its pipeline.
        is_chained = len(known) > 1 if pipeline else len(written) > 1 or None
        verdicts.append(_judge(stage, settings, source, traits, platform, switched_on, is_chained))
    return verdicts


def _judge(
    stage: PipelineStage,
    settings: Mapping[str, Any],
    source: EngineSource,
    traits: EngineTraits,
    platform: str,
    switched_on: bool,
    is_chained: bool | None,
) -> StageVerdict:
    def verdict(packed: bool, *why: str, is_mistake: bool = False) -> StageVerdict:
        return StageVerdict(stage.stage_id, stage.name, stage.kind, packed, why, is_mistake)

    worker_cls = settings.get("worker_cls")
    problem = _worker_problem(worker_cls)
    if problem:
        return verdict(False, problem, is_mistake=True)
    if stage.kind not in ("ar", "?"):
        if worker_cls == PACKED_AR_WORKER:
            return verdict(False, f"remove its worker_cls: {stage.kind} stages have no AR worker", is_mistake=True)
        return verdict(False, f"{stage.kind} stages are left alone")
    facts = _stage_facts(stage, settings, source, traits, platform, is_chained)
    reasons = list(reasons_against(facts))
    if worker_cls not in (None, "auto", PACKED_AR_WORKER):
        reasons.insert(0, f"its worker_cls is {worker_cls}")
    elif worker_cls != PACKED_AR_WORKER and not switched_on:
        reasons.insert(0, f"not switched on: set OMNI_RUNNER=1 or worker_cls: {PACKED_AR_WORKER}")
    if reasons:
        return verdict(False, *reasons)
    selected = "by its worker_cls" if worker_cls == PACKED_AR_WORKER else "by OMNI_RUNNER"
    conditions = ["it is an AR stage"] if stage.kind == "?" else []
    if facts.async_chunk is None:
        conditions.append("its pipeline has other stages")
    if facts.model_opts_in is None:
        conditions.append("the model opts in")
    if conditions:
        return verdict(True, selected, f"if {' and '.join(conditions)}, which cannot be told here")
    return verdict(True, selected)


def _worker_problem(worker_cls: object) -> str:
    """Return what is wrong with a stage's worker class; "" if it is ours, a third party's or not set."""
    if worker_cls in (None, "auto", PACKED_AR_WORKER):
        return ""
    parts = worker_cls.split(".") if isinstance(worker_cls, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"its worker_cls is {worker_cls!r}, expected a dotted name such as {PACKED_AR_WORKER}"
    package, _, name = PACKED_AR_WORKER.partition(".")
    if parts[0] == package:
        return f"{package} has no worker {'.'.join(parts[1:])}; is {name} meant?"
    return ""


def _stage_facts(
    stage: PipelineStage,
    settings: Mapping[str, Any],
    source: EngineSource,
    traits: EngineTraits,
    platform: str,
    is_chained: bool | None,
) -> StageFacts:
    flags = source.model_flags(stage.architecture, stage.name)
    return StageFacts(
        platform=platform,
        v2_runner=traits.has_v2_runner and settings.get("model_runner") == "v2",
        async_scheduling=bool(settings.get("async_scheduling", True)),
        speculative_decoding=settings.get("speculative_config") is not None,
        prefix_cache=bool(settings.get("enable_prefix_caching", True)),
        prefix_cache_excludes_async=traits.prefix_cache_excludes_async,
        async_chunk=is_chained if settings["async_chunk"] else False,
        routed_experts=bool(settings.get("enable_return_routed_experts", False)),
        model_opts_in=flags["use_async_omni_output"],
        postprocess=flags["has_postprocess"],
        eager_postprocess=flags["eager_omni_postprocess_before_async_output"],
    )


def _stage_settings(deploy: Mapping[str, Any], stage: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Merge the settings of one stage: the deployment's, its own, and those for the platform; later ones win."""
    section = (deploy.get("platforms") or {}).get(platform) or {}
    settings = {name: value for name, value in deploy.items() if name not in _SECTIONS}
    if "model_runner" in section:
        settings["model_runner"] = section["model_runner"]
    settings |= _flat(stage)
    for override in section.get("stages") or ():
        if override.get("stage_id") == stage.get("stage_id"):
            settings |= _flat(override)
    # A stage can opt out of async_chunk, but not in.
    settings["async_chunk"] = deploy.get("async_chunk", True) and stage.get("async_chunk") is not False
    return {name: value for name, value in settings.items() if value is not None}


def _flat(stage: Mapping[str, Any]) -> dict[str, Any]:
    nested: Sequence[Mapping[str, Any]] = [stage.get(name) or {} for name in _NESTED]
    flat = {name: value for name, value in stage.items() if name not in _NESTED}
    for entries in nested:
        flat |= entries
    return flat
