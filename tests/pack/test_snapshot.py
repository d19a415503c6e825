"""Snapshots and views: zero-copy, alive as long as anybody looks, and no larger than themselves when they travel."""

from __future__ import annotations

import gc
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from spanpack import Batch, ClosedError, ColumnSpec, PackedTree, Packer, Placement, Snapshot, make_plan
from tests.support.compare import assert_same

REQUESTS = 64
WIDTH = 500
IDS = [f"r{i}" for i in range(REQUESTS)]
OVERHEAD_BYTES = 4096  # of a pickled tree of a few tensors, whatever their length


def snapshot_of(*leaves: Tensor, copies: int = 1) -> Snapshot:
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf, copies) for i, leaf in enumerate(leaves)])
    return Packer("cpu").run(plan, leaves)


def packed_tree() -> PackedTree:
    payload = {
        "hidden": torch.arange(REQUESTS * WIDTH, dtype=torch.float32).view(REQUESTS, WIDTH),
        "layers": {0: torch.ones(REQUESTS, WIDTH), 24: torch.zeros(REQUESTS, WIDTH)},
        "codes": [torch.full((WIDTH,), i) for i in range(REQUESTS)],
        "embed": torch.ones(1, 1, WIDTH),
        "scale": torch.tensor(0.5),
    }
    rules = {"embed": Placement.INVARIANT, "scale": Placement.INVARIANT}
    return Packer("cpu").pack(payload, Batch(IDS, [1] * REQUESTS), rules)


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for child in tree.values() for tensor in tensors_of(child)]


def test_columns_and_pieces_in_order() -> None:
    leaf, scalar = torch.arange(6).view(3, 2), torch.tensor(2.5)
    snapshot = snapshot_of(leaf, scalar, copies=2)
    assert_same(snapshot.column(0), torch.cat([leaf, leaf]))
    assert_same(snapshot.column(1), torch.tensor([2.5, 2.5]))
    for pieces in (snapshot.split, snapshot.pieces):
        assert [len(pieces(0)), len(pieces(1))] == [2, 2]
        for piece in pieces(0):
            assert_same(piece, leaf)
        for piece in pieces(1):
            assert_same(piece, scalar)


@pytest.mark.parametrize("rows", [[0, 3, 0], [3], [1, 0, 1, 1], [0]], ids=str)
def test_pieces_without_rows_keep_their_shape(rows: list[int]) -> None:
    leaf = torch.arange(6).view(3, 2)
    starts = [sum(rows[:i]) for i in range(len(rows))]
    plan = make_plan([leaf], [ColumnSpec(0, torch.tensor(starts).numpy(), torch.tensor(rows).numpy())])
    snapshot = Packer("cpu").run(plan, [leaf])
    for pieces in (snapshot.split(0), snapshot.pieces(0)):
        for piece, start, count in zip(pieces, starts, rows, strict=True):
            assert_same(piece, leaf[start : start + count])


def test_splits_share_the_memory_of_their_column_and_pieces_that_of_the_slab() -> None:
    snapshot = snapshot_of(torch.arange(6), torch.ones(3), copies=2)
    first, second = snapshot.split(0)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first[0] = 77
    assert snapshot.pieces(0)[0][0] == 77  # zero-copy: the same bytes
    assert snapshot.column(0)[0] == 77


def test_views_outlive_snapshot_and_packer() -> None:
    packed = packed_tree()
    views = packed.views()
    packed.release()
    del packed
    gc.collect()
    for index, name in enumerate(IDS):
        assert views[name]["codes"].tolist() == [index] * WIDTH
        assert views[name]["hidden"][0, 0] == index * WIDTH


def test_reading_after_release_is_refused() -> None:
    snapshot = snapshot_of(torch.arange(6), torch.eye(2).to_sparse())
    kept = snapshot.column(0)
    snapshot.release()
    snapshot.release()
    snapshot.wait()
    assert snapshot.done()
    assert kept.tolist() == list(range(6))
    for index in (0, 1):
        with pytest.raises(ClosedError, match="this snapshot was released; read its columns before"):
            snapshot.column(index)
        with pytest.raises(ClosedError):
            snapshot.pieces(index)


@pytest.mark.parametrize("read", ["column", "split", "pieces"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=["no rows", "no elements"])
def test_reading_nothing_after_release_is_refused_too(shape: tuple[int, ...], read: str) -> None:
    leaf = torch.zeros(shape)
    snapshot = snapshot_of(leaf, copies=2)
    assert len(snapshot.pieces(0)) == len(snapshot.split(0)) == 2
    snapshot.release()
    with pytest.raises(ClosedError, match="this snapshot was released"):
        getattr(snapshot, read)(0)


def test_a_snapshot_of_the_cpu_is_done_at_once_whatever_is_in_it() -> None:
    assert snapshot_of(torch.arange(6)).done()
    assert snapshot_of(torch.arange(6), torch.eye(2).to_sparse()).done()
    assert packed_tree().done()


def test_views_are_plain_tensors_and_may_be_written() -> None:
    for tensor in tensors_of(packed_tree().views()["r5"]):
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        tensor.fill_(1)


def test_writing_one_request_changes_no_other() -> None:
    views = packed_tree().views()
    for tensor in tensors_of(views["r5"]):
        tensor.fill_(-1)
    for name in ("r4", "r6"):
        assert not any((tensor == -1).any() for tensor in tensors_of(views[name]))


def own_bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(tree))


def test_storages_are_no_larger_than_their_tensors() -> None:
    for tensor in tensors_of(packed_tree().views()["r63"]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_serialised_payloads_hold_the_bytes_of_their_request_only(how: str) -> None:
    views = packed_tree().views()
    tree = views["r7"]
    buffer = io.BytesIO()
    pickle.dump(tree, buffer) if how == "pickle" else torch.save(tree, buffer)
    assert own_bytes(tree) <= len(buffer.getvalue()) <= own_bytes(tree) + OVERHEAD_BYTES
    buffer.seek(0)
    loaded = pickle.load(buffer) if how == "pickle" else torch.load(buffer)
    for found, expected in zip(tensors_of(loaded), tensors_of(tree), strict=True):
        assert_same(found, expected)


def test_shared_memory_holds_the_bytes_of_its_request_only() -> None:
    tree = packed_tree().views()["r7"]
    before = [tensor.clone() for tensor in tensors_of(tree)]
    for tensor, expected in zip(tensors_of(tree), before, strict=True):
        tensor.share_memory_()
        assert tensor.is_shared()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert_same(tensor, expected)


def test_views_from_several_threads() -> None:
    packed = packed_tree()
    found: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: found.append(packed.views())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for views in found:
        assert_same(views["r3"]["hidden"], found[0]["r3"]["hidden"])
