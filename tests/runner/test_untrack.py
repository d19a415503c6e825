"""Payloads that the cyclic garbage collector does not walk through."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from omni_runner import untrack as untrack_module
from omni_runner.untrack import DICTS_COME_BACK, untrack


@pytest.fixture(autouse=True)
def no_collection() -> Any:
    gc.disable()
    yield
    gc.enable()


def test_tensors_and_dicts_are_passed_over_by_the_collector_from_then_on() -> None:
    tensors = torch.arange(6).split(2)
    payload = {"a": tensors[0]}
    untrack([*tensors, payload])
    assert not any(map(gc.is_tracked, [*tensors, payload]))
    gc.collect()
    assert payload["a"].tolist() == [0, 1]


def test_they_go_with_their_last_reference() -> None:
    payload = {"a": torch.zeros(3)}
    gone: list[str] = []
    weakref.finalize(payload["a"], gone.append, "tensor")
    untrack([payload["a"], payload])
    del payload
    assert gone == ["tensor"]


@pytest.mark.skipif(not DICTS_COME_BACK, reason="dicts of this Python stay with the collector")
def test_a_dict_that_is_put_into_a_cycle_later_is_collected() -> None:
    payload: dict[str, Any] = {"a": torch.zeros(3)}
    gone = weakref.ref(payload["a"])
    untrack([payload["a"], payload])
    payload["self"] = payload
    assert gc.is_tracked(payload)
    del payload
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_the_collector_does_not_know_is_left_alone() -> None:
    untrack([None, 1, "text", (), b"", torch.float32, {}])


def test_they_work_as_before() -> None:
    tensor = torch.arange(4.0)
    untrack([tensor])
    tensor.note = "attributes"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(tensor)).tolist() == [0, 1, 2, 3]
    clone = tensor.clone().requires_grad_()
    (clone * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert tensor.share_memory_().is_shared()


def test_without_cpython_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrack_module, "_untrack", None)
    payload = {"a": torch.zeros(3)}
    untrack([payload])
    assert gc.is_tracked(payload)
