"""Payload trees: taken apart, recognised, described, and put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spanpack import flatten, unflatten
from spanpack.matcher import compile_matcher
from spanpack.tree import nodes
from tests.support.compare import assert_same_tree
from tests.support.differential import try_cases
from tests.support.random_cases import Case, random_case

A, B, C = (torch.full((2,), value) for value in (1, 2, 3))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    first: Any
    second: Any
    derived: Any = field(init=False, default=None)


class Plain:
    """Neither container nor tensor."""


TREES = [
    A,
    {},
    [],
    {"a": A, "b": {"c": [B, C]}},
    {"a": (A, B), 0: A, 24: B, "": C},
    [A, "text", {"k": (1, B)}],
    Point(A, Point(B, None)),
    Record(A, [B, Record(C, 7)]),
    {"empty": [], "none": None, "numbers": [1, 2.5, None], "pair": (True, "x"), "nested": {"t": ()}},
    {"same": A, "again": A},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_round_trip(tree: Any) -> None:
    leaves, spec, values = flatten(tree)
    assert_same_tree(unflatten(spec, leaves, values), tree)


@pytest.mark.parametrize("kind", [dict, MappingProxyType, UserDict])
def test_keys_of_different_kinds_are_told_apart_although_they_are_equal(kind: Any) -> None:
    for keys in ((1, True, 1.0, 1 + 0j), ((1, 0), (True, 0), (1, (0,)))):
        specs = [flatten(kind({key: A}))[1] for key in keys]
        assert len(set(specs)) == len(keys)
        for spec, key in zip(specs, keys, strict=True):
            (found,) = unflatten(spec, [A], [])
            assert (found, type(found)) == (key, type(key))


def test_leaves_come_in_walking_order_and_are_not_copied() -> None:
    leaves, _, values = flatten({"z": A, "a": [1, {"m": B}], "k": (C, "text")})
    assert [leaf is expected for leaf, expected in zip(leaves, (A, B, C), strict=True)] == [True] * 3
    assert values == [1, "text"]


@pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType, UserDict])
def test_other_mappings_come_back_as_dicts(kind: Any) -> None:
    leaves, spec, values = flatten(kind({"x": A, "y": kind({"z": 3})}))
    assert_same_tree(unflatten(spec, leaves, values), {"x": A, "y": {"z": 3}})


def test_specs_are_equal_for_equal_structures_only() -> None:
    def spec(tree: Any) -> Any:
        return flatten(tree)[1]

    base = {"a": A, "b": [B, 1]}
    assert spec(base) == spec({"a": C, "b": [A, 2]})
    assert hash(spec(base)) == hash(spec({"a": C, "b": [A, 2]}))
    others = [
        {"b": [B, 1], "a": A},
        {"a": A, "b": (B, 1)},
        {"a": A, "b": [1, B]},
        {"a": A, "b": [B]},
        {"a": A},
        {"a": A, "c": [B, 1]},
        {"a": [A], "b": [B, 1]},
        OrderedDict(base),
    ]
    assert all(spec(base) != spec(other) for other in others)


def test_plain_values_are_detached_from_the_caller() -> None:
    numbers, array, raw, names, thing = [1, 2], np.arange(3), bytearray(b"ab"), {"x"}, Plain()
    tree = {"numbers": numbers, "array": array, "raw": raw, "names": names, "thing": thing}
    leaves, spec, values = flatten(tree)
    numbers.append(3)
    array[0] = 9
    raw[0] = 0
    names.add("y")
    built = unflatten(spec, leaves, values)
    assert built["numbers"] == [1, 2]
    assert built["array"].tolist() == [0, 1, 2]
    assert (built["raw"], built["names"]) == (bytearray(b"ab"), {"x"})
    assert built["thing"] is thing  # objects of other types are kept by reference


def test_trees_from_one_spec_do_not_share_lists() -> None:
    leaves, spec, values = flatten({"numbers": [1, 2], "tensors": [A]})
    first, second = (unflatten(spec, leaves, values) for _ in range(2))
    first["numbers"].append(3)
    first["tensors"].append(B)
    assert second["numbers"] == [1, 2]
    assert len(second["tensors"]) == 1


def test_nodes_name_leaves_by_path_and_take_lists_of_tensors_together() -> None:
    tree = {
        "hidden": {"layers": {24: A}},
        "each": [A, B],
        "mixed": [A, 1, (B, C)],
        "point": Point(A, B),
        "record": Record(A, [B]),
        "value": 3,
        "none": [],
    }
    found = {node.path: (node.leaves, node.is_list) for node in nodes(flatten(tree)[1])}
    assert found == {
        "hidden.layers.24": ((0,), False),
        "each": ((1, 2), True),
        "mixed.0": ((3,), False),
        "mixed.2": ((4, 5), True),
        "point.x": ((6,), False),
        "point.y": ((7,), False),
        "record.first": ((8,), False),
        "record.second": ((9,), True),
    }


class TestMatcher:
    """Compiled matchers take trees apart like `flatten`, and see through trees of another structure."""

    def test_the_same_as_flatten_on_random_trees(self) -> None:
        compared = 0

        def check(case: Case) -> None:
            nonlocal compared
            tree = case.payload()
            leaves, spec, values = flatten(tree)
            matcher = compile_matcher(spec)
            found = matcher(tree) if matcher is not None else None
            if found is not None:
                compared += 1
                assert [a is b for a, b in zip(found[0], leaves, strict=True)] == [True] * len(leaves)
                assert_same_tree(found[1], values)

        try_cases(check, examples=300)
        assert compared > 0

    def test_lists_of_plain_values_are_taken_as_flatten_takes_them(self) -> None:
        for plain in ([1, "a"], (1.5, None), [True]):
            tree = {"codes": A, "plain": plain}
            matcher = compile_matcher(flatten(tree)[1])
            assert matcher is not None
            assert matcher(tree) == ((A,), [plain])
            assert type(matcher(tree)[1][0]) is type(plain)  # type: ignore[index]
            assert (matcher(tree)[1][0] is plain) == (type(plain) is tuple)  # type: ignore[index] # lists are copied
            for other in ([], (), [B], [[1]], [{}], {"a": 1}, bytearray(b"x")):
                assert matcher({"codes": A, "plain": other}) is None

    def test_another_structure_is_never_taken_for_this_one(self) -> None:
        """Either the matcher gives up, or the trees have equal specs once their leaves are known to be tensors."""
        trees = [random_case(Random(seed)).payload() for seed in range(60)] + TREES
        for one in TREES:
            spec = flatten(one)[1]
            matcher = compile_matcher(spec)
            for other in trees:
                found = matcher(other) if matcher is not None else None
                if found is not None and all(isinstance(leaf, torch.Tensor) for leaf in found[0]):
                    assert flatten(other)[1] == spec

    @pytest.mark.parametrize("tree", [{"a'; import os #": A}, {"\n": A, '"""': B}, {None: A, 15: B}])
    def test_keys_are_never_code(self, tree: Any) -> None:
        matcher = compile_matcher(flatten(tree)[1])
        assert matcher is not None
        found = matcher(tree)
        assert found is not None
        assert len(found[0]) == len(tree)

    @pytest.mark.parametrize("tree", [{True: A}, {1.5: A}, {("t", 1): A}], ids=str)
    def test_keys_that_other_keys_may_equal_have_none(self, tree: Any) -> None:
        assert compile_matcher(flatten(tree)[1]) is None

    def test_only_what_can_be_unpacked_has_one(self) -> None:
        assert compile_matcher(flatten(Point(A, B))[1]) is None
        assert compile_matcher(flatten(Record(A, B))[1]) is None
        assert compile_matcher(flatten(MappingProxyType({"a": A}))[1]) is None
