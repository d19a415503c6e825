"""The host metadata of a step: copied, checked, comparable."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_runner.step import NotCovered, StepContext, StepReader, make_step
from tests.support.steps import step_of


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
def test_query_start_loc_may_be_longer_and_of_any_host_kind(kind: Any) -> None:
    step = make_step(
        request_ids=["a", "b"],
        num_scheduled_tokens=np.array([2, 3, 9], dtype=np.int32),
        query_start_loc=kind([0, 2, 5, 5]),
        scheduled_tokens=5,
        consumer_ids=["b"],
    )
    assert (step.starts.tolist(), step.rows.tolist(), step.consumers) == ([0, 2], [2, 3], (1,))
    assert step.starts.dtype == step.rows.dtype == np.int64


@pytest.mark.parametrize("start", [None, [0], torch.empty(3, device="meta")], ids=["none", "short", "device"])
def test_unusable_metadata_is_refused(start: Any) -> None:
    with pytest.raises(NotCovered, match="query_start_loc"):
        make_step(
            request_ids=["a", "b"],
            num_scheduled_tokens=[1, 1],
            query_start_loc=start,
            scheduled_tokens=2,
            consumer_ids=[],
        )


def test_steps_that_look_alike_have_equal_keys() -> None:
    assert step_of([1, 2]).key == step_of([1, 2]).key
    others = [step_of([2, 1]), step_of([1, 2], [0]), step_of([1, 2], scheduled=4), step_of([1, 2], sparse=[1, 0])]
    assert len({step_of([1, 2]).key, *(step.key for step in others)}) == 5


@pytest.mark.parametrize("marker", [torch.tensor([1]), [1], 1, ("1",)], ids=["tensor", "numbers", "number", "tuple"])
@pytest.mark.parametrize("nested", [True, False])
def test_an_illegal_sparse_marker_is_never_read(marker: Any, nested: bool) -> None:
    """Nor is the engine asked about it here, where some versions would wait for the device."""
    payload = {"meta": {"sparse_audio": marker}} if nested else {"meta.sparse_audio": marker}
    upstream: Any = SimpleNamespace()
    with pytest.raises(NotCovered, match="sparse audio marker"):
        read(StepReader(upstream), SimpleNamespace(_downstream_payload_cache={}), payload=payload)


def read(
    reader: StepReader,
    runner: Any,
    rows: Sequence[int] = (2, 1),
    payload: Any = None,
    *,
    starts: Sequence[int] | None = None,
) -> StepContext:
    return reader.read(
        runner,
        scheduler_output=SimpleNamespace(total_num_scheduled_tokens=sum(rows)),
        request_ids=[f"r{i}" for i in range(len(rows))],
        num_scheduled_tokens=np.array(rows, dtype=np.int32),
        query_start_loc=torch.tensor(starts or [0, *np.cumsum(rows).tolist()]),
        multimodal_outputs=payload,
    )


class Engine:
    """A runner and an upstream that count how often they are asked who consumes."""

    def __init__(self) -> None:
        self.asked = 0
        self._downstream_payload_cache: dict[str, bool] = {}

    def _resolve_pooler_payload_req_ids(self, ids: list[str]) -> tuple[str, list[str]]:
        self.asked += 1
        return "latent", [i for i in ids if self._downstream_payload_cache.get(i, True)]

    def resolve_sparse_routing(
        self, runner: Any, output_type: str, ids: list[str], consumers: list[str], payload: Any
    ) -> tuple[list[str], dict[str, int], bool]:
        return consumers, {}, False


def test_a_step_that_repeats_the_last_is_that_step() -> None:
    engine: Any = Engine()
    engine._downstream_payload_cache = {"r0": True, "r1": False}
    reader = StepReader(engine)
    first = read(reader, engine)
    assert first.consumers == (0,)
    assert read(reader, engine) is first
    assert engine.asked == 1
    assert read(reader, engine, rows=(1, 2)) is not first


def test_a_request_that_comes_back_under_the_same_name_is_asked_about_again() -> None:
    engine: Any = Engine()
    engine._downstream_payload_cache = {"r0": True, "r1": False}
    reader = StepReader(engine)
    assert read(reader, engine).consumers == (0,)
    engine._downstream_payload_cache["r1"] = True
    assert read(reader, engine).consumers == (0, 1)
    engine._downstream_payload_cache.pop("r0")
    assert read(reader, engine).consumers == (0, 1)
    assert engine.asked == 3


def test_where_rows_start_is_looked_at_in_every_step_unless_it_follows_from_their_numbers() -> None:
    engine: Any = Engine()
    engine._downstream_payload_cache = {"r0": True, "r1": True}
    reader = StepReader(engine)
    for starts in ([0, 5, 6], [1, 3, 4], [0, 2, 3]):
        assert read(reader, engine, starts=starts).starts.tolist() == starts[:2]


@pytest.mark.parametrize(
    ("settled", "payload"),
    [({}, None), ({"r0": True, "r1": True}, {"meta": {"sparse_audio": ["0"]}})],
    ids=["marker not there yet", "sparse"],
)
def test_a_step_that_may_change_its_consumers_is_asked_about_again(settled: dict[str, bool], payload: Any) -> None:
    engine: Any = Engine()
    engine._downstream_payload_cache = settled
    reader = StepReader(engine)
    for _ in range(3):
        read(reader, engine, payload=payload)
    assert engine.asked == 3
