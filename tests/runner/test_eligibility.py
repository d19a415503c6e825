"""Eligibility: it agrees with the engine on every combination of flags, and every refusal has its reason."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from omni_runner.eligibility import (
    StageFacts,
    describe,
    prefix_cache_excludes_async,
    reasons_against,
    runner_facts,
)

ELIGIBLE = StageFacts(
    platform="cuda",
    v2_runner=False,
    last_pipeline_rank=True,
    async_scheduling=True,
    speculative_decoding=False,
    prefix_cache=False,
    prefix_cache_excludes_async=True,
    async_chunk=True,
    routed_experts=False,
    model_opts_in=True,
    postprocess=False,
    eager_postprocess=False,
)


def with_facts(**changes: Any) -> StageFacts:
    facts = {name: getattr(ELIGIBLE, name) for name in StageFacts.__dataclass_fields__}
    return StageFacts(**{**facts, **changes})


def test_all_conditions_met() -> None:
    assert reasons_against(ELIGIBLE) == ()
    assert describe("stage 0 (thinker)", ()) == "omni_runner: stage 0 (thinker): packed asynchronous output"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "npu"}, "platform npu is left alone"),
        ({"platform": "musa"}, "platform musa is left alone"),
        ({"v2_runner": True}, "Model Runner V2"),
        ({"last_pipeline_rank": False}, "not the last rank"),
        ({"async_scheduling": False}, "async_scheduling is off"),
        ({"speculative_decoding": True}, "speculative decoding"),
        ({"prefix_cache": True}, "prefix caching"),
        ({"async_chunk": False}, "async_chunk is off"),
        ({"routed_experts": True}, "routed experts"),
        ({"model_opts_in": False}, "does not opt in"),
        ({"postprocess": True}, "postprocess is not eager"),
    ],
)
def test_each_condition_is_reported(changes: dict[str, Any], words: str) -> None:
    (reason,) = reasons_against(with_facts(**changes))
    assert words in reason
    assert reason in describe("stage 1", (reason,))


@pytest.mark.parametrize(
    "changes",
    [
        {"platform": "rocm"},
        {"postprocess": True, "eager_postprocess": True},
        {"prefix_cache": True, "prefix_cache_excludes_async": False},
    ],
)
def test_what_is_no_obstacle(changes: dict[str, Any]) -> None:
    assert reasons_against(with_facts(**changes)) == ()


def test_all_reasons_are_given_at_once() -> None:
    assert len(reasons_against(with_facts(async_chunk=False, async_scheduling=False, model_opts_in=False))) == 3


def test_the_unknown_is_no_reason() -> None:
    assert reasons_against(StageFacts()) == ()
    assert StageFacts(platform="cuda").unknown() == tuple(StageFacts.__dataclass_fields__)[1:]
    assert ELIGIBLE.unknown() == ()


def test_agrees_with_the_engine() -> None:
    """All 256 combinations of what the engine looks at, with its own method on its own class."""
    gpu_ar_model_runner = pytest.importorskip("vllm_omni.worker.gpu_ar_model_runner")
    runner_cls = gpu_ar_model_runner.GPUARModelRunner
    differing = []
    for flags in itertools.product((False, True), repeat=8):
        scheduling, speculative, prefix, chunk, experts, opt_in, postprocess, eager = flags
        runner = object.__new__(runner_cls)
        runner.use_async_scheduling = scheduling
        runner.speculative_config = object() if speculative else None
        runner.omni_prefix_cache = object() if prefix else None
        runner.model_config = SimpleNamespace(async_chunk=chunk, enable_return_routed_experts=experts)
        runner.model = SimpleNamespace(
            use_async_omni_output=opt_in,
            has_postprocess=postprocess,
            eager_omni_postprocess_before_async_output=eager,
        )
        facts = runner_facts(runner, platform="cuda", last_pipeline_rank=True)
        assert facts.unknown() == ()
        if (reasons_against(facts) == ()) != runner._should_use_async_omni_output():
            differing.append(flags)
    assert differing == []


def test_flags_that_nobody_set_agree_with_the_engine() -> None:
    gpu_ar_model_runner = pytest.importorskip("vllm_omni.worker.gpu_ar_model_runner")
    runner = object.__new__(gpu_ar_model_runner.GPUARModelRunner)
    runner.use_async_scheduling = True
    runner.speculative_config = runner.omni_prefix_cache = None
    runner.model_config = SimpleNamespace(async_chunk=True)
    runner.model = SimpleNamespace(use_async_omni_output=True)
    facts = runner_facts(runner, platform="cuda", last_pipeline_rank=True)
    assert reasons_against(facts) == ()
    assert runner._should_use_async_omni_output()


def test_a_version_that_keeps_prefix_caching_apart_is_recognised() -> None:
    class Old:
        def _should_use_async_omni_output(self) -> bool:
            return self.omni_prefix_cache is None  # type: ignore[attr-defined]

    class OursOverOld(Old):
        def _should_use_async_omni_output(self) -> bool:
            return super()._should_use_async_omni_output()

    class New:
        def _should_use_async_omni_output(self) -> bool:
            return True

    assert prefix_cache_excludes_async(Old)
    assert prefix_cache_excludes_async(OursOverOld)
    assert not prefix_cache_excludes_async(New)
