"""Residents: plans whose descriptors are on the device, with all that their next pack needs at hand."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from torch import Tensor

from . import segments
from ._runtime import TorchRuntime
from .config import LaunchConfig
from .flight import Flight
from .gather import Launcher
from .plan import Plan
from .pool import HostPool
from .tiles import make_tiles


class Resident:
    """One plan's descriptors: ``[num_leaves] int64`` addresses, then ``[num_tiles, 6] int64`` tiles.

    What fits is passed to the kernel by each launch instead: the addresses of a few leaves, or all there is to know
    about a few runs. A plan of that kind has nothing on the device.

    Attributes
    ----------
    launch
        ``launch(slab, stream, addresses)`` queues the gather.
    buffer, buffer_address
        The descriptors on the device, if there are any.
    known
        The addresses that are there, none before the first upload; None once nothing more has to get there because
        launches pass them.
    stream
        The one that reads and writes them; at first the one they were allocated on.
    flight
        The last pack that reads them.
    turn
        Grows from use to use, over all residents.
    shelf, staging_shelf
        The pinned slabs that its packs go to, and those for new addresses.
    direct
        Whether the gather stores into the pinned slab.
    reads_every_leaf
        Whether that is the address of each of them, as given.
    has_extras
        Whether something else than one launch is to be done: leaves that are staged, on the host, or opaque.
    """

    __slots__ = (
        "_pack",
        "_stored",
        "_upload",
        "buffer",
        "buffer_address",
        "direct",
        "flight",
        "has_extras",
        "known",
        "launch",
        "reads_every_leaf",
        "shelf",
        "staging_shelf",
        "stream",
        "turn",
    )

    def __init__(
        self,
        plan: Plan,
        config: LaunchConfig,
        runtime: TorchRuntime,
        launcher: Launcher,
        pool: HostPool,
        staging: HostPool,
        *,
        direct: bool,
        passes_runs: bool = True,
    ) -> None:
        leaves = len(plan.use.routes)
        self._stored = 0 if leaves <= segments.MOST_PASSED else leaves
        self._upload: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.buffer: Tensor | None = None
        self.buffer_address = 0
        self.known: tuple[int, ...] | None = None
        runs = plan.passed_runs if passes_runs else None
        if runs is not None:
            self.launch = launcher.bind_runs(config, runs)
        else:
            tiles = make_tiles(plan.segments, config.tile_bytes)
            head = (self._stored + 1) // 2 * 2  # keeps the tiles aligned to 16 bytes
            self._upload = np.concatenate([np.zeros(head, np.int64), tiles.ravel()])
            self.buffer = runtime.empty(self._upload.nbytes)
            address = self.buffer_address = self.buffer.data_ptr()
            self.known = ()
            self.launch = launcher.bind(config, len(tiles), address + 8 * head, address if head else None)
        self.stream = runtime.current_stream()
        self.flight: Flight | None = None
        self.turn = 0
        self.shelf = pool.shelf(plan.slab_bytes)
        self.staging_shelf = staging.shelf(8 * self._stored)
        self.direct = direct
        self.reads_every_leaf = plan.use.reads_every_leaf
        self.has_extras = bool(plan.use.staged or plan.host_runs or plan.use.has_opaque)
        self._pack = struct.Struct(f"{self._stored}q")

    def upload_bytes(self) -> int:
        """How much the device lacks: all of it at first, later new addresses."""
        return self._pack.size if self._upload is None else self._upload.nbytes

    def write(self, staging: memoryview, addresses: tuple[int, ...]) -> None:
        """Put what the device lacks, `upload_bytes` of it, into `staging`; from then on it counts as known."""
        if self._upload is not None:
            staging[: self._upload.nbytes] = self._upload.view(np.uint8).data
            self._upload = None
        if self._stored:
            self._pack.pack_into(staging, 0, *addresses)
            self.known = addresses
        else:
            self.known = None
