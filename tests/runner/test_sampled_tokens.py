"""The sampled tokens' own copy: when it is made, what it leaves behind, when the engine's is."""

from __future__ import annotations

import functools
from copy import copy as shallow_copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spanpack
from omni_runner.async_output import make_async_output_cls
from omni_runner.builder_thread import BuilderThread
from omni_runner.demo.cpu_streams import StandInEvent
from omni_runner.sampled_tokens import VLLM_FIELDS, PromisedTokens, SampledTokens, stores_only

TOKENS = torch.tensor([[7], [8], [9]], dtype=torch.int32)


class Copier:
    """Stands for `spanpack.Fetcher`."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.streams: list[Any] = []

    def fetch(self, tokens: torch.Tensor, stream: Any) -> Any:
        self.streams.append(stream)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def arguments(**others: Any) -> dict[str, Any]:
    needed = {
        "sampled_token_ids": TOKENS,
        "invalid_req_indices": [1],
        "async_output_copy_stream": "the engine's stream",
        "vocab_size": 10,
    }
    return {**needed, "logprobs_tensors": None, **others}


def sampled(monkeypatch: pytest.MonkeyPatch, copier: Copier) -> SampledTokens:
    copy = SampledTokens()
    monkeypatch.setattr(copy, "_fetch", copier.fetch)
    return copy


def fetched() -> spanpack.Fetched:
    event: Any = StandInEvent()
    return spanpack.Fetched(TOKENS.clone(), event)


def test_it_goes_on_the_engines_stream_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(fetched())
    copy = sampled(monkeypatch, copier)
    fields = copy.fields(arguments(num_nans=None, check_ep_fault=False))
    assert fields is not None
    assert copier.streams == ["the engine's stream"]
    assert fields["sampled_token_ids_cpu"] is copier.answer.tensor
    assert fields["async_copy_ready_event"] is copier.answer.landed
    assert fields["_sampled_token_ids"] is TOKENS
    assert copy.copied == 1


class InThePack:
    """Stands for a `PackedStep`."""

    def __init__(self, *, has_tokens: bool = True) -> None:
        self.has_tokens = has_tokens
        self.waits = 0
        self.made_tokens: torch.Tensor | None = None

    def arrive(self) -> None:
        self.waits += 1

    def tokens(self) -> torch.Tensor:
        if self.made_tokens is None:
            self.arrive()
            self.made_tokens = TOKENS.clone()
        return self.made_tokens


def test_tokens_that_are_in_their_steps_pack_are_promised_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = InThePack()
    copier = Copier(fetched())
    copy = sampled(monkeypatch, copier)
    copy.expected = TOKENS, step
    fields = copy.fields(arguments())
    assert fields is not None
    promised, event = fields["sampled_token_ids_cpu"], fields["async_copy_ready_event"]
    assert (step.waits, promised.kept) == (0, None)
    event.synchronize()
    assert (step.waits, promised.kept) == (1, None)
    assert promised.shape[-1] == 1
    assert promised.tolist() == TOKENS.tolist()
    assert promised.kept is step.made_tokens
    assert (copy.packed, copy.copied) == (1, 0)
    assert copier.streams == []
    copy.fields(arguments())  # of a step without a pack
    assert (copy.packed, copy.copied) == (1, 1)


def test_a_promise_may_be_copied_and_is_not_kept_for_that() -> None:
    step: Any = InThePack()
    promised = PromisedTokens(step)
    assert not hasattr(promised, "__array__")
    assert shallow_copy(promised).kept is None
    assert step.waits == 0


def test_an_output_that_wants_other_copies_leaves_tokens_out_of_the_next_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = sampled(monkeypatch, Copier(fetched()))
    assert copy.wanted
    copy.fields(arguments(num_nans=torch.zeros(3)))
    assert not copy.wanted
    copy.fields(arguments())
    assert copy.wanted


@pytest.mark.parametrize("what", ["other tokens", "not in there", "forgotten"])
def test_all_others_are_copied(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    copier = Copier(fetched())
    copy = sampled(monkeypatch, copier)
    step: Any = InThePack(has_tokens=what != "not in there")
    copy.expected = TOKENS.clone() if what == "other tokens" else TOKENS, step
    if what == "forgotten":
        copy.forget()
    fields = copy.fields(arguments())
    assert fields is not None
    assert fields["sampled_token_ids_cpu"] is copier.answer.tensor
    assert (copy.packed, copy.copied) == (0, 1)


@pytest.mark.parametrize(
    "others",
    [
        {"logprobs_tensors": SimpleNamespace()},
        {"num_nans": torch.zeros(3)},
        {"routed_experts": SimpleNamespace()},
        {"check_ep_fault": True},
        {"something_new": None},
    ],
    ids=lambda others: next(iter(others)),
)
def test_whatever_else_is_asked_for_is_the_engines(monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]) -> None:
    copier = Copier(fetched())
    assert sampled(monkeypatch, copier).fields(arguments(**others)) is None
    assert copier.streams == []


def test_an_argument_that_is_missing_is_the_engines_business(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments()
    del given["vocab_size"]
    assert sampled(monkeypatch, Copier(fetched())).fields(given) is None


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:0]], ids=["on the host", "none"])
def test_tokens_that_need_no_copy_are_left_alone(tokens: torch.Tensor) -> None:
    assert SampledTokens().fields(arguments(sampled_token_ids=tokens)) is None


def test_a_failure_is_logged_once_and_leaves_tokens_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copier = Copier(RuntimeError("simulated"))
    copy = sampled(monkeypatch, copier)
    assert [copy.fields(arguments()) for _ in range(3)] == [None] * 3
    assert len(copier.streams) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.fixture
def vllm_output_cls() -> type[Any]:
    pytest.importorskip("vllm_omni", reason="needs vllm-omni")
    from omni_runner.compat import resolve

    return resolve().async_output_cls.__mro__[1]


def test_the_installed_engines_output_is_known(vllm_output_cls: type[Any]) -> None:
    assert stores_only(vllm_output_cls, VLLM_FIELDS)


def test_an_output_that_stores_more_is_not() -> None:
    class Known:
        def __init__(self) -> None:
            self.vocab_size = 1

    class Other:
        def __init__(self) -> None:
            self.vocab_size = 1
            self.news = 2

    class Wrapped:
        @functools.wraps(Known.__init__)
        def __init__(self) -> None:
            self.vocab_size = 1

    class Elsewhere:
        def __init__(self) -> None:
            vars(self).update(news=2)

    assert not stores_only(Other, VLLM_FIELDS)
    assert not stores_only(object, VLLM_FIELDS)
    assert not stores_only(Wrapped, VLLM_FIELDS)
    assert not stores_only(Elsewhere, VLLM_FIELDS)
    assert stores_only(Known, VLLM_FIELDS)
    assert stores_only(Other, VLLM_FIELDS | {"news"})


def test_the_installed_engine_finishes_such_an_output(
    vllm_output_cls: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_runner.compat import resolve

    thread = BuilderThread()
    copier = Copier(fetched())
    cls = make_async_output_cls(resolve().async_output_cls, thread, sampled(monkeypatch, copier))
    output = cls(
        model_runner_output_builder=lambda: SimpleNamespace(req_ids=["a", "b", "c"]), cuda_device=None, **arguments()
    )
    assert vllm_output_cls in type(output).__mro__
    assert output.sampled_token_ids_cpu is copier.answer.tensor
    assert output.get_output().sampled_token_ids == [[7], [], [9]]
    assert thread.close()
