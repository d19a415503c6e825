"""The asynchronous output: the engine's own class, ours beside it, on stand-ins for CUDA streams."""

from __future__ import annotations

import gc
import threading
import traceback
import types
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from omni_runner.async_output import constructed_as, make_async_output_cls
from omni_runner.builder_thread import BuilderThread
from omni_runner.demo.cpu_streams import StandInEvent, StandInStream
from omni_runner.sampled_tokens import SampledTokens

SOON_S = 5.0


class VllmOutput:
    """What vLLM's class does, as far as it matters here."""

    def __init__(
        self, model_runner_output: Any, sampled_token_ids: Any, logprobs_tensors: Any, invalid_req_indices: Any,
        async_output_copy_stream: Any, vocab_size: int, num_nans: Any = None,
    ) -> None:  # fmt: skip
        self._model_runner_output = model_runner_output
        self._invalid_req_indices = invalid_req_indices
        self.async_copy_ready_event = torch.Event()
        self._sampled_token_ids = sampled_token_ids
        self.sampled_token_ids_cpu = sampled_token_ids.to("cpu")
        self._num_nans = num_nans

    def get_output(self) -> Any:
        self.async_copy_ready_event.synchronize()
        del self._sampled_token_ids  # so that a second call fails, as it does there
        tokens = self.sampled_token_ids_cpu.tolist()
        for i in self._invalid_req_indices:
            tokens[i].clear()
        self._model_runner_output.sampled_token_ids = tokens
        return self._model_runner_output


class OmniOutput(VllmOutput):
    """What vllm-omni's class does."""

    def __init__(self, *, model_runner_output_builder: Any, cuda_device: Any = None, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)
        self._model_runner_output_builder = model_runner_output_builder
        self._background_exception: BaseException | None = None
        self._cuda_device = cuda_device
        self._background_thread: Any = threading.Thread(target=self._build_output_in_background, daemon=True)
        self._background_thread.start()

    def _build_model_runner_output_once(self) -> None:
        if self._model_runner_output is None:
            self._model_runner_output = self._model_runner_output_builder()
            self._model_runner_output_builder = None

    def _build_output_in_background(self) -> None:
        try:
            if self._cuda_device is not None:
                torch.cuda.set_device(self._cuda_device)
            self._build_model_runner_output_once()
        except BaseException as failure:  # noqa: BLE001  as the engine does
            self._background_exception = failure

    def get_output(self) -> Any:
        if (thread := getattr(self, "_background_thread", None)) is not None:
            thread.join()
            self._background_thread = None
            if (failure := getattr(self, "_background_exception", None)) is not None:
                raise failure
        self._build_model_runner_output_once()
        return super().get_output()


@pytest.fixture(params=["stand-in engine", "installed engine"])
def engine_cls(request: pytest.FixtureRequest) -> type[Any]:
    """The engine's asynchronous output class."""
    if request.param == "stand-in engine":
        return OmniOutput
    pytest.importorskip("vllm_omni", reason="needs vllm-omni")
    from omni_runner.compat import resolve

    return resolve().async_output_cls


@pytest.fixture(autouse=True)
def device_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Stand-ins for streams; returns (thread name, device) of each `set_device`."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    return calls


@pytest.fixture
def thread() -> Iterator[BuilderThread]:
    thread = BuilderThread("test-builder")
    yield thread
    assert thread.close(SOON_S)


@pytest.fixture
def packed_cls(engine_cls: type[Any], thread: BuilderThread) -> type[Any]:
    return make_async_output_cls(engine_cls, thread)


def output_of(request_ids: list[str]) -> Any:
    return types.SimpleNamespace(req_ids=request_ids, req_id_to_index={name: i for i, name in enumerate(request_ids)})


def construct(cls: type[Any], builder: Any, *, cuda_device: Any = None) -> Any:
    return cls(
        model_runner_output_builder=builder,
        cuda_device=cuda_device,
        sampled_token_ids=torch.tensor([[7], [8], [9]]),
        logprobs_tensors=None,
        invalid_req_indices=[1],
        async_output_copy_stream=StandInStream(),
        vocab_size=10,
    )


def made_by_hand(cls: type[Any], **attributes: Any) -> Any:
    """An object without `__init__`, as the engine's own tests make them."""
    output = object.__new__(cls)
    vars(output).update(
        {
            "_model_runner_output": None,
            "_invalid_req_indices": [],
            "sampled_token_ids_cpu": torch.tensor([[7]]),
            "async_copy_ready_event": StandInEvent(),
            "_sampled_token_ids": torch.tensor([[7]]),
            "_logprobs_tensors": None,
            "_logprobs_tensors_cpu": None,
            "_routed_experts": None,
            "_routed_experts_cpu": None,
            "vocab_size": 10,
            **attributes,
        }
    )
    return output


def test_it_yields_what_the_engines_class_yields(engine_cls, packed_cls):
    stock = construct(engine_cls, lambda: output_of(["a", "b", "c"]))
    packed = construct(packed_cls, lambda: output_of(["a", "b", "c"]))
    assert torch.equal(packed.sampled_token_ids_cpu, stock.sampled_token_ids_cpu)
    assert packed.async_copy_ready_event is not None
    assert isinstance(packed, engine_cls)
    assert vars(packed.get_output()) == vars(stock.get_output())


def test_the_builder_runs_once_on_the_builder_thread(packed_cls, device_calls):
    builds: list[str] = []

    def builder() -> Any:
        builds.append(threading.current_thread().name)
        return output_of(["a"] * 3)

    output = construct(packed_cls, builder, cuda_device="cuda:1")
    first = output.get_output()
    assert output.get_output() is first
    assert first.sampled_token_ids == [[7], [], [9]]
    assert builds == ["test-builder"]
    assert device_calls == [("test-builder", "cuda:1")]


def test_a_failure_shows_where_it_happened_and_is_kept(packed_cls):
    builds: list[int] = []

    def helper_in_the_builder() -> None:
        raise RuntimeError("boom")

    def builder() -> None:
        builds.append(1)
        helper_in_the_builder()

    output = construct(packed_cls, builder)
    seen = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="boom") as caught:
            output.get_output()
        seen.append((caught.value, len(traceback.extract_tb(caught.value.__traceback__))))
        assert "helper_in_the_builder" in "".join(traceback.format_exception(caught.value))
    assert len({id(failure) for failure, _ in seen}) == 1
    assert seen[1][1] == seen[2][1], "the traceback must not grow with every call"
    assert builds == [1]


@pytest.mark.parametrize("failure", [SystemExit(2), KeyboardInterrupt()])
def test_a_base_exception_in_one_step_leaves_the_next_alone(packed_cls, failure):
    def builder() -> None:
        raise failure

    broken = construct(packed_cls, builder)
    fine = construct(packed_cls, lambda: output_of(["a"] * 3))
    for _ in range(2):
        with pytest.raises(type(failure)) as caught:
            broken.get_output()
        assert caught.value is failure
    assert fine.get_output().req_ids == ["a"] * 3


def test_callers_at_once_get_one_object(packed_cls):
    go, builds, got = threading.Event(), [], []

    def builder() -> Any:
        builds.append(1)
        go.wait(SOON_S)
        return output_of(["a"] * 3)

    output = construct(packed_cls, builder)
    callers = [threading.Thread(target=lambda: got.append(output.get_output())) for _ in range(8)]
    for caller in callers:
        caller.start()
    go.set()
    for caller in callers:
        caller.join(SOON_S)
    assert len(got) == 8
    assert len({id(result) for result in got}) == 1
    assert builds == [1]


def test_outputs_are_built_in_order(packed_cls):
    order: list[int] = []
    outputs = [construct(packed_cls, lambda i=i: order.append(i) or output_of(["a"] * 3)) for i in range(8)]
    outputs[-1].get_output()
    assert order == list(range(8))


def test_made_by_hand_it_builds_in_get_output(engine_cls, packed_cls):
    builds: list[int] = []

    def builder() -> Any:
        builds.append(1)
        return output_of(["a"])

    for cls in (engine_cls, packed_cls, make_async_output_cls(engine_cls)):
        output = made_by_hand(cls, _model_runner_output_builder=builder)
        assert output.get_output().sampled_token_ids == [[7]]
        assert output._model_runner_output_builder is None
    assert builds == [1, 1, 1]


def test_made_by_hand_it_joins_and_raises(engine_cls, packed_cls):
    for cls in (engine_cls, packed_cls):
        joined: list[str] = []
        output = object.__new__(cls)
        output._background_thread = types.SimpleNamespace(join=lambda joined=joined: joined.append("join"))
        output._background_exception = RuntimeError("background failed")
        with pytest.raises(RuntimeError, match="background failed"):
            output.get_output()
        assert joined == ["join"]
        assert output._background_thread is None


def test_an_interrupted_wait_is_not_the_outcome(packed_cls):
    interrupts = [KeyboardInterrupt()]

    def join() -> None:
        if interrupts:
            raise interrupts.pop()

    output = made_by_hand(
        packed_cls,
        _background_thread=types.SimpleNamespace(join=join),
        _model_runner_output_builder=lambda: output_of(["a"]),
    )
    with pytest.raises(KeyboardInterrupt):
        output.get_output()
    assert output.get_output().req_ids == ["a"]


def test_with_a_closed_thread_the_caller_builds(packed_cls, thread):
    assert thread.close(SOON_S)
    names: list[str] = []
    output = construct(packed_cls, lambda: names.append(threading.current_thread().name) or output_of(["a"] * 3))
    assert output.get_output().req_ids == ["a"] * 3
    assert names == [threading.current_thread().name]


def test_a_job_that_is_cancelled_is_built_by_the_caller(packed_cls, thread):
    running, go = threading.Event(), threading.Event()
    thread.submit(lambda: (running.set(), go.wait(SOON_S)))
    assert running.wait(SOON_S)
    output = construct(packed_cls, lambda: output_of(["a"] * 3))
    assert not thread.close(0.01)
    assert output.get_output().req_ids == ["a"] * 3
    go.set()


def test_without_a_runner_it_is_the_engines_class(engine_cls):
    before = threading.active_count()
    names: list[str] = []

    def builder() -> Any:
        names.append(threading.current_thread().name)
        return output_of(["a"] * 3)

    output = construct(make_async_output_cls(engine_cls), builder)
    assert output.get_output() is output.get_output()
    assert names != [threading.current_thread().name]
    assert threading.active_count() == before


def test_what_stores_something_unknown_is_made_by_the_engine_alone(engine_cls, thread, caplog):
    class Newer(engine_cls):
        def __init__(self, **given):
            super().__init__(**given)
            self.news = "unknown"

        def get_output(self):
            assert self.news == "unknown"
            return super().get_output()

    ran_on = []

    def build():
        ran_on.append(threading.current_thread().name)
        return output_of(["a", "b", "c"])

    packed_cls = make_async_output_cls(Newer, thread, SampledTokens())
    assert ["keeps something unknown" in record.message for record in caplog.records] == [True]
    assert construct(packed_cls, build).get_output().sampled_token_ids == [[7], [], [9]]
    assert ran_on != ["test-builder"]


def test_nor_are_tokens_packed_for_it(thread):
    class Newer(VllmOutput):
        def __init__(self, **given):
            self._background_thread = None
            self.news = given

    assert make_async_output_cls(Newer, thread, SampledTokens())._sampled_tokens is None


def test_the_engine_as_it_is_stores_nothing_unknown(engine_cls, thread, caplog):
    packed_cls = make_async_output_cls(engine_cls, thread, SampledTokens())
    assert packed_cls.builder_thread is thread
    assert packed_cls._sampled_tokens is not None
    assert not caplog.records


def test_nothing_of_a_step_outlives_it(packed_cls):
    class Payload:
        pass

    payload = Payload()
    alive = weakref.ref(payload)
    output = construct(packed_cls, lambda kept=payload: output_of(["a"] * 3))
    del payload
    output.get_output()
    gc.collect()
    assert alive() is None


def test_ten_thousand_steps_take_one_thread(packed_cls):
    construct(packed_cls, lambda: output_of(["a"] * 3)).get_output()
    count = threading.active_count()
    for _ in range(10_000):
        output = construct(packed_cls, lambda: output_of(["a"] * 3))
        assert threading.active_count() == count
        output.get_output()


def test_the_engines_name_is_lent_and_given_back():
    module = types.ModuleType("engine")
    module.OmniAsyncGPUModelRunnerOutput = OmniOutput
    upstream: Any = types.SimpleNamespace(runner_module=module, async_output_cls=OmniOutput)

    with constructed_as(upstream, VllmOutput):
        assert module.OmniAsyncGPUModelRunnerOutput is VllmOutput
        with constructed_as(upstream, dict):  # another runner, in the middle of our step
            assert module.OmniAsyncGPUModelRunnerOutput is VllmOutput
        assert module.OmniAsyncGPUModelRunnerOutput is VllmOutput
    assert module.OmniAsyncGPUModelRunnerOutput is OmniOutput

    ours = constructed_as(upstream, VllmOutput)
    with ours, ours:
        assert module.OmniAsyncGPUModelRunnerOutput is VllmOutput
    assert module.OmniAsyncGPUModelRunnerOutput is OmniOutput

    with pytest.raises(RuntimeError), constructed_as(upstream, VllmOutput):
        raise RuntimeError
    assert module.OmniAsyncGPUModelRunnerOutput is OmniOutput

    module.OmniAsyncGPUModelRunnerOutput = dict  # a test's own class stays
    with constructed_as(upstream, VllmOutput):
        assert module.OmniAsyncGPUModelRunnerOutput is dict
    assert module.OmniAsyncGPUModelRunnerOutput is dict
