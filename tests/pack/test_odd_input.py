"""Input that is wrong in unusual ways: an error of our own, and never a wrong byte."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spanpack import (
    Batch,
    BatchError,
    ColumnSpec,
    DeviceError,
    InputError,
    LeafError,
    Packer,
    Placement,
    PlacementError,
    RowMap,
    make_plan,
)
from tests.support.leaves import Wrapper


@pytest.mark.parametrize(
    "counts",
    [None, 3, [[4], [2]], [(4,), (2,)], [4.0, 2.0], torch.ones(2), [4, 2**63 - 4], [4, 1 << 48], [1, [2]]],
    ids=["none", "number", "nested", "tuples", "floats", "float tensor", "overflow", "huge", "ragged"],
)
def test_counts_that_are_no_row_counts(counts: Any) -> None:
    with pytest.raises(BatchError, match="num_scheduled_tokens"):
        Batch(["a", "b"], counts)


def test_starts_that_would_overflow_never_reach_the_kernel() -> None:
    with pytest.raises(BatchError, match="query_start_loc"):
        Batch(["a", "b"], [4, 2], [0, 2**63 - 2], per_token_rows=6)
    leaf = torch.zeros(6, 4)
    with pytest.raises(PlacementError, match="piece 0"):
        make_plan([leaf], [ColumnSpec(0, np.array([2**63 - 2]), np.array([2]))])


@pytest.mark.parametrize("rows", [6.0, "6", [6, None]], ids=["float", "text", "none among them"])
def test_per_token_rows_that_are_no_integers(rows: Any) -> None:
    with pytest.raises(BatchError, match="per_token_rows"):
        Batch(["a"], [1], per_token_rows=rows)


@pytest.mark.parametrize("given", [{"request_ids": None}, {"consumers": 3}, {"request_ids": [["a"]]}])
def test_names_that_are_no_sequence_of_ids(given: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=next(iter(given))):
        Batch(**{"request_ids": ["a"], "num_scheduled_tokens": [1], **given})


def test_counts_in_a_list_of_tensors_are_read_anew() -> None:
    numbers = torch.tensor([4, 2])
    first = Batch(["a", "b"], list(numbers.unbind()), per_token_rows=8)
    numbers += 1
    assert Batch(["a", "b"], list(numbers.unbind()), per_token_rows=8).spans.rows.tolist() == [5, 3]
    assert first.spans.rows.tolist() == [4, 2]


@pytest.mark.parametrize("rows", [{"a": (0, 2.5)}, {"a": 3}, {"a": (0, 1, 2)}, None], ids=str)
def test_row_maps_of_other_things(rows: Any) -> None:
    with pytest.raises(PlacementError, match="RowMap maps request ids"):
        RowMap(rows)


@pytest.mark.parametrize("device", ["bogus", -1, object()], ids=["name", "number", "object"])
def test_devices_that_torch_does_not_know(device: Any) -> None:
    with pytest.raises(DeviceError):
        Packer(device)


@pytest.mark.parametrize(
    "options",
    [
        {"pinned_budget_bytes": -1},
        {"pinned_budget_bytes": 1e9},
        {"pinned_budget_bytes": "1 GiB"},
        {"slabs_per_class": 0},
        {"slabs_per_class": 2.0},
        {"slabs_per_class": None},
        {"transport": "x"},
    ],
    ids=str,
)
def test_options_that_mean_nothing(options: Any) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Packer("cpu", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbytes": -1}, "nbytes=-1; give an integer of at least 0"),
        ({"nbytes": True}, "nbytes=True; give an integer of at least 0"),
        ({"nbytes": 1e6}, "nbytes=1000000.0"),
        ({"nbytes": None}, "nbytes=None"),
        ({"nbytes": 1, "slabs": 0}, "slabs=0; give an integer of at least 1"),
        ({"nbytes": 1, "slabs": "2"}, "slabs='2'"),
    ],
    ids=str,
)
def test_reservations_that_mean_nothing(options: Any, message: str) -> None:
    packer = Packer("cpu")
    with pytest.raises(InputError, match=message):
        packer.reserve(**options)
    packer.reserve(np.int64(0), slabs=np.int32(1))  # type: ignore[arg-type]


def test_integers_of_numpy_are_limits_too() -> None:
    assert Packer("cpu", pinned_budget_bytes=np.int64(1 << 20), slabs_per_class=np.int32(2)).backend == "torch"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "rules", "message"),
    [
        ("b", None, r"batch is a str; give a spanpack\.Batch"),
        (None, None, "batch is a NoneType"),
        (Batch(["a"], [3]), [1], r"rules are \[1\]; give a mapping from path to Placement or RowMap, or a function"),
        (Batch(["a"], [3]), Placement, "rules are the class Placement; give a mapping from path to Placement"),
        (Batch(["a"], [3]), RowMap, "rules are the class RowMap"),
        (Batch(["a"], [3]), {"x": [1]}, r"rules are \{'x': \[1\]\}; give a mapping"),
    ],
    ids=["text for a batch", "no batch", "list of rules", "placements", "row maps", "list for a rule"],
)
def test_batches_and_rules_that_are_none(batch: Any, rules: Any, message: str) -> None:
    packer, payload = Packer("cpu"), {"x": torch.arange(3)}
    packer.pack(payload, Batch(["a"], [3]))
    with pytest.raises(InputError, match=message):
        packer.pack(payload, batch, rules)
    assert packer.stats().packs == 1


@dataclasses.dataclass
class Doubles:
    """Would change its tensors if it were made through its constructor."""

    rows: torch.Tensor
    derived: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.rows * 2
        self.derived = self.rows + 1


def test_dataclasses_come_back_as_they_were() -> None:
    given = Doubles(torch.arange(3.0))
    found = Packer("cpu").pack(given, Batch(["a"], [3])).views()["a"]
    assert torch.equal(found.rows, given.rows)
    assert torch.equal(found.derived, given.derived)


@pytest.mark.parametrize("kind", [deque, set, frozenset])
def test_containers_that_would_be_kept_by_reference(kind: Any) -> None:
    with pytest.raises(LeafError, match=kind.__name__):
        Packer("cpu").pack({"x": kind([torch.zeros(2)])}, Batch(["a"], [2]))


def test_empty_views_stay_on_the_host_whatever_the_default_device() -> None:
    tree = Packer("cpu").pack({"x": torch.zeros(0, 3)}, Batch(["a"], [0]))
    with torch.device("meta"):
        assert tree.views()["a"]["x"].device.type == "cpu"


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "negated"])
def test_a_leaf_that_was_freed_after_its_plan_was_made(layout: str) -> None:
    packer, batch = Packer("cpu"), Batch(["a"], [4])
    views = {"contiguous": torch.clone, "transposed": torch.t, "negated": torch._neg_view}
    leaf, freed = (views[layout](torch.ones(4, 4)) for _ in range(2))
    packer.pack({"x": leaf}, batch)
    freed.untyped_storage().resize_(0)
    with pytest.raises(LeafError, match="leaf 0 is a Tensor whose storage was freed or shrunk; pack it before"):
        packer.pack({"x": freed}, batch)
    assert torch.equal(packer.pack({"x": leaf}, batch).views()["a"]["x"], leaf)


@pytest.mark.parametrize(
    ("first_row", "left_bytes"), [(0, 0), (4, 0), (4, 8 * 16 - 1)], ids=["whole", "view", "shrunk"]
)
def test_a_leaf_that_was_freed_before_its_plan_was_made(first_row: int, left_bytes: int) -> None:
    freed = torch.ones(8, 4)[first_row : first_row + 4]
    freed.untyped_storage().resize_(left_bytes)
    with pytest.raises(LeafError, match="'x' is a Tensor whose storage was freed or shrunk; pack it before"):
        Packer("cpu").pack({"x": freed}, Batch(["a"], [4]))


LEAF = torch.zeros(4, 6)


@pytest.mark.parametrize("times_run", [0, 1, 3], ids=lambda times: f"run {times} times")
@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (None, r"these leaves differ from those of the plan \(2\): given a NoneType, not a sequence of tensors"),
        (3, "given a int, not a sequence"),
        ([LEAF], r"these 1 leaves differ from those of the plan \(2\): given 1, expected 2; make a plan for them"),
        ([LEAF, None], "leaf 1 is a NoneType, not a tensor"),
        ([LEAF, LEAF.half()], r"leaf 1 is float16\[4, 6\] with strides \(6, 1\) on cpu, expected float32\[4, 6\] with"),
        ([LEAF, LEAF[:3]], r"leaf 1 is float32\[3, 6\] .* expected float32\[4, 6\]"),
        ([LEAF, torch.zeros(6, 4).t()], r"leaf 1 is float32\[4, 6\] with strides \(1, 4\) on cpu"),
        ([LEAF, LEAF.to("meta")], r"leaf 1 is float32\[4, 6\] with strides \(6, 1\) on meta, expected .* on cpu;"),
        ([LEAF, LEAF.to_sparse()], r"leaf 1 is float32\[4, 6\] with layout torch\.sparse_coo on cpu"),
        ([LEAF, torch._neg_view(LEAF)], r"leaf 1 is float32.* on cpu, lazily conjugated or negated, expected"),
        ([LEAF, torch.tensor(1.0)], r"leaf 1 is float32\[\] with strides \(\) on cpu"),
    ],
    ids=["none", "number", "few", "none in it", "dtype", "rows", "strides", "meta", "sparse", "lazy", "0-d"],
)
def test_leaves_that_a_plan_was_not_made_for_are_told_apart(leaves: Any, message: str, times_run: int) -> None:
    packer = Packer("cpu")
    plan = make_plan([LEAF, LEAF], [ColumnSpec.whole(0, LEAF), ColumnSpec.whole(1, LEAF)])
    for _ in range(times_run):
        packer.run(plan, [LEAF, LEAF])
    with pytest.raises(LeafError, match=message):
        packer.run(plan, leaves)
    assert packer.stats().packs == times_run


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_nor_was_it_made_for_a_nested_one() -> None:
    plan = make_plan([LEAF], [ColumnSpec.whole(0, LEAF)])
    with pytest.raises(LeafError, match="leaf 0 is a nested tensor"):
        Packer("cpu").run(plan, [_nested(torch.jagged)])


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_a_nested_leaf_in_the_place_of_one_that_torch_has_no_guard_for(layout: torch.layout) -> None:
    packer, batch = Packer("cpu"), Batch(["a"], [4])
    for _ in range(3):
        packer.pack({"x": torch.nn.Parameter(torch.zeros(4, 4))}, batch)
    with pytest.raises(LeafError, match="'x' is a nested tensor; give the list of its parts"):
        packer.pack({"x": _nested(layout)}, batch)


@pytest.mark.parametrize("plan", [None, "plan", LEAF], ids=["none", "text", "tensor"])
def test_plans_that_are_none(plan: Any) -> None:
    with pytest.raises(InputError, match=f"plan is a {type(plan).__name__}; give one from spanpack.make_plan"):
        Packer("cpu").run(plan, [LEAF])


def _cycles() -> dict[str, Any]:
    in_itself: dict[str, Any] = {"x": LEAF}
    in_itself["self"] = in_itself
    deep: dict[str, Any] = {"x": LEAF, "a": {"b": [LEAF, "head"]}}
    deep["a"]["b"].append((1, {"up": deep["a"]}))
    flat: Any = LEAF
    for _ in range(100_000):
        flat = [flat]
    return {"itself": in_itself, "deep": deep, "nested": flat}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("itself", "the payload holds itself, at 'self'; give a tree"),
        ("deep", r"the container 'a' holds itself, at 'a\.b\.2\.1\.up'; give a tree"),
        ("nested", "the payload is nested deeper than Python's recursion limit"),
    ],
)
def test_payloads_without_an_end(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Packer("cpu").pack(_cycles()[name], Batch(["a"], [4]))


def _read_ever_deeper() -> Iterator[int]:
    """Pack and read deeper and deeper payloads; yields the depth of each."""
    payload: dict[str, Any] = {"x": LEAF}
    for depth in range(0, 2 * sys.getrecursionlimit(), 20):
        tree = Packer("cpu").pack(payload, Batch(["a"], [4]))
        assert list(tree.views()["a"]) == ["x"]
        yield depth
        for _ in range(10):
            payload = {"x": [payload]}


def test_a_payload_as_deep_as_it_can_be_packed_can_be_read() -> None:
    depths: list[int] = []
    with pytest.raises(InputError, match="nested deeper"):
        depths.extend(_read_ever_deeper())
    assert depths[-1] > sys.getrecursionlimit() // 2


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(2, 4, dtype=torch.uint4), r"'x\.y' is uint4, narrower than a byte; give leaf\.view"),
        (lambda: torch.empty(2, 4, dtype=torch.int2), r"'x\.y' is int2, narrower than a byte"),
        (lambda: _nested(torch.strided), r"'x\.y' is a nested tensor; give the list of its parts, leaf\.unbind\(\)"),
        (lambda: _nested(torch.jagged), r"'x\.y' is a nested tensor"),
        (lambda: Wrapper(torch.zeros(2, 3)), r"'x\.y' is a Wrapper without memory of its own"),
    ],
    ids=["uint4", "int2", "nested", "jagged", "wrapper"],
)
def test_tensors_that_are_no_bytes_in_memory(make: Any, message: str) -> None:
    packer = Packer("cpu")
    for leaf in (make(), [make()]):
        with pytest.raises(LeafError, match=message):
            packer.pack({"x": {"y": leaf}}, Batch(["a"], [2]), {"x.y": Placement.INVARIANT})


def test_narrow_dtypes_as_the_message_says() -> None:
    leaf = torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.uint4)
    tree = Packer("cpu").pack({"x": leaf.view(torch.uint8)}, Batch(["a"], [2])).views()["a"]
    assert torch.equal(tree["x"].view(torch.uint4).view(torch.uint8), leaf.view(torch.uint8))


def test_a_tensor_in_the_middle_of_a_transformation() -> None:
    packer = Packer("cpu")
    with pytest.raises(LeafError, match="'x' is a Tensor without memory of its own"):
        torch.vmap(lambda row: packer.pack({"x": row}, Batch(["a"], [3])))(torch.zeros(2, 3))
