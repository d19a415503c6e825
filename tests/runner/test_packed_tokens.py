"""The sampled tokens in their step's pack: through the engine's real `sample_tokens`, on a simulated device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="needs vllm-omni")

from omni_runner import lowering
from omni_runner.packed_path import PackedPath
from omni_runner.runner import PackedGPUARModelRunner, path_of
from tests.runner.step_rig import STOCK, assert_same, install_stand_ins, make_runner, payload, run, sample
from tests.support.rig import Rig
from tests.support.steps import step_of


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_ins(monkeypatch)


def say_what_is_sampled(runner: Any, *, another_tensor: bool = False) -> None:
    """Have bookkeeping say, as the engine's does, which tokens the output is made with; or others."""
    bookkeeping = runner._bookkeeping_sync

    def remember(scheduled: Any, sampled: Any, *others: Any) -> Any:
        tokens = sampled.sampled_token_ids
        runner.input_batch.prev_sampled_token_ids = tokens + 1 if another_tensor else tokens
        return bookkeeping(scheduled, sampled, *others)

    runner._bookkeeping_sync = remember


def simulated(rig: Rig, runner: Any) -> PackedPath:
    """The path of a runner that packs on the rig's engine."""
    path = path_of(runner)
    path._open(runner)
    rig.drive(path._packer)
    return path


@pytest.mark.parametrize("case", ["packed", "another tensor", "awaited", "awaited behind too much", "many leaves"])
def test_sampled_tokens_come_in_the_pack_where_they_can(monkeypatch, case):
    """The runner says what it has sampled; the output is made with that, or with others."""
    hidden, multimodal = payload()
    if case != "many leaves":
        multimodal = {"hidden_states": multimodal["hidden_states"], "codes": multimodal["codes"]}

    if case == "awaited behind too much":
        monkeypatch.setattr(lowering, "WITH_AWAITED_TOKENS_BYTES", 0)

    def on(cls: type[Any]) -> Any:
        runner = make_runner(cls)
        say_what_is_sampled(runner, another_tensor=case == "another tensor")
        if case.startswith("awaited"):
            runner.input_batch.sampling_metadata.output_token_ids = [[1]]
        return runner

    rig, runner = Rig(), on(PackedGPUARModelRunner)
    path = simulated(rig, runner)
    expected = run(on(STOCK), hidden, multimodal)
    for _ in range(3):
        output = sample(runner, hidden, multimodal)
        assert_same(vars(output.get_output()), expected)
        assert output.sampled_token_ids_cpu.flatten().tolist() == [0, 1, 2, 3]
    assert path._sampled_tokens.expected is None
    assert rig.device.launches == 3
    stats = runner.omni_runner_stats()
    assert (stats.columns, stats.tokens_packed, stats.token_copies) == (3, 3 * (case in ("packed", "awaited")), 0)
    del output
    gc.collect()
    assert rig.pool.in_use == 0


def test_nothing_of_a_step_that_fails_after_its_pack_is_kept(monkeypatch):
    hidden, multimodal = payload()
    multimodal = {"codes": multimodal["codes"]}
    rig, runner = Rig(), make_runner(PackedGPUARModelRunner)
    path = simulated(rig, runner)
    runner.input_batch.prev_sampled_token_ids = torch.zeros(4, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr(path.output_cls, "__init__", fail)  # what `sample_tokens` calls last, in every version
    with pytest.raises(RuntimeError, match="simulated"):
        sample(runner, hidden, multimodal)
    gc.collect()
    assert path.pending is None
    assert path._sampled_tokens.expected is None
    assert rig.pool.in_use == 0


@pytest.mark.parametrize("builder", ["its thread", "closed"])
def test_promised_tokens_are_kept(builder: str) -> None:
    """They become a tensor on the builder thread; where that is closed, `get_output` makes them."""
    hidden, multimodal = payload()
    multimodal = {"codes": multimodal["codes"]}
    rig, runner = Rig(), make_runner(PackedGPUARModelRunner)
    say_what_is_sampled(runner)
    path = simulated(rig, runner)
    if builder == "closed":
        path.builder_thread.close()
    output = sample(runner, hidden, multimodal)
    assert output.sampled_token_ids_cpu.shape == (4, 1)
    assert runner.omni_runner_stats().tokens_packed == 1
    assert output.get_output().sampled_token_ids == [[0], [], [2], [3]]
    assert isinstance(output.sampled_token_ids_cpu, torch.Tensor) == (builder == "its thread")


def test_tokens_outlive_the_release_of_their_step() -> None:
    path = simulated(Rig(), make_runner(PackedGPUARModelRunner))
    assert path._steps is not None
    codes, tokens = torch.arange(8).view(4, 2), torch.arange(4)[:, None]
    step = path._steps.pack(step_of([1] * 4), hidden_states=None, multimodal_outputs={"codes": codes}, tokens=tokens)
    assert step.has_tokens
    assert step.tokens().tolist() == tokens.tolist()
    step.release()
    assert step.tokens().tolist() == tokens.tolist()


def test_tokens_that_the_builder_has_made_and_released_meanwhile_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = simulated(Rig(), make_runner(PackedGPUARModelRunner))
    assert path._steps is not None
    codes, tokens = torch.arange(8).view(4, 2), torch.arange(4)[:, None]
    step = path._steps.pack(step_of([1] * 4), hidden_states=None, multimodal_outputs={"codes": codes}, tokens=tokens)
    assert step.snapshot is not None
    wait = step.snapshot.wait

    def builder_is_quicker(snapshot: Any) -> None:
        wait()
        step.made_tokens = tokens.clone()
        step.release()

    monkeypatch.setattr(type(step.snapshot), "wait", builder_is_quicker)
    assert step.tokens() is step.made_tokens
    assert step.tokens().tolist() == tokens.tolist()


def test_awaited_tokens_may_be_looked_at_while_the_builder_is_at_work() -> None:
    """As the next step's sampling does: wait for the event, then read."""
    rig, runner = Rig(), make_runner(PackedGPUARModelRunner)
    seen = []

    def look(tokens: Any, event: Any) -> None:
        event.synchronize()
        seen.append(tokens.tolist())

    say_what_is_sampled(runner)
    runner.input_batch.sampling_metadata.output_token_ids = [[1]]
    runner.input_batch.set_async_sampled_token_ids = look
    simulated(rig, runner)
    hidden, multimodal = payload()
    for _ in range(20):
        output = sample(runner, hidden, {"codes": multimodal["codes"]})
        assert output.get_output().sampled_token_ids == [[0], [], [2], [3]]
    assert seen == [[[0], [1], [2], [3]]] * 20
    assert runner.omni_runner_stats().tokens_packed == 20
