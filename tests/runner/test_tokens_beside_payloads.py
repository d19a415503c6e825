"""Which payloads take their step's tokens along, and how those that do not are found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_runner import lowering, packing
from omni_runner.builder import ChannelBuilder
from omni_runner.packing import StepPacker
from spanpack import flatten
from tests.runner.packing_rig import ONE_LIST, UPSTREAM, WIDTH, numbered
from tests.support.steps import step_of


def test_hidden_rows_and_tokens_that_look_alike_are_told_apart(packer: StepPacker) -> None:
    step, payload, rows = step_of([1, 1]), {"x": numbered(2)}, numbered(2)
    with_hidden = packer.pack(step, hidden_states=rows, multimodal_outputs=payload)
    with_tokens = packer.pack(step, hidden_states=None, multimodal_outputs=payload, tokens=rows)
    for packed, keys, tokens in ((with_hidden, ["hidden", "x"], False), (with_tokens, ["x"], True)):
        assert packed.lowering is not None
        assert [recipe.key for recipe in packed.lowering.recipes] == keys
        assert (packed.lowering.tokens is not None) == tokens
        channel, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
        assert [list(payload) for payload in channel or ()] == [keys, keys]


def has_tokens(packer: StepPacker, payload: dict[str, Any], rows: int = 2) -> bool:
    step, tokens = step_of([1] * rows), torch.zeros(rows, 1)
    packed = packer.pack(step, hidden_states=None, multimodal_outputs=payload, tokens=tokens)
    assert packed.lowering is not None
    found = packed.lowering.tokens is not None
    if packed.snapshot is not None:
        assert len(packed.snapshot.plan.use.routes) == len(flatten(payload)[0]) + found  # no leaf that is not used
    return found


def test_an_odd_step_without_tokens_keeps_them_out_of_no_other(packer: StepPacker) -> None:
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    found = [has_tokens(packer, each) for each in (payload, {}, {"t": "text"}, payload, many, many, payload)]
    assert found == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("taken_between", [0, 1])
def test_after_many_refusals_tokens_are_left_out_for_a_while(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch, taken_between: int
) -> None:
    monkeypatch.setattr(packing, "_REST_STEPS", 5)
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    for number in range(packing._REFUSALS * (1 + taken_between) - taken_between):
        assert not has_tokens(packer, many)
        if taken_between and number < packing._REFUSALS * 2 - 2:
            assert has_tokens(packer, payload)
    assert [has_tokens(packer, payload) for _ in range(7)] == [False] * 5 + [True] * 2


def test_a_refusal_now_and_then_costs_nobody_its_tokens(packer: StepPacker) -> None:
    payload, many = {"x": numbered(2)}, {f"x{i}": numbered(2) for i in range(8)}
    for _ in range(4 * packing._REFUSALS):
        assert not has_tokens(packer, many)
        assert has_tokens(packer, payload)
        assert has_tokens(packer, payload)


def test_awaited_tokens_that_are_refused_keep_no_others_out(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "WITH_AWAITED_TOKENS_BYTES", 0)
    payload, step, tokens = {"x": numbered(2)}, step_of([1, 1]), torch.zeros(2, 1)
    for awaited in [True] * packing._REFUSALS + [False]:
        packed = packer.pack(
            step, hidden_states=None, multimodal_outputs=payload, tokens=tokens, tokens_awaited=awaited
        )
        assert packed.has_tokens is not awaited


def test_prefills_that_are_too_large_for_tokens_are_lowered_once(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "WITH_TOKENS_BYTES", 9 * WIDTH * 2)
    lowered = []
    lower = packer._lowerer.lower
    monkeypatch.setattr(packer._lowerer, "lower", lambda *given, **more: lowered.append(more) or lower(*given, **more))
    tokens = torch.zeros(2, 1)
    for rows, attempts in (([1, 8], 1), ([1, 9], 1), ([1, 1], 1)):
        lowered.clear()
        hidden = numbered(sum(rows))
        packed = packer.pack(step_of(rows), hidden_states=hidden, multimodal_outputs=None, tokens=tokens)
        assert len(lowered) == attempts
        assert packed.has_tokens == (sum(rows) <= 9)
