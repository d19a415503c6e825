"""Device code. Nothing but `@triton.jit` functions; who launches them is in gather.py.

Everything is bytes and 64-bit addresses: dtypes play no part, so one launch serves all leaves of a payload.
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
def _copy_run(source, destination, length, TILE_BYTES: tl.constexpr):
    """Copy one run of bytes with the widest lanes that both addresses allow."""
    if (source - destination) % 16 == 0:
        head = tl.minimum((16 - destination % 16) % 16, length)
        if head > 0:
            _copy_lanes(source, destination, head, 16, tl.uint8)
        source = tl.multiple_of(source + head, 16)
        destination = tl.multiple_of(destination + head, 16)
        vectors = (length - head) // 16
        # Pairs of 8-byte elements at addresses that are multiples of 16 become one 16-byte access per lane.
        _copy_lanes(source, destination, vectors * 2, TILE_BYTES // 8, tl.int64)
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
        _copy_lanes(source, destination, length, TILE_BYTES, tl.uint8)


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
    """Copy rows that stand `row_stride` bytes apart into one run; WIDTH is the size of LANE in bytes."""
    lane = tl.arange(0, LANES)
    lanes_per_row = (row_bytes // WIDTH).to(tl.int32)
    row = lane // lanes_per_row
    offset = row.to(tl.int64) * row_stride + (lane - row * lanes_per_row).to(tl.int64) * WIDTH
    mask = lane < length // WIDTH
    value = tl.load((source + offset).to(tl.pointer_type(LANE)), mask=mask)
    tl.store(destination.to(tl.pointer_type(LANE)) + lane, value, mask=mask)


@triton.jit
def _copy_rows(source, destination, length, row_bytes, row_stride, TILE_BYTES: tl.constexpr):
    """Copy strided rows with 8-byte, 4-byte or 1-byte lanes, whichever divides every address."""
    alignment = source | destination | row_bytes | row_stride
    if alignment % 8 == 0:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, TILE_BYTES // 8, tl.int64, 8)
    elif alignment % 4 == 0:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, TILE_BYTES // 4, tl.int32, 4)
    else:
        _copy_row_lanes(source, destination, length, row_bytes, row_stride, TILE_BYTES, tl.uint8, 1)


@triton.jit
def _pick(leaf, a0, a1, a2, a3, a4, a5, a6, a7):
    """The address of one of a few leaves, without memory to look it up in."""
    low = tl.where(leaf == 1, a1, tl.where(leaf == 2, a2, tl.where(leaf == 3, a3, a0)))
    high = tl.where(leaf == 5, a5, tl.where(leaf == 6, a6, tl.where(leaf == 7, a7, a4)))
    return tl.where(leaf < 4, low, high)


@triton.jit(do_not_specialize=["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"])
def gather_tiles(
    tiles,  # [num_tiles, 6] int64: leaf, source byte, destination byte, length, row bytes, row stride
    addresses,  # [num_leaves] int64: first byte of each leaf; not read if PASSED
    slab,  # [slab_bytes] uint8, aligned to 16: device memory, or pinned host memory mapped into the device
    a0,  # first byte of leaf 0 if PASSED, and so on up to eight leaves
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    PASSED: tl.constexpr,  # whether addresses are passed rather than stored
    TILE_BYTES: tl.constexpr,  # longest tile
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
