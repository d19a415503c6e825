"""Lower a payload's structure to packed columns, deciding once per key how the key is packed.

The engine routes a payload request by request. This module applies the same rules key by key to a tree that holds
placeholders instead of tensors and values, so that the result serves every later step of the same structure. Shapes
that these rules do not cover raise `NotCovered`; the engine's own builder then handles the step.

A prefill step differs from all earlier steps, but its payload has the same keys, dtypes and widths as the last one's.
What depends only on those is cached, and only what depends on row counts is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

import spanpack
from omni_runner.step import NotCovered, StepContext
from omni_runner.step_columns import Pieces, StepColumns, make_pieces, whole_copies, whole_leaves
from spanpack.leaf_table import LeafKind, LeafLooks, LeafTables
from spanpack.plan import Route
from spanpack.planner import plan_columns
from spanpack.segments import MOST_PASSED
from spanpack.tree import TreeSpec

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

HIDDEN_KEY = "hidden"  # the key under which the engine puts a stage's own hidden rows

# Keys share a column up to this size. Above it one more torch call hardly matters, while pickling a tensor with its
# storage, which is torch's default, includes the whole column.
SHARED_COLUMN_BYTES = 1 << 20

# Largest payload that is packed together with its step's sampled tokens: 0.3 ms over a PCIe 5 link.
WITH_TOKENS_BYTES = 1 << 24
# The limit if the next step's sampling waits for the tokens: 5 us.
WITH_AWAITED_TOKENS_BYTES = 1 << 18

_GATHERED = (Route.KERNEL, Route.STAGED)
_TABLES = 4  # sets of dtypes, widths, strides and devices that are cached for one structure


@dataclass(frozen=True, slots=True)
class LeafRef:
    """Placeholder for a tensor; `index` is its position in traversal order."""

    index: int


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Placeholder for a plain value, which may differ from step to step."""

    index: int


Template: TypeAlias = Any  # LeafRef, ValueRef, or a dict, list or tuple of templates


class PackedPieces(NamedTuple):
    """The pieces of a packed column that are the tensors of one key.

    Attributes
    ----------
    column
        Index of the column in the plan; keys with tensors of the same kind share columns.
    first, end
        Range of the column's pieces.
    owners
        For each piece, its consumer's index among the step's consumers; None if each gets one, in order.
    """

    column: int
    first: int
    end: int
    owners: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PlainElements:
    """Per-request plain values of one key: a template without tensors for each owner (index among the consumers)."""

    owners: tuple[int, ...]
    templates: tuple[Template, ...]


class KeyRecipe(NamedTuple):
    """How one flat key of the payload is built for all consumers.

    Attributes
    ----------
    key
        Name of the key in the per-request payloads.
    pieces
        Where the key's tensors are.
    plain
        Plain values: a `ValueRef`, whose value all consumers share or, if it is a list, split by element;
        `PlainElements` for a tuple or a list that is not entirely plain; None if the key holds only tensors.
    """

    key: str
    pieces: tuple[PackedPieces, ...]
    plain: ValueRef | PlainElements | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """What to pack and how to read it back, for every step of one structure.

    Attributes
    ----------
    recipes
        One per key, in the order of the per-request payloads.
    plan
        None if no tensor has to be packed.
    tokens
        Index of the column with the step's sampled tokens, always the last; None if they are not packed.
    """

    recipes: tuple[KeyRecipe, ...]
    plan: spanpack.Plan | None
    tokens: int | None = None

    @property
    def payload_columns(self) -> int:
        """Number of the plan's columns that belong to the payload."""
        if self.plan is None:
            return 0
        return len(self.plan.columns) - (self.tokens is not None)


def with_tokens_bytes(*, awaited: bool) -> int:
    """Return the size of the largest payload that is packed with tokens."""
    return WITH_AWAITED_TOKENS_BYTES if awaited else WITH_TOKENS_BYTES


def make_template(spec: TreeSpec, num_leaves: int, num_values: int) -> Template:
    """Build the tree of a spec with placeholders in place of its tensors and plain values.

    Raises
    ------
    NotCovered
        The tree has containers other than dict, list and tuple, which the engine leaves unchanged.
    """
    for token in spec:
        if type(token) is tuple and (token[0] not in (dict, list, tuple) or len(token) > 2):
            raise NotCovered(f"a container of type {getattr(token[0], '__name__', token[0])}")
    return spanpack.unflatten(spec, [LeafRef(i) for i in range(num_leaves)], [ValueRef(i) for i in range(num_values)])


class Lowerer:
    """Decides how each key of a payload is packed, and caches what does not depend on row counts.

    Not thread-safe.

    Parameters
    ----------
    upstream
        The resolved engine names.
    capacity
        How many structures to cache.
    """

    def __init__(self, upstream: Upstream, capacity: int = 64) -> None:
        self._upstream = upstream
        self._capacity = capacity
        self._structures: OrderedDict[tuple[TreeSpec, bool, bool], _Structure] = OrderedDict()

    def lower(
        self,
        step: StepContext,
        spec: TreeSpec,
        num_values: int,
        leaves: Sequence[Tensor],
        *,
        has_hidden: bool,
        has_tokens: bool = False,
        tokens_awaited: bool = False,
    ) -> Lowering | None:
        """Decide how each key of a payload is packed.

        Parameters
        ----------
        step
            A step with at least one consumer.
        spec, num_values
            The payload's structure, from `flatten`, and how many plain values it has.
        leaves
            The payload's tensors, then hidden rows and sampled tokens, if any.
        has_hidden
            Whether `leaves` has the stage's hidden rows; some models omit them.
        has_tokens
            Whether the last of `leaves` is the step's sampled tokens.
        tokens_awaited
            Whether anything besides the step's output waits for the tokens.

        Returns
        -------
        Lowering or None
            None if the tokens should not be packed along: nothing else is gathered on their device, the payload is too
            large, or the kernel would need a table on the device because of them.

        Raises
        ------
        NotCovered
            Columns can't express the payload; the message says why.
        """
        structure = self._structure(spec, num_values, len(leaves), has_hidden, has_tokens)
        looks = structure.tables.look(leaves)
        return _StepLowerer(step, structure, looks, with_tokens_bytes(awaited=tokens_awaited)).lower()

    def _structure(
        self, spec: TreeSpec, num_values: int, num_leaves: int, has_hidden: bool, has_tokens: bool
    ) -> _Structure:
        key = spec, has_hidden, has_tokens
        found = self._structures.get(key)
        if found is not None:
            self._structures.move_to_end(key)
            return found
        in_tree = num_leaves - has_hidden - has_tokens
        template = make_template(spec, in_tree, num_values)
        found = self._structures[key] = _structure_of(
            self._upstream, template, in_tree if has_hidden else None, num_leaves - 1 if has_tokens else None
        )
        if len(self._structures) > self._capacity:
            self._structures.popitem(last=False)
        return found


class _Key(NamedTuple):
    """A flat key, its node and, for a list that holds only tensors, its first leaf and their number."""

    name: str
    node: Template
    leaf_list: tuple[int, int] | None


class _Structure(NamedTuple):
    """What depends only on a payload's containers and keys.

    Attributes
    ----------
    keys
        In the order of the per-request payloads, without those of the sparse protocol.
    hidden
        Index of the hidden rows' leaf, or None.
    tokens
        Index of the sampled tokens' leaf, or None.
    tables
        Cached dtypes, widths, strides and devices of the leaves.
    """

    keys: tuple[_Key, ...]
    hidden: int | None
    tokens: int | None
    tables: LeafTables


def _structure_of(upstream: Upstream, template: Template, hidden: int | None, tokens: int | None) -> _Structure:
    flat = upstream.flatten_payload(template)
    if hidden is not None and HIDDEN_KEY in flat:
        raise NotCovered(f"the payload has a key {HIDDEN_KEY!r} of its own")
    keys = [_Key(key, node, _leaf_list(node)) for key, node in flat.items() if key not in upstream.sparse_protocol_keys]
    return _Structure(tuple(keys), hidden, tokens, LeafTables(_TABLES))


def _leaf_list(node: Template) -> tuple[int, int] | None:
    if isinstance(node, list) and node and all(isinstance(item, LeafRef) for item in node):
        return node[0].index, len(node)  # the leaves of a list are traversed together, so their indices are consecutive
    return None


class _StepLowerer:
    def __init__(self, step: StepContext, structure: _Structure, looks: LeafLooks, most_bytes: int) -> None:
        self.step = step
        self.structure = structure
        self.looks = looks
        self.most_bytes = most_bytes  # of a payload that is packed together with tokens
        self.columns = StepColumns(looks.table, SHARED_COLUMN_BYTES)
        self.spans: dict[int | None, Pieces] = {}

    def lower(self) -> Lowering | None:
        recipes = tuple(self._recipes())
        columns = self.columns.specs
        leaf, tokens = self.structure.tokens, None
        if leaf is not None:
            if not self._suits_tokens(leaf):
                return None
            tokens = self.columns.add_apart(leaf, whole_copies(self.looks.row_counts[leaf], 1))
        return Lowering(recipes, plan_columns(self.looks, columns) if columns else None, tokens)

    def _suits_tokens(self, leaf: int) -> bool:
        """Whether the sampled tokens can be gathered with the payload at no extra cost."""
        kinds, routes = self.looks.table.kinds, self.looks.table.routes
        if routes[leaf] is not Route.KERNEL or kinds[leaf].scalar or self.columns.nbytes > self.most_bytes:
            return False
        needs_tiles = self.columns.runs > MOST_PASSED
        if self.columns.runs == MOST_PASSED or (needs_tiles and len(routes) > MOST_PASSED):
            return False
        first = [specs[0].first_leaf for specs in self.columns.specs]
        return any(routes[i] in _GATHERED and kinds[i].device == kinds[leaf].device for i in first)

    def _recipes(self) -> Iterator[KeyRecipe]:
        step, hidden = self.step, self.structure.hidden
        hidden_rows = 0
        if hidden is not None:
            hidden_rows = self._rows_of(hidden, HIDDEN_KEY)
            if not step.is_sparse:
                # If every request is a consumer, the engine cuts the padding off first; otherwise it does not.
                limit = min(step.scheduled_tokens, hidden_rows) if step.everyone_consumes else hidden_rows
                yield KeyRecipe(HIDDEN_KEY, (self._per_token(hidden, limit),))
        for key in self.structure.keys:
            yield self._recipe(key, hidden_rows)

    def _recipe(self, key: _Key, hidden_rows: int) -> KeyRecipe:
        name, node, leaf_list = key
        if isinstance(node, LeafRef):
            rows = self._rows_of(node.index, name)
            if rows in (hidden_rows, self.step.scheduled_tokens):
                return KeyRecipe(name, (self._per_token(node.index, rows),))
            return KeyRecipe(name, (self._copies(node.index),))
        if isinstance(node, ValueRef):
            return KeyRecipe(name, (), node)
        if leaf_list is not None:
            return self._leaf_list(name, *leaf_list)
        if isinstance(node, list):
            return self._mixed_list(name, node)
        if isinstance(node, tuple) and not _has_leaf(node):
            count = len(self.step.consumers)
            return KeyRecipe(name, (), PlainElements(tuple(range(count)), (node,) * count))
        raise NotCovered(f"key {name!r} holds a {type(node).__name__}")

    def _per_token(self, leaf: int, row_limit: int) -> PackedPieces:
        """Add each consumer's span, clipped at the end of the rows as a Python slice is."""
        spans = self._consumer_spans(None)
        if spans.facts.smallest < 0 or spans.facts.end > row_limit:
            spans = self._consumer_spans(row_limit)
        return PackedPieces(*self.columns.add(leaf, spans), None)

    def _consumer_spans(self, row_limit: int | None) -> Pieces:
        found = self.spans.get(row_limit)
        if found is None:
            step = self.step
            starts, rows = step.starts, step.rows
            if not step.everyone_consumes:
                chosen = list(step.consumers)
                starts, rows = starts[chosen], rows[chosen]
            if row_limit is not None:
                first = np.minimum(starts, row_limit)
                starts, rows = first, np.minimum(starts + rows, row_limit) - first
            found = self.spans[row_limit] = make_pieces(starts, rows)
        return found

    def _copies(self, leaf: int) -> PackedPieces:
        """Add the whole leaf once per consumer, because a consumer may change its payload in place."""
        copies = whole_copies(self.looks.row_counts[leaf], len(self.step.consumers))
        return PackedPieces(*self.columns.add(leaf, copies), None)

    def _leaf_list(self, key: str, first: int, count: int) -> KeyRecipe:
        """Lower a list that holds only tensors."""
        if count == 1 and not self.step.is_sparse:
            # Tensors for all requests usually come as a list of one: no need to look up every request's element.
            self._check_packable(first, key)
            return KeyRecipe(key, (self._copies(first),))
        step, kinds = self.step, self.looks.table.kinds
        leaves: Sequence[int] = range(first, first + count)
        if not step.everyone_consumes or step.is_sparse or count != len(step.consumers):
            leaves = pick_elements(key, leaves, step)
        if any(kinds[leaf] is not kinds[leaves[0]] for leaf in leaves):
            return self._mixed_list(key, [LeafRef(leaf) for leaf in range(first, first + count)])
        if Route.OPAQUE in self.looks.table.routes:
            for leaf in leaves:
                self._check_packable(leaf, key)
        return KeyRecipe(key, (self._stack(leaves),))

    def _mixed_list(self, key: str, node: list[Template]) -> KeyRecipe:
        groups: dict[LeafKind, tuple[list[int], list[int]]] = {}
        plain_owners: list[int] = []
        plain: list[Template] = []
        for owner, element in enumerate(pick_elements(key, node, self.step)):
            if isinstance(element, LeafRef):
                self._check_packable(element.index, key)
                owners, indices = groups.setdefault(self.looks.table.kinds[element.index], ([], []))
                owners.append(owner)
                indices.append(element.index)
            elif isinstance(element, dict) or _has_leaf(element):
                raise NotCovered(f"key {key!r} holds a list of {type(element).__name__}")
            else:
                plain_owners.append(owner)
                plain.append(element)
        in_order = len(groups) == 1 and not plain
        pieces = tuple(self._stack(indices, None if in_order else tuple(owners)) for owners, indices in groups.values())
        return KeyRecipe(key, pieces, PlainElements(tuple(plain_owners), tuple(plain)) if plain else None)

    def _stack(self, leaves: Sequence[int], owners: tuple[int, ...] | None = None) -> PackedPieces:
        """Add several leaves of one kind, each of them whole."""
        rows = tuple(map(self.looks.row_counts.__getitem__, leaves))
        return PackedPieces(*self.columns.add(leaves[0], whole_leaves(tuple(leaves), rows)), owners)

    def _rows_of(self, leaf: int, key: str) -> int:
        self._check_packable(leaf, key)
        if self.looks.table.kinds[leaf].scalar:
            raise NotCovered(f"key {key!r} holds a 0-dimensional tensor")
        return self.looks.row_counts[leaf]

    def _check_packable(self, leaf: int, key: str) -> None:
        if self.looks.table.routes[leaf] is Route.OPAQUE:
            raise NotCovered(f"key {key!r} holds a tensor of layout {self.looks.table.layout(leaf)}")


def pick_elements(key: str, elements: Sequence[Any], step: StepContext) -> list[Any]:
    """Return each consumer's element of a per-request list.

    A consumer for which the list is too short gets the first element, as in the engine, except under sparse routing.

    Raises
    ------
    NotCovered
        The list is empty, or too short under sparse routing: the engine raises or reports an error.
    """
    count = len(elements)
    if not count:
        raise NotCovered(f"key {key!r} holds an empty list")
    if step.is_sparse and max(step.elements) >= count:
        raise NotCovered(f"key {key!r}: sparse list out of step with its request ids")
    return [elements[i] if i < count else elements[0] for i in step.elements]


def fill_template(template: Template, values: Sequence[Any]) -> Any:
    """Fill a template without tensors with this step's values."""
    if isinstance(template, ValueRef):
        return values[template.index]
    if isinstance(template, dict):
        return {key: fill_template(child, values) for key, child in template.items()}
    return type(template)(fill_template(child, values) for child in template)


def _has_leaf(template: Template) -> bool:
    if isinstance(template, dict):
        return any(map(_has_leaf, template.values()))
    if isinstance(template, list | tuple):
        return any(map(_has_leaf, template))
    return isinstance(template, LeafRef)
