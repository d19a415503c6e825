"""From columns of leaves to a plan. Host arithmetic only, nothing here touches a device.

Planning happens once for steps that look alike, but a prefill looks like no other: this runs on the decode thread, so
what can be done for all columns together is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .columns import MOST_ROWS, ColumnSpec, Int64Array, Pieces, merge_pieces
from .errors import LeafError, PlacementError
from .plan import Column, Plan, Route
from .signature import make_signature
from .tiles import DESTINATION, LEAF, LENGTH, ROW_BYTES, ROW_STRIDE, SOURCE

ALIGNMENT_BYTES = 16  # of every column in the slab: one vector load or store of a GPU lane


def make_plan(leaves: Sequence[Tensor], columns: Sequence[ColumnSpec], device_type: str | None = None) -> Plan:
    """Lay out columns in a slab and work out the segments that fill it.

    Parameters
    ----------
    leaves
        The tensors, for their dtype, shape, strides and device type. Neither read nor kept.
    columns
        What to pack, in the order of the result.
    device_type
        Type of the device to gather on. CPU leaves beside leaves of that device are copied at once by the host.
        By default the type of the first leaf that is not on the CPU, or ``"cpu"``.

    Returns
    -------
    Plan

    Raises
    ------
    PlacementError
        A piece lies outside its leaf, or the leaves of a column differ in dtype or row shape.
    LeafError
        A leaf that can only be moved whole (sparse, quantized) is asked for in part.
    """
    if device_type is None:
        device_type = next((leaf.device.type for leaf in leaves if leaf.device.type != "cpu"), "cpu")
    return _Planner(leaves, columns, device_type).plan()


class _Planner:
    def __init__(self, leaves: Sequence[Tensor], columns: Sequence[ColumnSpec], device_type: str) -> None:
        self.leaves = leaves
        self.specs = columns
        self.device_type = device_type
        self.routes: list[Route | None] = [None] * len(leaves)
        self.facts: dict[tuple[int, int], _SpanFacts] = {}
        self.merged: list[_Merged] = []

    def plan(self) -> Plan:
        homes = [self._on_host(index, spec) for index, spec in enumerate(self.specs)]
        placed: dict[int, Column] = {}
        end = device_bytes = payload_bytes = 0
        for host_part in (False, True):  # device columns first: they are what the one copy brings over
            for index, spec in enumerate(self.specs):
                if homes[index] is host_part:
                    column = self._place(index, spec, end, host_part)
                    placed[index] = column
                    end = _align(end + column.nbytes)
                    payload_bytes += column.nbytes
            if not host_part:
                device_bytes = end
        return Plan(
            columns=tuple(placed[index] for index in range(len(self.specs))),
            segments=self._segments(),
            specs=tuple(self.specs),
            routes=tuple(self.routes),
            device_type=self.device_type,
            device_bytes=device_bytes,
            slab_bytes=end,
            payload_bytes=payload_bytes,
            signature=make_signature(self.leaves),
        )

    def _on_host(self, index: int, spec: ColumnSpec) -> bool:
        if not len(spec.rows):
            raise PlacementError(f"column {index} has no pieces; leave it out")
        on_host = {self._route(leaf) is Route.HOST for leaf in spec.leaf_set}
        if len(on_host) > 1:
            raise PlacementError(f"column {index} mixes leaves on the CPU and on a device; give each its own column")
        return on_host == {True}

    def _route(self, leaf: int) -> Route:
        if not 0 <= leaf < len(self.leaves):
            raise PlacementError(f"a column takes rows of leaf {leaf}, but there are {len(self.leaves)} leaves")
        route = self.routes[leaf]
        if route is None:
            route = self.routes[leaf] = _route(self.leaves[leaf], self.device_type)
        return route

    def _place(self, index: int, spec: ColumnSpec, offset: int, host: bool) -> Column:
        first = spec.first_leaf
        model = self.leaves[first]
        if self.routes[first] is Route.OPAQUE:
            return self._opaque(spec, first, offset)
        facts = self._span_facts(spec)
        self._check(index, spec, facts, model)
        row_shape = tuple(model.shape[1:])
        row_bytes = model.element_size() * _product(row_shape)
        if not host and row_bytes:
            shared = facts.merged if isinstance(spec.leaves, int) else None
            self.merged.append(_Merged(shared or merge_pieces(spec), spec, row_bytes, offset))
        return Column(
            offset_bytes=offset,
            nbytes=facts.total_rows * row_bytes,
            dtype=model.dtype,
            shape=(facts.total_rows,) if spec.scalar else (facts.total_rows, *row_shape),
            rows=facts.rows,
            scalar=spec.scalar,
        )

    def _span_facts(self, spec: ColumnSpec) -> _SpanFacts:
        """What depends on the spans alone: per-token columns share their arrays, so it is worked out once."""
        key = (id(spec.starts), id(spec.rows))
        facts = self.facts.get(key)
        if facts is None:
            facts = self.facts[key] = _SpanFacts(
                rows=tuple(spec.rows.tolist()),
                total_rows=int(spec.rows.sum()),
                lowest=int(min(spec.starts.min(), spec.rows.min())),
                highest=int(max(spec.starts.max(), spec.rows.max())),
                end=int((spec.starts + spec.rows).max()),
                merged=merge_pieces(spec) if isinstance(spec.leaves, int) else None,
            )
        return facts

    def _check(self, index: int, spec: ColumnSpec, facts: _SpanFacts, model: Tensor) -> None:
        for leaf in spec.leaf_set:
            tensor = self.leaves[leaf]
            if tensor.dtype != model.dtype or tensor.shape[1:] != model.shape[1:]:
                raise PlacementError(
                    f"column {index} holds {_kind(model)} and {_kind(tensor)}; "
                    "the leaves of a column must agree in dtype and shape[1:]"
                )
            if self.routes[leaf] is Route.OPAQUE:
                raise LeafError(
                    f"column {index}: leaf {leaf} is {_kind(tensor)} with layout {tensor.layout}, which can't share a "
                    "column; give it its own"
                )
            if (tensor.dim() == 0) != spec.scalar:
                raise PlacementError(f"column {index}: leaf {leaf} is {_kind(tensor)}, but scalar={spec.scalar}")
        if (
            facts.lowest < 0
            or facts.highest > MOST_ROWS
            or facts.end > min(_row_count(self.leaves[leaf]) for leaf in spec.leaf_set)
        ):
            self._check_pieces(index, spec)

    def _check_pieces(self, index: int, spec: ColumnSpec) -> None:
        """Look at every piece with its own leaf's rows; raise for the first that lies outside."""
        for piece, (leaf, start, rows) in enumerate(spec.pieces()):
            available = _row_count(self.leaves[leaf])
            if start < 0 or rows < 0 or start + rows > available:
                raise PlacementError(
                    f"column {index}, piece {piece}: rows [{start}, {start + rows}) of leaf {leaf}, "
                    f"which has {available} rows"
                )

    def _opaque(self, spec: ColumnSpec, leaf: int, offset: int) -> Column:
        tensor = self.leaves[leaf]
        whole = len(spec.leaf_set) == 1 and not spec.starts.any()
        if not whole or (tensor.dim() and (spec.rows != tensor.shape[0]).any()):
            raise LeafError(
                f"leaf {leaf} is {_kind(tensor)} with layout {tensor.layout}: it can only be packed whole, "
                "not by rows; declare it request-invariant"
            )
        rows = tuple(spec.rows.tolist())
        return Column(offset, 0, tensor.dtype, tuple(tensor.shape), rows, spec.scalar, opaque=leaf)

    def _segments(self) -> Int64Array:
        """All columns at once: a NumPy call costs the same for one column as for all of them."""
        if not self.merged:
            return np.zeros((0, 6), dtype=np.int64)
        counts = [len(column.pieces[0]) for column in self.merged]
        leaf, start, rows = (
            np.concatenate(part) for part in zip(*(column.pieces for column in self.merged), strict=True)
        )
        row_bytes = np.repeat([column.row_bytes for column in self.merged], counts)
        stride = self._row_strides()[leaf]
        stride = np.where(stride < 0, row_bytes, stride)
        length = rows * row_bytes
        before = np.cumsum(length) - length
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        column_start = [column.offset for column in self.merged]
        shift = np.repeat(np.asarray(column_start) - np.append(before, 0)[first], counts)
        one_run = (stride == row_bytes) | (rows == 1)
        table = np.empty((len(leaf), 6), dtype=np.int64)
        table[:, LEAF] = leaf
        table[:, SOURCE] = start * stride
        table[:, DESTINATION] = before + shift
        table[:, LENGTH] = length
        table[:, ROW_BYTES] = np.where(one_run, 0, row_bytes)
        table[:, ROW_STRIDE] = np.where(one_run, 0, stride)
        return table

    def _row_strides(self) -> Int64Array:
        """Bytes from a row to the next, ``[num_leaves] int64``; -1 where rows follow each other once it is staged."""
        return np.array(
            [
                leaf.stride(0) * leaf.element_size() if route is Route.KERNEL and leaf.dim() else -1
                for leaf, route in zip(self.leaves, self.routes, strict=True)
            ],
            dtype=np.int64,
        )


class _SpanFacts(NamedTuple):
    rows: tuple[int, ...]
    total_rows: int
    lowest: int  # of all starts and row counts
    highest: int
    end: int
    merged: Pieces | None


class _Merged(NamedTuple):
    shared: Pieces
    spec: ColumnSpec
    row_bytes: int
    offset: int

    @property
    def pieces(self) -> Pieces:
        if not isinstance(self.spec.leaves, int):
            return self.shared
        _, start, rows = self.shared
        return np.full_like(start, self.spec.leaves), start, rows


def _route(tensor: Tensor, device_type: str) -> Route:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return Route.OPAQUE
    if tensor.device.type == "cpu" and device_type != "cpu":
        return Route.HOST
    if tensor.is_conj() or tensor.is_neg() or not _rows_contiguous(tensor):
        return Route.STAGED
    return Route.KERNEL


def _rows_contiguous(tensor: Tensor) -> bool:
    """Whether each row, an index of dimension 0, is one run of memory."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
