"""Tiles: segments cut into pieces of work for one program of the kernel each."""

from __future__ import annotations

import numpy as np

from .columns import Int64Array

# Columns of the segment table.
LEAF, SOURCE, DESTINATION, LENGTH, ROW_BYTES, ROW_STRIDE = range(6)


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
