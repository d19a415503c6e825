"""Residents: plans that were launched before, with everything that their next pack needs."""

from __future__ import annotations

from ._runtime import TorchRuntime
from ._size_classes import LaunchConfig
from .device_table import DeviceTable
from .launcher import Launcher
from .plan import Plan
from .pool import HostPool


class Resident:
    """What all packs of one plan share.

    Attributes
    ----------
    launch
        ``launch(slab, stream, addresses)`` queues the gather.
    table
        The descriptors on the device; None if the launch's arguments carry all of them.
    turn
        Increases with every use, across all residents.
    shelf
        The pinned slabs that its packs go to.
    direct
        Whether the gather stores into the pinned slab.
    reads_every_leaf
        Whether the gather reads every leaf in place, at the leaf's own address.
    has_extras
        Whether packs need more than one launch: they have leaves that are staged, on the host, or opaque.
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
