"""The self-test at warm-up: packs awkward leaves as a real pack does, and compares every byte with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ._size_classes import LaunchConfig
from .columns import ColumnSpec
from .flight import Events, Flight
from .gather import addresses_of, gather_torch
from .planner import make_plan
from .resident import Resident
from .segments import MOST_PASSED

if TYPE_CHECKING:
    from .cuda import CudaEngine

_SENTINEL = 0xA5


def self_test(engine: CudaEngine, config: LaunchConfig, *, direct: bool = False) -> None:
    """Pack runs, odd lengths and strided rows with one configuration; gaps between columns must stay unwritten.

    Triggers what the driver loads at first use: the upload of descriptors, the kernel, and the copy to the host or the
    store into pinned memory. Without pinned memory, torch makes the copy, and a direct store is not tested.

    Raises
    ------
    RuntimeError
        The bytes are wrong. Errors of a compiler or a driver propagate unchanged.
    """
    base = _bytes(engine)
    leaves = [
        base[:99999],
        base[7:4000],
        base[1:].view(-1)[: 64 * 1000].view(64, 1000)[:, :333],
        base.view(-1, 512)[:, :64],
    ]
    _test(engine, config, leaves, _whole(leaves), direct=direct)
    if not direct:  # which uses the same kernel
        leaves = leaves * MOST_PASSED  # so many that their addresses need a table
        _test(engine, config, leaves, _whole(leaves))


def self_test_of_runs(engine: CudaEngine, config: LaunchConfig, *, direct: bool = False) -> None:
    """Like `self_test`, for the kernel with passed runs: as many runs as it takes, all different."""
    base = _bytes(engine)
    leaves = [base[:99999], base[7:4000]]
    runs = [(0, 0, 99999, 1), (1, 0, 3993, 3), (0, 11, 5001, 1), (1, 5, 17, 2)]  # leaf, first byte, bytes, copies
    runs += [(0, 70000, 1, 5), (1, 100, 33, 1), (0, 33333, 40000, 1), (1, 16, 16, 4)]
    columns = [ColumnSpec(leaf, np.full(copies, start), np.full(copies, rows)) for leaf, start, rows, copies in runs]
    _test(engine, config, leaves, columns, direct=direct)


def _bytes(engine: CudaEngine) -> Tensor:
    return torch.arange(1 << 15, device=engine.runtime.device, dtype=torch.int32).view(torch.uint8)


def _whole(leaves: list[Tensor]) -> list[ColumnSpec]:
    return [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)]


def _test(
    engine: CudaEngine, config: LaunchConfig, leaves: list[Tensor], columns: list[ColumnSpec], *, direct: bool = False
) -> None:
    runtime, launcher = engine.runtime, engine.launcher
    assert launcher is not None
    plan = make_plan(leaves, columns)
    expected = torch.full((plan.device_bytes,), _SENTINEL, dtype=torch.uint8, device=runtime.device)
    packed = expected.clone()
    gather_torch(plan, leaves, expected)
    resident = Resident(plan, config, runtime, launcher, engine.pool, engine.staging, direct=direct)
    host = engine.pool.acquire(plan.slab_bytes)
    if host is None and direct:
        return
    stream = runtime.current_stream()
    flight = Flight(Events.make(runtime.make_event))
    addresses = addresses_of(plan, leaves)
    try:
        if resident.table is not None:
            resident.table.update(addresses, stream, flight)
        if host is None:
            resident.launch(packed.data_ptr(), stream, addresses)
            runtime.synchronize_current()
            found = packed.cpu()
        else:
            host.flight = flight
            found = torch.frombuffer(host.lease(plan.slab_bytes), dtype=torch.uint8)
            found.fill_(_SENTINEL)
            if direct:
                resident.launch(host.address, stream, addresses)
                runtime.mark_landed(flight, stream)
            else:
                resident.launch(packed.data_ptr(), stream, addresses)
                runtime.copy_to_host(flight, host.address, packed.data_ptr(), plan.device_bytes, stream)
    finally:  # also on failure: queued work may still read and write
        runtime.synchronize_current()
        flight.wait()
    _compare(found, expected, config)


def _compare(found: Tensor, expected: Tensor, config: LaunchConfig) -> None:
    if not torch.equal(found, expected.cpu()):
        raise RuntimeError(f"{config} yields wrong bytes")
