"""Device code only: `@triton.jit` functions and lists of their parameters; launcher.py and gather.py launch them.

The kernels see bytes and 64-bit addresses, no dtypes, so one launch serves all leaves of a payload.
"""

import triton
import triton.language as tl


@triton.jit
def _copy_lanes(source, destination, count, LANES: tl.constexpr, LANE: tl.constexpr):
    """Copy `count` elements of type LANE between byte addresses; count <= LANES."""
    lane = tl.arange(0, LANES)
    value = tl.load(source.to(tl.pointer_type(LANE)) + lane, mask=lane < count)
    tl.store(destination.to(tl.pointer_type(LANE)) + lane, value, mask=lane < count)


@triton.jit
def _copy_vectors(source, destination, count, VECTORS: tl.constexpr):
    """Copy `count` vectors of 16 bytes between byte addresses that are multiples of 16; count <= VECTORS."""
    vector = tl.arange(0, VECTORS)[:, None]
    half = tl.arange(0, 2)[None, :]
    # The hint must be on the pointers: the compiler loses hints on integers that are then cast to pointers.
    read = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    written = tl.multiple_of(destination.to(tl.pointer_type(tl.int64)), 16)
    value = tl.load(read + (vector * 2 + half), mask=vector < count)
    tl.store(written + (vector * 2 + half), value, mask=vector < count)


@triton.jit
def _copy_bytes(source, destination, length, TILE_BYTES: tl.constexpr):
    """Copy with 1-byte lanes, an eighth of a tile at a time: code for a whole tile takes seconds to compile."""
    LANES: tl.constexpr = TILE_BYTES // 8
    for first in range(0, length, LANES):
        _copy_lanes(source + first, destination + first, tl.minimum(length - first, LANES), LANES, tl.uint8)


@triton.jit
def _copy_run(source, destination, length, TILE_BYTES: tl.constexpr):
    """Copy one run of bytes with the widest lanes that both addresses allow."""
    if (source - destination) % 16 == 0:
        head = tl.minimum((16 - destination % 16) % 16, length)
        if head > 0:
            _copy_lanes(source, destination, head, 16, tl.uint8)
        source += head
        destination += head
        vectors = (length - head) // 16
        _copy_vectors(source, destination, vectors, TILE_BYTES // 16)
        tail = (length - head) % 16
        if tail > 0:
            _copy_lanes(source + vectors * 16, destination + vectors * 16, tail, 16, tl.uint8)
    elif (source % 4 == 0) & (destination % 4 == 0):
        words = length // 4
        _copy_lanes(source, destination, words, TILE_BYTES // 4, tl.int32)
        tail = length % 4
        if tail > 0:
            _copy_lanes(source + words * 4, destination + words * 4, tail, 4, tl.uint8)
    else:
        _copy_bytes(source, destination, length, TILE_BYTES)


@triton.jit
def _copy_row_lanes(
    source,
    destination,
    length,
    row_bytes,
    row_stride,
    LANES: tl.constexpr,
    LANE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy rows `row_stride` bytes apart into one run, LANES elements at a time; WIDTH is the size of LANE in bytes."""
    lanes_per_row = (row_bytes // WIDTH).to(tl.int32)
    count = (length // WIDTH).to(tl.int32)
    for first in range(0, count, LANES):
        lane = first + tl.arange(0, LANES)
        row = lane // lanes_per_row
        offset = row.to(tl.int64) * row_stride + (lane - row * lanes_per_row).to(tl.int64) * WIDTH
        mask = lane < count
        value = tl.load((source + offset).to(tl.pointer_type(LANE)), mask=mask)
        tl.store(destination.to(tl.pointer_type(LANE)) + lane, value, mask=mask)


@triton.jit
def _copy_rows(source, destination, length, row_bytes, row_stride, TILE_BYTES: tl.constexpr):
    """Copy strided rows with 8-byte, 4-byte or 1-byte lanes, whichever divides every address."""
    LANES: tl.constexpr = TILE_BYTES // 8  # a whole tile of 8-byte lanes; as many narrower ones take seconds to compile
    alignment = source | destination | row_bytes | row_stride
    if alignment % 8 == 0:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, LANES, tl.int64, 8)
    elif alignment % 4 == 0:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, LANES, tl.int32, 4)
    else:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, LANES, tl.uint8, 1)


@triton.jit
def _pick(index, v0, v1, v2, v3, v4, v5, v6, v7):
    """Select one of eight values by index, without a lookup in memory."""
    low = tl.where(index == 1, v1, tl.where(index == 2, v2, tl.where(index == 3, v3, v0)))
    high = tl.where(index == 5, v5, tl.where(index == 6, v6, tl.where(index == 7, v7, v4)))
    return tl.where(index < 4, low, high)


# Names of eight parameters each: addresses of leaves or runs, lengths, destinations, ends.
_A, _N, _D, _E = ([f"{letter}{index}" for index in range(8)] for letter in "ande")


# fmt: off
@triton.jit(do_not_specialize=_A)
def gather_tiles(
    slab,  # [slab_bytes] uint8, aligned to 16: device memory, or pinned host memory mapped into the device
    a0, a1, a2, a3, a4, a5, a6, a7,  # address of each leaf's first byte; used only if PASSED
    tiles,  # [num_tiles, 6] int64: leaf, source byte, destination byte, length, row bytes, row stride
    addresses,  # [num_leaves] int64: address of each leaf's first byte; not read if PASSED
    PASSED: tl.constexpr,  # whether the addresses are in a0 to a7 rather than in `addresses`
    TILE_BYTES: tl.constexpr,  # length of the longest tile
):
    """One program copies one tile from its leaf into the slab."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 6
    leaf = tl.load(tile)
    base = _pick(leaf, a0, a1, a2, a3, a4, a5, a6, a7) if PASSED else tl.load(addresses + leaf)
    source = base + tl.load(tile + 1)
    destination = slab.to(tl.int64) + tl.load(tile + 2)
    length = tl.load(tile + 3)
    row_bytes = tl.load(tile + 4)
    if row_bytes == 0:
        _copy_run(source, destination, length, TILE_BYTES)
    else:
        _copy_rows(source, destination, length, row_bytes, tl.load(tile + 5), TILE_BYTES)


@triton.jit(do_not_specialize=[*_A, *_N, *_D, *_E])
def gather_runs(
    slab,  # [slab_bytes] uint8, as in gather_tiles
    a0, a1, a2, a3, a4, a5, a6, a7,  # address of each run's first source byte
    n0, n1, n2, n3, n4, n5, n6, n7,  # length of each run in bytes
    d0, d1, d2, d3, d4, d5, d6, d7,  # slab offset of each run's first copy; its further copies follow contiguously
    e0, e1, e2, e3, e4, e5, e6, e7,  # tiles of all copies of each run and of the runs before it
    TILE_BYTES: tl.constexpr,  # length of the longest tile
):
    """One program copies one tile of one copy of a run into the slab; all descriptors are launch arguments."""
    tile = tl.program_id(0)
    run = (tile >= e0).to(tl.int32) + (tile >= e1) + (tile >= e2) + (tile >= e3)
    run += (tile >= e4).to(tl.int32) + (tile >= e5) + (tile >= e6)
    length = _pick(run, n0, n1, n2, n3, n4, n5, n6, n7).to(tl.int64)
    tiles_per_copy = ((length + TILE_BYTES - 1) // TILE_BYTES).to(tl.int32)
    tile -= _pick(run, 0, e0, e1, e2, e3, e4, e5, e6).to(tl.int32)
    copy = tile // tiles_per_copy
    done = (tile - copy * tiles_per_copy).to(tl.int64) * TILE_BYTES
    source = _pick(run, a0, a1, a2, a3, a4, a5, a6, a7) + done
    destination = slab.to(tl.int64) + _pick(run, d0, d1, d2, d3, d4, d5, d6, d7).to(tl.int64) + copy * length + done
    _copy_run(source, destination, tl.minimum(length - done, TILE_BYTES), TILE_BYTES)
# fmt: on
