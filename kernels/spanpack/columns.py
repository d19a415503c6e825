"""Columns: what a plan packs, before it becomes segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int64Array = npt.NDArray[np.int64]


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
        rows = np.array([1 if scalar else tensor.shape[0] for tensor in tensors], dtype=np.int64)
        return ColumnSpec(np.asarray(leaves, dtype=np.int64), np.zeros(len(leaves), dtype=np.int64), rows, scalar)
