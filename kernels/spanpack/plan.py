"""Plans: what a pack copies and where to; `planner` makes them.

A plan is frozen. It depends on dtypes, shapes, strides and spans, not on addresses, so one plan serves every step
that looks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from .columns import ColumnSpec, Int64Array
from .segments import Part, PassedRun, count_segments, make_passed_runs, make_segments
from .signature import PlanSignature


class Route(Enum):
    """How a leaf's bytes get into the slab."""

    KERNEL = "kernel"  # read in place by the gather
    STAGED = "staged"  # strided within its rows, or lazily conjugated: made contiguous on the device first
    HOST = "host"  # already on the CPU: copied at once
    OPAQUE = "opaque"  # sparse or quantized: moved as an object, outside the slab


class LeafUse(NamedTuple):
    """How the leaves of a plan get into the slab.

    Attributes
    ----------
    routes
        Route of each leaf; None for a leaf that no column uses.
    kernel
        Leaves whose address the gather needs, in order.
    staged
        Leaves that are made contiguous on the device before the gather.
    has_opaque
        Whether some leaves are moved as objects.
    reads_every_leaf
        Whether the gather reads every leaf in place, at the leaf's own address.
    """

    routes: tuple[Route | None, ...]
    kernel: tuple[int, ...]
    staged: tuple[int, ...]
    has_opaque: bool
    reads_every_leaf: bool

    @staticmethod
    def of(routes: Sequence[Route | None]) -> LeafUse:
        """Group leaves by their routes."""
        return LeafUse(
            routes=tuple(routes),
            kernel=tuple(i for i, route in enumerate(routes) if route in (Route.KERNEL, Route.STAGED)),
            staged=tuple(i for i, route in enumerate(routes) if route is Route.STAGED),
            has_opaque=Route.OPAQUE in routes,
            reads_every_leaf=all(route is Route.KERNEL for route in routes),
        )


class Column(NamedTuple):
    """Where one column is in the slab and how it is split.

    Attributes
    ----------
    offset_bytes, nbytes
        Position and length in the slab.
    dtype, shape
        Of the whole column: ``[sum of rows, *row_shape]``, or ``[num_pieces]`` for 0-dimensional leaves.
    rows
        Rows of each piece, in order.
    scalar
        Whether pieces are 0-dimensional.
    opaque
        Index of the column's leaf if that is moved as an object and has no bytes in the slab; else None.
    """

    offset_bytes: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    scalar: bool
    opaque: int | None = None


class RowCopy(NamedTuple):
    """Consecutive rows of a leaf that become consecutive rows of a column."""

    column: int
    leaf: int
    start: int
    rows: int
    first_row: int  # in the column


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What to copy and where to; made by `make_plan`, run by `Packer.run`.

    Attributes
    ----------
    columns
        In the order of the column specs.
    parts
        Parts of the columns, filled by the gather.
    specs
        For each column, the specs whose pieces it holds one after another.
    use
        How the leaves get into the slab.
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
    parts: tuple[Part, ...]
    specs: tuple[Sequence[ColumnSpec], ...]
    use: LeafUse
    device_type: str
    device_bytes: int
    slab_bytes: int
    payload_bytes: int
    signature: PlanSignature

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.columns)} columns from {len(self.use.routes)} leaves on {self.device_type}: "
            f"{self.num_segments} segments, {self.payload_bytes} bytes)"
        )

    @cached_property
    def segments(self) -> Int64Array:
        """The segments that the gather copies, ``[num_segments, 6] int64``, computed at the first access.

        Columns: leaf, first source byte in the leaf, destination offset in the slab, length, row bytes, row stride in
        bytes. The last two are 0 if the source is one run.
        """
        return make_segments(self.parts)

    @cached_property
    def num_segments(self) -> int:
        """Number of segments."""
        return count_segments(self.parts)

    @cached_property
    def passed_runs(self) -> tuple[PassedRun, ...] | None:
        """The segments as runs that fit in the kernel's arguments; None if they do not fit."""
        return make_passed_runs(self.parts)

    @cached_property
    def device_copies(self) -> tuple[RowCopy, ...]:
        """Row copies that fill the device part of the slab; used by the torch reference."""
        return self._row_copies(host=False)

    @cached_property
    def host_copies(self) -> tuple[RowCopy, ...]:
        """Row copies from leaves that are already on the CPU."""
        return self._row_copies(host=True) if self.slab_bytes > self.device_bytes else ()

    def _row_copies(self, *, host: bool) -> tuple[RowCopy, ...]:
        found: list[RowCopy] = []
        for index, (specs, column) in enumerate(zip(self.specs, self.columns, strict=True)):
            on_host = self.use.routes[specs[0].first_leaf] is Route.HOST
            if column.opaque is not None or not column.nbytes or on_host != host:
                continue
            first_row = 0
            for spec in specs:
                facts = spec.piece_facts()
                starts, rows = facts.runs.starts, facts.runs.rows
                leaves = spec.leaves if facts.runs.leaves is None else facts.runs.leaves
                before = np.cumsum(rows) - rows + first_row
                found.extend(
                    RowCopy(index, *copy)
                    for copy in zip(
                        np.broadcast_to(leaves, starts.shape).tolist(),
                        starts.tolist(),
                        rows.tolist(),
                        before.tolist(),
                        strict=True,
                    )
                )
                first_row += facts.total_rows
        return tuple(found)
