"""The worker class: which runner it makes, how it falls back, and what it logs."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import omni_runner
from omni_runner import worker as worker_module
from omni_runner.compat import ATTRIBUTES
from omni_runner.eligibility import StageFacts
from omni_runner.errors import StageRefused, UpstreamMismatch
from omni_runner.worker import make_worker_cls, stage_reasons

PLATFORM_FLAGS = ("cuda", "rocm", "npu", "xpu", "musa")


class StockRunner:
    pass


class PackedRunner(StockRunner):
    pass


class Platform:
    """A platform of vllm-omni, as far as we look at it."""

    def __init__(self, name: str) -> None:
        for flag in PLATFORM_FLAGS:
            setattr(self, f"is_{flag}", lambda flag=flag: flag == name)
        self.is_out_of_tree = lambda: False


class Worker28:
    """Picks its runner as 0.28 and 0.30 do."""

    model_runner_cls: type[Any] = StockRunner
    use_v2_model_runner = False

    def __init__(self, worker_type: str = "ar") -> None:
        self.model_config = types.SimpleNamespace(worker_type=worker_type, stage_id=3, model_stage="talker")

    def init_device(self) -> None:
        self.model_runner = self.model_runner_cls()

    def compile_or_warm_up_model(self) -> float:
        return 1.5


def old_worker_cls() -> type[Any]:
    """A worker that picks its runner as 0.24 and 0.26 do: by a global of its module, under a decorator."""
    module = types.ModuleType("old_worker")
    module.__dict__.update(StockRunner=StockRunner)
    source = """
import functools

def traced(function):
    @functools.wraps(function)
    def call(self):
        return function(self)
    return call

class Worker24:
    use_v2_model_runner = False

    @traced
    def init_device(self):
        if self.fails:
            raise RuntimeError("no device")
        self.model_runner = StockRunner()
"""
    exec(source, module.__dict__)
    return module.Worker24  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A CUDA platform, names that resolve, and nothing in the environment."""
    for name in ("OMNI_RUNNER_STRICT", "OMNI_RUNNER_PINNED_MIB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_module, "current_platform", lambda: Platform("cuda"))
    fakes = types.SimpleNamespace(
        compat=types.SimpleNamespace(resolve=lambda: types.SimpleNamespace(runner_cls=StockRunner)),
        runner=types.SimpleNamespace(PackedGPUARModelRunner=PackedRunner),
    )
    for name, fake in vars(fakes).items():
        monkeypatch.setitem(sys.modules, f"omni_runner.{name}", fake)
        monkeypatch.setattr(omni_runner, name, fake, raising=False)
    return fakes


def test_newer_worker_makes_our_runner() -> None:
    cls = make_worker_cls(Worker28)
    assert issubclass(cls, Worker28)
    assert cls.model_runner_cls is PackedRunner
    worker = cls()
    worker.init_device()
    assert type(worker.model_runner) is PackedRunner
    assert Worker28.model_runner_cls is StockRunner


def test_older_worker_makes_our_runner_and_its_module_is_left_as_it_was() -> None:
    stock = old_worker_cls()
    worker = make_worker_cls(stock)()
    worker.model_config, worker.fails = types.SimpleNamespace(), False
    worker.init_device()
    assert type(worker.model_runner) is PackedRunner
    plain = stock()
    plain.fails = False
    plain.init_device()
    assert type(plain.model_runner) is StockRunner


def test_older_workers_module_is_restored_after_an_error() -> None:
    stock = old_worker_cls()
    worker = make_worker_cls(stock)()
    worker.model_config, worker.fails = types.SimpleNamespace(), True
    with pytest.raises(RuntimeError, match="no device"):
        worker.init_device()
    assert stock.init_device.__wrapped__.__globals__["StockRunner"] is StockRunner


def missing_name() -> None:
    raise UpstreamMismatch("vllm-omni 0.99 lacks GPUARModelRunner.sample_tokens; known to work: 0.24, 0.30")


def test_missing_names_leave_the_stock_runner_with_one_warning(
    engine: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine.compat.resolve = missing_name
    with caplog.at_level(logging.WARNING):
        cls = make_worker_cls(Worker28)
    worker = cls()
    worker.init_device()
    assert type(worker.model_runner) is StockRunner
    (record,) = caplog.records
    assert "lacks GPUARModelRunner.sample_tokens; known to work: 0.24, 0.30" in record.getMessage()
    assert stage_reasons(worker, last_pipeline_rank=True) == (cls._omni_runner_refusal,)


def test_strict_refuses_to_start(engine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_RUNNER_STRICT", "1")
    assert make_worker_cls(Worker28).model_runner_cls is PackedRunner
    engine.compat.resolve = missing_name
    with pytest.raises(StageRefused, match=r"lacks GPUARModelRunner\.sample_tokens"):
        make_worker_cls(Worker28)


def test_strict_holds_beside_settings_that_are_unreadable(
    engine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_RUNNER_STRICT", "1")
    monkeypatch.setenv("OMNI_RUNNER_PINNED_MIB", "lots")
    with pytest.raises(StageRefused, match="OMNI_RUNNER_PINNED_MIB"):
        make_worker_cls(Worker28)


def test_variables_without_effect_are_named_where_a_stage_runs(
    engine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMNI_RUNNER_UNTRACK", "0")
    assert make_worker_cls(Worker28).model_runner_cls is PackedRunner
    (record,) = caplog.records
    assert "OMNI_RUNNER_UNTRACK has no effect" in record.getMessage()


def test_unreadable_settings_leave_the_stock_runner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMNI_RUNNER_PINNED_MIB", "plenty")
    with caplog.at_level(logging.WARNING):
        assert make_worker_cls(Worker28).model_runner_cls is StockRunner
    assert "OMNI_RUNNER_PINNED_MIB='plenty'" in caplog.text


def test_errors_of_any_kind_leave_the_stock_runner(engine: types.SimpleNamespace) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    engine.compat.resolve = broken
    assert make_worker_cls(Worker28)._omni_runner_refusal == "ZeroDivisionError"


@pytest.mark.parametrize("name", ["npu", "xpu", "musa"])
def test_other_platforms_are_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, engine: types.SimpleNamespace
) -> None:
    monkeypatch.setattr(worker_module, "current_platform", lambda: Platform(name))
    engine.compat.resolve = missing_name  # not even asked
    cls = make_worker_cls(Worker28)
    assert cls.model_runner_cls is StockRunner
    assert cls._omni_runner_refusal == f"platform {name} is left alone"


def test_a_worker_with_a_runner_of_its_own_is_left_alone() -> None:
    class Custom(Worker28):
        model_runner_cls = int

    cls = make_worker_cls(Custom)
    assert cls.model_runner_cls is int
    assert "Custom runs int, not StockRunner" in cls._omni_runner_refusal


def test_a_worker_that_hides_its_choice_is_left_alone() -> None:
    class Hidden:
        def init_device(self) -> None:
            pass

    assert "does not say how it picks its runner" in make_worker_cls(Hidden)._omni_runner_refusal


def test_generation_stages_are_refused() -> None:
    worker = make_worker_cls(Worker28)("generation")
    with pytest.raises(StageRefused, match=r"stage 3 \(talker\) is a generation stage: remove `worker_cls"):
        worker.init_device()


class Group:
    """A process group of vLLM."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank_in_group, self.world_size = rank, size
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1


def start(monkeypatch: pytest.MonkeyPatch, pipeline: Group, tensor: Group, **attributes: Any) -> Any:
    """Start a worker whose runner has nothing against the packed path but its rank."""
    groups = types.SimpleNamespace(get_pp_group=lambda: pipeline, get_tp_group=lambda: tensor)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(distributed=groups))
    monkeypatch.setitem(sys.modules, "vllm.distributed", groups)
    monkeypatch.setattr(worker_module, "runner_facts", lambda runner, **facts: StageFacts(**facts))
    monkeypatch.setattr(PackedRunner, "_should_use_async_omni_output", lambda self: True, raising=False)
    for name in ATTRIBUTES:
        monkeypatch.setattr(PackedRunner, name, None, raising=False)
    worker = make_worker_cls(Worker28)()
    worker.init_device()
    for name, value in attributes.items():
        setattr(worker, name, value)
    assert worker.compile_or_warm_up_model() == 1.5
    return worker


def test_one_line_at_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(monkeypatch, Group(), Group(0, 2))
        start(monkeypatch, Group(), Group(1, 2))  # the second tensor-parallel rank is silent
    assert caplog.messages == ["omni_runner: stage 3 (talker): packed asynchronous output"]


def test_each_pipeline_rank_says_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(monkeypatch, Group(0, 2), Group())
        start(monkeypatch, Group(1, 2), Group())
    first, last = caplog.messages
    assert "stage 3 (talker), pipeline rank 0: the engine's own output path: not the last rank" in first
    assert last == "omni_runner: stage 3 (talker), pipeline rank 1: packed asynchronous output"


def test_model_runner_v2_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(monkeypatch, Group(), Group(), use_v2_model_runner=True)
    assert "Model Runner V2" in caplog.text


def test_a_runner_without_an_attribute_that_packing_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(monkeypatch, Group(), Group())
    monkeypatch.delattr(PackedRunner, "omni_prefix_cache")
    with caplog.at_level(logging.INFO):
        worker.compile_or_warm_up_model()
    assert "the engine's own output path: the runner has no omni_prefix_cache" in caplog.text
    monkeypatch.setenv("OMNI_RUNNER_STRICT", "1")
    with pytest.raises(StageRefused, match="the runner has no omni_prefix_cache"):
        worker.compile_or_warm_up_model()


def test_a_condition_that_only_the_engine_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(monkeypatch, Group(), Group())
    monkeypatch.setattr(PackedRunner, "_should_use_async_omni_output", lambda self: False)
    (reason,) = stage_reasons(worker, last_pipeline_rank=True)
    assert "the engine's own check declines" in reason


def test_a_report_that_fails_does_not_keep_a_stage_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker_cls(Worker28)()
    groups = types.SimpleNamespace(get_pp_group=object, get_tp_group=Group)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(distributed=groups))
    monkeypatch.setitem(sys.modules, "vllm.distributed", groups)
    assert worker.compile_or_warm_up_model() == 1.5
    assert "cannot tell which path stage 3 (talker) takes" in caplog.text


REAL_ENGINE = """
import pickle
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_ar_worker import GPUARWorker
cls = resolve_obj_by_qualname("omni_runner.PackedGPUARWorker")
assert issubclass(cls, GPUARWorker) and cls._omni_runner_refusal == "", cls._omni_runner_refusal
assert cls is resolve_obj_by_qualname("omni_runner.PackedGPUARWorker")
assert pickle.loads(pickle.dumps(cls)) is cls
import omni_runner
assert cls.model_runner_cls is omni_runner.PackedGPUARModelRunner
assert issubclass(omni_runner.PackedGPUARModelRunner, GPUARModelRunner)
try:
    from vllm_omni.worker.omni_connector_validation import validate_worker_omni_connector
except ImportError:
    pass  # 0.24, 0.26
else:
    validate_worker_omni_connector("omni_runner.PackedGPUARWorker", True)
"""


def test_the_real_engine_resolves_it() -> None:
    pytest.importorskip("vllm_omni")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", REAL_ENGINE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pickled_by_its_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = make_worker_cls(Worker28)
    monkeypatch.setitem(vars(omni_runner), "PackedGPUARWorker", cls)
    assert pickle.loads(pickle.dumps(cls)) is cls
