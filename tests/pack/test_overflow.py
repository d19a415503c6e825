"""Payloads that are kept long, on the simulated device: moved to pageable memory, which is bounded and used again."""

from __future__ import annotations

import gc
import threading
from collections import deque

import pytest
import torch

from spanpack import ClosedError, ColumnSpec, Snapshot, make_plan
from tests.support.compare import assert_same
from tests.support.rig import ROWS, WIDTH, Rig, numbers, rows, whole


def test_views_kept_for_long_are_copied_out_and_all_memory_stays_bounded() -> None:
    """First into pageable slabs of up to 50 x 64 KiB, then each into memory of its own."""
    rig = Rig(slabs_per_class=4, overflow_bytes=50 << 16)
    leaf = numbers(0)
    plan = rows(leaf, [0, 1, 2, 3, 4, 5], [1] * 6)
    kept, crowded = [], []
    for step in range(200):
        leaf.copy_(numbers(step))
        packed = rig.pack(leaf, plan)
        kept.append(packed.split(0)[3])
        crowded.append(packed.copies_out)
    assert rig.pool.peak_bytes <= 4 * (1 << 16) + (1 << 16)
    for step, view in enumerate(kept):
        assert torch.equal(view, numbers(step)[3:4])
    stored = [view.untyped_storage().nbytes() for view in kept]
    assert stored == [ROWS * WIDTH * 4] * 52 + [WIDTH * 4] * 148  # of the whole step, of the row alone
    assert crowded == [False] * 2 + [True] * 198
    assert rig.overflow.nbytes == 50 << 16
    del packed
    gc.collect()
    assert rig.pool.in_use == 2


def test_pageable_slabs_are_used_again_and_hold_what_was_copied() -> None:
    rig = Rig(slabs_per_class=2, overflow_bytes=1 << 20)
    leaf = numbers(0)
    plan = whole(leaf)
    kept: deque[tuple[int, Snapshot, torch.Tensor]] = deque(maxlen=5)
    for step in range(100):
        leaf.copy_(numbers(step))
        snapshot = rig.pack(leaf, plan)
        kept.append((step, snapshot, snapshot.column(0)))
        for of_step, snapshot_of_step, view in kept:
            assert_same(view, numbers(of_step))
            assert_same(snapshot_of_step.column(0), numbers(of_step))
            (piece,) = snapshot_of_step.pieces(0)
            assert_same(piece, numbers(of_step))
    assert rig.overflow.nbytes <= 5 << 16
    assert rig.pool.allocations <= 2


def test_a_released_snapshot_keeps_no_pageable_slab() -> None:
    rig = Rig(slabs_per_class=2, overflow_bytes=1 << 16)
    leaf = numbers(1)
    held = [rig.pack(leaf).column(0) for _ in range(2)]
    for _ in range(10):
        snapshot = rig.pack(leaf)
        assert_same(snapshot.column(0), leaf)
        assert snapshot.copies_out
        snapshot.release()
        with pytest.raises(ClosedError):
            snapshot.column(0)
    assert rig.overflow.nbytes == 1 << 16
    assert len(held) == 2


def test_only_what_is_read_is_moved_out() -> None:
    rig = Rig(slabs_per_class=2, overflow_bytes=1 << 20)
    leaf = numbers(1)
    leaves = [leaf, torch.zeros(3, 0)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, each) for i, each in enumerate(leaves)])
    held = [rig.engine.run(plan, leaves).column(0) for _ in range(2)]
    before = rig.overflow.nbytes
    snapshot = rig.engine.run(plan, leaves)
    assert snapshot.column(1).shape == (3, 0)
    assert snapshot.copies_out
    assert rig.overflow.nbytes == before
    with torch.device("meta"):  # as a program may have it where a snapshot is read
        assert_same(snapshot.column(0), leaf)
    assert rig.overflow.nbytes == before + (1 << 16)
    assert len(held) == 2


def test_once_closed_nothing_more_is_moved_out() -> None:
    rig = Rig(slabs_per_class=2, overflow_bytes=1 << 20)
    leaf = numbers(1)
    plan = rows(leaf, [0, 3], [1, 2])
    held = [rig.pack(leaf, plan).column(0) for _ in range(2)]
    snapshot = rig.pack(leaf, plan)
    snapshot.wait()
    before = rig.overflow.nbytes
    rig.overflow.close()
    pieces = snapshot.split(0)
    assert_same(torch.cat(pieces), leaf[[0, 3, 4]])
    assert [piece.untyped_storage().nbytes() for piece in pieces] == [WIDTH * 4, 2 * WIDTH * 4]
    assert rig.overflow.nbytes == before
    assert len(held) == 2


def test_nor_what_was_about_to_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(overflow_bytes=1 << 20)
    overflow, lock = rig.overflow, rig.overflow._lock

    class ClosedMeanwhile:
        def acquire(self, blocking: bool) -> bool:
            overflow._lock = lock
            overflow.close()
            return lock.acquire(blocking)

    monkeypatch.setattr(overflow, "_lock", ClosedMeanwhile())
    assert overflow.take_over(memoryview(b"bytes")) is None
    assert overflow.nbytes == 0


def test_moving_out_in_the_middle_of_moving_out_is_left_to_the_pieces() -> None:
    """As a destructor that reads a snapshot may have it, or a child that was forked just then."""
    rig = Rig(overflow_bytes=1 << 20)
    taken = rig.overflow.take_over(memoryview(b"bytes"))
    assert taken is not None
    assert bytes(taken) == b"bytes"
    with rig.overflow._lock:
        assert rig.overflow.take_over(memoryview(b"bytes")) is None


def test_many_readers_of_crowded_snapshots_get_the_same_bytes() -> None:
    rig = Rig(slabs_per_class=4, overflow_bytes=20 << 16)
    leaf = numbers(0)
    plan = rows(leaf, [0, 2, 4], [2, 2, 2])
    kept = []
    for step in range(40):
        leaf.copy_(numbers(step))
        snapshot = rig.pack(leaf, plan)
        snapshot.wait()
        found: list[list[torch.Tensor]] = []
        readers = [threading.Thread(target=lambda s=snapshot, f=found: f.append(list(s.split(0)))) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert len(found) == 4
        kept.append((step, found))
    for step, found in kept:
        for pieces in found:
            assert_same(torch.cat(pieces), numbers(step))
