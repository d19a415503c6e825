"""Which rows of a leaf reach which request: inferred where it is certain, said where it is not, never guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spanpack import Batch, Packer, Placement, PlacementError, RowMap
from tests.support.compare import assert_same, assert_same_tree

IDS = ["a", "b", "c"]
BATCH = Batch(IDS, [2, 0, 3], consumers=["a", "c"])
ROWS = torch.arange(5 * 4).view(5, 4)


@pytest.fixture
def packer() -> Packer:
    return Packer("cpu")


def test_a_first_dimension_of_the_batch_is_per_token(packer: Packer) -> None:
    views = packer.pack({"x": ROWS}, BATCH).views()
    assert list(views) == ["a", "c"]
    assert_same(views["a"]["x"], ROWS[:2])
    assert_same(views["c"]["x"], ROWS[2:])


@pytest.mark.parametrize("rows", [5, 8], ids=["scheduled tokens", "hidden rows"])
def test_either_of_two_numbers_of_rows_marks_a_per_token_leaf(packer: Packer, rows: int) -> None:
    leaf = torch.arange(rows)
    views = packer.pack({"x": leaf}, Batch(IDS, [2, 0, 3], per_token_rows=(5, 8))).views()
    assert [views[name]["x"].tolist() for name in IDS] == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize("requests", [1, 3, 64])
def test_each_request_sees_only_its_own_rows(packer: Packer, requests: int) -> None:
    generator = np.random.default_rng(requests)
    counts = generator.integers(0, 20, requests)
    ids = [f"r{i}" for i in generator.permutation(requests)]
    owner = torch.repeat_interleave(torch.arange(requests), torch.from_numpy(counts))
    views = packer.pack({"x": owner, "y": owner[:, None].expand(-1, 3)}, Batch(ids, counts)).views()
    for index, request in enumerate(ids):
        assert views[request]["x"].tolist() == [index] * counts[index]
        assert_same(views[request]["y"], torch.full((int(counts[index]), 3), index))


def test_chunked_prefills_mixed_with_decodes_add_up_to_the_whole(packer: Packer) -> None:
    prompt = torch.arange(4096 + 4096 + 1808, dtype=torch.int32)[:, None].expand(-1, 8)
    parts, done = [], 0
    for chunk in (4096, 4096, 1808):
        decodes = torch.full((15, 8), -1, dtype=torch.int32)
        step = torch.cat([decodes[:7], prompt[done : done + chunk], decodes[7:]])
        ids = [*(f"d{i}" for i in range(7)), "prefill", *(f"d{i}" for i in range(7, 15))]
        views = packer.pack({"x": step}, Batch(ids, [*[1] * 7, chunk, *[1] * 8])).views()
        assert all((views[request]["x"] == -1).all() for request in ids if request != "prefill")
        parts.append(views["prefill"]["x"])
        done += chunk
    assert_same(torch.cat(parts), prompt)


def test_padding_and_rows_of_nobody_are_not_gathered(packer: Packer) -> None:
    leaf = torch.full((64, 4), float("nan"))
    leaf[3:5], leaf[9:10] = 1.0, 2.0
    batch = Batch(["a", "b", "c"], [2, 1, 1], [3, 6, 9, 64], consumers=["a", "c"], per_token_rows=64)
    packed = packer.pack({"x": leaf}, batch)
    assert packed.snapshot.plan.payload_bytes == 3 * 4 * 4
    assert not any(tree["x"].isnan().any() for tree in packed.views().values())
    assert packed.snapshot.plan.segments[:, 3].sum() == 3 * 4 * 4


def test_adjacent_spans_are_one_segment(packer: Packer) -> None:
    leaf = torch.arange(64 * 3).view(64, 3)
    plan = packer.pack({"x": leaf}, Batch([str(i) for i in range(64)], [1] * 64)).snapshot.plan
    assert len(plan.segments) == 1


def test_a_list_as_long_as_the_batch_is_per_request(packer: Packer) -> None:
    items = [torch.arange(i + 1) for i in range(3)]
    mixed = (torch.ones(2, 2), torch.tensor(7), torch.zeros(0, dtype=torch.bool))
    views = packer.pack({"x": items, "y": mixed}, BATCH).views()
    assert_same_tree(views, {"a": {"x": items[0], "y": mixed[0]}, "c": {"x": items[2], "y": mixed[2]}})


def test_an_invariant_leaf_is_an_own_copy_for_each(packer: Packer) -> None:
    views = packer.pack(
        {"x": torch.ones(7), "s": torch.tensor(3)}, BATCH, dict.fromkeys("xs", Placement.INVARIANT)
    ).views()
    views["a"]["x"].fill_(5)
    views["a"]["s"].fill_(5)
    assert_same(views["c"]["x"], torch.ones(7))
    assert_same(views["c"]["s"], torch.tensor(3))


def test_a_shared_leaf_is_packed_once_and_seen_by_all(packer: Packer) -> None:
    packed = packer.pack({"x": torch.ones(7), "l": [torch.zeros(2)]}, BATCH, dict.fromkeys("xl", Placement.SHARED))
    views = packed.views()
    assert packed.snapshot.plan.payload_bytes == 9 * 4
    assert views["a"]["x"] is views["c"]["x"]
    assert views["a"]["l"][0] is views["c"]["l"][0]
    assert views["a"]["l"] is not views["c"]["l"]  # the list is nobody else's


def test_an_invariant_list_stays_a_list(packer: Packer) -> None:
    items = [torch.ones(1, 1, 4), torch.zeros(2), torch.tensor(1)]
    views = packer.pack({"x": items}, BATCH, {"x": Placement.INVARIANT}).views()
    assert_same_tree(views["c"]["x"], items)


def test_a_row_map_gives_rows_to_those_it_names(packer: Packer) -> None:
    rows = {"a": (1, 2), "b": (0, 1), "c": (3, 0)}
    tree = packer.pack({"x": ROWS}, Batch(IDS, [2, 0, 3]), {"x": RowMap(rows)}).views()
    assert_same(tree["a"]["x"], ROWS[1:3])
    assert_same(tree["b"]["x"], ROWS[:1])
    assert_same(tree["c"]["x"], ROWS[3:3])
    tree = packer.pack({"x": ROWS}, Batch(IDS, [2, 0, 3]), {"x": RowMap({"b": (4, 1)})}).views()
    assert (tree["a"]["x"], tree["c"]["x"]) == (None, None)
    assert_same(tree["b"]["x"], ROWS[4:])


def test_a_row_map_is_detached_from_the_dict_it_was_given(packer: Packer) -> None:
    rows = {"a": (0, 1)}
    rule = RowMap(rows)
    rows["a"] = (2, 2)
    views = packer.pack({"x": ROWS}, Batch(["a"], [5]), {"x": rule}).views()
    assert_same(views["a"]["x"], ROWS[:1])


def test_rules_from_a_function_are_asked_each_time(packer: Packer) -> None:
    asked: list[str] = []

    def rules(path: str) -> Placement | None:
        asked.append(path)
        return Placement.SHARED if path == "b.c" else None

    for _ in range(2):
        packer.pack({"a": ROWS, "b": {"c": torch.ones(3)}}, BATCH, rules)
    assert asked == ["a", "b.c"] * 2


def test_the_same_payload_under_other_rules_is_planned_anew(packer: Packer) -> None:
    for rule, expected in ((Placement.PER_TOKEN, 2), (Placement.SHARED, 5), (Placement.PER_TOKEN, 2)):
        assert len(packer.pack({"x": ROWS}, BATCH, {"x": rule}).views()["a"]["x"]) == expected


def test_no_consumers_no_bytes(packer: Packer) -> None:
    payload = {"x": ROWS, "l": [ROWS] * 3, "i": torch.ones(2)}
    packed = packer.pack(payload, Batch(IDS, [2, 0, 3], consumers=[]), {"i": Placement.INVARIANT})
    assert packed.views() == {}
    assert packed.snapshot.plan.slab_bytes == 0


@pytest.mark.parametrize(
    ("payload", "rules", "message"),
    [
        ({"k": {"x": torch.ones(7, 2)}}, None, r"'k\.x' has shape \[7, 2\]; per-token leaves have 5 rows"),
        ({"x": torch.tensor(1)}, None, r"'x' has shape \[\]"),
        ({"x": [torch.ones(5)] * 2}, None, "'x' is a list of 2 tensors, the batch has 3 requests"),
        (
            {"x": torch.ones(4)},
            {"x": Placement.PER_TOKEN},
            r"'x' has 4 rows, but request 'c' has rows \[2, 5\)\. Give all rows",
        ),
        (
            {"x": torch.tensor(1)},
            {"x": Placement.PER_TOKEN},
            r"'x' is 0-dimensional; Placement\.PER_TOKEN takes.*Declare it",
        ),
        (
            {"x": [ROWS] * 3},
            {"x": Placement.PER_TOKEN},
            r"'x' is a list of 3 tensors; Placement\.PER_TOKEN takes one.*INVARIANT",
        ),
        ({"x": ROWS}, {"x": Placement.PER_REQUEST}, r"'x' is one tensor; Placement\.PER_REQUEST takes a list of 3"),
        ({"x": [ROWS] * 2}, {"x": Placement.PER_REQUEST}, "'x' is a list of 2 tensors.*one per request.*Give such a"),
        ({"x": ROWS}, {"x": RowMap({"z": (0, 1)})}, "row map of 'x' names 'z', which is not in the batch; leave it"),
        ({"x": ROWS}, {"x": RowMap({"a": (4, 2)})}, r"gives request 'a' rows \[4, 6\) of 5; give a first row"),
        ({"x": ROWS}, {"x": RowMap({"a": (-1, 1)})}, r"gives request 'a' rows \[-1, 0\)"),
        ({"x": [ROWS]}, {"x": RowMap({"a": (0, 1)})}, "'x' is a list of 1 tensors; a RowMap takes one"),
        ({"x": ROWS}, {"x": "per-token"}, "the rule for 'x' is 'per-token'; give a Placement or a RowMap"),
        (
            {"x": ROWS, "k": {"y": ROWS}},
            {"x.y": Placement.SHARED},
            r"rule for 'x\.y', but no such leaf; .* has 'x', 'k\.y'",
        ),
        ({"x": 5}, {"x": Placement.SHARED}, "rule for 'x', but no such leaf; this payload has no tensors"),
        ({str(i): ROWS for i in range(60)}, {"x": Placement.SHARED}, "'48', '49' and 10 more"),
        ({"x": torch.eye(5).to_sparse()}, None, "'x' is sparse or quantized and can only be packed whole"),
    ],
)
def test_what_fits_no_rule_is_named(packer: Packer, payload: Any, rules: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        packer.pack(payload, BATCH, rules)
    assert packer.stats().packs == 0
    assert len(packer.pack({"x": ROWS}, BATCH).views()) == 2  # and the packer is usable
