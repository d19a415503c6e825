"""Leaf properties other than row counts: all that a plan depends on besides row counts and spans.

A decode step and a prefill differ in row counts, and so do two prefills. What is determined here about dtypes, strides
and devices holds for all of them, so only the first step pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .columns import Int64Array
from .plan import LeafUse, Route
from .signature import guarded

_MOST_USES = 8  # sets of leaves cached per table; a structure rarely has more than one


@dataclass(frozen=True, eq=False, slots=True)
class LeafKind:
    """What the leaves of a column have in common; a table has one object per kind, so `is` compares kinds."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    scalar: bool
    device: torch.device


class _LeafLayout(NamedTuple):
    """Properties of one leaf that do not depend on its number of rows."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    scalar: bool
    device: torch.device
    layout: torch.layout
    strides: tuple[int, ...] | None  # None for sparse and quantized leaves
    lazy: bool  # whether it is conjugated or negated when read

    def in_words(self, rows: int) -> str:
        """A description for an error message, e.g. ``float32[4, 3] with strides (3, 1) on cpu``."""
        shape = [] if self.scalar else [rows, *self.row_shape]
        stored = f"layout {self.layout}" if self.strides is None else f"strides {self.strides}"
        lazy = ", lazily conjugated or negated" if self.lazy else ""
        return f"{str(self.dtype).removeprefix('torch.')}{shape} with {stored} on {self.device}{lazy}"


class LeafTable:
    """Routes, kinds and strides of leaves, independent of their numbers of rows.

    Parameters
    ----------
    leaves
        Only their metadata is read; they are not kept.
    device_type
        Type of the device to gather on; by default that of the first leaf that is not on the CPU, or ``"cpu"``.

    Attributes
    ----------
    routes
        How each leaf gets into the slab.
    kinds
        Kind of each leaf.
    groups
        A number for each leaf, equal for leaves that look alike, ``[num_leaves] int64``.
    row_bytes
        Bytes of one row of each leaf.
    row_strides
        Bytes from one row to the next, after staging if any, ``[num_leaves] int64``.
    latest
        Last result of `look`: leaves with the same row counts often recur.
    """

    def __init__(self, leaves: Sequence[Tensor], device_type: str | None = None) -> None:
        if device_type is None:
            device_type = next((leaf.device.type for leaf in leaves if leaf.device.type != "cpu"), "cpu")
        self.device_type = device_type
        self._looks = tuple(map(_layout_of, leaves))
        numbers: dict[_LeafLayout, int] = {}
        groups = [numbers.setdefault(look, len(numbers)) for look in self._looks]
        self.groups: Int64Array = np.array(groups, dtype=np.int64)
        known: dict[tuple[Any, ...], LeafKind] = {}
        kinds = [known.setdefault(look[:4], LeafKind(*look[:4])) for look in numbers]
        facts = [_facts(look, device_type) for look in numbers]
        self.kinds = tuple([kinds[group] for group in groups])
        self.routes = tuple([facts[group].route for group in groups])
        self.row_bytes = tuple([facts[group].row_bytes for group in groups])
        self.row_strides: Int64Array = np.array([facts[group].row_stride for group in groups], dtype=np.int64)
        self._has_scalars = any(kind.scalar for kind in kinds)
        self._check = self.guard(leaves, None)
        self.latest: LeafLooks | None = None
        self._uses: dict[frozenset[int], LeafUse] = {}

    def look(self, leaves: Sequence[Tensor]) -> LeafLooks | None:
        """A `LeafLooks` of leaves that match this table; None for others."""
        latest = self.latest
        if latest is not None and latest.is_quick and latest.matches(leaves):
            return latest
        if not self.matches(leaves):
            return None
        row_counts = self.row_counts(leaves)
        if latest is not None and latest.row_counts == row_counts:
            latest.compile_guard(leaves)
        else:
            latest = self.latest = LeafLooks(self, row_counts)
        return latest

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether leaves match this table, with any row counts; fast, but may reject leaves that `admits` accepts."""
        if len(leaves) != len(self._looks):
            return False
        return self._check(leaves) if self._check is not None else self.admits(leaves)

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        """Like `matches`, but exact and slower: inference mode and gradients make no difference."""
        return (
            len(leaves) == len(self._looks)
            and all(isinstance(leaf, Tensor) and not leaf.is_nested for leaf in leaves)
            and tuple(map(_layout_of, leaves)) == self._looks
        )

    @property
    def has_guard(self) -> bool:
        """Whether torch's guards can describe the leaves that the table was made from."""
        return self._check is not None

    def row_counts(self, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        """Number of rows of each leaf; a 0-dimensional leaf counts as one row."""
        if self._has_scalars:
            return tuple([leaf.shape[0] if leaf.dim() else 1 for leaf in leaves])
        return tuple([leaf.shape[0] for leaf in leaves])

    def guard(
        self, leaves: Sequence[Tensor], row_counts: Sequence[int] | None
    ) -> Callable[[Sequence[Tensor]], bool] | None:
        """Torch's own tensor guards, which compare all leaves in one C++ call (64 leaves: 4 us, against 50 in Python).

        Parameters
        ----------
        leaves
            Leaves that match this table.
        row_counts
            Their row counts, or None for guards that accept any number of rows.

        Returns
        -------
        callable or None
            None if guards can't describe these leaves.
        """
        looks = self._looks
        if not looks or any(look.strides is None for look in looks) or any(type(leaf) is not Tensor for leaf in leaves):
            return None
        rows: Sequence[int | None] = row_counts or [None] * len(looks)
        shapes = [[] if look.scalar else [count, *look.row_shape] for look, count in zip(looks, rows, strict=True)]
        strides = [list(look.strides or ()) for look in looks]
        try:
            guards: Any = torch._C._dynamo.guards
            made = guards.TensorGuards(*leaves, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
            check = guarded(made.check, len(leaves))
            return check if check(leaves) else None
        except (AttributeError, TypeError, RuntimeError):
            return None

    def mismatch(self, leaves: Any, row_counts: Sequence[int]) -> str | None:
        """How `leaves` differ from this table and these row counts, in words; None if they don't."""
        if not (isinstance(leaves, Sized) and isinstance(leaves, Iterable)):
            return f"given a {type(leaves).__name__}, not a sequence of tensors"
        if len(leaves) != len(row_counts):
            return f"given {len(leaves)}, expected {len(row_counts)}"
        for index, (leaf, expected, rows) in enumerate(zip(leaves, self._looks, row_counts, strict=True)):
            if not isinstance(leaf, Tensor):
                return f"leaf {index} is a {type(leaf).__name__}, not a tensor"
            if leaf.is_nested:
                return f"leaf {index} is a nested tensor"
            look, found_rows = _layout_of(leaf), leaf.shape[0] if leaf.dim() else 1
            if (look, found_rows) != (expected, rows):
                return f"leaf {index} is {look.in_words(found_rows)}, expected {expected.in_words(rows)}"
        return None

    def layout(self, leaf: int) -> torch.layout:
        """The torch layout of a leaf."""
        return self._looks[leaf].layout

    def use(self, leaves: frozenset[int]) -> LeafUse:
        """How a plan that uses exactly these leaves gets them into the slab."""
        found = self._uses.get(leaves)
        if found is None:
            if len(self._uses) >= _MOST_USES:
                self._uses.clear()
            routes = tuple(route if leaf in leaves else None for leaf, route in enumerate(self.routes))
            found = self._uses[leaves] = LeafUse.of(routes)
        return found


class LeafLooks:
    """A table and the row counts of its leaves, which a plan is made from and recognises leaves by.

    Parameters
    ----------
    table
        Table that the leaves match.
    row_counts
        Number of rows of each leaf; a 0-dimensional leaf counts as one row.
    """

    __slots__ = ("_check", "row_counts", "table")

    def __init__(self, table: LeafTable, row_counts: tuple[int, ...]) -> None:
        self.table = table
        self.row_counts = row_counts
        # Guard for these row counts; made when such leaves recur.
        self._check: Callable[[Sequence[Tensor]], bool] | None = None

    @staticmethod
    def of(leaves: Sequence[Tensor], device_type: str | None = None) -> LeafLooks:
        """Make the table and the row counts of leaves that match no earlier table."""
        table = LeafTable(leaves, device_type)
        return LeafLooks(table, table.row_counts(leaves))

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these leaves look like those it was made from; fast, but may reject some that `admits` accepts."""
        if self._check is not None:
            return self._check(leaves)
        if not self.table.matches(leaves) or self.table.row_counts(leaves) != self.row_counts:
            return False
        self.compile_guard(leaves)
        return True

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        """Like `matches`, but exact and slower: inference mode and gradients make no difference."""
        return self.table.admits(leaves) and self.table.row_counts(leaves) == self.row_counts

    def mismatch(self, leaves: Any) -> str | None:
        """How these differ from the leaves it was made from, in words; None if `admits` would be true."""
        return self.table.mismatch(leaves, self.row_counts)

    @property
    def is_quick(self) -> bool:
        """Whether one guard call recognises leaves."""
        return self._check is not None

    def compile_guard(self, leaves: Sequence[Tensor]) -> None:
        """Compile a guard for exactly these row counts from matching leaves, if torch's guards can describe them."""
        if self._check is None and self.table.has_guard:
            self._check = self.table.guard(leaves, self.row_counts)

    def describe(self, leaf: int) -> str:
        """A description of a leaf for an error message, e.g. ``float32[4, 3]``."""
        kind = self.table.kinds[leaf]
        shape = [] if kind.scalar else [self.row_counts[leaf], *kind.row_shape]
        return f"{str(kind.dtype).removeprefix('torch.')}{shape}"


class LeafTables:
    """Tables of the leaves seen most recently. Safe to use from several threads.

    Parameters
    ----------
    capacity
        Maximum number of tables; the least recently used one is dropped first.
    device_type
        As for `LeafTable`.
    """

    def __init__(self, capacity: int, device_type: str | None = None) -> None:
        self._capacity = capacity
        self._device_type = device_type
        self._tables: list[LeafTable] = []  # most recently used first; replaced, never mutated

    def __len__(self) -> int:
        return len(self._tables)

    def look(self, leaves: Sequence[Tensor]) -> LeafLooks:
        """A `LeafLooks` of leaves, with the table of earlier leaves if they match one."""
        tables = self._tables
        for table in tables:
            looks = table.look(leaves)
            if looks is not None:
                break
        else:
            looks = LeafLooks.of(leaves, self._device_type)
            looks.table.latest = looks
        if not tables or tables[0] is not looks.table:
            others = [table for table in tables if table is not looks.table]
            self._tables = [looks.table, *others][: self._capacity]
        return looks


class _Facts(NamedTuple):
    route: Route
    row_bytes: int
    row_stride: int


def _layout_of(leaf: Tensor) -> _LeafLayout:
    shape, layout = leaf.shape, leaf.layout
    strides, lazy = None, False
    if layout is torch.strided and not leaf.is_quantized:
        strides, lazy = leaf.stride(), leaf.is_conj() or leaf.is_neg()
    return _LeafLayout(leaf.dtype, tuple(shape[1:]), not shape, leaf.device, layout, strides, lazy)


def _facts(look: _LeafLayout, device_type: str) -> _Facts:
    item_bytes, strides = look.dtype.itemsize, look.strides
    row_bytes = item_bytes * math.prod(look.row_shape)
    if strides is None:
        return _Facts(Route.OPAQUE, row_bytes, row_bytes)
    if look.device.type == "cpu" and device_type != "cpu":
        return _Facts(Route.HOST, row_bytes, row_bytes)
    if look.lazy or not _is_one_run(look.row_shape, strides[1:]):
        return _Facts(Route.STAGED, row_bytes, row_bytes)  # contiguous once staged
    return _Facts(Route.KERNEL, row_bytes, strides[0] * item_bytes if strides else row_bytes)


def _is_one_run(row_shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each row, an index of dimension 0, is one run of memory."""
    expected = 1
    for length, stride in zip(reversed(row_shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return 0 in row_shape
        expected *= length
    return True
