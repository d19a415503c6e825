"""Finding the plan of an earlier payload: by structure, key, dtypes, shapes, strides; never by address or value."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from spanpack import Batch, ColumnSpec, LeafError, Packer, PlanCache, Sighting, make_plan
from spanpack.leaf_table import LeafLooks


def payload(rows: int = 3, **extra: Any) -> dict[str, Any]:
    return {"hidden": torch.zeros(rows, 4), "codes": [torch.zeros(2, dtype=torch.int64)], "rate": 24000, **extra}


@pytest.fixture
def cache() -> PlanCache[str]:
    cache: PlanCache[str] = PlanCache(capacity=4)
    cache.keep(cache.look(payload(), "key"), "key", "entry")
    return cache


def test_a_payload_that_looks_alike_is_found(cache: PlanCache[str]) -> None:
    tree = payload()
    seen = cache.look(tree, "key")
    assert isinstance(seen, Sighting)
    assert seen.entry == "entry"
    assert all(leaf is expected for leaf, expected in zip(seen.leaves, (tree["hidden"], *tree["codes"]), strict=True))
    assert seen.values == [24000]


def test_values_do_not_matter_and_are_those_of_the_payload(cache: PlanCache[str]) -> None:
    seen = cache.look({**payload(), "rate": "other"}, "key")
    assert (seen.entry, seen.values) == ("entry", ["other"])


@pytest.mark.parametrize(
    "tree",
    [
        payload(rows=4),
        payload(more=torch.zeros(1)),
        {**payload(), "hidden": torch.zeros(3, 4).half()},
        {**payload(), "hidden": torch.zeros(4, 3).t()},
        {**payload(), "hidden": torch.zeros(3, 4, device="meta")},
        {**payload(), "hidden": 1.0},
        {**payload(), "rate": torch.tensor(24000)},
        {**payload(), "codes": (torch.zeros(2, dtype=torch.int64),)},
        {**payload(), "codes": []},
        OrderedDict(payload()),
    ],
    ids=["rows", "key", "dtype", "strides", "device", "value", "tensor", "tuple", "shorter list", "mapping"],
)
def test_a_payload_that_looks_different_is_not(cache: PlanCache[str], tree: Any) -> None:
    seen = cache.look(tree, "key")
    assert seen.entry is None
    cache.keep(seen, "key", "another")
    assert cache.look(tree, "key").entry == "another"
    assert cache.look(payload(), "key").entry == "entry"


def test_another_key_is_another_entry(cache: PlanCache[str]) -> None:
    assert cache.look(payload(), "other").entry is None


def test_tensors_beside_the_tree_count(cache: PlanCache[str]) -> None:
    extra = (torch.zeros(5),)
    assert cache.look(payload(), "key", extra).entry is None
    cache.keep(cache.look(payload(), "key", extra), "key", "with extra")
    assert cache.look(payload(), "key", extra).entry == "with extra"
    assert cache.look(payload(), "key").entry == "entry"


def test_the_least_recently_used_go_first() -> None:
    cache: PlanCache[int] = PlanCache(capacity=8)
    for key in range(12):
        cache.keep(cache.look(payload(), key), key, key)
    assert len(cache) == 8
    assert [cache.look(payload(), key).entry for key in range(12)] == [None] * 4 + list(range(4, 12))


def test_only_so_many_shapes_are_kept_for_one_structure() -> None:
    cache: PlanCache[int] = PlanCache()
    for rows in range(1, 100):
        cache.keep(cache.look(payload(rows), "key"), "key", rows)
    assert len(cache) <= 4
    assert cache.look(payload(99), "key").entry == 99


def test_threads_share_a_cache() -> None:
    cache: PlanCache[int] = PlanCache(capacity=2)
    wrong: list[int] = []

    def work(thread: int) -> None:
        for step in range(300):
            key = (thread + step) % 5
            seen = cache.look(payload(rows=1 + key), key)
            if seen.entry is None:
                cache.keep(seen, key, key)
            elif seen.entry != key:
                wrong.append(seen.entry)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


BASE = torch.zeros(3, 4)


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(3, 4), torch.ones(3, 4, requires_grad=True), torch.nn.Parameter(torch.ones(3, 4)), inference(BASE)],
    ids=["address", "gradient", "parameter", "inference"],
)
def test_a_plan_serves_leaves_that_differ_in_what_bytes_do_not_depend_on(leaf: Tensor) -> None:
    plan = make_plan([BASE], [ColumnSpec.whole(0, BASE)])
    snapshot = Packer("cpu").run(plan, [leaf])
    assert torch.equal(snapshot.column(0), leaf.detach())
    with torch.inference_mode():
        assert torch.equal(Packer("cpu").run(plan, [leaf]).column(0), leaf.detach())


@pytest.mark.parametrize(
    "leaves",
    [[], [BASE, BASE], [torch.zeros(4, 3).t()], [BASE.double()], [BASE[:2]], [BASE.to_sparse()], [BASE.to("meta")]],
    ids=["none", "two", "strides", "dtype", "rows", "layout", "device"],
)
def test_a_plan_refuses_other_leaves(leaves: list[Tensor]) -> None:
    plan = make_plan([BASE], [ColumnSpec.whole(0, BASE)])
    with pytest.raises(LeafError, match=rf"these {len(leaves)} leaves differ from those of the plan \(1\)"):
        Packer("cpu").run(plan, leaves)


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view], ids=["conjugated", "negated"])
@pytest.mark.parametrize("first", [False, True], ids=["plain first", "lazy first"])
def test_lazy_views_are_told_from_plain_tensors(view: Any, first: bool) -> None:
    plain = torch.ones(3, dtype=torch.complex64)
    pair = (view(plain), plain) if first else (plain, view(plain))
    signature = LeafLooks.of([pair[0]])
    assert signature.matches([pair[0]])
    assert not signature.matches([pair[1]])
    assert not signature.admits([pair[1]])


def test_keys_that_are_equal_but_of_other_types_are_not_taken_for_each_other() -> None:
    batch = Batch(["a"], [2])
    with Packer("cpu") as packer:
        for _ in range(3):
            for key in (1, True, 1.0):
                (found,) = packer.pack({key: torch.ones(2)}, batch).views()["a"]
                assert type(found) is type(key)


def test_a_nested_tensor_in_the_place_of_another_is_an_error_and_not_the_end_of_the_process() -> None:
    """In a process of its own: torch's guards, left alone, abort."""
    program = """
import torch
from spanpack import Batch, LeafError, Packer, PlanCache, make_plan, ColumnSpec
leaf = torch.zeros(3, 4)
nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)])
packer, batch, plan = Packer("cpu"), Batch(["a"], [3]), make_plan([leaf], [ColumnSpec.whole(0, leaf)])
cache = PlanCache()
cache.keep(cache.look({"x": leaf}, "k"), "k", "entry")
assert cache.look({"x": leaf}, "k").entry == "entry"
assert cache.look({"x": nested}, "k").entry is None
for attempt in (lambda: packer.pack({"x": nested}, batch), lambda: packer.run(plan, [nested])):
    for _ in range(3):
        packer.pack({"x": leaf}, batch)
        packer.run(plan, [leaf])
        try:
            attempt()
        except LeafError:
            continue
        raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
