"""Lowering remembers structures: steps that were never seen get the plans they would get from scratch."""

from __future__ import annotations

import re
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_runner.lowering import Lowerer, Lowering
from omni_runner.reference import SPARSE_PROTOCOL_KEYS, flatten_payload
from omni_runner.step import NotCovered, StepContext
from spanpack import Plan, flatten
from spanpack.leaf_table import LeafTable
from spanpack.segments import MOST_PASSED
from tests.support.plans import assert_same_plan
from tests.support.steps import step_of

UPSTREAM: Any = SimpleNamespace(flatten_payload=flatten_payload, sparse_protocol_keys=SPARSE_PROTOCOL_KEYS)
DEVICES = ("cpu", "meta")  # meta tensors stand for those of a GPU


def lower(
    lowerer: Lowerer, step: StepContext, payload: dict[str, Any], hidden: Tensor | None, tokens: Tensor | None = None
) -> Lowering:
    leaves, spec, values = flatten(payload)
    leaves += [leaf for leaf in (hidden, tokens) if leaf is not None]
    found = lowerer.lower(step, spec, len(values), leaves, has_hidden=hidden is not None, has_tokens=tokens is not None)
    if found is None:
        raise Refused
    return found


class Refused(Exception):
    """Tokens are not packed along."""


def attempt(lowerer: Lowerer, step: tuple[StepContext, dict[str, Any], Tensor | None]) -> Lowering | str:
    """The lowering, or the reason why there is none."""
    try:
        return lower(lowerer, *step)
    except NotCovered as reason:
        return str(reason)


class Steps:
    """Random steps of a few structures: rows, consumers, padding and the rows of list elements are other ones each."""

    def __init__(self, seed: int, device: str) -> None:
        self._source = Random(seed)
        self._device = device

    def zeros(self, rows: int, *row_shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(rows, *row_shape, dtype=dtype, device=self._device)

    def next(self) -> tuple[StepContext, dict[str, Any], Tensor | None]:
        source = self._source
        requests = source.choice([1, 4, 4, 7])
        rows = [source.choice([1, 1, 1, 0, source.randint(2, 300)]) for _ in range(requests)]
        padding = source.choice([0, 0, 3])
        consumers = sorted(source.sample(range(requests), source.randint(1, requests)))
        sparse = source.sample(consumers, len(consumers)) if source.random() < 0.2 else None
        step = step_of(rows, source.choice([None, consumers]), sparse=sparse)
        payload = source.choice([self.thinker, self.tts, self.mixed])(sum(rows), requests, padding)
        return step, payload, source.choice([None, self.zeros(sum(rows) + padding, 1024)])

    def thinker(self, tokens: int, requests: int, padding: int) -> dict[str, Any]:
        rows = tokens + padding
        return {
            "hidden_states": {"layers": {0: self.zeros(rows, 1024), 24: self.zeros(rows, 2048)[:, :1024]}},
            "embed": {name: [self.zeros(1, 1, 1024)] for name in ("bos", "eos")},
            "cpu": torch.zeros(tokens, 2),
        }

    def tts(self, tokens: int, requests: int, padding: int) -> dict[str, Any]:
        codes = [self.zeros(self._source.choice([1, 1, 1, 5]), 16, dtype=torch.int64) for _ in range(requests)]
        return {"codes": codes, "meta": {"frame": self.zeros(requests, dtype=torch.int32), "final": [True] * requests}}

    def mixed(self, tokens: int, requests: int, padding: int) -> dict[str, Any]:
        kinds = [self.zeros(2, 3), self.zeros(2, 3).float(), torch.tensor(1.0, device=self._device), 5]
        return {"kinds": [self._source.choice(kinds[:2]), *kinds], "strided": self.zeros(9, tokens).t(), "text": "x"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_a_structure_known_gives_what_one_never_seen_gives(seed: int, device: str) -> None:
    steps, lowerer = Steps(seed, device), Lowerer(UPSTREAM, capacity=3)
    covered = 0
    for _ in range(150):
        step = steps.next()
        found, expected = attempt(lowerer, step), attempt(Lowerer(UPSTREAM), step)
        if isinstance(found, str) or isinstance(expected, str):
            assert found == expected
            continue
        assert found.recipes == expected.recipes
        assert (found.plan is None) == (expected.plan is None)
        if found.plan is not None and expected.plan is not None:
            assert_same_plan(found.plan, expected.plan)
        covered += 1
    assert covered > 100


def test_other_spans_cost_no_look_at_single_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    lowerer, made = Lowerer(UPSTREAM), []
    make = LeafTable.__init__
    monkeypatch.setattr(LeafTable, "__init__", lambda *arguments: made.append(1) or make(*arguments))

    def step(prompt: int) -> tuple[StepContext, dict[str, Any], Tensor]:
        rows = [1, prompt, 1]
        codes = [torch.zeros(1, 16, dtype=torch.int64) for _ in rows]
        return step_of(rows), {"layer": torch.zeros(sum(rows), 8), "codes": codes}, torch.zeros(sum(rows), 8)

    plans = [lower(lowerer, *step(prompt)).plan for prompt in (5, 6, 700)]
    assert made == [1]
    assert [plan and plan.payload_bytes for plan in plans] == [2 * 32 * (n + 2) + 3 * 128 for n in (5, 6, 700)]


def test_tokens_get_the_last_column_and_change_no_other() -> None:
    steps, lowerer, packed = Steps(0, "meta"), Lowerer(UPSTREAM), 0
    for _ in range(100):
        step, payload, hidden = steps.next()
        tokens = torch.zeros(len(step.request_ids), 1, dtype=torch.int32, device="meta")
        try:
            alone = lower(lowerer, step, payload, hidden)
        except NotCovered as reason:
            with pytest.raises(NotCovered, match=re.escape(str(reason))):
                lower(lowerer, step, payload, hidden, tokens)
            continue
        leaves = len(flatten(payload)[0]) + (hidden is not None) + 1
        runs = 0 if alone.plan is None else count_runs(alone.plan)
        try:
            found = lower(lowerer, step, payload, hidden, tokens)
        except Refused:
            assert runs in (0, MOST_PASSED) or (runs > MOST_PASSED and leaves > MOST_PASSED)
            continue
        assert found.recipes == alone.recipes
        assert found.plan is not None
        assert alone.plan is not None
        assert found.plan.passed_runs is not None or alone.plan.passed_runs is None
        assert found.payload_columns == alone.payload_columns
        assert found.tokens == found.payload_columns == len(found.plan.columns) - 1
        assert found.plan.columns[found.tokens].shape == tokens.shape
        assert found.plan.payload_bytes == alone.plan.payload_bytes + tokens.nbytes
        assert [column.rows for column in found.plan.columns[:-1]] == [column.rows for column in alone.plan.columns]
        packed += 1
    assert packed > 50


def count_runs(plan: Plan) -> int:
    return sum(1 if part.facts.copies > 1 else len(part.facts.runs.starts) for part in plan.parts)


def test_tokens_stay_away_from_large_payloads() -> None:
    tokens = torch.zeros(3, 2, dtype=torch.int32, device="meta")
    for rows, packed in ((1 << 13, True), ((1 << 13) + 1, False), (1 << 13, True)):
        leaf = torch.zeros(rows, 1 << 10, dtype=torch.int8, device="meta")
        step, payload = step_of([rows - 1, 1]), {"x": leaf, "y": leaf}
        if packed:
            assert lower(Lowerer(UPSTREAM), step, payload, None, tokens).tokens == 2
        else:
            with pytest.raises(Refused):
                lower(Lowerer(UPSTREAM), step, payload, None, tokens)


@pytest.mark.parametrize(
    ("tokens", "payload"),
    [
        (torch.zeros(3, 2), torch.zeros(2, 8, device="meta")),
        (torch.zeros(3, 2, 8, device="meta")[:, :, :3], torch.zeros(2, 8, device="meta")),
        (torch.tensor(1, device="meta"), torch.zeros(2, 8, device="meta")),
        (torch.zeros(3, 2, device="meta"), torch.zeros(2, 8)),
    ],
    ids=["on the host", "strided", "a scalar", "a payload on the host"],
)
def test_tokens_that_would_not_be_gathered_like_the_payload_are_refused(tokens: Tensor, payload: Tensor) -> None:
    with pytest.raises(Refused):
        lower(Lowerer(UPSTREAM), step_of([1, 1]), {"x": payload}, None, tokens)


@pytest.mark.parametrize(("consumers", "refused"), [(7, False), (8, True), (9, False)])
def test_tokens_that_would_be_a_run_too_many_are_refused(consumers: int, refused: bool) -> None:
    """Of 7 consumers apart from each other 7 runs and one more are passed; of 9 there is a table of tiles anyway."""
    step = step_of([1] * 20, consumers=list(range(0, 2 * consumers, 2)))
    leaf, tokens = torch.zeros(20, 4, device="meta"), torch.zeros(20, 1, device="meta")
    try:
        found = lower(Lowerer(UPSTREAM), step, {"x": leaf}, None, tokens)
    except Refused:
        assert refused
    else:
        assert not refused
        assert found.plan is not None
        assert (found.plan.passed_runs is None) == (consumers == 9)


def test_structures_and_looks_that_are_kept_are_bounded() -> None:
    lowerer = Lowerer(UPSTREAM, capacity=2)
    for width in range(1, 9):
        lower(lowerer, step_of([1]), {"x": torch.zeros(1, width)}, None)
        lower(lowerer, step_of([1]), {f"x{width}": torch.zeros(1, 2)}, None)
    assert len(lowerer._structures) == 2
    lower(lowerer, step_of([1]), {"x": torch.zeros(1, 1)}, None)
    for width in range(1, 9):
        lower(lowerer, step_of([1]), {"x": torch.zeros(1, width)}, None)
    assert max(len(structure.tables) for structure in lowerer._structures.values()) == 4
