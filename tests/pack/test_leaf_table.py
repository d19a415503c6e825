"""What leaves look like apart from their rows: what a table recognises, and plans made from it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from spanpack import ColumnSpec, PlacementError, make_plan
from spanpack.leaf_table import LeafLooks, LeafTable, LeafTables
from spanpack.planner import plan_columns
from tests.support.plans import assert_same_plan

WIDE = torch.zeros(9, 8)


@pytest.mark.parametrize(
    ("leaf", "fits"),
    [
        (torch.zeros(4, 3), True),
        (torch.zeros(0, 3), True),
        (torch.ones(9, 3), True),
        (torch.zeros(4, 4), False),
        (torch.zeros(4, 3).double(), False),
        (torch.zeros(4, 3, 1), False),
        (torch.zeros(4), False),
        (torch.tensor(1.0), False),
        (WIDE[:, :3], False),
        (torch.zeros(4, 3, device="meta"), False),
        (torch.eye(3).to_sparse(), False),
    ],
    ids=lambda value: None if isinstance(value, bool) else f"{list(value.shape)}",
)
def test_a_table_recognises_leaves_with_other_rows(leaf: Tensor, fits: bool) -> None:
    table = LeafTable([torch.zeros(5, 3), torch.tensor(2.0)])
    given = [leaf, torch.tensor(3.0)]
    assert table.matches(given) is table.admits(given) is fits
    assert not table.matches([leaf])
    if fits:
        assert table.row_counts(given) == (leaf.shape[0], 1)


def test_without_false_alarms_inference_and_gradients_make_no_difference() -> None:
    table = LeafTable([torch.zeros(5, 3)])
    with torch.inference_mode():
        inferred = torch.zeros(2, 3)
    assert table.admits([inferred]) and table.admits([torch.zeros(2, 3, requires_grad=True)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.eye(4).to_sparse(), torch.zeros(3)],
        lambda: [torch.zeros(3)] * 2,  # one object twice is more than torch's guards can describe
        list,
    ],
    ids=["sparse", "twice", "none"],
)
def test_leaves_that_guards_cannot_describe_are_recognised_all_the_same(make: Callable[[], list[Tensor]]) -> None:
    looks = LeafLooks.of(make())
    assert looks.matches(make()) and looks.admits(make())
    assert not looks.matches([*make(), torch.zeros(3)])


def test_looks_are_those_of_leaves_with_the_same_rows() -> None:
    looks = LeafLooks.of([torch.zeros(5, 3), torch.zeros(2)])
    assert looks.matches([torch.ones(5, 3), torch.zeros(2)])
    assert not looks.matches([torch.ones(4, 3), torch.zeros(2)])
    assert not looks.admits([torch.ones(4, 3), torch.zeros(2)])


def leaves_of(source: Random, device: str) -> list[Tensor]:
    """Leaves of fixed looks with a random number of rows, contiguous, strided and to be staged."""
    rows = source.choice([1, 2, 30, 64])
    return [
        torch.zeros(rows, 16, dtype=torch.bfloat16, device=device),
        torch.zeros(rows, 16, dtype=torch.bfloat16, device=device),
        torch.zeros(64, 8, device=device)[:rows, 2:5],
        torch.zeros(64, 4, 6, device=device).transpose(1, 2)[:rows],
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor(3, dtype=torch.int32, device=device),
    ]


def columns_of(source: Random, leaves: list[Tensor]) -> list[list[ColumnSpec]]:
    """Spans of the first rows, whole leaves and copies; some columns in parts."""
    rows = leaves[0].shape[0]
    cuts = sorted(source.choices(range(rows + 1), k=source.choice([1, 2, 40])))
    starts = np.array([0, *cuts[:-1]])
    counts = np.array(cuts) - starts
    if source.random() < 0.3:
        keep = sorted(source.sample(range(len(cuts)), k=source.randint(1, len(cuts))))
        starts, counts = starts[keep], counts[keep]
    spans = [ColumnSpec(leaf, starts, counts) for leaf in range(5)]
    copies = source.randint(1, 5)
    stacked = ColumnSpec.stack([1, 0, 1], [leaves[1], leaves[0], leaves[1]])
    return [
        [spans[0], spans[1], stacked],
        [spans[2]],
        [spans[4], ColumnSpec.whole(4, leaves[4], copies)],
        [spans[3]],
        [ColumnSpec.whole(5, leaves[5], copies)],
    ]


def joined(parts: list[ColumnSpec]) -> ColumnSpec:
    leaves = [np.broadcast_to(np.asarray(part.leaves), part.rows.shape) for part in parts]
    starts, rows = [part.starts for part in parts], [part.rows for part in parts]
    return ColumnSpec(np.concatenate(leaves), np.concatenate(starts), np.concatenate(rows), parts[0].scalar)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_plans_from_a_table_are_those_made_from_scratch(device: str) -> None:
    source = Random(0)
    table = LeafTable(leaves_of(source, device))
    for _ in range(200):
        leaves = leaves_of(source, device)
        assert table.matches(leaves)
        columns = columns_of(source, leaves)
        plan = plan_columns(LeafLooks(table, table.row_counts(leaves)), columns)
        assert_same_plan(plan, make_plan(leaves, [joined(parts) for parts in columns]))
        assert plan.signature.matches(leaves)


def test_pieces_in_a_later_part_are_counted_on() -> None:
    leaves = [torch.zeros(4, 3), torch.zeros(2, 3)]
    parts = [ColumnSpec.whole(0, leaves[0], 5), ColumnSpec(1, np.array([0, 1]), np.array([1, 2]))]
    with pytest.raises(PlacementError, match=r"column 0, piece 6: rows \[1, 3\) of leaf 1, which has 2 rows"):
        plan_columns(LeafLooks.of(leaves), [parts])


def test_tables_that_are_kept_are_bounded_and_the_latest_stay() -> None:
    tables = LeafTables(capacity=2)
    first = tables.look([torch.zeros(5, 1)])
    assert tables.look([torch.zeros(9, 1)]).table is first.table
    for width in (2, 1, 3):
        tables.look([torch.zeros(1, width)])
    assert len(tables) == 2
    assert tables.look([torch.zeros(4, 1)]).table is first.table
    assert tables.look([torch.zeros(4, 2)]).row_counts == (4,)


def test_leaves_that_come_again_are_looked_at_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = LeafTables(capacity=1)
    looks = [tables.look([torch.zeros(rows, 3)]) for rows in (4, 4, 4, 5, 4)]
    assert looks[0] is looks[1] is looks[2]
    assert [found.row_counts for found in looks[2:]] == [(4,), (5,), (4,)]
    monkeypatch.setattr(LeafTable, "row_counts", lambda *arguments: pytest.fail("the rows were read one by one"))
    assert looks[0].matches([torch.zeros(4, 3)])
    assert not looks[0].matches([torch.zeros(5, 3)])
