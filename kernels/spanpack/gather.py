"""Gather: fill a slab from leaves according to a plan, by the Triton kernel or the torch reference.

Both have the signature ``gather(plan, leaves, slab)`` and write the same bytes; gaps between columns are not written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._size_classes import LaunchConfig, size_class
from .errors import UnavailableError
from .leaf_memory import check_memory
from .plan import Column, Plan, Route, RowCopy
from .segments import MOST_PASSED, PassedRun
from .stats import Fallbacks
from .tiles import make_tiles

# Placeholder for an unused address. It needs more than 32 bits, as Triton passes smaller integers as 32 bits.
NO_ADDRESSES = ((1 << 40) + 1,) * MOST_PASSED


def gather_torch(plan: Plan, leaves: Sequence[Tensor], slab: Tensor) -> None:
    """Fill the device part of a slab with plain torch copies.

    Parameters
    ----------
    plan
        What goes where.
    leaves
        Leaves like those that the plan was made for.
    slab
        ``[>= plan.device_bytes] uint8`` on the leaves' device.
    """
    _copy_rows(plan, plan.device_copies, leaves, slab)


def gather_host(plan: Plan, leaves: Sequence[Tensor], slab: Tensor) -> None:
    """Copy the leaves that are already on the CPU into their part of a host slab, ``[plan.slab_bytes] uint8``."""
    _copy_rows(plan, plan.host_copies, leaves, slab)


def _copy_rows(plan: Plan, copies: Sequence[RowCopy], leaves: Sequence[Tensor], slab: Tensor) -> None:
    targets: dict[int, Tensor] = {}
    sources: dict[int, Tensor] = {}
    with torch.no_grad():
        for column_index, leaf, start, rows, first_row in copies:
            if not plan.columns[column_index].nbytes:
                continue  # rows without elements
            target = targets.get(column_index)
            if target is None:
                target = targets[column_index] = _column_of(slab, plan.columns[column_index])
            source = sources.get(leaf)
            if source is None:
                check_memory(leaves, (leaf,))
                source = sources[leaf] = _plain(leaves[leaf])
            source = source.reshape(1) if source.dim() == 0 else source[start : start + rows]
            target[first_row : first_row + rows].copy_(source)


def _plain(leaf: Tensor) -> Tensor:
    """A leaf without pending conjugation or negation.

    The whole leaf is resolved, whichever of its rows are packed: the sign that torch gives a negated zero depends on
    its position in a vector, and all backends must yield the same bytes.
    """
    return leaf.detach().resolve_conj().resolve_neg()


def _column_of(slab: Tensor, column: Column) -> Tensor:
    return slab[column.offset_bytes : column.offset_bytes + column.nbytes].view(column.dtype).view(column.shape)


def gather_triton(plan: Plan, leaves: Sequence[Tensor], slab: Tensor, config: LaunchConfig | None = None) -> None:
    """Fill the device part of a slab with one kernel launch on the current stream.

    If the plan has too many runs to be passed, every call uploads its tiles; `Packer` keeps them on the device.

    Parameters
    ----------
    plan
        What goes where. Leaves that can't be read in place (`Route.STAGED`) are made contiguous first.
    leaves
        Leaves like those that the plan was made for.
    slab
        ``[>= plan.device_bytes] uint8`` on the leaves' device, aligned to 16 bytes.
    config
        Tile size and warps; the default for this size if None.

    Raises
    ------
    UnavailableError
        Triton can't be imported.
    """
    if not plan.num_segments:
        return
    config = config or size_class(plan.device_bytes, plan.num_segments).default
    read = stage(plan, leaves)
    addresses = addresses_of(plan, read)
    if plan.passed_runs is not None:
        passed = RunArguments(plan.passed_runs, config.tile_bytes)
        kernel = load_kernels().gather_runs
        kernel[(passed.num_tiles,)](
            slab,
            *passed.sources(addresses),
            *passed.constants,
            TILE_BYTES=config.tile_bytes,
            num_warps=config.num_warps,
        )
        return
    tiles = torch.from_numpy(make_tiles(plan.segments, config.tile_bytes)).to(slab.device)
    passes = len(addresses) <= MOST_PASSED
    table = torch.tensor(() if passes else addresses, dtype=torch.int64, device=slab.device)
    kernel = load_kernels().gather_tiles
    kernel[(len(tiles),)](
        slab,
        *(padded(addresses) if passes else NO_ADDRESSES),
        tiles,
        table,
        PASSED=passes,
        TILE_BYTES=config.tile_bytes,
        num_warps=config.num_warps,
    )


def padded(addresses: tuple[int, ...]) -> tuple[int, ...]:
    """Up to `MOST_PASSED` addresses, padded to the fixed number of kernel arguments."""
    return (addresses + NO_ADDRESSES)[:MOST_PASSED]


class RunArguments:
    """Kernel arguments that describe a few runs.

    Attributes
    ----------
    num_tiles
        Programs to launch.
    constants
        Arguments that do not change from step to step: lengths, destinations, ends.
    sources
        Takes the addresses of all leaves; returns the arguments that change: the address of each run's first byte.
    """

    def __init__(self, runs: Sequence[PassedRun], tile_bytes: int) -> None:
        ends, end = [], 0
        for run in runs:
            end += run.copies * -(-run.nbytes // tile_bytes)
            ends.append(end)
        missing = MOST_PASSED - len(runs)
        self.num_tiles = end
        lengths, destinations = [run.nbytes for run in runs], [run.destination for run in runs]
        self.constants = (*lengths, *[1] * missing, *destinations, *[0] * missing, *ends, *[end] * missing)
        places = [(run.leaf, run.source) for run in runs]

        def sources(addresses: tuple[int, ...]) -> tuple[int, ...]:
            return padded(tuple([addresses[leaf] + source for leaf, source in places]))

        each_leaf = places == [(leaf, 0) for leaf in range(len(runs))]  # the case in most steps
        self.sources: Callable[[tuple[int, ...]], tuple[int, ...]] = padded if each_leaf else sources


def stage(plan: Plan, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves as the kernel can read them: those of `Route.STAGED` are replaced by contiguous copies."""
    check_memory(leaves, plan.use.kernel)
    read = [leaf.detach() for leaf in leaves]
    for index in plan.use.staged:
        read[index] = _plain(read[index]).contiguous()
    return read


def addresses_of(plan: Plan, leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """Addresses of the leaves; 0 for those that the kernel does not read, which may have no address."""
    return tuple(
        leaf.data_ptr() if route in (Route.KERNEL, Route.STAGED) else 0
        for leaf, route in zip(leaves, plan.use.routes, strict=True)
    )


class OpaqueCopy:
    """A copy of a leaf that is moved as an object; it stays on the leaf's device until it is fetched."""

    def __init__(self, leaf: Tensor) -> None:
        self._copy = leaf.detach().clone()
        self._made: torch.cuda.Event | None = None
        if leaf.device.type == "cuda":  # the thread that fetches it may use another stream
            self._made = torch.cuda.Event(blocking=True)
            self._made.record(torch.cuda.current_stream(leaf.device))

    def is_done(self) -> bool:
        """Whether the copy on the device is complete; never blocks."""
        return self._made is None or self._made.query()

    def fetch(self) -> Tensor:
        """Wait for the copy on the device and return it on the host."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy.cpu()


def copy_opaque(plan: Plan, leaves: Sequence[Tensor], fallbacks: Fallbacks) -> dict[int, OpaqueCopy]:
    """Copies of the leaves that are moved as objects, by leaf index; counted as a fallback."""
    if not plan.use.has_opaque:
        return {}
    fallbacks.note("opaque", "sparse and quantized leaves are copied one by one, as objects")
    return {i: OpaqueCopy(leaves[i]) for i, route in enumerate(plan.use.routes) if route is Route.OPAQUE}


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_available() -> bool:
    """Whether the kernel module can be imported."""
    try:
        load_kernels()
    except UnavailableError:
        return False
    return True


def load_kernels() -> Any:
    """The module of the Triton kernels.

    Raises
    ------
    UnavailableError
        The module can't be imported.
    """
    try:
        from . import _kernels as kernels  # noqa: PLC0415 - spanpack works without Triton
    except Exception as error:  # a broken installation can raise anything on import
        raise UnavailableError(f"Triton can't be used here: {type(error).__name__}: {error}") from error
    return kernels
