"""From a payload's structure to packed columns: what each key becomes, decided once per key.

The engine routes a payload request by request. Here the same rules are applied key by key to a tree that holds
placeholders instead of tensors and values, so that the outcome serves every later step that looks alike. Shapes that
the rules below leave out raise `NotCovered`; the engine's own builder then decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

import spanpack
from omni_runner.step import NotCovered, StepContext
from spanpack.tree import TreeSpec

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

HIDDEN_KEY = "hidden"  # under which the engine puts a stage's own hidden rows

# Keys share a column up to this size. Beyond it one more torch call hardly counts, while whoever pickles a tensor
# together with its storage, which is torch's default, drags the whole column along.
SHARED_COLUMN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeafRef:
    """Stands for a tensor; `index` counts in walking order."""

    index: int


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Stands for a plain value, which may differ from step to step."""

    index: int


Template: TypeAlias = Any  # LeafRef, ValueRef, or a dict, list or tuple of templates


@dataclass(frozen=True, slots=True)
class PackedPieces:
    """Tensors of one key among the pieces of a packed column.

    Attributes
    ----------
    column
        Index of the column in the plan; keys whose tensors are alike share one.
    first, end
        Which of its pieces.
    owners
        Which consumer, counted among the step's consumers, gets which piece; None if each gets its own, in order.
    """

    column: int
    first: int
    end: int
    owners: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PlainElements:
    """Per-request plain values of one key: for each owner, counted among the consumers, a template without tensors."""

    owners: tuple[int, ...]
    templates: tuple[Template, ...]


@dataclass(frozen=True, slots=True)
class KeyRecipe:
    """How one flat key of the payload is made for all consumers.

    Attributes
    ----------
    key
        As in the per-request payloads.
    pieces
        Where its tensors are.
    plain
        Plain values: one template whose value is shared or, if it turns out to be a list, dealt out by element;
        `PlainElements` for a list that is not plain as a whole; None where all is tensors.
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
        None where no tensor has to be packed.
    """

    recipes: tuple[KeyRecipe, ...]
    plan: spanpack.Plan | None


def make_template(spec: TreeSpec, num_leaves: int, num_values: int) -> Template:
    """The tree of a spec with placeholders where its tensors and plain values were.

    Raises
    ------
    NotCovered
        The tree has containers other than dict, list and tuple; the engine leaves those as they are.
    """
    for token in spec:
        if type(token) is tuple and (token[0] not in (dict, list, tuple) or len(token) > 2):
            raise NotCovered(f"a container of type {getattr(token[0], '__name__', token[0])}")
    return spanpack.unflatten(spec, [LeafRef(i) for i in range(num_leaves)], [ValueRef(i) for i in range(num_values)])


def lower(
    upstream: Upstream, step: StepContext, template: Template, leaves: Sequence[Tensor], hidden: Tensor | None
) -> Lowering:
    """Decide what each key of a payload becomes.

    Parameters
    ----------
    upstream
        The resolved engine names.
    step
        A step with at least one consumer.
    template
        The payload's structure, from `make_template`.
    leaves
        Its tensors; `hidden`, if given, is the last of them.
    hidden
        The stage's own hidden rows, or None where the model leaves them out of its payloads.

    Raises
    ------
    NotCovered
        With the reason, for a payload that columns can't express.
    """
    return _Lowerer(upstream, step, leaves, hidden).lower(template)


class _Lowerer:
    def __init__(self, upstream: Upstream, step: StepContext, leaves: Sequence[Tensor], hidden: Tensor | None) -> None:
        self.upstream = upstream
        self.step = step
        self.leaves = leaves
        self.hidden = hidden
        self.columns = _Columns(leaves)
        self.consumers = np.array(step.consumers, dtype=np.int64)  # [num_consumers]
        self.spans: dict[int, tuple[Any, Any]] = {}

    def lower(self, template: Template) -> Lowering:
        recipes = list(self._recipes(template))
        columns = self.columns.specs()
        plan = spanpack.make_plan(self.leaves, columns) if columns else None
        return Lowering(tuple(recipes), plan)

    def _recipes(self, template: Template) -> Iterator[KeyRecipe]:
        flat = self.upstream.flatten_payload(template)
        hidden_rows = 0
        if self.hidden is not None:
            if HIDDEN_KEY in flat:
                raise NotCovered(f"the payload has a key {HIDDEN_KEY!r} of its own")
            hidden_rows = _rows_of(self.hidden, HIDDEN_KEY)
            if not self.step.is_sparse:
                # With every request consuming, the engine cuts the padding off first; otherwise it does not.
                limit = min(self.step.scheduled_tokens, hidden_rows) if self.step.everyone_consumes else hidden_rows
                yield KeyRecipe(HIDDEN_KEY, (self._per_token(len(self.leaves) - 1, limit),))
        for key, node in flat.items():
            if key not in self.upstream.sparse_protocol_keys:
                yield self._recipe(key, node, hidden_rows)

    def _recipe(self, key: str, node: Template, hidden_rows: int) -> KeyRecipe:
        if isinstance(node, LeafRef):
            rows = _rows_of(self.leaves[node.index], key)
            if rows in (hidden_rows, self.step.scheduled_tokens):
                return KeyRecipe(key, (self._per_token(node.index, rows),))
            return KeyRecipe(key, (self._copies(node.index),))
        if isinstance(node, ValueRef):
            return KeyRecipe(key, (), node)
        if isinstance(node, list):
            return self._list(key, node)
        if isinstance(node, tuple) and not _has_leaf(node):
            count = len(self.consumers)
            return KeyRecipe(key, (), PlainElements(tuple(range(count)), (node,) * count))
        raise NotCovered(f"key {key!r} holds a {type(node).__name__}")

    def _per_token(self, leaf: int, row_limit: int) -> PackedPieces:
        """Each consumer's span, cut at the end of the rows as a Python slice is."""
        spans = self.spans.get(row_limit)
        if spans is None:
            first, count = self.step.starts[self.consumers], self.step.rows[self.consumers]
            starts = np.minimum(first, row_limit)
            spans = self.spans[row_limit] = starts, np.minimum(first + count, row_limit) - starts
        return self.columns.add(spanpack.ColumnSpec(leaf, *spans))

    def _copies(self, leaf: int) -> PackedPieces:
        """The whole leaf once per consumer, because a consumer may change its payload in place."""
        return self.columns.add(spanpack.ColumnSpec.whole(leaf, self.leaves[leaf], copies=len(self.consumers)))

    def _list(self, key: str, node: list[Template]) -> KeyRecipe:
        if len(node) == 1 and isinstance(node[0], LeafRef) and not self.step.is_sparse:
            # What all requests get usually comes this way: no need to look at every request's element.
            _packable(self.leaves[node[0].index], key)
            return KeyRecipe(key, (self._copies(node[0].index),))
        groups: dict[_Kind, tuple[list[int], list[int]]] = {}
        plain_owners: list[int] = []
        plain: list[Template] = []
        for owner, element in enumerate(pick_elements(key, node, self.step)):
            if isinstance(element, LeafRef):
                tensor = _packable(self.leaves[element.index], key)
                owners, indices = groups.setdefault(_kind(tensor), ([], []))
                owners.append(owner)
                indices.append(element.index)
            elif isinstance(element, dict) or _has_leaf(element):
                raise NotCovered(f"key {key!r} holds a list of {type(element).__name__}")
            else:
                plain_owners.append(owner)
                plain.append(element)
        in_order = len(groups) == 1 and not plain
        pieces = tuple(
            self.columns.add(
                spanpack.ColumnSpec.stack(indices, [self.leaves[i] for i in indices]),
                None if in_order else tuple(owners),
            )
            for owners, indices in groups.values()
        )
        return KeyRecipe(key, pieces, PlainElements(tuple(plain_owners), tuple(plain)) if plain else None)


_Kind: TypeAlias = tuple[torch.dtype, torch.Size, bool, torch.device]


def _kind(tensor: Tensor) -> _Kind:
    """What all pieces of a column have in common."""
    return tensor.dtype, tensor.shape[1:], tensor.dim() == 0, tensor.device


class _Columns:
    """The columns of a plan, as few as it takes: splitting one is two torch calls, however many keys share it."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._parts: list[list[spanpack.ColumnSpec]] = []
        self._open: dict[_Kind, tuple[int, int]] = {}  # column that takes pieces of a kind, and its bytes

    def add(self, pieces: spanpack.ColumnSpec, owners: tuple[int, ...] | None = None) -> PackedPieces:
        """Append pieces to the column of their kind."""
        model = self._leaves[pieces.first_leaf]
        nbytes = int(pieces.rows.sum()) * math.prod(model.shape[1:]) * model.element_size()
        kind = _kind(model)
        column, column_bytes = self._open.get(kind, (-1, 0))
        if column < 0 or column_bytes + nbytes > SHARED_COLUMN_BYTES:
            column, column_bytes = len(self._parts), 0
            self._parts.append([])
        self._open[kind] = column, column_bytes + nbytes
        first = sum(len(part.rows) for part in self._parts[column])
        self._parts[column].append(pieces)
        return PackedPieces(column, first, first + len(pieces.rows), owners)

    def specs(self) -> list[spanpack.ColumnSpec]:
        """One `spanpack.ColumnSpec` per column."""
        return [parts[0] if len(parts) == 1 else _join(parts) for parts in self._parts]


def _join(parts: Sequence[spanpack.ColumnSpec]) -> spanpack.ColumnSpec:
    leaves = [np.broadcast_to(np.asarray(part.leaves), part.rows.shape) for part in parts]
    starts, rows = [part.starts for part in parts], [part.rows for part in parts]
    return spanpack.ColumnSpec(np.concatenate(leaves), np.concatenate(starts), np.concatenate(rows), parts[0].scalar)


def pick_elements(key: str, elements: Sequence[Any], step: StepContext) -> list[Any]:
    """Each consumer's element of a per-request list.

    A list that is too short gives its first element, as the engine has it, except under sparse routing.

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
    """A template without tensors, with this step's values in it."""
    if isinstance(template, ValueRef):
        return values[template.index]
    if isinstance(template, dict):
        return {key: fill_template(child, values) for key, child in template.items()}
    return type(template)(fill_template(child, values) for child in template)


def _rows_of(tensor: Tensor, key: str) -> int:
    if not _packable(tensor, key).dim():
        raise NotCovered(f"key {key!r} holds a 0-dimensional tensor")
    return tensor.shape[0]


def _packable(tensor: Tensor, key: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise NotCovered(f"key {key!r} holds a tensor of layout {tensor.layout}")
    return tensor


def _has_leaf(template: Template) -> bool:
    if isinstance(template, dict):
        return any(map(_has_leaf, template.values()))
    if isinstance(template, list | tuple):
        return any(map(_has_leaf, template))
    return isinstance(template, LeafRef)
