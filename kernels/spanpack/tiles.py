"""Tiles: segments cut into pieces, each copied by one program of the kernel."""

from __future__ import annotations

import numpy as np

from .columns import Int64Array

# Columns of the segment table.
LEAF, SOURCE, DESTINATION, LENGTH, ROW_BYTES, ROW_STRIDE = range(6)


def make_tiles(segments: Int64Array, tile_bytes: int) -> Int64Array:
    """Cut segments into tiles, each copied by one program of the kernel.

    Parameters
    ----------
    segments
        ``[num_segments, 6] int64``, see `Plan.segments`.
    tile_bytes
        Length of a tile. A tile of a row-strided segment holds whole rows, or part of one row if a row is longer.

    Returns
    -------
    ndarray
        ``[num_tiles, 6] int64``, with the columns of `Plan.segments`.
    """
    row_bytes = segments[:, ROW_BYTES]
    if not row_bytes.any():
        return _cut(segments, tile_bytes, tile_bytes)
    long = row_bytes > tile_bytes
    if long.any():  # rows longer than a tile become segments of their own
        segments = np.concatenate([segments[~long], _one_per_row(segments[long])])
        row_bytes = segments[:, ROW_BYTES]
    strided = row_bytes > 0
    rows_per_tile = tile_bytes // np.maximum(row_bytes, 1)
    return _cut(
        segments,
        np.where(strided, rows_per_tile * row_bytes, tile_bytes),
        np.where(strided, rows_per_tile * segments[:, ROW_STRIDE], tile_bytes),
    )


def _cut(segments: Int64Array, step: int | Int64Array, source_step: int | Int64Array) -> Int64Array:
    """Cut segments into tiles of `step` bytes, whose first bytes are `source_step` bytes apart in the leaf."""
    counts = -(-segments[:, LENGTH] // step)
    ends = counts.cumsum()
    if not len(ends) or ends[-1] == len(ends):  # one tile each
        return segments.copy()
    rest = segments[:, LENGTH] - (counts - 1) * step
    if not isinstance(step, int):
        step = step.repeat(counts)
    if not isinstance(source_step, int):
        source_step = source_step.repeat(counts)
    tiles = segments.repeat(counts, axis=0)
    nth = np.arange(len(tiles)) - (ends - counts).repeat(counts)
    tiles[:, SOURCE] += nth * source_step
    tiles[:, DESTINATION] += nth * step
    tiles[:, LENGTH] = step
    tiles[ends - 1, LENGTH] = rest
    return tiles


def _one_per_row(segments: Int64Array) -> Int64Array:
    counts = segments[:, LENGTH] // segments[:, ROW_BYTES]
    rows = segments.repeat(counts, axis=0)
    nth = np.arange(len(rows)) - (counts.cumsum() - counts).repeat(counts)
    rows[:, SOURCE] += nth * rows[:, ROW_STRIDE]
    rows[:, DESTINATION] += nth * rows[:, ROW_BYTES]
    rows[:, LENGTH] = rows[:, ROW_BYTES]
    rows[:, ROW_BYTES:] = 0
    return rows
