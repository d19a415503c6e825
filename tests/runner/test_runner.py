"""The packed runner against the engine's own, through the engine's real `sample_tokens`, on stand-ins for streams."""

from __future__ import annotations

import gc
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_omni", reason="needs vllm-omni")

from omni_runner.async_output import PackedAsyncOutputMixin
from omni_runner.packed_path import NO_METADATA
from omni_runner.runner import PackedGPUARModelRunner, path_of
from omni_runner.warmup import reservations
from tests.runner.step_rig import (
    MINOR,
    REQUESTS,
    ROWS,
    STOCK,
    TOKENS,
    UPSTREAM,
    WIDTH,
    assert_same,
    install_stand_ins,
    make_runner,
    payload,
    run,
    sample,
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_ins(monkeypatch)


class PrefixCache:
    """Hands out each step once, as the engine's does; 0.30 on."""

    def __init__(self, runner: Any) -> None:
        self.consumed: list[int] = []
        runner.omni_prefix_cache = self
        runner._model_needs_full_prefix_hidden_states = lambda: False
        runner._prefix_cache_materialize = self.materialize

    def take(self, step_id: int) -> None:
        if step_id in self.consumed:
            raise RuntimeError(f"step {step_id} is consumed twice")
        self.consumed.append(step_id)

    def materialize(self, step_id: int, req_ids: list[str]) -> tuple[Any, Any]:
        self.take(step_id)
        hidden = {name: torch.full((2, WIDTH), float(i)) for i, name in enumerate(req_ids)}
        return hidden, {"codes.audio": {name: torch.full((2, 2), i) for i, name in enumerate(req_ids)}}

    discard_step = take


needs_prefix_steps = pytest.mark.skipif(MINOR < (0, 30), reason="this version has no asynchronous prefix caching")


@pytest.mark.parametrize("consumers", ["abcd", "bd", "a", ""])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sender": False},
        {"include_hidden": False},
        {"output_type": "text"},
        {"output_type": "audio"},
        {"omni_client_multimodal_output_keys": ("sr", "codes.audio")},
        {"output_type": "text", "omni_client_multimodal_output_keys": ("sr",)},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_a_step_yields_what_the_engines_own_runner_yields(options, consumers):
    stock = make_runner(STOCK, consumers=consumers, **options)
    packed = make_runner(PackedGPUARModelRunner, consumers=consumers, **options)
    for seed in range(3):
        assert_same(run(packed, *payload(seed)), run(stock, *payload(seed)))
    stats = packed.omni_runner_stats()
    assert (stats.columns + stats.empty, stats.mirror, stats.stock) == (3, {}, {})


def test_sparse_audio_yields_what_the_engines_own_runner_yields():
    stock, packed = (make_runner(cls, output_type="audio") for cls in (STOCK, PackedGPUARModelRunner))
    for marker in (["1"], ["0"], "true", 3, torch.tensor([1])):
        audio = {
            "audio": [torch.ones(5), torch.full((7,), 2.0)],
            "meta": {"req_id": ["d", "b"], "sparse_audio": marker},
        }
        assert_same(run(packed, payload()[0], audio), run(stock, payload()[0], audio))
    assert packed.omni_runner_stats().columns == 3
    assert sum(packed.omni_runner_stats().mirror.values()) == 2


def test_the_payload_is_safe_from_the_next_step():
    hidden, multimodal = payload()
    expected = run(make_runner(STOCK), *payload())
    output = sample(make_runner(PackedGPUARModelRunner), hidden, multimodal)
    hidden.fill_(-1)
    multimodal["codes"]["audio"].zero_()
    multimodal["embed"]["prefill"][0].zero_()
    multimodal["meta"]["segment_end"][0] = 7
    multimodal.pop("sr")
    assert_same(vars(output.get_output()), expected)


def test_the_output_is_ours_only_while_the_engine_samples():
    runner = make_runner(PackedGPUARModelRunner)
    output = sample(runner, *payload())
    assert isinstance(output, PackedAsyncOutputMixin)
    assert UPSTREAM.runner_module.OmniAsyncGPUModelRunnerOutput is UPSTREAM.async_output_cls
    assert output.get_output() is output.get_output()


def test_the_engines_other_paths_are_untouched():
    stock, packed = make_runner(STOCK), make_runner(PackedGPUARModelRunner)
    for runner in (stock, packed):
        runner.use_async_scheduling = False
    outputs = [sample(runner, *payload()) for runner in (packed, stock)]
    assert_same(*map(vars, outputs))
    assert packed.omni_runner_stats().steps == 0


def test_a_live_runner_may_be_given_the_class():
    runner = make_runner(STOCK)
    expected = run(runner, *payload())
    runner.__class__ = PackedGPUARModelRunner
    PackedGPUARModelRunner.on_swap(runner)
    assert_same(run(runner, *payload()), expected)
    assert runner.omni_runner_stats().columns == 1
    runner.__class__ = STOCK
    assert_same(run(runner, *payload()), expected)


def test_memory_is_reserved_from_the_smallest_step_to_the_largest():
    thinker = list(reservations(row_bytes=4096, max_requests=64, max_tokens=8192))
    assert [nbytes >> 10 for nbytes, _ in thinker] == [64, 128, 256, 512, 1024, 2048, 65536]
    assert list(reservations(row_bytes=0, max_requests=64, max_tokens=8192)) == [(1 << 16, 2)]
    assert max(reservations(row_bytes=1 << 20, max_requests=512, max_tokens=1 << 20)) == (1 << 26, 2)


def test_a_loaded_runner_is_warmed_up(monkeypatch):
    monkeypatch.setattr(STOCK, "load_model", lambda self: None)
    reserved: list[int] = []
    monkeypatch.setattr("spanpack.Packer.reserve", lambda self, nbytes, slabs: reserved.append(nbytes))
    runner = make_runner(PackedGPUARModelRunner)
    runner.dtype, runner.hidden_size, runner.max_num_reqs, runner.max_num_tokens = torch.bfloat16, WIDTH, 4, 64
    runner.load_model()
    assert reserved
    del runner.hidden_size  # a version that calls it something else still serves
    runner.load_model()
    assert runner.omni_runner_stats().steps == 0
    assert_same(run(runner, *payload()), run(make_runner(STOCK), *payload()))


def snapshot_arguments() -> dict[str, Any]:
    hidden, multimodal = payload()
    return {
        "use_async_omni_output": True,
        "hidden_states": hidden,
        "staged_hidden_states_cpu": None,
        "multimodal_outputs": multimodal,
    }


def test_a_snapshot_without_metadata_is_the_engines():
    snapshots = []
    for cls in (PackedGPUARModelRunner, STOCK):
        runner = make_runner(cls)
        snapshots.append(runner._snapshot_omni_output_tensors_for_async_output(**snapshot_arguments()))
        snapshots[-1].async_payload.wait()
    assert_same(snapshots[0][:3], snapshots[1][:3])


def test_metadata_of_another_step_is_not_used():
    runner = make_runner(PackedGPUARModelRunner)
    hidden, multimodal = payload(1)
    runner._maybe_run_eager_omni_postprocess_before_async_output(
        hidden_states=hidden,
        multimodal_outputs=multimodal,
        num_scheduled_tokens_np=np.array(ROWS),
        scheduler_output=SimpleNamespace(total_num_scheduled_tokens=TOKENS),
        req_ids_output_copy=REQUESTS,
        query_start_loc_cpu=torch.tensor([0, *np.cumsum(ROWS)]),
    )
    snapshot = runner._snapshot_omni_output_tensors_for_async_output(**snapshot_arguments())
    assert type(snapshot) is UPSTREAM.runner_module._OmniOutputTensorSnapshot
    assert runner.omni_runner_stats().stock == {NO_METADATA: 1}


def test_the_models_postprocess_runs_before_the_pack():
    seen: list[str] = []

    def postprocess(hidden: torch.Tensor, *, multimodal_outputs: Any, **info: Any) -> dict[str, Any]:
        seen.append(threading.current_thread().name)
        multimodal_outputs["codes"]["audio"] += 1  # what it writes is part of the payload
        return {}

    options = {
        "has_postprocess": True,
        "eager_omni_postprocess_before_async_output": True,
        "postprocess": postprocess,
    }
    stock, packed = (make_runner(cls, **options) for cls in (STOCK, PackedGPUARModelRunner))
    for runner in (stock, packed):
        runner._update_intermediate_buffer = lambda *_: None
    assert_same(run(packed, *payload()), run(stock, *payload()))
    assert set(seen) == {threading.current_thread().name}
    assert packed.omni_runner_stats().columns == 1


def test_who_does_what_on_which_thread():
    runner = make_runner(PackedGPUARModelRunner)
    main = threading.current_thread().name
    events: list[tuple[str, str]] = []

    def note(event: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_, **__: events.append((event, threading.current_thread().name)) or result

    runner.get_omni_connector_output = note("connector", "signals")
    output = sample(runner, *payload())
    assert output.get_output().omni_connector_output == "signals"
    drained_by = "omni-runner-builder" if UPSTREAM.drains_connector_in_builder else main
    assert events == [("connector", drained_by)]


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What our logger warns of; the engine's loggers don't propagate to where caplog looks."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.omni_runner")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def test_a_failing_pack_leaves_the_step_to_the_engine(monkeypatch, messages):
    runner = make_runner(PackedGPUARModelRunner)
    expected = run(make_runner(STOCK), *payload())
    assert_same(run(runner, *payload()), expected)
    monkeypatch.setattr(path_of(runner)._packer, "run", lambda *_, **__: 1 / 0)
    for _ in range(3):
        assert_same(run(runner, *payload()), expected)
    stats = runner.omni_runner_stats()
    assert stats.columns == 1
    assert list(stats.stock.values()) == [3]
    assert next(iter(stats.stock)).startswith("ZeroDivisionError")
    assert ["ZeroDivisionError" in message for message in messages] == [True]


def test_unreadable_settings_leave_the_step_to_the_engine(monkeypatch):
    monkeypatch.setenv("OMNI_RUNNER_PINNED_MIB", "lots")
    runner = make_runner(PackedGPUARModelRunner)
    assert_same(run(runner, *payload()), run(make_runner(STOCK), *payload()))
    assert list(runner.omni_runner_stats().stock.values()) == [1]


def test_what_columns_do_not_cover_is_packed_whole():
    hidden, multimodal = payload()
    multimodal["nested"] = {"deep": {"er": torch.arange(6.0)}}
    stock, packed = make_runner(STOCK), make_runner(PackedGPUARModelRunner)
    for _ in range(2):
        assert_same(run(packed, hidden, multimodal), run(stock, hidden, multimodal))
    assert sum(packed.omni_runner_stats().mirror.values()) == 2
    assert packed.omni_runner_stats().pack.packs == 2


def test_what_cannot_be_packed_at_all_is_left_to_the_engine_with_the_reason(messages):
    hidden, multimodal = payload()
    multimodal["odd"] = MappingProxyType({"a": torch.ones(2)})
    packed = make_runner(PackedGPUARModelRunner)
    for _ in range(2):
        assert_same(run(packed, hidden, multimodal), run(make_runner(STOCK), hidden, multimodal))
    assert packed.omni_runner_stats().stock == {"a container of type Mapping": 2}
    assert len(messages) == 1


def test_accumulated_payloads_go_through_the_engines_builder():
    kept: dict[type, list[Any]] = {}
    for cls in (STOCK, PackedGPUARModelRunner):
        runner = make_runner(cls, consumers="ac")
        kept[cls] = []
        runner._should_accumulate_full_payload_output = lambda: True
        runner.accumulate_full_payload_output = lambda name, item, request, cls=cls: kept[cls].append((name, item))
        run(runner, *payload())
    assert [name for name, _ in kept[STOCK]] == ["a", "c"]
    assert_same(kept[PackedGPUARModelRunner], kept[STOCK])
    assert list(runner.omni_runner_stats().mirror) == ["full payloads are accumulated"]


@needs_prefix_steps
@pytest.mark.parametrize("consumers", ["abcd", "c", ""])
def test_a_prefix_cache_step_is_consumed_once(consumers):
    outputs = []
    for cls in (PackedGPUARModelRunner, STOCK):
        runner = make_runner(cls, consumers=consumers)
        cache = PrefixCache(runner)
        hidden, multimodal = payload()
        staged = hidden[:TOKENS].clone()
        for step_id in (5, 6):
            step = {"hidden_states_cpu": staged, "prefix_cache_step_id": step_id}
            outputs += [run(runner, hidden, multimodal, **step)]
        assert cache.consumed == [5, 6]
    assert_same(outputs[:2], outputs[2:])


@needs_prefix_steps
@pytest.mark.parametrize("broken", ["wait", "unpack", "before the merge", "after the merge", "discard"])
def test_a_prefix_cache_step_is_consumed_once_when_something_raises(monkeypatch, broken):
    runner = make_runner(PackedGPUARModelRunner, consumers="" if broken == "discard" else "abcd")
    cache = PrefixCache(runner)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"broken: {broken}")

    if broken == "wait":
        monkeypatch.setattr("spanpack.Snapshot.wait", fail)
    elif broken == "unpack":
        monkeypatch.setattr("omni_runner.packing.PackedTree.payload", fail)
    elif broken == "before the merge":
        runner._should_defer_full_payload_d2h = fail
    elif broken == "after the merge":
        runner._build_omni_pooler_payload = fail
    else:
        runner._build_omni_step_outputs = fail
    hidden, multimodal = payload()
    output = sample(runner, hidden, multimodal, hidden_states_cpu=hidden[:TOKENS], prefix_cache_step_id=9)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"broken: {broken}"):
            output.get_output()
    assert cache.consumed == [9]


def test_profiler_ranges(monkeypatch):
    ranges: list[str] = []

    @contextmanager
    def record(name: str) -> Iterator[None]:
        ranges.append(name)
        yield

    monkeypatch.setattr("vllm.v1.utils._PROFILER_FUNC", record)
    run(make_runner(STOCK), *payload())
    stock, ranges[:] = set(ranges), []
    run(make_runner(PackedGPUARModelRunner), *payload())
    per_request = {name for name in stock if name.startswith("omni_output_builder:") and name not in ranges}
    assert stock - per_request <= set(ranges)
    assert {"omni_async_output:snapshot_cpu_payload", "omni_runner:build_channels"} <= set(ranges)


def test_a_trace_is_recorded(monkeypatch, tmp_path):
    pytest.importorskip("safetensors")
    monkeypatch.setenv("OMNI_RUNNER_TRACE", str(tmp_path))
    monkeypatch.setenv("OMNI_RUNNER_TRACE_STEPS", "2")
    runner = make_runner(PackedGPUARModelRunner, consumers="bd")
    for seed in range(3):
        run(runner, *payload(seed))
    (written,) = tmp_path.glob("*.json")
    trace = json.loads(written.read_text())
    assert trace["stage"] == "thinker"
    assert [step["needs_payload"] for step in trace["steps"]] == [["b", "d"]] * 2
    assert runner.omni_runner_stats().columns == 3


def test_a_trace_that_cannot_be_recorded_costs_no_step(monkeypatch, tmp_path, messages):
    monkeypatch.setenv("OMNI_RUNNER_TRACE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "omni_runner.trace_record", None)  # as without safetensors
    runner = make_runner(PackedGPUARModelRunner)
    for seed in range(2):
        assert_same(run(runner, *payload(seed)), run(make_runner(STOCK), *payload(seed)))
    assert runner.omni_runner_stats().columns == 2
    assert ["no trace" in message for message in messages] == [True]


def test_the_engine_shuts_down_even_if_we_cannot(monkeypatch, messages):
    done: list[str] = []
    monkeypatch.setattr(STOCK, "shutdown", lambda self: done.append("engine"))
    runner = make_runner(PackedGPUARModelRunner)
    run(runner, *payload())
    monkeypatch.setattr(path_of(runner), "close", lambda: 1 / 0)
    runner.shutdown()
    assert done == ["engine"]
    assert len(messages) == 1


def test_shutdown_finishes_what_is_in_flight(monkeypatch):
    monkeypatch.setattr(STOCK, "shutdown", lambda self: None)
    runner = make_runner(PackedGPUARModelRunner)
    output = sample(runner, *payload())
    runner.shutdown()
    runner.shutdown()
    assert path_of(runner).builder_thread.close() is True
    assert output.get_output().req_ids == REQUESTS
    # A step after all: the engine's snapshot, built by whoever asks for it.
    assert_same(run(runner, *payload()), run(make_runner(STOCK), *payload()))


def test_a_thousand_steps_take_one_thread():
    runner = make_runner(PackedGPUARModelRunner)
    hidden, multimodal = payload()
    gc.collect()  # ends the threads of the other tests' runners
    run(runner, hidden, multimodal)
    count = threading.active_count()
    for _ in range(1000):
        output = sample(runner, hidden, multimodal)
        assert threading.active_count() <= count
        output.get_output()
    assert runner.omni_runner_stats().columns == 1001


def test_a_replaced_snapshot_helper_is_used(monkeypatch):
    """Whoever puts a function of their own in its place, a test or another plugin, wants it called."""
    called = []
    module = sys.modules[STOCK.__module__]
    helper = module._snapshot_tensor_payload_to_cpu_async

    def replacement(value, **options):
        called.append(options)
        return helper(value, **options)

    monkeypatch.setattr(module, "_snapshot_tensor_payload_to_cpu_async", replacement)
    runner = make_runner(PackedGPUARModelRunner)
    run(runner, *payload())
    assert len(called) == 1
    assert sum(runner.omni_runner_stats().stock.values()) == 1


@pytest.mark.parametrize(
    ("config", "crosses"),
    [
        (None, False),
        (SimpleNamespace(world_size=1, distributed_executor_backend="uni"), False),
        (SimpleNamespace(world_size=1, distributed_executor_backend="mp"), True),
        (SimpleNamespace(world_size=2, distributed_executor_backend=None), True),
    ],
    ids=["unknown", "one process", "worker process", "tensor parallel"],
)
def test_payloads_get_storages_of_their_own_where_they_are_pickled(config: Any, crosses: bool) -> None:
    from omni_runner.packed_path import _crosses_processes

    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=config))
    assert _crosses_processes(runner) is crosses


@pytest.mark.parametrize("wanted", [True, False])
def test_python_is_tuned_while_the_path_is_open(monkeypatch: pytest.MonkeyPatch, *, wanted: bool) -> None:
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr("omni_runner.interpreter.tune", lambda path: asked.append(("tune", path)))
    monkeypatch.setattr("omni_runner.interpreter.restore", lambda path: asked.append(("restore", path)))
    monkeypatch.setenv("OMNI_RUNNER_TUNE_PYTHON", str(int(wanted)))
    runner = make_runner(PackedGPUARModelRunner)
    run(runner, *payload())
    path = path_of(runner)
    path.close()
    assert asked == [("tune", path)] * wanted + [("restore", path)]
