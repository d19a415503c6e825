"""Plans: the layout of the slab, segments of bytes, and tiles. Arithmetic only; meta tensors stand for huge leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spanpack import ColumnSpec, LeafError, Packer, PlacementError, Plan, make_plan
from spanpack.columns import PieceFacts
from spanpack.plan import Route
from spanpack.tiles import DESTINATION, LEAF, LENGTH, ROW_BYTES, ROW_STRIDE, SOURCE, make_tiles
from tests.support.differential import try_cases
from tests.support.random_cases import Case


def rows(leaf: int, starts: list[int], counts: list[int]) -> ColumnSpec:
    return ColumnSpec(leaf, np.array(starts, dtype=np.int64), np.array(counts, dtype=np.int64))


def segments(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(segment) for segment in plan.segments.tolist()]


def test_columns_start_at_multiples_of_16_bytes_in_their_order() -> None:
    leaves = [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, 5), torch.tensor(1.0, dtype=torch.float64)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    assert [(c.offset_bytes, c.nbytes, c.shape, c.dtype) for c in plan.columns] == [
        (0, 3, (3,), torch.uint8),
        (16, 40, (2, 5), torch.float32),
        (64, 8, (1,), torch.float64),
    ]
    assert (plan.device_bytes, plan.slab_bytes, plan.payload_bytes) == (80, 80, 51)


def test_adjacent_pieces_become_one_segment_and_empty_ones_none() -> None:
    leaf = torch.zeros(20, 3, dtype=torch.int16)
    plan = make_plan([leaf], [rows(0, [2, 4, 4, 9, 10], [2, 0, 3, 1, 5])])
    assert segments(plan) == [(0, 12, 0, 30, 0, 0), (0, 54, 30, 36, 0, 0)]
    assert plan.columns[0].rows == (2, 0, 3, 1, 5)


def test_pieces_that_go_backwards_or_overlap_are_not_merged() -> None:
    leaf = torch.zeros(20, 4, dtype=torch.int8)
    plan = make_plan([leaf], [rows(0, [5, 3, 4], [2, 2, 2])])
    assert [(s[SOURCE], s[DESTINATION], s[LENGTH]) for s in segments(plan)] == [(20, 0, 8), (12, 8, 8), (16, 16, 8)]


def test_row_strides_are_kept_where_rows_are_not_adjacent() -> None:
    leaf = torch.zeros(10, 8, dtype=torch.int16)[:, 1:4]
    plan = make_plan([leaf], [rows(0, [1, 7], [2, 1])])
    assert segments(plan) == [(0, 16, 0, 12, 6, 16), (0, 112, 12, 6, 0, 0)]  # one row alone is a run
    assert plan.use.routes == (Route.KERNEL,)


def test_several_leaves_in_one_column() -> None:
    leaves = [torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(5, 6)[:, ::2].contiguous(), torch.zeros(1, 3)]
    plan = make_plan(leaves, [ColumnSpec.stack(range(4), leaves)])
    assert plan.columns[0].shape == (8, 3)
    assert [(s[LEAF], s[DESTINATION], s[LENGTH]) for s in segments(plan)] == [(0, 0, 24), (2, 24, 60), (3, 84, 12)]


def test_copies_of_scalars_and_of_whole_leaves() -> None:
    leaves = [torch.tensor(5, dtype=torch.int16), torch.zeros(2, 2, dtype=torch.int8)]
    plan = make_plan(leaves, [ColumnSpec.whole(0, leaves[0], copies=3), ColumnSpec.whole(1, leaves[1], copies=2)])
    assert [(c.shape, c.rows, c.scalar) for c in plan.columns] == [((3,), (1, 1, 1), True), ((4, 2), (2, 2), False)]
    assert len(plan.segments) == 5


@pytest.mark.parametrize(
    ("make", "route"),
    [
        (lambda: torch.zeros(4, 6), Route.KERNEL),
        (lambda: torch.zeros(4, 6)[::2], Route.KERNEL),
        (lambda: torch.zeros(4, 6)[:, 2:4], Route.KERNEL),
        (lambda: torch.zeros(1, 6).expand(4, 6), Route.KERNEL),
        (lambda: torch.zeros(4, 2, 6).transpose(0, 1), Route.STAGED),
        (lambda: torch.zeros(4, 6).t(), Route.STAGED),
        (lambda: torch.zeros(4, 6)[:, ::2], Route.STAGED),
        (lambda: torch.zeros(4, 1).expand(4, 6), Route.STAGED),
        (lambda: torch.zeros(4, 6, dtype=torch.complex64).conj(), Route.STAGED),
        (lambda: torch._neg_view(torch.zeros(4, 6)), Route.STAGED),
        (lambda: torch.zeros(0, 6).t(), Route.KERNEL),
        (lambda: torch.zeros(4, 1)[:, ::3], Route.KERNEL),
        (lambda: torch.eye(4).to_sparse(), Route.OPAQUE),
        (lambda: torch.eye(4).to_sparse_csr(), Route.OPAQUE),
        (lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8), Route.OPAQUE),
        (lambda: torch.zeros(4, 6, device="meta"), Route.KERNEL),
    ],
    ids=lambda value: value.value if isinstance(value, Route) else "",
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*quantize.*")
def test_how_a_leaf_gets_into_the_slab(make: Callable[[], Tensor], route: Route) -> None:
    leaf = make()
    assert make_plan([leaf], [ColumnSpec.whole(0, leaf)]).use.routes == (route,)


def test_cpu_leaves_beside_device_leaves_stand_at_the_end_of_the_slab() -> None:
    leaves = [torch.zeros(3), torch.zeros(5, device="meta"), torch.zeros(7)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    assert plan.device_type == "meta"
    assert plan.use.routes == (Route.HOST, Route.KERNEL, Route.HOST)
    assert [column.offset_bytes for column in plan.columns] == [32, 0, 48]
    assert (plan.device_bytes, plan.slab_bytes) == (32, 80)
    assert plan.segments[:, LEAF].tolist() == [1]


def test_offsets_past_2_31_and_2_32() -> None:
    """5 GiB leaves; nothing is allocated."""
    big = torch.empty(5 << 20, 1024, dtype=torch.uint8, device="meta")
    tall = torch.empty(3, 5 << 30, dtype=torch.uint8, device="meta")[:, 7:1007]
    plan = make_plan([big, tall], [ColumnSpec.whole(0, big), rows(0, [(5 << 20) - 3], [3]), ColumnSpec.whole(1, tall)])
    assert segments(plan) == [
        (0, 0, 0, 5 << 30, 0, 0),
        (0, (5 << 30) - 3072, 5 << 30, 3072, 0, 0),
        (1, 0, (5 << 30) + 3072, 3000, 1000, 5 << 30),
    ]
    assert plan.device_bytes == (5 << 30) + 3072 + 3008
    tiles = make_tiles(plan.segments, 1 << 20)
    assert tiles[-1].tolist() == [1, 0, (5 << 30) + 3072, 3000, 1000, 5 << 30]
    assert int(tiles[:, LENGTH].sum()) == plan.payload_bytes
    last_rows = make_tiles(plan.segments, 1000)[-1]
    assert (last_rows[SOURCE], last_rows[DESTINATION]) == (10 << 30, (5 << 30) + 3072 + 2000)


def test_a_plan_is_a_value_without_addresses() -> None:
    leaf = torch.zeros(4)
    plan = make_plan([leaf], [ColumnSpec.whole(0, leaf)])
    assert repr(plan) == "Plan(1 columns from 1 leaves on cpu: 1 segments, 16 bytes)"
    with pytest.raises(AttributeError):
        plan.slab_bytes = 0  # type: ignore[misc]
    assert plan.signature.matches([torch.ones(4)])


LEAVES = [torch.zeros(4, 3), torch.zeros(2, 3), torch.zeros(4, 3).half(), torch.tensor(1.0), torch.eye(4).to_sparse()]


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (rows(0, [3], [2]), PlacementError, r"column 0, piece 0: rows \[3, 5\) of leaf 0, which has 4 rows"),
        (rows(0, [0, -1], [1, 1]), PlacementError, r"piece 1: rows \[-1, 0\) of leaf 0"),
        (rows(0, [0], [-1]), PlacementError, r"piece 0: rows \[0, -1\)"),
        (rows(0, [], []), PlacementError, "column 0 has no pieces; leave it out"),
        (ColumnSpec.stack([0, 2], [LEAVES[0], LEAVES[2]]), PlacementError, r"float32\[4, 3\] and float16\[4, 3\]"),
        (ColumnSpec(np.array([0, 1]), np.array([0, 2]), np.array([4, 1])), PlacementError, r"\[2, 3\) of leaf 1"),
        (ColumnSpec.stack([0, 3], [LEAVES[0], LEAVES[3]]), PlacementError, r"holds float32\[4, 3\] and float32\[\]"),
        (ColumnSpec(0, np.array([0]), np.array([4]), scalar=True), PlacementError, "but scalar=True"),
        (rows(3, [0], [1]), PlacementError, "but scalar=False"),
        (rows(4, [0], [2]), LeafError, r"leaf 4 is float32\[4, 4\].*only be packed whole"),
        (rows(4, [1], [3]), LeafError, "leaf 4"),
    ],
)
def test_columns_that_do_not_fit_their_leaves(column: ColumnSpec, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(LEAVES, [column])


ZERO, ONE = np.array([0]), np.array([1])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (ColumnSpec(0, np.array([0, 2]), ONE), "column 1 has 2 starts, 1 rows; give one of each per piece"),
        (ColumnSpec(0, ZERO, np.array([1, 1])), "column 1 has 1 starts, 2 rows"),
        (ColumnSpec(np.array([0, 0]), ZERO, ONE), "column 1 has 1 starts, 1 rows, 2 leaves"),
        (ColumnSpec(0, np.array([0.0]), ONE), r"column 1 has float64\[1\] among its leaves, starts and rows"),
        (ColumnSpec(0, ZERO, np.array([1.0])), r"column 1 has float64\[1\]"),
        (ColumnSpec(np.array([0.0]), ZERO, ONE), r"column 1 has float64\[1\]"),
        (ColumnSpec(0, ZERO[None], ONE[None]), r"column 1 has int64\[1, 1\].*expected flat arrays of integers"),
        (
            ColumnSpec(0, ZERO, ONE.astype("m8[s]")),
            r"column 1 has timedelta64\[s\]\[1\].*expected flat arrays of integers",
        ),
    ],
)
def test_columns_whose_arrays_make_no_pieces(column: ColumnSpec, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        make_plan(LEAVES, [rows(0, [0], [1]), column])


def test_columns_of_other_integers_than_int64() -> None:
    leaf = torch.arange(300).view(300, 1)
    wanted = leaf[[100, 101, 5]]
    narrow = ColumnSpec(0, np.array([100, 5], np.int8), np.array([2, 1], np.uint8))
    listed = ColumnSpec(0, [100, 5], [2, 1])  # type: ignore[arg-type]
    numpy_leaf = ColumnSpec(np.int64(0), narrow.starts, narrow.rows)  # type: ignore[arg-type]
    plan = make_plan([leaf], [narrow, listed, numpy_leaf])
    snapshot = Packer("cpu").run(plan, [leaf])
    for index in range(3):
        assert torch.equal(snapshot.column(index), wanted)


@pytest.mark.parametrize("convert", [list, lambda numbers: np.array(numbers, np.int32)], ids=["lists", "int32"])
def test_columns_that_are_made_one_by_one_while_the_plan_is_made(convert: Callable[..., Any]) -> None:
    """Each is gone before the next is made, which then gets its memory."""
    leaf = torch.arange(100)
    specs = (ColumnSpec(0, convert([7 * i]), convert([1 + i % 2])) for i in range(12))
    snapshot = Packer("cpu").run(make_plan([leaf], specs), [leaf])  # type: ignore[arg-type]
    found = [snapshot.column(i).tolist() for i in range(12)]
    assert found == [list(range(7 * i, 7 * i + 1 + i % 2)) for i in range(12)]


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_a_nested_leaf() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(LeafError, match="leaf 0 is a nested tensor; give the list of its parts"):
        make_plan([nested], [rows(0, [0], [1])])


@pytest.mark.parametrize("name", ["starts", "rows", "leaves"])
def test_arrays_of_a_column_that_change_later_do_not_change_the_plan(name: str) -> None:
    """Which works its runs out when it is first run."""
    leaves = [torch.arange(6), 10 + torch.arange(6)]
    given = {"leaves": np.array([0, 1]), "starts": np.array([0, 4]), "rows": np.array([1, 2])}
    plan = make_plan(leaves, [ColumnSpec(**given)])
    given[name][:] = 1
    found = Packer("cpu").run(plan, leaves).split(0)
    assert [piece.tolist() for piece in found] == [[0], [14, 15]]


@pytest.mark.parametrize(
    ("leaves", "columns", "error", "message"),
    [
        (None, [], LeafError, "leaves are a NoneType; give a sequence of tensors"),
        ([LEAVES[0], 3], [], LeafError, "leaf 1 is a int; give a tensor"),
        ([None], [rows(0, [0], [1])], LeafError, "leaf 0 is a NoneType"),
        (LEAVES, None, PlacementError, "columns are a NoneType; give a sequence of ColumnSpec"),
        (LEAVES, [rows(0, [0], [1]), 7], PlacementError, "column 1 is a int; give a ColumnSpec"),
    ],
)
def test_leaves_and_columns_that_are_none(leaves: Any, columns: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(leaves, columns)


@pytest.mark.parametrize("leaf", [-1, 2])
def test_a_column_of_a_leaf_that_is_not_there(leaf: int) -> None:
    with pytest.raises(PlacementError, match=f"leaf {leaf}, but there are 2 leaves"):
        make_plan([torch.zeros(3), torch.zeros(3)], [rows(leaf, [0], [3])])


def test_a_sparse_leaf_shares_no_column() -> None:
    leaves = [torch.eye(4), torch.eye(4).to_sparse()]
    with pytest.raises(LeafError, match=r"leaf 1 is float32\[4, 4\] with layout torch.sparse_coo"):
        make_plan(leaves, [ColumnSpec.stack([0, 1], leaves)])


def test_a_column_holds_leaves_of_one_side_only() -> None:
    leaves = [torch.zeros(2), torch.zeros(2, device="meta")]
    with pytest.raises(PlacementError, match="column 0 mixes leaves on the CPU and on a device"):
        make_plan(leaves, [ColumnSpec.stack([0, 1], leaves)])


class TestTiles:
    """Tiles cover the bytes of their segments, each once, and are no longer than asked for."""

    @staticmethod
    def moves(table: Any) -> set[tuple[int, int, int]]:
        """(leaf, source byte, destination byte) of every byte."""
        found = set()
        for leaf, source, destination, length, row_bytes, row_stride in table.tolist():
            for byte in range(length):
                row, column = divmod(byte, row_bytes or length)
                move = (leaf, source + row * row_stride + column, destination + byte)
                assert move not in found
                found.add(move)
        return found

    @pytest.mark.parametrize("tile_bytes", [16, 64, 256])
    def test_random_plans(self, tile_bytes: int) -> None:
        packer = Packer("cpu")

        def check(case: Case) -> None:
            plan = packer.pack(case.payload(), case.batch(), case.rules).snapshot.plan
            if plan.device_bytes > 20_000:
                return  # byte by byte takes too long
            tiles = make_tiles(plan.segments, tile_bytes)
            assert self.moves(tiles) == self.moves(plan.segments)
            if len(tiles):
                assert 0 < tiles[:, LENGTH].min() <= tiles[:, LENGTH].max() <= tile_bytes
            strided = tiles[:, ROW_BYTES] > 0
            assert (tiles[strided, LENGTH] % tiles[strided, ROW_BYTES] == 0).all()
            assert (tiles[~strided, ROW_STRIDE] == 0).all()

        try_cases(check, examples=100)

    def test_no_segments_no_tiles(self) -> None:
        assert make_tiles(np.zeros((0, 6), dtype=np.int64), 64).shape == (0, 6)


def test_a_plan_keeps_nothing_of_the_arrays_that_it_was_made_from() -> None:
    leaf, starts, rows = torch.zeros(8, 2), np.array([0, 4]), np.array([2, 2])
    plan = make_plan([leaf], [ColumnSpec(0, starts, rows, facts=PieceFacts.of(starts, rows))])
    starts[:] = [1, 6]
    assert plan.segments[:, SOURCE].tolist() == [0, 32]
    assert [run.source for run in plan.passed_runs or ()] == [0, 32]


def test_numbers_of_rows_that_overflow_are_an_error_in_words() -> None:
    huge = np.array([2**62, 2**62])
    with pytest.raises(PlacementError, match="which has 4 rows"):
        make_plan([torch.zeros(4, 2)], [ColumnSpec(0, np.array([0, 2**62]), huge)])
