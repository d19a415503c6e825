"""Which stages take the packed path, and why the others don't.

The engine decides at every step whether it makes its output asynchronously; this module expresses the same
conditions as text, for the one line that each stage logs at start and for ``omni-runner doctor``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

#: Platforms whose AR workers this package subclasses. Others have workers of their own, or are untested (MUSA).
#: "unspecified" is a machine without an accelerator.
SUPPORTED_PLATFORMS = ("cuda", "rocm", "unspecified")

_CHECK = "_should_use_async_omni_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """The facts that decide which path one stage takes; None means unknown, e.g. before a model is loaded.

    Attributes
    ----------
    platform : str
        Name of vllm-omni's current platform: ``cuda``, ``rocm``, ``npu``, ``xpu``, ``musa``,
        ``unspecified``, ...
    v2_runner : bool
        The stage runs on Model Runner V2, which has an output path of its own.
    last_pipeline_rank : bool
        This rank samples; the other ranks of a pipeline produce no output.
    async_scheduling : bool
        The engine schedules the next step before this one's output is read.
    speculative_decoding : bool
        A draft model or n-gram proposer is configured.
    prefix_cache : bool
        The runner keeps payloads for the engine's prefix cache.
    prefix_cache_excludes_async : bool
        The installed version does not combine prefix caching with asynchronous output (0.24 to 0.28 do not, 0.30
        does).
    async_chunk : bool
        The stage sends its payloads chunk by chunk.
    routed_experts : bool
        The stage is asked to return which experts each token was routed to.
    model_opts_in : bool
        The model sets ``use_async_omni_output``.
    postprocess : bool
        The model has a postprocess hook.
    eager_postprocess : bool
        That hook may run on device tensors, before the payload is snapshotted.
    """

    platform: str | None = None
    v2_runner: bool | None = None
    last_pipeline_rank: bool | None = None
    async_scheduling: bool | None = None
    speculative_decoding: bool | None = None
    prefix_cache: bool | None = None
    prefix_cache_excludes_async: bool | None = None
    async_chunk: bool | None = None
    routed_experts: bool | None = None
    model_opts_in: bool | None = None
    postprocess: bool | None = None
    eager_postprocess: bool | None = None

    def unknown(self) -> tuple[str, ...]:
        """Return the names of the unknown facts."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is None)


# The rules compare with `is`, so that an unknown fact is no reason.
_RULES: tuple[tuple[Callable[[StageFacts], bool], str], ...] = (
    (
        lambda facts: facts.platform is not None and facts.platform not in SUPPORTED_PLATFORMS,
        "platform {facts.platform} is left alone",
    ),
    (
        lambda facts: facts.v2_runner is True,
        "runs on Model Runner V2 (`model_runner: v1` in the deploy YAML opts out)",
    ),
    (
        lambda facts: facts.last_pipeline_rank is False,
        "not the last rank of its pipeline, which makes no output",
    ),
    (lambda facts: facts.async_scheduling is False, "async_scheduling is off"),
    (lambda facts: facts.speculative_decoding is True, "speculative decoding is on"),
    (
        lambda facts: facts.prefix_cache is True and facts.prefix_cache_excludes_async is True,
        "prefix caching is on, which this vllm-omni version does not combine with asynchronous output",
    ),
    (lambda facts: facts.async_chunk is False, "async_chunk is off"),
    (lambda facts: facts.routed_experts is True, "routed experts are to be returned"),
    (lambda facts: facts.model_opts_in is False, "the model does not opt in (use_async_omni_output)"),
    (
        lambda facts: facts.postprocess is True and facts.eager_postprocess is False,
        "the model's postprocess is not eager (eager_omni_postprocess_before_async_output)",
    ),
)


def reasons_against(facts: StageFacts) -> tuple[str, ...]:
    """Return why a stage stays on the engine's own path; empty if it takes the packed one."""
    return tuple(text.format(facts=facts) for applies, text in _RULES if applies(facts))


def describe(stage: str, reasons: tuple[str, ...]) -> str:
    """Return the line that a stage logs at start."""
    path = f"the engine's own output path: {'; '.join(reasons)}" if reasons else "packed asynchronous output"
    return f"omni_runner: {stage}: {path}"


def prefix_cache_excludes_async(runner_cls: type[Any]) -> bool:
    """Whether this version of the engine has no asynchronous output if its prefix cache is on."""
    checks = [vars(cls)[_CHECK] for cls in runner_cls.__mro__ if _CHECK in vars(cls)]
    return any("omni_prefix_cache" in check.__code__.co_names for check in checks)


def runner_facts(runner: Any, *, platform: str, last_pipeline_rank: bool) -> StageFacts:
    """Read the facts from a V1 runner whose model is loaded and whose caches are set up.

    Parameters
    ----------
    runner : GPUARModelRunner
        The engine's runner or a subclass.
    platform : str
        See :class:`StageFacts`.
    last_pipeline_rank : bool
        See :class:`StageFacts`.
    """

    # A model defines only the flags that it needs, and a plain vLLM model config has none of the Omni
    # fields: an absent flag means False, here as in the engine.
    def model_flag(name: str) -> bool:
        return bool(getattr(runner.model, name, False))

    def config_flag(name: str) -> bool:
        return bool(getattr(runner.model_config, name, False))

    return StageFacts(
        platform=platform,
        v2_runner=False,
        last_pipeline_rank=last_pipeline_rank,
        async_scheduling=bool(runner.use_async_scheduling),
        speculative_decoding=runner.speculative_config is not None,
        prefix_cache=runner.omni_prefix_cache is not None,
        prefix_cache_excludes_async=prefix_cache_excludes_async(type(runner)),
        async_chunk=config_flag("async_chunk"),
        routed_experts=config_flag("enable_return_routed_experts"),
        model_opts_in=model_flag("use_async_omni_output"),
        postprocess=model_flag("has_postprocess"),
        eager_postprocess=model_flag("eager_omni_postprocess_before_async_output"),
    )
