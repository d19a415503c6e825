"""Plans: from columns of leaves to segments of bytes. Host arithmetic only, nothing here touches a device.

A plan is frozen. It depends on dtypes, shapes, strides and spans, not on addresses, so one plan serves every step
that looks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .columns import ColumnSpec, Int64Array
from .errors import LeafError, PlacementError
from .signature import Signature, make_signature

ALIGNMENT_BYTES = 16  # of every column in the slab: one vector load or store of a GPU lane

# Columns of the segment table.
LEAF, SOURCE, DESTINATION, LENGTH, ROW_BYTES, ROW_STRIDE = range(6)


class Route(Enum):
    """How a leaf's bytes get into the slab."""

    KERNEL = "kernel"  # read in place by the gather
    STAGED = "staged"  # strided within its rows, or lazily conjugated: made contiguous on the device first
    HOST = "host"  # already on the CPU: copied at once
    OPAQUE = "opaque"  # sparse or quantized: moved as an object, outside the slab


@dataclass(frozen=True, slots=True)
class Column:
    """Where one column stands in the slab and how it is split.

    Attributes
    ----------
    offset_bytes, nbytes
        Its place in the slab.
    dtype, shape
        Of the whole column: ``[sum of rows, *row_shape]``, or ``[num_pieces]`` for 0-dimensional leaves.
    rows
        Rows of each piece, in order.
    scalar
        Whether pieces are 0-dimensional.
    opaque
        Index of the leaf that is moved as an object, for a column that has no bytes in the slab.
    """

    offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    scalar: bool
    opaque: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What to copy where. Made by `make_plan`, run by `Packer.run`.

    Attributes
    ----------
    columns
        In the order of the column specs.
    segments
        Device segments, ``[num_segments, 6] int64``: leaf, first source byte in the leaf, destination offset in the
        slab, length, bytes of a row, bytes from a row to the next. The last two are 0 where the source is one run.
    host_runs
        Copies from CPU leaves: (column, leaf, start row, rows, first row in the column).
    device_runs
        The same for the device leaves, in rows instead of bytes; what the torch reference works from.
    routes
        For each leaf, how it gets into the slab; None for a leaf that no column uses.
    device_type
        Type of the device whose leaves are gathered, e.g. ``"cuda"``; ``"cpu"`` if all leaves are on the CPU.
    device_bytes
        Length of the slab's front part, which is gathered on the device and copied to the host.
    slab_bytes
        Length of the whole slab.
    payload_bytes
        Bytes of all pieces, without alignment gaps.
    signature
        Recognises leaves that the plan may be run on.
    """

    columns: tuple[Column, ...]
    segments: Int64Array  # [num_segments, 6]
    host_runs: tuple[tuple[int, int, int, int, int], ...]
    device_runs: tuple[tuple[int, int, int, int, int], ...]
    routes: tuple[Route | None, ...]
    device_type: str
    device_bytes: int
    slab_bytes: int
    payload_bytes: int
    signature: Signature

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.columns)} columns from {len(self.routes)} leaves on {self.device_type}: "
            f"{len(self.segments)} segments, {self.payload_bytes} bytes)"
        )

    @cached_property
    def kernel_leaves(self) -> tuple[int, ...]:
        """Leaves whose address the gather needs, in order."""
        return tuple(i for i, route in enumerate(self.routes) if route in (Route.KERNEL, Route.STAGED))

    @cached_property
    def staged_leaves(self) -> tuple[int, ...]:
        """Leaves that are made contiguous on the device before the gather."""
        return tuple(i for i, route in enumerate(self.routes) if route is Route.STAGED)

    @cached_property
    def has_opaque(self) -> bool:
        """Whether some leaves are moved as objects."""
        return Route.OPAQUE in self.routes

    @cached_property
    def reads_every_leaf(self) -> bool:
        """Whether the addresses of all leaves, as given, are what the gather needs."""
        return all(route is Route.KERNEL for route in self.routes)


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
        self.merged: dict[tuple[int, int], tuple[Int64Array, Int64Array, Int64Array]] = {}
        self.segments: list[Int64Array] = []
        self.runs: dict[bool, list[tuple[int, int, int, int, int]]] = {True: [], False: []}

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
            segments=np.concatenate(self.segments) if self.segments else np.zeros((0, 6), dtype=np.int64),
            host_runs=tuple(self.runs[True]),
            device_runs=tuple(self.runs[False]),
            routes=tuple(self.routes),
            device_type=self.device_type,
            device_bytes=device_bytes,
            slab_bytes=end,
            payload_bytes=payload_bytes,
            signature=make_signature(self.leaves),
        )

    def _on_host(self, index: int, spec: ColumnSpec) -> bool:
        used = {int(spec.leaves)} if isinstance(spec.leaves, int) else set(spec.leaves.tolist())
        for leaf in used:
            if self.routes[leaf] is None:
                self.routes[leaf] = _route(self.leaves[leaf], self.device_type)
        on_host = {self.routes[leaf] is Route.HOST for leaf in used}
        if len(on_host) > 1:
            raise PlacementError(f"column {index} mixes leaves on the CPU and on a device; give each its own column")
        return on_host == {True}

    def _place(self, index: int, spec: ColumnSpec, offset: int, host: bool) -> Column:
        leaf_ids = np.broadcast_to(np.asarray(spec.leaves, dtype=np.int64), spec.rows.shape)
        first = int(spec.leaves if isinstance(spec.leaves, int) else leaf_ids[0]) if leaf_ids.size else None
        if first is None:
            raise PlacementError(f"column {index} has no pieces; leave it out")
        model = self.leaves[first]
        if self.routes[first] is Route.OPAQUE:
            return self._opaque(index, spec, first, offset)
        self._check(index, spec, leaf_ids, model)
        row_shape = tuple(model.shape[1:])
        row_bytes = model.element_size() * _product(row_shape)
        rows = int(spec.rows.sum())
        self._add_runs(index, spec, leaf_ids, host)
        if not host:
            self._add_segments(spec, leaf_ids, row_bytes, offset)
        return Column(
            offset_bytes=offset,
            nbytes=rows * row_bytes,
            dtype=model.dtype,
            shape=(rows,) if spec.scalar else (rows, *row_shape),
            rows=tuple(spec.rows.tolist()),
            scalar=spec.scalar,
        )

    def _check(self, index: int, spec: ColumnSpec, leaf_ids: Int64Array, model: Tensor) -> None:
        used = [int(spec.leaves)] if isinstance(spec.leaves, int) else sorted(set(leaf_ids.tolist()))
        for leaf in used:
            tensor = self.leaves[leaf]
            if tensor.dtype != model.dtype or tensor.shape[1:] != model.shape[1:]:
                raise PlacementError(
                    f"column {index} holds {_kind(model)} and {_kind(tensor)}; "
                    "the leaves of a column must agree in dtype and shape[1:]"
                )
            if (tensor.dim() == 0) != spec.scalar:
                raise PlacementError(f"column {index}: leaf {leaf} is {_kind(tensor)}, but scalar={spec.scalar}")
        counts = np.array([_row_count(self.leaves[leaf]) for leaf in used], dtype=np.int64)
        available = counts[np.searchsorted(np.asarray(used), leaf_ids)]
        bad = (spec.starts < 0) | (spec.rows < 0) | (spec.starts + spec.rows > available)
        if bad.any():
            piece = int(np.flatnonzero(bad)[0])
            start, rows = int(spec.starts[piece]), int(spec.rows[piece])
            raise PlacementError(
                f"column {index}, piece {piece}: rows [{start}, {start + rows}) of leaf {int(leaf_ids[piece])}, "
                f"which has {int(available[piece])} rows"
            )

    def _opaque(self, index: int, spec: ColumnSpec, leaf: int, offset: int) -> Column:
        tensor = self.leaves[leaf]
        whole = isinstance(spec.leaves, int) and not spec.starts.any()
        if not whole or (tensor.dim() and (spec.rows != tensor.shape[0]).any()):
            raise LeafError(
                f"leaf {leaf} is {_kind(tensor)} with layout {tensor.layout}: it can only be packed whole, "
                "not by rows; declare it request-invariant"
            )
        rows = tuple(spec.rows.tolist())
        return Column(offset, 0, tensor.dtype, tuple(tensor.shape), rows, spec.scalar, opaque=leaf)

    def _add_runs(self, index: int, spec: ColumnSpec, leaf_ids: Int64Array, host: bool) -> None:
        leaf, start, rows = self._merge(spec, leaf_ids)
        before = np.concatenate(([0], np.cumsum(rows)[:-1])) if len(rows) else rows
        columns = np.full_like(leaf, index)
        self.runs[host].extend(zip(*(part.tolist() for part in (columns, leaf, start, rows, before)), strict=True))

    def _merge(self, spec: ColumnSpec, leaf_ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Pieces that follow each other in their leaf, taken together; pieces without rows, dropped."""
        key = (id(spec.starts), id(spec.rows))  # per-token columns share their span arrays: merge those once
        if isinstance(spec.leaves, int) and key in self.merged:
            _, start, rows = self.merged[key]
            return np.full_like(start, spec.leaves), start, rows
        keep = spec.rows > 0
        leaf, start, rows = leaf_ids[keep], spec.starts[keep], spec.rows[keep]
        if len(start):
            joined = (leaf[1:] == leaf[:-1]) & (start[1:] == start[:-1] + rows[:-1])
            heads = np.flatnonzero(np.concatenate(([True], ~joined)))
            leaf, start, rows = leaf[heads], start[heads], np.add.reduceat(rows, heads)
        if isinstance(spec.leaves, int):
            self.merged[key] = (leaf, start, rows)
        return leaf, start, rows

    def _add_segments(self, spec: ColumnSpec, leaf_ids: Int64Array, row_bytes: int, offset: int) -> None:
        leaf, start, rows = self._merge(spec, leaf_ids)
        if not len(leaf) or not row_bytes:
            return
        strides = {i: self._row_stride(i, row_bytes) for i in set(leaf.tolist())}
        stride = np.array([strides[i] for i in leaf.tolist()], dtype=np.int64)
        length = rows * row_bytes
        one_run = (stride == row_bytes) | (rows == 1)
        table = np.empty((len(leaf), 6), dtype=np.int64)
        table[:, LEAF] = leaf
        table[:, SOURCE] = start * stride
        table[:, DESTINATION] = offset + np.cumsum(length) - length
        table[:, LENGTH] = length
        table[:, ROW_BYTES] = np.where(one_run, 0, row_bytes)
        table[:, ROW_STRIDE] = np.where(one_run, 0, stride)
        self.segments.append(table)

    def _row_stride(self, leaf: int, row_bytes: int) -> int:
        tensor = self.leaves[leaf]
        if self.routes[leaf] is Route.STAGED or tensor.dim() == 0:
            return row_bytes
        return tensor.stride(0) * tensor.element_size()


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


def make_tiles(segments: Int64Array, tile_bytes: int) -> Int64Array:
    """Cut segments into pieces of work for one program of the kernel each.

    Parameters
    ----------
    segments
        ``[num_segments, 6] int64``, see `Plan.segments`.
    tile_bytes
        Length of a tile. A tile of a row-strided segment holds whole rows, or part of one row where a row is longer.

    Returns
    -------
    ndarray
        ``[num_tiles, 6] int64``, in the columns of `Plan.segments`.
    """
    row_bytes, row_stride = segments[:, ROW_BYTES], segments[:, ROW_STRIDE]
    strided = row_bytes > 0
    if (row_bytes > tile_bytes).any():  # rows longer than a tile become segments of their own
        long = row_bytes > tile_bytes
        segments = np.concatenate([segments[~long], _one_per_row(segments[long])])
        row_bytes, row_stride = segments[:, ROW_BYTES], segments[:, ROW_STRIDE]
        strided = row_bytes > 0
    rows_per_tile = np.maximum(tile_bytes // np.maximum(row_bytes, 1), 1)
    step = np.where(strided, rows_per_tile * row_bytes, tile_bytes)
    source_step = np.where(strided, rows_per_tile * row_stride, tile_bytes)
    counts = -(-segments[:, LENGTH] // step)
    owner = np.repeat(np.arange(len(segments)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = segments[owner]
    tiles[:, SOURCE] += nth * source_step[owner]
    tiles[:, DESTINATION] += nth * step[owner]
    tiles[:, LENGTH] = np.minimum(step[owner], tiles[:, LENGTH] - nth * step[owner])
    return tiles


def _one_per_row(segments: Int64Array) -> Int64Array:
    counts = segments[:, LENGTH] // segments[:, ROW_BYTES]
    owner = np.repeat(np.arange(len(segments)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = segments[owner]
    rows[:, SOURCE] += nth * rows[:, ROW_STRIDE]
    rows[:, DESTINATION] += nth * rows[:, ROW_BYTES]
    rows[:, LENGTH] = rows[:, ROW_BYTES]
    rows[:, ROW_BYTES:] = 0
    return rows
