"""Parts of columns, and their descriptors for the gather: a table of segments, or a few runs as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .columns import Int64Array, PieceFacts
from .tiles import DESTINATION, LEAF, LENGTH, ROW_BYTES, ROW_STRIDE, SOURCE

MOST_PASSED = 8  # maximum number of runs, or of leaf addresses, passed as kernel arguments


class Part(NamedTuple):
    """Pieces of a column that the gather fills.

    Attributes
    ----------
    leaf
        The leaf that the pieces are taken from; the first one if their runs name several.
    facts
        Facts about the pieces.
    row_bytes, row_stride
        Of that leaf, and of the others that the runs name.
    offset_bytes
        Offset in the slab where the pieces start; they are contiguous.
    """

    leaf: int
    facts: PieceFacts
    row_bytes: int
    row_stride: int | Int64Array  # [num_runs] where the runs name several leaves
    offset_bytes: int


class PassedRun(NamedTuple):
    """A run of bytes of a leaf that goes into the slab once, or several times contiguously.

    Attributes
    ----------
    leaf
        Index of the leaf.
    source
        First byte in the leaf.
    destination
        First byte in the slab.
    nbytes
        Length of one copy.
    copies
        Number of copies.
    """

    leaf: int
    source: int
    destination: int
    nbytes: int
    copies: int


def count_segments(parts: Sequence[Part]) -> int:
    """Number of segments in the table."""
    return sum([len(part.facts.runs.starts) for part in parts])


def make_segments(parts: Sequence[Part]) -> Int64Array:
    """The segment table of all parts, see `Plan.segments`; a NumPy call costs the same for one part as for all."""
    if not parts:
        return np.zeros((0, 6), dtype=np.int64)
    counts = [len(part.facts.runs.starts) for part in parts]
    per_part = []
    bytes_before = 0
    for part in parts:
        per_part.append((part.leaf, part.row_bytes, part.offset_bytes - bytes_before))
        bytes_before += part.facts.total_rows * part.row_bytes
    leaf, row_bytes, shift = np.array(per_part, dtype=np.int64).T.repeat(counts, axis=1)
    row_stride = np.empty(len(leaf), dtype=np.int64)
    first = 0
    for part, count in zip(parts, counts, strict=True):
        row_stride[first : first + count] = part.row_stride
        if part.facts.runs.leaves is not None:
            leaf[first : first + count] = part.facts.runs.leaves
        first += count
    rows = np.concatenate([part.facts.runs.rows for part in parts])
    length = rows * row_bytes
    table = np.zeros((len(leaf), 6), dtype=np.int64)
    table[:, LEAF] = leaf
    table[:, SOURCE] = np.concatenate([part.facts.runs.starts for part in parts]) * row_stride
    table[:, DESTINATION] = length.cumsum() - length + shift
    table[:, LENGTH] = length
    strided = row_stride != row_bytes
    if strided.any():
        strided &= rows != 1
        table[:, ROW_BYTES] = row_bytes * strided
        table[:, ROW_STRIDE] = row_stride * strided
    return table


def make_passed_runs(parts: Sequence[Part]) -> tuple[PassedRun, ...] | None:
    """The segments as kernel arguments; None if there are more than `MOST_PASSED` runs, or one with strided rows.

    Most steps have few runs: all spans of a step are one run per leaf, and so are the copies of an invariant leaf.
    """
    found: list[PassedRun] = []
    for part in parts:
        leaves, starts, rows = part.facts.runs
        count = part.facts.num_passed
        if count + len(found) > MOST_PASSED:
            return None
        destination = part.offset_bytes
        for place in range(count):
            row_count = int(rows[place])
            stride = part.row_stride if isinstance(part.row_stride, int) else int(part.row_stride[place])
            if stride != part.row_bytes and row_count != 1:
                return None
            leaf = part.leaf if leaves is None else int(leaves[place])
            nbytes = row_count * part.row_bytes
            found.append(PassedRun(leaf, int(starts[place]) * stride, destination, nbytes, part.facts.copies))
            destination += nbytes
    return tuple(sorted(found))  # so that run i is mostly leaf i, see RunArguments
