"""Steps that are the engine's: what is not covered, what fails, and what somebody else has replaced."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm_omni", reason="needs vllm-omni")

from omni_runner.packed_path import NO_METADATA
from omni_runner.runner import PackedGPUARModelRunner, path_of
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

needs_prefix_steps = pytest.mark.skipif(MINOR < (0, 30), reason="this version has no asynchronous prefix caching")


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
    assert sum(packed.omni_runner_stats().whole.values()) == 2
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
    assert list(runner.omni_runner_stats().whole) == ["full payloads are accumulated"]


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
        monkeypatch.setattr("omni_runner.packing.PackedWhole.payload", fail)
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
