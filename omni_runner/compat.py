"""Resolve the names of the installed vllm-omni and vLLM that this package builds on.

These names are private and change between versions. `upstream_names` lists them with the versions they were seen in;
this module looks them up once and reports by name what is missing or has changed. Module-level helpers are found
through the globals of the runner method that calls them, so it does not matter which module defines them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from omni_runner.errors import UpstreamMismatch, UpstreamMissing
from omni_runner.upstream_names import (
    ATTRIBUTES,
    BUILDER,
    KNOWN_VERSIONS,
    NAMES,
    OUTPUT,
    RUNNER,
    SNAPSHOT,
    WORKER,
    UpstreamName,
)

__all__ = [
    "ATTRIBUTES",
    "KNOWN_VERSIONS",
    "NAMES",
    "Finding",
    "Upstream",
    "UpstreamName",
    "check_runner",
    "inspect_names",
    "is_known_version",
    "resolve",
    "resolve_classes",
]

_SNAPSHOT_HELPER = "_snapshot_tensor_payload_to_cpu_async"

# Keys of the sparse audio protocol; 0.24 and 0.26 have them as literals in the code that skips them.
_SPARSE_PROTOCOL_KEYS = frozenset({"meta.req_id", "meta.sparse_audio"})


@dataclass(frozen=True)
class Finding:
    """Result of checking one name; `problem` is None if it is as expected."""

    name: UpstreamName
    problem: str | None


@dataclass(frozen=True, eq=False)
class Upstream:
    """The parts of the installed engine that this package builds on.

    Attributes
    ----------
    version : str
        Version of vllm-omni.
    runner_cls, worker_cls : type
        The stock AR runner and worker.
    async_output_cls : type
        vllm-omni's asynchronous output.
    runner_module : module
        The module in whose globals `sample_tokens` looks its names up.
    record_function : callable
        Returns a profiler range, or a null context if profiling is off.
    flatten_payload : callable
        Converts a nested payload to one with dotted keys.
    partition_flat_payload : callable
        Splits one flat payload into (inter-stage, client).
    ensure_tensor_values : callable
        Wraps numbers and lists of a flat payload into tensors and drops the rest with the engine's warning.
    sparse_protocol_keys : frozenset of str
        Flat keys that are routing metadata, not payload.
    shares_channel : bool
        Whether channels of equal content are one list (0.26 and later) or two equal lists.
    """

    version: str
    runner_cls: type[Any]
    worker_cls: type[Any]
    async_output_cls: type[Any]
    runner_module: ModuleType
    record_function: Callable[[str], AbstractContextManager[Any]]
    flatten_payload: Callable[[Any], dict[str, Any]]
    partition_flat_payload: Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
    ensure_tensor_values: Callable[[dict[str, Any]], dict[str, Any]]
    sparse_protocol_keys: frozenset[str]
    shares_channel: bool
    _snapshot_names: Mapping[str, Any]
    _snapshot_helper: Callable[..., Any]
    _sparse_routing: Callable[..., tuple[list[str], dict[str, int], bool]]
    _stage_sends: Callable[[Any], bool] | None
    _has_client_keys: bool

    def snapshots_as_known(self) -> bool:
        """Whether the engine's snapshot helper is still the resolved one and has not been replaced."""
        return self._snapshot_names.get(_SNAPSHOT_HELPER) is self._snapshot_helper

    def resolve_sparse_routing(
        self,
        runner: Any,
        engine_output_type: str,
        req_ids: list[str],
        downstream_req_ids: list[str],
        multimodal_outputs: Any,
    ) -> tuple[list[str], dict[str, int], bool]:
        """Return the requests that get a payload, their indices in sparse lists, and whether lists are sparse."""
        del runner  # a static method in 0.24 and 0.26, a function since
        return self._sparse_routing(
            engine_output_type=engine_output_type,
            req_ids_output_copy=req_ids,
            downstream_req_ids=downstream_req_ids,
            multimodal_outputs=multimodal_outputs,
        )

    def sampled_tokens(self, runner: Any) -> tuple[Tensor | None, bool]:
        """Return the device tensor of the step's sampled tokens, and whether the next sampling waits for them.

        The tensor is None if it cannot be determined, or if the engine copies log probabilities and tokens together;
        the second value is then meaningless.
        """
        try:
            batch = runner.input_batch
            tokens, sampling = batch.prev_sampled_token_ids, batch.sampling_metadata
            brings_its_own = sampling.max_num_logprobs is not None  # the engine's copy of logprobs includes the tokens
            awaited = bool(sampling.output_token_ids)
        except AttributeError:
            return None, False
        return (tokens if type(tokens) is Tensor and not brings_its_own else None), awaited

    def partitions_channels(self, runner: Any) -> bool:
        """Whether inter-stage and client payloads differ; if not, both channels carry the same payloads."""
        if not runner._async_chunk:
            return False
        return self._stage_sends is None or bool(self._stage_sends(runner.model_config))

    def client_output_keys(self, runner: Any) -> tuple[str, ...]:
        """Return the flat keys that the model declares for its client; empty if there are none."""
        return runner._client_multimodal_output_keys() if self._has_client_keys else ()


@functools.cache
def resolve() -> Upstream:
    """Resolve the names of the installed engine, once per process.

    Raises
    ------
    UpstreamMissing
        vllm-omni or vLLM cannot be imported.
    UpstreamMismatch
        vllm-omni lacks names that this package builds on, or has changed them; the message lists names and versions.
    """
    try:
        import vllm_omni  # noqa: PLC0415  the package can be imported without an engine
    except ImportError as error:
        raise UpstreamMissing(
            f"vllm-omni cannot be imported ({error}). Install it, one of {', '.join(KNOWN_VERSIONS)}, "
            "together with the vLLM of the same version."
        ) from error
    version = str(vllm_omni.__version__)
    try:
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner  # noqa: PLC0415
        from vllm_omni.worker.gpu_ar_worker import GPUARWorker  # noqa: PLC0415
    except ImportError as error:
        raise _mismatch(version, [f"GPUARModelRunner or GPUARWorker cannot be imported ({error})"]) from error
    return resolve_classes(GPUARModelRunner, GPUARWorker, version)


def resolve_classes(runner_cls: type[Any], worker_cls: type[Any], version: str) -> Upstream:
    """Resolve the names from the given classes; `resolve` passes those of the installed engine.

    Raises
    ------
    UpstreamMismatch
        See `resolve`.
    """
    problems = [finding.problem for finding in inspect_names(runner_cls, worker_cls) if finding.problem is not None]
    if problems:
        raise _mismatch(version, problems)

    def used_by(method: str, name: str) -> Any:
        return _function(runner_cls, method).__globals__.get(name)

    sparse_routing = used_by(BUILDER, "resolve_sparse_mm_routing")
    return Upstream(
        version=version,
        runner_cls=runner_cls,
        worker_cls=worker_cls,
        async_output_cls=used_by("sample_tokens", "OmniAsyncGPUModelRunnerOutput"),
        runner_module=sys.modules[_function(runner_cls, "sample_tokens").__module__],
        record_function=used_by(SNAPSHOT, "record_function_or_nullcontext"),
        flatten_payload=used_by(BUILDER, "flatten_payload"),
        partition_flat_payload=used_by(BUILDER, "partition_payload_list").__globals__["partition_flat_payload"],
        ensure_tensor_values=used_by("_build_multimodal_outputs", "_ensure_tensor_values"),
        sparse_protocol_keys=_sparse_protocol_keys(runner_cls),
        shares_channel=used_by(BUILDER, "stage_sends_async_output") is not None,
        _snapshot_names=_function(runner_cls, SNAPSHOT).__globals__,
        _snapshot_helper=used_by(SNAPSHOT, _SNAPSHOT_HELPER),
        _sparse_routing=sparse_routing or runner_cls._resolve_sparse_mm_routing,
        _stage_sends=used_by(BUILDER, "stage_sends_async_output"),
        _has_client_keys=hasattr(runner_cls, "_client_multimodal_output_keys"),
    )


def is_known_version(version: str) -> bool:
    """Whether this package was tested with a version of vllm-omni."""
    return ".".join(version.split(".")[:2]) in KNOWN_VERSIONS


def check_runner(runner: Any) -> None:
    """Raise `UpstreamMismatch` if a runner lacks one of `ATTRIBUTES`."""
    lost = [name for name in ATTRIBUTES if not hasattr(runner, name)]
    if lost:
        raise UpstreamMismatch(f"the runner has no {_and(lost)}", tuple(lost))


def inspect_names(runner_cls: type[Any], worker_cls: type[Any]) -> tuple[Finding, ...]:
    """Check every name of `NAMES`, and the conditions that involve several of them."""
    findings = [Finding(name, _problem(name, runner_cls, worker_cls)) for name in NAMES]
    by_name = {finding.name.name: finding for finding in findings}
    routing = by_name["resolve_sparse_mm_routing"]
    if not _present(routing.name, runner_cls) and not hasattr(runner_cls, "_resolve_sparse_mm_routing"):
        findings[findings.index(routing)] = Finding(routing.name, _missing(routing.name))
    partition = by_name["partition_payload_list"]
    if partition.problem is None and not _present(partition.name, runner_cls, beside="partition_flat_payload"):
        findings[findings.index(partition)] = Finding(partition.name, f"{partition.name} has no partition_flat_payload")
    return tuple(findings)


def _problem(name: UpstreamName, runner_cls: type[Any], worker_cls: type[Any]) -> str | None:
    holder = {RUNNER: runner_cls, WORKER: worker_cls, OUTPUT: _output_cls(runner_cls)}.get(name.holder)
    if holder is None:  # a global; or the output class is missing, which is reported separately
        found = name.holder == OUTPUT or _present(name, runner_cls)
        return _missing(name) if name.required and not found else None
    if not hasattr(holder, name.name):
        return _missing(name) if name.required else None
    if not (name.takes or name.uses):
        return None
    function = _function(holder, name.name)
    if not isinstance(function, FunctionType):
        return f"{name} is no longer a function"
    lost = [parameter for parameter in name.takes if parameter not in inspect.signature(function).parameters]
    if lost:
        return f"{name} no longer takes {_and(lost)}"
    unused = [used for used in name.uses if not _mentions(function, used)]
    return f"{name} no longer uses {_and(unused)}" if unused else None


def _present(name: UpstreamName, runner_cls: type[Any], beside: str | None = None) -> bool:
    """Whether the holder method's globals have `name`; with `beside`, whether `name`'s own globals have that."""
    if not hasattr(runner_cls, name.holder):
        return False
    namespace = _globals(runner_cls, name.holder)
    if beside is None:
        return name.name in namespace
    return beside in getattr(inspect.unwrap(namespace[name.name]), "__globals__", {})


def _function(cls: type[Any], name: str) -> Any:
    """Return the function behind a method and its decorators, e.g. `torch.inference_mode`, or whatever else it is."""
    return inspect.unwrap(getattr(cls, name))


def _globals(cls: type[Any], name: str) -> dict[str, Any]:
    """Return the globals of a method; empty if it is not a plain function."""
    return getattr(_function(cls, name), "__globals__", {})


def _output_cls(runner_cls: type[Any]) -> type[Any] | None:
    if not hasattr(runner_cls, "sample_tokens"):
        return None
    return _globals(runner_cls, "sample_tokens").get("OmniAsyncGPUModelRunnerOutput")


def _mentions(function: FunctionType, name: str) -> bool:
    """Whether the code of `function`, closures included, uses `name` as an attribute, a global or a string."""
    codes = [function.__code__]
    for code in codes:
        if name in code.co_names or name in code.co_consts:
            return True
        codes.extend(constant for constant in code.co_consts if inspect.iscode(constant))
    return False


def _sparse_protocol_keys(runner_cls: type[Any]) -> frozenset[str]:
    if not hasattr(runner_cls, "_build_omni_pooler_payload"):
        return _SPARSE_PROTOCOL_KEYS
    build = _function(runner_cls, "_build_omni_pooler_payload").__globals__.get("build_omni_mm_payload")
    return getattr(build, "__globals__", {}).get("_SPARSE_AUDIO_PROTOCOL_KEYS", _SPARSE_PROTOCOL_KEYS)


def _missing(name: UpstreamName) -> str:
    return f"{name} is missing (seen in {_and(name.seen_in)})"


def _mismatch(version: str, problems: Iterable[str]) -> UpstreamMismatch:
    problems = tuple(problems)
    return UpstreamMismatch(
        f"vllm-omni {version} is not what omni-runner builds on: {'; '.join(problems)}. "
        f"Known to work: {', '.join(KNOWN_VERSIONS)}.",
        problems,
    )


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
