"""The columns of one step's plan, filled key by key."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spanpack import ColumnSpec
from spanpack.columns import Int64Array, PieceFacts
from spanpack.leaf_table import LeafKind, LeafTable
from spanpack.plan import Route


class Pieces(NamedTuple):
    """Row ranges for one key: of a leaf that is given later, so that keys can share them, or of `leaves`."""

    leaves: Int64Array | None  # [num_pieces]
    starts: Int64Array  # [num_pieces]
    rows: Int64Array  # [num_pieces]
    facts: PieceFacts


def make_pieces(starts: Int64Array, rows: Int64Array, leaves: Int64Array | None = None) -> Pieces:
    """Create pieces together with the facts derived from them."""
    return Pieces(leaves, starts, rows, PieceFacts.of(starts, rows, leaves))


@lru_cache(maxsize=256)
def whole_copies(rows: int, copies: int) -> Pieces:
    """Return pieces that take all rows of a leaf, `copies` times."""
    return _shared(np.full(copies, rows, dtype=np.int64), None)


@lru_cache(maxsize=256)
def whole_leaves(leaves: tuple[int, ...], rows: tuple[int, ...]) -> Pieces:
    """Return pieces that take all rows of each of several leaves."""
    return _shared(np.array(rows, dtype=np.int64), np.array(leaves, dtype=np.int64))


def _shared(rows: Int64Array, leaves: Int64Array | None) -> Pieces:
    starts = np.zeros(len(rows), dtype=np.int64)
    for array in (starts, rows) if leaves is None else (starts, rows, leaves):
        array.flags.writeable = False  # the plans of many steps share it
    return make_pieces(starts, rows, leaves)


class StepColumns:
    """The columns of a plan, as few as possible: splitting one takes two torch calls, however many keys share it.

    Parameters
    ----------
    table
        Table of the step's leaves.
    most_bytes
        Keys share a column up to this size.

    Attributes
    ----------
    specs
        Specs of each column, one per key.
    nbytes
        Size of all columns.
    runs
        How many runs the gather copies into the columns, see `spanpack.segments`.
    """

    def __init__(self, table: LeafTable, most_bytes: int) -> None:
        self.specs: list[list[ColumnSpec]] = []
        self.nbytes = self.runs = 0
        self._table = table
        self._most_bytes = most_bytes
        self._open: dict[LeafKind, tuple[int, int, int]] = {}  # kind -> current column, its bytes and pieces

    def add(self, leaf: int, pieces: Pieces) -> tuple[int, int, int]:
        """Append pieces of `leaf`, or of their own `leaves`, to the column of the leaf's kind.

        Returns
        -------
        column, first, end
            The column, and the range of its pieces that were added.
        """
        kind = self._table.kinds[leaf]
        nbytes = pieces.facts.total_rows * self._table.row_bytes[leaf]
        column, column_bytes, first = self._open.get(kind, (-1, 0, 0))
        if column < 0 or column_bytes + nbytes > self._most_bytes:
            column, column_bytes, first = len(self.specs), 0, 0
            self.specs.append([])
        end = first + len(pieces.rows)
        self._open[kind] = column, column_bytes + nbytes, end
        self._append(column, leaf, pieces, nbytes)
        return column, first, end

    def add_apart(self, leaf: int, pieces: Pieces) -> int:
        """Put pieces of `leaf` into a column of their own and return its index."""
        self.specs.append([])
        column = len(self.specs) - 1
        self._append(column, leaf, pieces, pieces.facts.total_rows * self._table.row_bytes[leaf])
        return column

    def _append(self, column: int, leaf: int, pieces: Pieces, nbytes: int) -> None:
        self.nbytes += nbytes
        if nbytes and self._table.routes[leaf] is not Route.HOST:
            self.runs += pieces.facts.num_passed
        leaves = leaf if pieces.leaves is None else pieces.leaves
        scalar = self._table.kinds[leaf].scalar
        self.specs[column].append(ColumnSpec(leaves, pieces.starts, pieces.rows, scalar, pieces.facts))
