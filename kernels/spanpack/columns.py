"""Columns: what a plan packs, before it becomes segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int64Array = npt.NDArray[np.int64]
MOST_ROWS = 1 << 48  # more than memory can hold; sums of smaller row numbers are far from overflowing int64


class Runs(NamedTuple):
    """Runs of rows: pieces that are adjacent in their leaf are merged, pieces without rows are dropped.

    Attributes
    ----------
    leaves
        Leaf of each run, ``[num_runs] int64``; None if all pieces are from one leaf.
    starts, rows
        First row and number of rows of each run, ``[num_runs] int64``.
    """

    leaves: Int64Array | None
    starts: Int64Array
    rows: Int64Array


class PieceFacts(NamedTuple):
    """Facts about the pieces of a column, whatever their leaf; columns with the same pieces can share them.

    Attributes
    ----------
    rows
        Rows of each piece, in order.
    total_rows
        Total number of rows of all pieces.
    smallest, largest
        Bounds of all first rows and row counts: `smallest` is negative if and only if one of them is; `largest` may
        exceed the largest of them.
    end
        One past the last row of all pieces.
    runs
        The runs to copy.
    copies
        Number of pieces if all are the same rows of one leaf, else 1.
    """

    rows: tuple[int, ...]
    total_rows: int
    smallest: int
    largest: int
    end: int
    runs: Runs
    copies: int = 1

    @property
    def num_passed(self) -> int:
        """Number of runs passed to the kernel: copies of the same rows are passed once, with their count."""
        return 1 if self.copies > 1 else len(self.runs.starts)

    @staticmethod
    def of(starts: Int64Array, rows: Int64Array, leaves: Int64Array | None = None) -> PieceFacts:
        """Compute the facts of at least one piece; `leaves` is the leaf of each piece, None if all have the same."""
        counts = tuple(rows.tolist())
        total_rows = sum(counts)
        ends = starts + rows
        joined = starts[1:] == ends[:-1]
        # Fast path: all spans of a step, adjacent. Row counts too large for any leaf take the general path below.
        if leaves is None and min(counts) >= 0 and joined.all() and total_rows <= MOST_ROWS:
            start = int(starts[0])
            run = Runs(None, starts[:1], np.array([total_rows], dtype=np.int64)) if total_rows else _NO_RUNS
            return PieceFacts(counts, total_rows, min(start, *counts), start + total_rows, start + total_rows, run)
        both = starts | rows  # bitwise: negative if either is, else not less than the larger
        runs = _merge(leaves, starts, rows)
        alike = leaves is None and bool((starts == starts[0]).all() and (rows == rows[0]).all())
        copies = len(counts) if alike and counts[0] else 1
        return PieceFacts(counts, total_rows, int(both.min()), int(both.max()), int(ends.max()), runs, copies)


_NO_RUNS = Runs(None, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _merge(leaves: Int64Array | None, starts: Int64Array, rows: Int64Array) -> Runs:
    if not rows.all():
        keep = rows > 0
        starts, rows = starts[keep], rows[keep]
        leaves = None if leaves is None else leaves[keep]
    joined = starts[1:] == starts[:-1] + rows[:-1]
    if leaves is not None:
        joined &= leaves[1:] == leaves[:-1]
    if not joined.any():
        return Runs(leaves, starts, rows)
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Runs(None if leaves is None else leaves[heads], starts[heads], np.add.reduceat(rows, heads))


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSpec:
    """Rows from one or several leaves that are contiguous in the slab and are split by one call.

    Everything that is packed is a column: a per-token leaf contributes the spans of the consumers, a list of
    per-request tensors contributes whole tensors, a request-invariant leaf is repeated once per consumer.

    Attributes
    ----------
    leaves
        Index of the leaf of each piece, ``[num_pieces] int64``, or one index for all pieces. All leaves of a column
        have the same dtype and the same ``shape[1:]``.
    starts
        First row of each piece in its leaf, ``[num_pieces] int64``; a row is an index of dimension 0.
    rows
        Number of rows of each piece, ``[num_pieces] int64``.
    scalar
        Whether the leaves are 0-dimensional: each piece is then one element and is returned 0-dimensional.
    facts
        Facts about the pieces, if they are known already. If None, planning computes them, once for all columns that
        have the same arrays.
    """

    leaves: int | Int64Array
    starts: Int64Array  # [num_pieces]
    rows: Int64Array  # [num_pieces]
    scalar: bool = False
    facts: PieceFacts | None = None

    @property
    def first_leaf(self) -> int:
        """The leaf of the first piece."""
        return self.leaves if isinstance(self.leaves, int) else int(self.leaves[0])

    @property
    def leaf_set(self) -> set[int]:
        """The leaves that pieces are taken from."""
        return {self.leaves} if isinstance(self.leaves, int) else set(self.leaves.tolist())

    def piece_facts(self) -> PieceFacts:
        """The facts about the pieces, computed if they are not known yet."""
        if self.facts is not None:
            return self.facts
        return PieceFacts.of(self.starts, self.rows, None if isinstance(self.leaves, int) else self.leaves)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Leaf, first row and number of rows of each piece."""
        leaves = np.broadcast_to(np.asarray(self.leaves), self.rows.shape)
        return zip(leaves.tolist(), self.starts.tolist(), self.rows.tolist(), strict=True)

    @staticmethod
    def whole(leaf: int, tensor: Tensor, copies: int = 1) -> ColumnSpec:
        """A column of one whole leaf, once or several times.

        Parameters
        ----------
        leaf
            Index of the leaf.
        tensor
            The leaf itself, for its shape.
        copies
            Number of pieces: one copy for each of that many requests.
        """
        rows = tensor.shape[0] if tensor.dim() else 1
        return ColumnSpec(
            leaf, np.zeros(copies, dtype=np.int64), np.full(copies, rows, dtype=np.int64), tensor.dim() == 0
        )

    @staticmethod
    def stack(leaves: Sequence[int], tensors: Sequence[Tensor]) -> ColumnSpec:
        """A column of several whole leaves, one piece per leaf.

        Parameters
        ----------
        leaves
            Indices of the leaves, at least one.
        tensors
            The leaves themselves, for their shapes; of the same dtype and ``shape[1:]``.
        """
        scalar = tensors[0].dim() == 0
        rows = np.array([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors], dtype=np.int64)
        return ColumnSpec(np.asarray(leaves, dtype=np.int64), np.zeros(len(leaves), dtype=np.int64), rows, scalar)
