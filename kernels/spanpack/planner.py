"""Make a plan from columns of leaves, by host arithmetic only: nothing here touches a device.

A step that looks like an earlier one reuses its plan, but every prefill needs a new one, and planning runs on the
decode thread. So the properties of leaves other than their rows are taken from a `LeafTable`, which outlives the step,
and the segments of all columns are made together: a NumPy call costs the same for one column as for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .columns import MOST_ROWS, ColumnSpec, Int64Array, PieceFacts
from .errors import LeafError, PlacementError
from .leaf_memory import WHY_NOT_NESTED
from .leaf_table import LeafLooks
from .plan import Column, Plan, Route
from .segments import Part

ALIGNMENT_BYTES = 16  # of every column in the slab: one vector load or store of a GPU thread


def make_plan(leaves: Sequence[Tensor], columns: Sequence[ColumnSpec], device_type: str | None = None) -> Plan:
    """Lay out columns in a slab and determine the segments that fill it.

    Parameters
    ----------
    leaves
        The tensors; only their dtype, shape, strides and device type are read, and they are not kept.
    columns
        What to pack, in the order of the result.
    device_type
        Type of the device to gather on. If it is not the CPU, CPU leaves are copied at once by the host.
        By default the type of the first leaf that is not on the CPU, or ``"cpu"``.

    Returns
    -------
    Plan

    Raises
    ------
    PlacementError
        A piece lies outside its leaf, the leaves of a column differ in dtype or row shape, its arrays differ in length
        or do not hold integers, or `columns` holds something else than `ColumnSpec`.
    LeafError
        A leaf is not a tensor, or it can only be moved whole (sparse, quantized) and a column takes part of it.
    """
    _check_kinds(leaves, columns)
    return plan_columns(LeafLooks.of(leaves, device_type), [(column,) for column in _detached(tuple(columns))])


def _check_kinds(leaves: Any, columns: Any) -> None:
    """Raise unless `leaves` is a sequence of tensors and `columns` is iterable."""
    if not (isinstance(leaves, Sized) and isinstance(leaves, Iterable)):
        raise LeafError(f"leaves are a {type(leaves).__name__}; give a sequence of tensors")
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise LeafError(f"leaf {index} is a {type(leaf).__name__}; give a tensor")
        if leaf.is_nested:
            raise LeafError(f"leaf {index} {WHY_NOT_NESTED}")
    if not isinstance(columns, Iterable):
        raise PlacementError(f"columns are a {type(columns).__name__}; give a sequence of ColumnSpec")


def _detached(columns: Sequence[ColumnSpec]) -> list[ColumnSpec]:
    """Checked copies of columns with their own arrays: the plan outlives the call, and computes runs later."""
    owned: dict[int, Int64Array] = {}  # by the id of an array of `columns`; columns that share arrays share copies too

    def own(index: int, given: Any) -> Int64Array:
        if id(given) not in owned:
            array = np.array(given)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise PlacementError(
                    f"column {index} has {array.dtype}{list(array.shape)} among its leaves, starts and rows; expected "
                    "flat arrays of integers"
                )
            owned[id(given)] = array.astype(np.int64, copy=False)
        return owned[id(given)]

    found = []
    for index, column in enumerate(columns):
        if not isinstance(column, ColumnSpec):
            raise PlacementError(f"column {index} is a {type(column).__name__}; give a ColumnSpec")
        starts, rows = own(index, column.starts), own(index, column.rows)
        one_leaf = isinstance(column.leaves, (int, np.integer))
        leaves = int(column.leaves) if one_leaf else own(index, column.leaves)
        counts = [len(starts), len(rows), *([] if isinstance(leaves, int) else [len(leaves)])]
        if len(set(counts)) > 1:
            names = ("starts", "rows", "leaves")[: len(counts)]
            given = ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))
            raise PlacementError(f"column {index} has {given}; give one of each per piece")
        found.append(ColumnSpec(leaves, starts, rows, column.scalar))  # no facts: they may use the caller's arrays
    return found


def plan_columns(looks: LeafLooks, columns: Sequence[Sequence[ColumnSpec]]) -> Plan:
    """Like `make_plan`, from a `LeafLooks`; a column is a sequence of specs, whose pieces are concatenated."""
    return _Planner(looks, columns).plan()


class _Content(NamedTuple):
    """What a column holds; its offset in the slab is not known yet."""

    leaf: int  # the first one; the others have the same dtype and row shape
    row_bytes: int
    rows: tuple[int, ...]
    total_rows: int
    facts: list[PieceFacts]  # of each spec
    scalar: bool


class _Planner:
    def __init__(self, looks: LeafLooks, columns: Sequence[Sequence[ColumnSpec]]) -> None:
        self.looks = looks
        self.table = looks.table
        self.columns = columns
        self.used: set[int] = set()
        self.facts: dict[tuple[int, int, int], PieceFacts] = {}
        self.parts: list[Part] = []

    def plan(self) -> Plan:
        table, routes = self.table, self.table.routes
        contents = [self._content(index, specs) for index, specs in enumerate(self.columns)]
        placed: dict[int, Column] = {}
        end = device_bytes = 0
        for on_host in (False, True):  # device columns first: they are the part that the one copy transfers
            for index, content in enumerate(contents):
                if (routes[content.leaf] is Route.HOST) is on_host:
                    column = placed[index] = self._place(self.columns[index], content, end)
                    end = _align(end + column.nbytes)
            if not on_host:
                device_bytes = end
        columns = tuple([placed[index] for index in range(len(contents))])
        return Plan(
            columns=columns,
            parts=tuple(self.parts),
            specs=tuple(self.columns),
            use=table.use(frozenset(self.used)),
            device_type=table.device_type,
            device_bytes=device_bytes,
            slab_bytes=end,
            payload_bytes=sum([column.nbytes for column in columns]),
            signature=self.looks,
        )

    def _content(self, index: int, specs: Sequence[ColumnSpec]) -> _Content:
        """Collect the pieces of a column; checks that they exist and that their leaves can share a column."""
        facts = [spec.facts or self._piece_facts(index, spec) for spec in specs]
        model = specs[0].first_leaf
        rows: tuple[int, ...] = ()
        total_rows = 0
        for spec, known in zip(specs, facts, strict=True):
            leaves = (spec.leaves,) if isinstance(spec.leaves, int) else spec.leaves.tolist()
            if not self._fits(spec, known, leaves, model):
                self._check(index, spec, leaves, model, len(rows))
            self.used.update(leaves)
            rows += known.rows
            total_rows += known.total_rows
        if self.table.routes[model] is Route.OPAQUE:
            self._check_opaque(specs, model)
        return _Content(model, self.table.row_bytes[model], rows, total_rows, facts, specs[0].scalar)

    def _piece_facts(self, index: int, spec: ColumnSpec) -> PieceFacts:
        """Facts about a spec's pieces, computed once for all columns that share its arrays, as per-token columns do."""
        if not len(spec.rows):
            raise PlacementError(f"column {index} has no pieces; leave it out")
        leaves = -1 if isinstance(spec.leaves, int) else id(spec.leaves)
        key = (leaves, id(spec.starts), id(spec.rows))
        facts = self.facts.get(key)
        if facts is None:
            facts = self.facts[key] = spec.piece_facts()
        return facts

    def _fits(self, spec: ColumnSpec, facts: PieceFacts, leaves: Sequence[int], model: int) -> bool:
        """Whether a spec is valid, decided by as few checks as possible; False if in doubt."""
        table, row_counts = self.table, self.looks.row_counts
        if isinstance(spec.leaves, int):
            if not 0 <= spec.leaves < len(row_counts):
                return False
            alike, available = table.kinds[spec.leaves] is table.kinds[model], row_counts[spec.leaves]
        else:
            if min(leaves) < 0 or max(leaves) >= len(row_counts):
                return False
            alike = bool((table.groups[spec.leaves] == table.groups[model]).all())
            available = min(map(row_counts.__getitem__, leaves))
        return (
            alike
            and table.routes[leaves[0]] is table.routes[model] is not Route.OPAQUE
            and spec.scalar == table.kinds[model].scalar
            and facts.smallest >= 0
            and facts.largest <= MOST_ROWS
            and facts.end <= available
        )

    def _check(self, index: int, spec: ColumnSpec, leaves: Sequence[int], model: int, pieces_before: int) -> None:
        """Raise for a leaf that does not exist or can't share a column with the first, or pieces outside their leaf."""
        table, describe = self.table, self.looks.describe
        for leaf in (model, *leaves):
            if not 0 <= leaf < len(table.routes):
                raise PlacementError(f"a column takes rows of leaf {leaf}, but there are {len(table.routes)} leaves")
        wanted = table.kinds[model]
        for leaf in leaves:
            kind = table.kinds[leaf]
            if (table.routes[leaf] is Route.HOST) is not (table.routes[model] is Route.HOST):
                raise PlacementError(
                    f"column {index} mixes leaves on the CPU and on a device; give each its own column"
                )
            if (kind.dtype, kind.row_shape) != (wanted.dtype, wanted.row_shape):
                raise PlacementError(
                    f"column {index} holds {describe(model)} and {describe(leaf)}; "
                    "the leaves of a column must agree in dtype and shape[1:]"
                )
            if table.routes[leaf] is Route.OPAQUE and leaf != model:
                raise LeafError(
                    f"column {index}: leaf {leaf} is {describe(leaf)} with layout {table.layout(leaf)}, which can't "
                    "share a column; give it its own"
                )
            if kind.scalar != spec.scalar:
                raise PlacementError(f"column {index}: leaf {leaf} is {describe(leaf)}, but scalar={spec.scalar}")
        if table.routes[model] is Route.OPAQUE:
            return  # see _check_opaque
        for piece, (leaf, start, rows) in enumerate(spec.pieces(), pieces_before):
            available = self.looks.row_counts[leaf]
            if start < 0 or rows < 0 or start + rows > available:
                raise PlacementError(
                    f"column {index}, piece {piece}: rows [{start}, {start + rows}) of leaf {leaf}, "
                    f"which has {available} rows"
                )

    def _check_opaque(self, specs: Sequence[ColumnSpec], leaf: int) -> None:
        spec, whole_rows = specs[0], self.looks.row_counts[leaf]
        if len(specs) > 1 or len(spec.leaf_set) > 1 or spec.starts.any() or (spec.rows != whole_rows).any():
            raise LeafError(
                f"leaf {leaf} is {self.looks.describe(leaf)} with layout {self.table.layout(leaf)}: it can only be "
                "packed whole, not by rows; declare it request-invariant"
            )

    def _place(self, specs: Sequence[ColumnSpec], content: _Content, offset: int) -> Column:
        leaf, row_bytes, rows, total_rows, facts, scalar = content
        kind, route = self.table.kinds[leaf], self.table.routes[leaf]
        if route is Route.OPAQUE:
            shape = () if kind.scalar else (self.looks.row_counts[leaf], *kind.row_shape)
            return Column(offset, 0, kind.dtype, shape, rows, scalar, opaque=leaf)
        end = offset
        if row_bytes and route is not Route.HOST:
            for spec, known in zip(specs, facts, strict=True):
                self.parts.append(Part(spec.first_leaf, known, row_bytes, self._row_stride(spec, known), end))
                end += known.total_rows * row_bytes
        shape = (total_rows,) if scalar else (total_rows, *kind.row_shape)
        return Column(offset, total_rows * row_bytes, kind.dtype, shape, rows, scalar)

    def _row_stride(self, spec: ColumnSpec, facts: PieceFacts) -> int | Int64Array:
        strides = self.table.row_strides
        return int(strides[spec.leaves]) if isinstance(spec.leaves, int) else strides[facts.runs.leaves]


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
