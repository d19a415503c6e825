"""Every snapshot holds the bytes of its own step, whatever happens to sources, buffers and handles after the call."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from spanpack import Batch, ColumnSpec, PackedTree, Packer, Placement, make_plan
from tests.support.compare import assert_same
from tests.support.gpu import copy_stream, hold_up

IDS = [f"request-{i}" for i in range(16)]
DECODE = Batch(IDS, [1] * 16)
RULES = {"shared": Placement.SHARED}
WIDTH = 2048  # 128 KiB per leaf of 16 rows of int32: several tiles, landed in about 10 us
HELD_MS = 60.0  # far longer than the host needs for all calls of a test


def filled(step: int, rows: int = 16) -> Tensor:
    return torch.full((rows, WIDTH), step, dtype=torch.int32, device="cuda")


def warm_up(packer: Packer, leaf: Tensor) -> None:
    """Bring descriptors and all slabs into being: allocating may wait for the device, packing must not."""
    packer.reserve(leaf.nbytes, slabs=8)
    packer.pack({"hidden": leaf}, DECODE).wait()


def assert_step(packed: PackedTree, step: int) -> None:
    views = packed.views()
    assert list(views) == IDS
    for tree in views.values():
        assert tree["hidden"].shape == (1, WIDTH)
        assert (tree["hidden"] == step).all()
        assert (tree["shared"] == -step).all()


class GraphStep:
    """A step that writes its number into the same two buffers, as a captured model does."""

    def __init__(self) -> None:
        self.payload = {"hidden": filled(0), "shared": filled(0, rows=3)}
        self._number = torch.zeros((), dtype=torch.int32, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._number.add_(1)
            self.payload["hidden"].copy_(self._number.expand(16, WIDTH))
            self.payload["shared"].copy_((-self._number).expand(3, WIDTH))
        self._number.zero_()
        torch.cuda.synchronize()

    def replay(self) -> None:
        self._graph.replay()


def test_a_graph_overwrites_its_buffers_200_times_and_all_snapshots_are_kept(any_packer: Packer) -> None:
    step = GraphStep()
    snapshots = []
    for _ in range(200):
        step.replay()
        snapshots.append(any_packer.pack(step.payload, DECODE, RULES))
    for number, packed in enumerate(snapshots, start=1):
        assert_step(packed, number)


def test_a_graph_overwrites_its_buffers_200_times_with_three_packs_in_flight(any_packer: Packer) -> None:
    step = GraphStep()
    flying: deque[tuple[int, PackedTree]] = deque()
    for number in range(1, 201):
        step.replay()
        flying.append((number, any_packer.pack(step.payload, DECODE, RULES)))
        if len(flying) > 3:
            oldest, packed = flying.popleft()
            assert_step(packed, oldest)
    for number, packed in flying:
        assert_step(packed, number)
    stats = any_packer.stats()
    assert (stats.packs, stats.launches, stats.fallbacks) == (200, 200, {})


def test_the_copy_waits_for_a_slow_producer_and_the_host_does_not(any_packer: Packer) -> None:
    leaf = filled(0)
    warm_up(any_packer, leaf)
    slow = hold_up(HELD_MS)
    leaf.fill_(7)
    packed = any_packer.pack({"hidden": leaf}, DECODE)
    leaf.fill_(8)
    assert not slow.query()
    assert not packed.done()
    assert (packed.views()[IDS[3]]["hidden"] == 7).all()
    assert packed.done()


def test_a_slow_producer_on_a_stream_of_its_own(any_packer: Packer) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        leaf = filled(0)
        hold_up(HELD_MS)
        leaf.fill_(9)
        packed = any_packer.pack({"hidden": leaf}, DECODE)
        leaf.fill_(10)
    assert (packed.views()[IDS[0]]["hidden"] == 9).all()


@pytest.mark.sanitizer
def test_one_plan_on_two_streams_in_turn(any_packer: Packer) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    leaves = [filled(0), filled(0)]
    torch.cuda.synchronize()
    snapshots = []
    for step in range(40):
        with torch.cuda.stream(streams[step % 2]):
            if step % 5 == 0:
                hold_up(2)
            leaves[step % 2].fill_(step)
            snapshots.append(any_packer.pack({"hidden": leaves[step % 2]}, DECODE))
    for step, packed in enumerate(snapshots):
        assert (packed.views()[IDS[5]]["hidden"] == step).all()


def test_more_packs_in_flight_than_device_slabs(packer: Packer) -> None:
    leaf = filled(0)
    warm_up(packer, leaf)
    hold_up(HELD_MS, copy_stream(packer))
    snapshots = []
    for step in range(7):  # four device slabs, eight pinned ones
        leaf.fill_(step)
        snapshots.append(packer.pack({"hidden": leaf}, DECODE))
    assert not snapshots[0].done()
    assert packer.stats().stream_waits >= 1
    for step, packed in enumerate(snapshots):
        assert (packed.views()[IDS[1]]["hidden"] == step).all()
    assert packer.stats().fallbacks == {}


def test_views_kept_while_others_come_and_go(any_packer: Packer) -> None:
    kept = [any_packer.pack({"hidden": filled(step)}, DECODE).views()[IDS[2]]["hidden"] for step in range(3)]
    for step in range(3, 100):
        any_packer.pack({"hidden": filled(step)}, DECODE).wait()
    for step, view in enumerate(kept):
        assert (view == step).all()


def test_dropped_snapshots_give_their_slabs_back_after_the_copy(packer: Packer) -> None:
    leaf = filled(1)
    warm_up(packer, leaf)
    hold_up(HELD_MS, copy_stream(packer))
    for _ in range(3):
        packer.pack({"hidden": leaf}, DECODE)  # dropped at once
    leaf.fill_(2)
    late = packer.pack({"hidden": leaf}, DECODE)
    assert (late.views()[IDS[0]]["hidden"] == 2).all()
    late.release()
    for step in range(20):
        packer.pack({"hidden": filled(step)}, DECODE).wait()
    stats = packer.stats()
    assert stats.slabs_in_use == 0
    assert stats.fallbacks == {}


def test_sources_freed_and_their_memory_reused_right_after_the_call(any_packer: Packer) -> None:
    snapshots = []
    addresses = set()
    hold_up(HELD_MS)
    for step in range(6):
        leaf = filled(step)
        addresses.add(leaf.data_ptr())
        snapshots.append(any_packer.pack({"hidden": leaf}, DECODE))
        del leaf
        filled(-1)
    assert len(addresses) < 6  # the allocator did reuse memory
    for step, packed in enumerate(snapshots):
        assert (packed.views()[IDS[15]]["hidden"] == step).all()


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["torch tensor", "numpy array", "list"])
def test_query_start_loc_changed_right_after_the_call(any_packer: Packer, kind: type) -> None:
    starts, counts = kind([0, 3, 5, 8]), kind([3, 2, 3])
    leaf = torch.arange(8, device="cuda")
    hold_up(HELD_MS)
    packed = any_packer.pack({"rows": leaf}, Batch(["a", "b", "c"], counts, starts))
    for index in range(3):
        starts[index] = counts[index] = 0
    views = packed.views()
    assert [views[name]["rows"].tolist() for name in "abc"] == [[0, 1, 2], [3, 4], [5, 6, 7]]


@pytest.mark.sanitizer
def test_different_spans_back_to_back_behind_a_slow_kernel(any_packer: Packer) -> None:
    leaf = torch.arange(64 * 33, dtype=torch.int16, device="cuda").reshape(64, 33)
    picks = [np.arange(0, 64, 2), np.arange(1, 64, 3), np.array([63, 0, 7]), np.arange(64)]
    plans = [make_plan([leaf], [ColumnSpec(0, rows, np.ones_like(rows))]) for rows in picks]
    hold_up(HELD_MS)
    snapshots = [any_packer.run(plan, [leaf]) for _ in range(2) for plan in plans]
    for snapshot, rows in zip(snapshots, picks * 2, strict=True):
        assert_same(snapshot.column(0), leaf[torch.from_numpy(rows)])


@pytest.mark.sanitizer
def test_sources_at_new_addresses_every_step_behind_a_slow_kernel(any_packer: Packer) -> None:
    leaves = [filled(step) for step in range(8)]
    hold_up(HELD_MS)
    snapshots = [any_packer.pack({"hidden": leaf}, DECODE) for leaf in leaves]
    for step, packed in enumerate(snapshots):
        assert (packed.views()[IDS[4]]["hidden"] == step).all()


def test_views_asked_for_before_the_bytes_have_landed_wait(any_packer: Packer) -> None:
    leaf = filled(0)
    hold_up(HELD_MS)
    leaf.fill_(5)
    packed = any_packer.pack({"hidden": leaf}, DECODE)
    found: list[Tensor] = []
    readers = [threading.Thread(target=lambda: found.append(packed.views()[IDS[9]]["hidden"])) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=30)
    assert len(found) == 4
    assert all((view == 5).all() for view in found)


def test_containers_changed_right_after_the_call(any_packer: Packer) -> None:
    tags = ["one", "two"]
    payload = {"layers": {"0": filled(1)}, "tags": tags, "each": [filled(i, 1) for i in range(16)]}
    hold_up(HELD_MS)
    packed = any_packer.pack(payload, DECODE)
    payload["layers"]["0"] = filled(99)  # type: ignore[index]
    payload["each"].clear()  # type: ignore[attr-defined]
    tags[0] = "changed"
    tree = packed.views()[IDS[6]]
    assert (tree["layers"]["0"] == 1).all()
    assert (tree["each"] == 6).all()
    assert tree["tags"] == ["one", "two"]


def test_opaque_leaves_packed_on_a_slow_stream_are_waited_for(any_packer: Packer) -> None:
    diagonal = torch.arange(16, device="cuda").expand(2, 16)
    mask = torch.sparse_coo_tensor(diagonal, torch.zeros(16, device="cuda"), (16, 16))
    leaf = filled(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        hold_up(HELD_MS)
        mask._values().fill_(3)
        packed = any_packer.pack({"hidden": leaf, "mask": mask}, DECODE, {"mask": Placement.SHARED})
        alone = any_packer.pack({"mask": mask}, DECODE, {"mask": Placement.SHARED})
        mask._values().fill_(4)
    for tree in (packed.views()[IDS[0]], alone.views()[IDS[0]]):
        assert (tree["mask"].to_dense().diagonal() == 3).all()


def test_padding_rows_of_a_graph_full_of_nan_are_neither_copied_nor_seen(packer: Packer) -> None:
    hidden = torch.full((64, WIDTH), float("nan"), device="cuda")
    hidden[:5] = torch.arange(5.0, device="cuda")[:, None]
    before = packer.stats().copied_bytes
    packed = packer.pack({"hidden": hidden}, Batch(IDS[:5], [1] * 5, consumers=IDS[1:4], per_token_rows=64))
    for request, tree in packed.views().items():
        assert (tree["hidden"] == float(IDS.index(request))).all()
    assert packer.stats().copied_bytes - before == 3 * WIDTH * 4
