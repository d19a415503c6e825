"""Residents: plans that were launched before, with all that their next pack needs at hand."""

from __future__ import annotations

from ._runtime import TorchRuntime
from ._size_classes import LaunchConfig
from .device_table import DeviceTable
from .launcher import Launcher
from .plan import Plan
from .pool import HostPool


class Resident:
    """What one plan's packs have in common.

    Attributes
    ----------
    launch
        ``launch(slab, stream, addresses)`` queues the gather.
    table
        The descriptors on the device; None if the launch's arguments carry all of them.
    turn
        Grows from use to use, over all residents.
    shelf
        The pinned slabs that its packs go to.
    direct
        Whether the gather stores into the pinned slab.
    reads_every_leaf
        Whether the addresses of all leaves, as given, are what the gather needs.
    has_extras
        Whether something else than one launch is to be done: leaves that are staged, on the host, or opaque.
    """

    __slots__ = ("direct", "has_extras", "launch", "reads_every_leaf", "shelf", "table", "turn")

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
        runs = plan.passed_runs if passes_runs else None
        self.table: DeviceTable | None = None
        if runs is not None:
            self.launch = launcher.bind_runs(config, runs)
        else:
            table = self.table = DeviceTable(plan, config, runtime, staging)
            self.launch = launcher.bind(config, table.num_tiles, table.tiles, table.addresses)
        self.turn = 0
        self.shelf = pool.shelf(plan.slab_bytes)
        self.direct = direct
        self.reads_every_leaf = plan.use.reads_every_leaf
        self.has_extras = bool(plan.use.staged or plan.host_copies or plan.use.has_opaque)
