"""Random payloads and batches, and what the requests must get: an oracle that does not use plans.

`random_case` depends only on a source of random choices: a seeded `random.Random`, or one that hypothesis controls and
shrinks. The oracle slices and clones plain tensors.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanpack import Batch, Placement, RowMap
from tests.support.leaves import DTYPES, LeafRecipe, layouts_of

ROW_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (8,), (17,), (2, 5), (1, 1, 33), (4, 3, 2), (0,), (2, 0, 3))
PLAIN_VALUES: tuple[Any, ...] = (24000, "voice", None, True, 0.5, b"raw", [1, 2, 3], ("a", 1), [], {})


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Place:
    """A node with one recipe or a list of recipes, and how it is divided; `rule` is None where that is inferred."""

    recipes: tuple[LeafRecipe, ...]
    is_list: bool
    placement: Placement | RowMap
    rule: Placement | RowMap | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A payload, a batch and rules, all of which can be made repeatedly.

    Attributes
    ----------
    tree
        Containers and plain values with a `Place` for each node of tensors.
    starts, rows
        First row and number of rows of each request.
    per_token_rows
        Rows of the per-token leaves; those outside all spans are padding.
    """

    tree: Any
    request_ids: tuple[str, ...]
    starts: tuple[int, ...]
    rows: tuple[int, ...]
    per_token_rows: int
    consumers: tuple[str, ...]
    rules: Mapping[str, Placement | RowMap]

    def payload(self, device: str = "cpu") -> Any:
        """The payload with newly made tensors."""

        def make(place: Place) -> Any:
            tensors = [recipe.make(device) for recipe in place.recipes]
            return tensors if place.is_list else tensors[0]

        return _map_places(self.tree, make)

    def batch(self) -> Batch:
        return Batch(
            self.request_ids, self.rows, [*self.starts, self.per_token_rows], self.consumers, self.per_token_rows
        )

    def expected(self) -> dict[str, Any]:
        """What each consumer gets, in batch order."""
        wanted = set(self.consumers)
        return {
            request: _map_places(self.tree, lambda place, index=index: self._share(place, index), as_seen=True)
            for index, request in enumerate(self.request_ids)
            if request in wanted
        }

    def _share(self, place: Place, index: int) -> Any:
        """The part of one node that one request gets."""
        tensors = [recipe.make() for recipe in place.recipes]
        if place.placement is Placement.PER_TOKEN:
            return _own(tensors[0])[self.starts[index] : self.starts[index] + self.rows[index]]
        if place.placement is Placement.PER_REQUEST:
            return _own(tensors[index])
        if isinstance(place.placement, RowMap):
            span = place.placement.rows.get(self.request_ids[index])
            return None if span is None else _own(tensors[0])[span[0] : span[0] + span[1]]
        return [_own(tensor) for tensor in tensors] if place.is_list else _own(tensors[0])


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _map_places(node: Any, replace: Any, *, as_seen: bool = False) -> Any:
    """A copy of the tree with its places replaced; with `as_seen`, mappings become dicts, as consumers see them."""
    if isinstance(node, Place):
        return replace(node)
    if isinstance(node, Mapping):
        mapped = {key: _map_places(child, replace, as_seen=as_seen) for key, child in node.items()}
        kind: Any = type(node)
        return mapped if as_seen else kind(mapped)
    if isinstance(node, Record):
        return Record(*(_map_places(child, replace, as_seen=as_seen) for child in (node.first, node.second)))
    if isinstance(node, list | tuple):
        children = [_map_places(child, replace, as_seen=as_seen) for child in node]
        return type(node)(*children) if isinstance(node, Pair) else type(node)(children)
    return node.copy() if isinstance(node, np.ndarray) else node


def random_case(source: Random) -> Case:
    """Draw a case."""
    count = source.choice([1, 1, 2, 3, 4, 7, 16])
    ids = tuple(f"r{i}" for i in range(count))
    rows, starts, end = [], [], 0
    for _ in range(count):
        end += source.choice([0, 0, 0, 0, 1, 5])  # a gap: rows of no request
        starts.append(end)
        rows.append(source.choice([0, 1, 1, 1, 1, 2, 3, 9, 40]))
        end += rows[-1]
    per_token_rows = end + source.choice([0, 0, 1, 7])
    consumers = tuple(name for name in ids if source.random() < 0.6)
    drawn = _Drawn(source, ids, per_token_rows)
    tree = {key: drawn.node((key,), depth=0) for key in _keys(source, source.randint(1, 5))}
    return Case(tree, ids, tuple(starts), tuple(rows), per_token_rows, consumers, drawn.rules)


def _keys(source: Random, count: int) -> list[str]:
    return source.sample(["hidden", "layers", "codes", "embed", "meta", "0", "x y", "é"], count)


class _Drawn:
    """Draws the nodes of a tree and notes the rules they need."""

    def __init__(self, source: Random, ids: tuple[str, ...], per_token_rows: int) -> None:
        self.rules: dict[str, Placement | RowMap] = {}
        self._source = source
        self._ids = ids
        self._rows = per_token_rows

    def node(self, path: tuple[str, ...], depth: int) -> Any:
        source = self._source
        kind = source.random()
        if depth < 2 and kind < 0.25:
            return self._container(path, depth)
        if kind < 0.35:
            return source.choice(PLAIN_VALUES)
        return self._place(path)

    def _container(self, path: tuple[str, ...], depth: int) -> Any:
        source = self._source
        kind = source.choice(["dict", "ordered", "proxy", "list", "tuple", "pair", "record"])
        if kind in ("dict", "ordered", "proxy"):
            content: dict[Any, Any] = {
                key: self.node((*path, key), depth + 1) for key in _keys(source, source.randint(0, 3))
            }
            return (
                OrderedDict(content) if kind == "ordered" else MappingProxyType(content) if kind == "proxy" else content
            )
        if kind == "pair":
            return Pair(*(self.node((*path, name), depth + 1) for name in Pair._fields))
        if kind == "record":
            return Record(*(self.node((*path, name), depth + 1) for name in ("first", "second")))
        # A plain value comes first, since a list of tensors only would be one node.
        children = ["head", *(self.node((*path, str(i + 1)), depth + 1) for i in range(source.randint(1, 2)))]
        return children if kind == "list" else tuple(children)

    def _place(self, path: tuple[str, ...]) -> Place:
        kind = self._source.choice(["token", "token", "token", "list", "whole", "whole", "whole list", "map"])
        dtype, seed = self._source.choice(DTYPES), self._source.randrange(1 << 16)
        if kind == "token":
            recipe = self._recipe(dtype, (self._rows, *self._source.choice(ROW_SHAPES)), seed)
            return Place((recipe,), False, Placement.PER_TOKEN, None)
        if kind == "list":
            return self._per_request(dtype, seed)
        if kind == "map":
            return self._row_map(path, dtype, seed)
        placement = self._source.choice([Placement.INVARIANT, Placement.SHARED])
        count = self._source.randint(1, 3) if kind == "whole list" else 1
        recipes = tuple(self._recipe(dtype, self._shape(), seed + i) for i in range(count))
        self.rules[".".join(path)] = placement
        return Place(recipes, kind == "whole list", placement, placement)

    def _per_request(self, dtype: torch.dtype, seed: int) -> Place:
        row_shape = self._source.choice([None, *ROW_SHAPES])  # None: every tensor has its own row shape
        recipes = []
        for index in range(len(self._ids)):
            shape = self._shape() if row_shape is None else (self._source.choice([0, 1, 2, 5]), *row_shape)
            recipes.append(self._recipe(dtype, shape, seed + index))
        return Place(tuple(recipes), True, Placement.PER_REQUEST, None)

    def _row_map(self, path: tuple[str, ...], dtype: torch.dtype, seed: int) -> Place:
        source, rows = self._source, self._source.randint(1, 20)
        spans = {}
        for name in self._ids:
            if source.random() < 0.7:
                start = source.randint(0, rows)
                spans[name] = (start, source.randint(0, rows - start))
        rule = RowMap(spans)
        self.rules[".".join(path)] = rule
        return Place((self._recipe(dtype, (rows, *source.choice(ROW_SHAPES)), seed),), False, rule, rule)

    def _shape(self) -> tuple[int, ...]:
        source = self._source
        return () if source.random() < 0.2 else (source.choice([0, 1, 1, 2, 30]), *source.choice(ROW_SHAPES))

    def _recipe(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> LeafRecipe:
        contiguous = self._source.random() < 0.5
        layout = "contiguous" if contiguous else self._source.choice(layouts_of(dtype))
        return LeafRecipe(dtype, shape, layout, seed)
