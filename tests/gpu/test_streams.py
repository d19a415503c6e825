"""Packs behind a stream or an event that the caller names."""

from __future__ import annotations

import pytest
import torch

from spanpack import Batch, Packer, Placement
from tests.support.gpu import MakePacker, copy_stream, hold_up

BATCH = Batch(["a", "b"], [3, 1])
HELD_MS = 60.0  # far longer than the host needs for all calls of a test


def filled(value: int) -> torch.Tensor:
    return torch.full((4, 2048), value, dtype=torch.int32, device="cuda")


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def test_the_gather_is_queued_on_the_stream_that_is_named(any_packer: Packer, side: torch.cuda.Stream) -> None:
    leaf = filled(0)
    any_packer.pack({"x": leaf}, BATCH).wait()
    hold_up(HELD_MS, side)
    with torch.cuda.stream(side):
        leaf.fill_(7)
    packed = any_packer.pack({"x": leaf}, BATCH, stream=side)
    with torch.cuda.stream(side):
        leaf.fill_(8)
    assert not packed.done()
    assert (packed.views()["a"]["x"] == 7).all()


def test_the_gather_waits_for_an_event_and_the_host_does_not(any_packer: Packer, side: torch.cuda.Stream) -> None:
    leaf = filled(0)
    any_packer.pack({"x": leaf}, BATCH).wait()
    written = torch.cuda.Event()
    hold_up(HELD_MS, side)
    with torch.cuda.stream(side):
        leaf.fill_(7)
        written.record()
    packed = any_packer.pack({"x": leaf}, BATCH, after=written)
    assert not written.query()
    assert not packed.done()
    assert (packed.views()["b"]["x"] == 7).all()


def test_an_event_that_was_never_recorded_is_not_waited_for(any_packer: Packer) -> None:
    packed = any_packer.pack({"x": filled(3)}, BATCH, after=torch.cuda.Event())
    assert (packed.views()["a"]["x"] == 3).all()


def test_leaves_freed_right_after_a_pack_on_another_stream_are_not_reused(
    any_packer: Packer, side: torch.cuda.Stream
) -> None:
    any_packer.pack({"x": filled(0)}, BATCH).wait()
    hold_up(HELD_MS, side)
    snapshots = []
    for step in range(6):
        leaf = filled(step)
        torch.cuda.current_stream().synchronize()
        snapshots.append(any_packer.pack({"x": leaf}, BATCH, stream=side))
        del leaf
        filled(-1)
    for step, packed in enumerate(snapshots):
        assert (packed.views()["a"]["x"] == step).all()


@pytest.mark.parametrize("path", ["torch", "late", "staged", "opaque"])
def test_slower_paths_run_on_the_stream_too(make_packer: MakePacker, side: torch.cuda.Stream, path: str) -> None:
    packer = make_packer(pinned_budget_bytes=0 if path == "late" else 1 << 30)
    if path == "torch":
        assert packer._engine is not None
        packer._engine._without_launcher()
    leaf = torch.zeros(4, 4, dtype=torch.int32, device="cuda")
    given = leaf.t() if path == "staged" else leaf.to_sparse() if path == "opaque" else leaf
    torch.cuda.synchronize()
    hold_up(HELD_MS, side)
    with torch.cuda.stream(side):
        leaf.fill_(7)
        given = leaf.to_sparse() if path == "opaque" else given
    packed = packer.pack({"x": given}, BATCH, {"x": Placement.INVARIANT}, stream=side)
    assert (packed.views()["b"]["x"].to_dense() == 7).all()


def test_the_side_stream_is_none_that_others_are_given(make_packer: MakePacker) -> None:
    others = {torch.cuda.Stream().cuda_stream for _ in range(64)}  # torch has 32 of a priority
    packers = [make_packer() for _ in range(3)]
    assert not others & {copy_stream(packer).cuda_stream for packer in packers}
