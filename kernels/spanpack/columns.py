"""Columns: what a plan packs, before it becomes segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int64Array = npt.NDArray[np.int64]
MOST_ROWS = 1 << 48  # more than memory can hold; sums of smaller row numbers stay far from overflowing


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSpec:
    """Rows from one or several leaves that stand one after another in the slab and are split by one call.

    Everything that can be packed is a column: a per-token leaf gives the spans of its consumers, a list of
    per-request tensors gives each of them whole, a request-invariant leaf is repeated once per consumer.

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
        The leaves are 0-dimensional: each piece is one element and comes back 0-dimensional.
    """

    leaves: int | Int64Array
    starts: Int64Array  # [num_pieces]
    rows: Int64Array  # [num_pieces]
    scalar: bool = False

    @property
    def first_leaf(self) -> int:
        """The leaf of the first piece."""
        return self.leaves if isinstance(self.leaves, int) else int(self.leaves[0])

    @property
    def leaf_set(self) -> set[int]:
        """The leaves that it takes pieces from."""
        return {self.leaves} if isinstance(self.leaves, int) else set(self.leaves.tolist())

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Leaf, first row and number of rows of each piece."""
        leaves = np.broadcast_to(np.asarray(self.leaves), self.rows.shape)
        return zip(leaves.tolist(), self.starts.tolist(), self.rows.tolist(), strict=True)

    @staticmethod
    def whole(leaf: int, tensor: Tensor, copies: int = 1) -> ColumnSpec:
        """The whole of one leaf, `copies` times (an own copy for each of so many requests)."""
        rows = tensor.shape[0] if tensor.dim() else 1
        return ColumnSpec(
            leaf, np.zeros(copies, dtype=np.int64), np.full(copies, rows, dtype=np.int64), tensor.dim() == 0
        )

    @staticmethod
    def stack(leaves: Sequence[int], tensors: Sequence[Tensor]) -> ColumnSpec:
        """Several leaves of the same dtype and ``shape[1:]``, each whole."""
        scalar = tensors[0].dim() == 0
        rows = np.array([tensor.shape[0] if tensor.dim() else 1 for tensor in tensors], dtype=np.int64)
        return ColumnSpec(np.asarray(leaves, dtype=np.int64), np.zeros(len(leaves), dtype=np.int64), rows, scalar)


Pieces = tuple[Int64Array, Int64Array, Int64Array]  # leaf, first row, rows of each, [num_pieces]


def merge_pieces(spec: ColumnSpec) -> Pieces:
    """Pieces that follow each other in their leaf, taken together; pieces without rows, dropped."""
    leaf = np.broadcast_to(np.asarray(spec.leaves, dtype=np.int64), spec.rows.shape)
    start, rows = spec.starts, spec.rows
    if not rows.all():
        keep = rows > 0
        leaf, start, rows = leaf[keep], start[keep], rows[keep]
    if len(start) > 1:
        joined = (leaf[1:] == leaf[:-1]) & (start[1:] == start[:-1] + rows[:-1])
        if joined.any():
            heads = np.flatnonzero(np.concatenate(([True], ~joined)))
            leaf, start, rows = leaf[heads], start[heads], np.add.reduceat(rows, heads)
    return leaf, start, rows
