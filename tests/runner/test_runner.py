"""The packed runner against the engine's own, through the engine's real `sample_tokens`, on stand-ins for streams."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="needs vllm-omni")

from omni_runner.async_output import PackedAsyncOutputMixin
from omni_runner.runner import PackedGPUARModelRunner, path_of
from omni_runner.warmup import reservations
from tests.runner.step_rig import (
    REQUESTS,
    STOCK,
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
    assert (stats.columns + stats.empty, stats.whole, stats.stock) == (3, {}, {})


def test_sparse_audio_yields_what_the_engines_own_runner_yields():
    stock, packed = (make_runner(cls, output_type="audio") for cls in (STOCK, PackedGPUARModelRunner))
    for marker in (["1"], ["0"], "true", 3, torch.tensor([1])):
        audio = {
            "audio": [torch.ones(5), torch.full((7,), 2.0)],
            "meta": {"req_id": ["d", "b"], "sparse_audio": marker},
        }
        assert_same(run(packed, payload()[0], audio), run(stock, payload()[0], audio))
    assert packed.omni_runner_stats().columns == 3
    assert sum(packed.omni_runner_stats().whole.values()) == 2


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
    drained_by = "omni-runner-builder" if not UPSTREAM.version.startswith("0.30") else main
    assert events == [("connector", drained_by)]


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
