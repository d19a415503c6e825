"""Whose memory payloads hold: after a release, while they pile up, and in another process."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

import spanpack
from omni_runner.builder import ChannelBuilder, ChannelRules
from omni_runner.packing import PackedStep, StepPacker
from omni_runner.untrack import DICTS_COME_BACK
from tests.runner.packing_rig import ONE_LIST, UPSTREAM, numbered
from tests.support.steps import step_of


def test_a_packed_step_outlives_its_release(packer: StepPacker) -> None:
    packed: PackedStep = packer.pack(step_of([1, 1]), hidden_states=numbered(2), multimodal_outputs=None)
    inter, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    packed.release()
    assert torch.equal(inter[1]["hidden"], numbered(2)[1:])


@pytest.mark.parametrize(
    ("piles_up", "rules", "tracked"),
    [
        (True, ONE_LIST, False),
        (False, ONE_LIST, True),
        (True, ChannelRules(partitions=False, untracks=False), True),
    ],
    ids=["piling up", "taken as they come", "switched off"],
)
def test_payloads_that_pile_up_are_none_of_the_garbage_collectors_business(
    packer: StepPacker, monkeypatch: pytest.MonkeyPatch, piles_up: bool, rules: ChannelRules, tracked: bool
) -> None:
    monkeypatch.setattr(spanpack.Snapshot, "copies_out", piles_up)
    payload = {"codes": [numbered(1), numbered(2)], "n": 3, "mixed": [numbered(1), 5]}
    packed = packer.pack(step_of([2, 1]), hidden_states=numbered(3), multimodal_outputs=payload)
    inter, _ = ChannelBuilder(UPSTREAM, rules).build(packed)
    assert inter is not None
    tensors = [tensor for one in inter if one is not None for tensor in one.values()]
    assert len(tensors) == 8
    assert {gc.is_tracked(tensor) for tensor in tensors} == {tracked}
    assert {gc.is_tracked(one) for one in inter} == {tracked or not DICTS_COME_BACK}


@pytest.mark.parametrize("hidden_rows", [6, 600])
def test_a_payload_that_crosses_processes_costs_its_own_bytes(packer: StepPacker, hidden_rows: int) -> None:
    width, rows = 512, hidden_rows // 6
    payload = {
        "layer": numbered(hidden_rows, width),
        "bos": [torch.zeros(1, 1, width)],
        "codes": [numbered(2) for _ in range(6)],
        "n": [1, 2, 3, 4, 5, 6],
    }
    step = step_of([rows] * 6)
    packed = packer.pack(step, hidden_states=numbered(hidden_rows, width), multimodal_outputs=payload)
    inter, _ = ChannelBuilder(UPSTREAM, ChannelRules(partitions=False, crosses_processes=True)).build(packed)
    usual, _ = ChannelBuilder(UPSTREAM, ONE_LIST).build(packed)
    assert inter is not None and usual is not None
    for one, same in zip(inter, usual, strict=True):
        assert one is not None and same is not None
        assert one.keys() == same.keys()
        assert all(torch.equal(one[key], same[key]) for key in one)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in one.values())
        assert len(pickle.dumps(one)) < sum(tensor.nbytes for tensor in one.values()) + 1024 * len(one)
    assert len(pickle.dumps(usual[0])) > len(pickle.dumps(inter[0]))


@pytest.mark.parametrize("crosses_processes", [True, False])
def test_the_engines_msgpack_of_a_payload_has_its_own_bytes_only(packer: StepPacker, crosses_processes: bool) -> None:
    serialization = pytest.importorskip(
        "vllm_omni.distributed.omni_connectors.utils.serialization", reason="needs vllm-omni"
    )
    packed = packer.pack(
        step_of([1] * 64), hidden_states=numbered(64, 512), multimodal_outputs={"x": numbered(64, 512)}
    )
    rules = ChannelRules(partitions=False, crosses_processes=crosses_processes)
    inter, _ = ChannelBuilder(UPSTREAM, rules).build(packed)
    assert inter is not None
    own_bytes = 2 * 512 * 2
    assert own_bytes < len(serialization.OmniSerializer.serialize(inter[5])) < own_bytes + 1024
