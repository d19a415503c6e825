"""The hot path on a CUDA or ROCm device: one launch, one copy, two events.

Host cost of the parts on an H200 host, in microseconds: launch 5.0, copy 1.8, record 1.0 each, stream wait 0.9.
Everything else (descriptor upload, allocation, waiting for a slab) happens only when something has changed. Between two
packs, a whole step of the engine evicts this code and its data from the CPU caches, so the cost depends on how many
functions and objects a pack touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ._runtime import TorchRuntime
from .backends import wrong_device
from .config import ConfigTable
from .errors import LeafError
from .flight import Events, Flight
from .gather import addresses_of, copy_opaque, gather_host, gather_torch, stage
from .late import MOST_WAITING, LateCopies, LateCopy
from .launcher import Launcher
from .leaf_memory import SUSPECT_ADDRESS, check_memory
from .overflow import Overflow
from .plan import Plan
from .pool import HostPool, HostSlab
from .resident import Resident
from .ring import DeviceRing, DeviceSlab
from .self_test import self_test, self_test_of_runs
from .snapshot import Rest, Snapshot
from .stats import Fallbacks

_address_of = Tensor.data_ptr
_MAX_RESIDENT = 128
_STAGING_BUDGET_BYTES = 1 << 26


class CudaEngine:
    """Runs plans on one device. Not thread-safe: `Packer` holds a lock around it.

    Parameters
    ----------
    runtime
        The device's streams, events and copies.
    pool
        Pinned slabs.
    fallbacks
        Where slower paths are counted.
    launcher
        Launches the compiled kernel; None to gather with torch copies.
    configs
        How packs of each size are launched.
    overflow
        Pageable slabs that take the bytes of crowded pinned slabs.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        pool: HostPool,
        fallbacks: Fallbacks,
        launcher: Launcher | None,
        configs: ConfigTable | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        self.runtime = runtime
        self.configs = configs or ConfigTable()
        self.pool = pool
        self.overflow = overflow
        self.staging = HostPool(_STAGING_BUDGET_BYTES, pin=pool.pin)  # for descriptors on their way to the device
        self.ring = DeviceRing(runtime)
        self.late = LateCopies()
        self.launcher = launcher
        self.fallbacks = fallbacks
        self.launches = self.copies = self.direct_stores = self.uploads = self.copied_bytes = 0
        self.passes_runs = True  # whether plans with few runs pass them as kernel arguments
        self.residents: dict[Plan, Resident] = {}
        self._device_index = runtime.device.index
        self._current_device = runtime.current_device
        self._current_stream = runtime.current_stream
        if launcher is None:
            self._without_launcher()

    def run(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        """Gather on the current stream of this device, copy on the copy stream."""
        if self._current_device() != self._device_index:
            with self.runtime.as_current():
                return self.run(plan, leaves)
        resident = self.residents.get(plan) or self._make_resident(plan, leaves, self.passes_runs)
        has_extras = resident is None or resident.has_extras
        if has_extras and plan.use.staged:
            self.fallbacks.note("strided", "leaves that are not contiguous within their rows are copied by torch first")
            leaves = stage(plan, leaves)
        stream = self._current_stream()
        host = resident.shelf.take() if resident is not None else None
        host = host or self.pool.acquire(plan.slab_bytes)
        if host is None:
            return self._run_late(plan, leaves, resident, stream)
        lease = host.lease(plan.slab_bytes)  # from here on an error returns the slab to its shelf
        if resident is not None and resident.direct:
            flight = self._store(plan, leaves, resident, host, stream)
        else:
            try:
                device = self.ring.acquire(plan.device_bytes, stream)
            except torch.cuda.OutOfMemoryError:
                return self._run_leaf_by_leaf(plan, leaves, lease, host, stream)
            flight = self._copy(plan, leaves, resident, host, device, stream)
        if has_extras:
            return self._with_extras(plan, leaves, lease, flight, host)
        return Snapshot(plan, lease, flight, host, None, self.overflow)

    def _copy(
        self,
        plan: Plan,
        leaves: Sequence[Tensor],
        resident: Resident | None,
        host: HostSlab,
        device: DeviceSlab,
        stream: int,
    ) -> Flight:
        """Gather into the device slab, and let the copy engine copy it to the pinned slab."""
        flight = host.flight = device.flight = Flight(host.events or host.make_events(self.runtime.make_event))
        device.turn = self.copies
        try:
            self._gather(plan, leaves, resident, device, stream, flight)
            self.runtime.copy_to_host(flight, host.address, device.address, plan.device_bytes, stream)
        except BaseException:
            # Work queued now or before may still use both slabs: the flight must end after it.
            with suppress(RuntimeError):
                self.runtime.copy_to_host(flight, host.address, device.address, plan.device_bytes, stream)
            raise
        self.copies += 1
        self.copied_bytes += plan.device_bytes
        return flight

    def _store(self, plan: Plan, leaves: Sequence[Tensor], resident: Resident, host: HostSlab, stream: int) -> Flight:
        """Gather straight into the pinned slab, which is mapped into the device: no device slab and no copy."""
        flight = host.flight = Flight(host.events or host.make_events(self.runtime.make_event))
        try:
            self._gather(plan, leaves, resident, host, stream, flight)
        finally:  # also on failure: queued work may still write
            self.runtime.mark_landed(flight, stream)
        self.direct_stores += 1
        return flight

    def _gather(
        self,
        plan: Plan,
        leaves: Sequence[Tensor],
        resident: Resident | None,
        slab: HostSlab | DeviceSlab,
        stream: int,
        flight: Flight,
    ) -> None:
        """Queue the gather into a slab, with torch copies if there is no resident."""
        if resident is None:
            assert isinstance(slab, DeviceSlab)
            gather_torch(plan, leaves, slab.tensor)
            return
        addresses = tuple(map(_address_of, leaves)) if resident.reads_every_leaf else addresses_of(plan, leaves)
        table = resident.table
        try:
            if (table is None or table.known != addresses) and min(addresses) < SUSPECT_ADDRESS:
                # It was there at the first pack, but may have been freed since.
                check_memory(leaves, [index for index in plan.use.kernel if addresses[index] < SUSPECT_ADDRESS])
            if table is not None and table.update(addresses, stream, flight):
                self.uploads += 1
            resident.launch(slab.address, stream, addresses)
        except BaseException as error:  # KeyboardInterrupt as well
            self.residents.pop(plan, None)  # the state of its descriptors on the device is unknown now
            if table is None and isinstance(error, Exception) and not isinstance(error, LeafError):
                self._give_up_passing_runs(error)
            raise
        resident.turn = self.launches = self.launches + 1

    def _make_resident(self, plan: Plan, leaves: Sequence[Tensor], passes_runs: bool) -> Resident | None:
        """Check the leaves that the kernel would read and make the plan's resident; None to gather with torch."""
        for index in plan.use.kernel:
            if leaves[index].device != self.runtime.device:
                raise wrong_device(f"leaf {index}", leaves[index].device, self.runtime.device)
        check_memory(leaves, plan.use.kernel)
        if self.launcher is None:
            return None
        try:
            resident = Resident(
                plan,
                self.configs.choose(plan.device_bytes, plan.num_segments),
                self.runtime,
                self.launcher,
                self.pool,
                self.staging,
                direct=plan.device_bytes <= self.configs.direct_store_bytes,
                passes_runs=passes_runs,
            )
        except torch.cuda.OutOfMemoryError:
            self.fallbacks.note("descriptors", "no device memory for descriptors; gathering with torch copies")
            return None
        except Exception as error:  # noqa: BLE001 - a compiler, a driver or a read-only cache may raise anything
            if not passes_runs or plan.passed_runs is None:
                self._give_up_triton(error)
                return None
            made = self._make_resident(plan, leaves, passes_runs=False)
            if made is not None:  # so only the kernel with passed runs failed
                self._give_up_passing_runs(error)
            return made
        if len(self.residents) >= _MAX_RESIDENT:  # drop a quarter at once: sorting for every new plan would cost more
            by_use = sorted(self.residents, key=lambda old: self.residents[old].turn)
            for old in by_use[: _MAX_RESIDENT // 4]:
                del self.residents[old]
        self.residents[plan] = resident
        return resident

    def _give_up_triton(self, error: Exception) -> None:
        self.fallbacks.note("triton failed", f"the Triton kernel can't be used ({error}); gathering with torch copies")
        self._without_launcher()

    def _give_up_passing_runs(self, error: Exception) -> None:
        self.fallbacks.note(
            "passing runs failed", f"the kernel that is told of a few runs can't be used ({error}); using the other"
        )
        self.passes_runs = False
        self.residents = {plan: resident for plan, resident in self.residents.items() if resident.table is not None}

    def _without_launcher(self) -> None:
        self.launcher = None
        self._without_direct_store()  # torch copies would store leaf by leaf, and block

    def _without_direct_store(self) -> None:
        self.configs = replace(self.configs, direct_store_bytes=0)
        self.residents.clear()

    def _run_late(self, plan: Plan, leaves: Sequence[Tensor], resident: Resident | None, stream: int) -> Snapshot:
        """Run without a pinned slab: the bytes stay in a separate device slab until the snapshot is waited for."""
        refusal = self.pool.refusal
        why = (
            f"pinned memory refused by the system ({refusal})"
            if refusal
            else "no pinned slab free within the budget and the number of slabs per size"
        )
        self.fallbacks.note("pinned memory", f"{why}; using pageable memory, filled when the snapshot is waited for")
        if self.late.make_room():
            self.fallbacks.note(
                "late packs",
                f"{MOST_WAITING} packs without a pinned slab were waiting on the device; copying the oldest at once, "
                "which blocks. Wait for snapshots sooner, drop views sooner, or give more pinned memory",
            )
        array = np.empty(plan.slab_bytes, dtype=np.uint8)
        try:
            device = DeviceSlab(plan.device_bytes, self.runtime, stream)
        except torch.cuda.OutOfMemoryError:
            return self._run_leaf_by_leaf(plan, leaves, array.data, None, stream)
        flight = device.flight
        try:
            self._gather(plan, leaves, resident, device, stream, flight)
        finally:  # also on failure: queued work may still read the descriptors
            self.runtime.mark_landed(flight, stream)
        self.copies += 1
        self.copied_bytes += plan.device_bytes
        gather_host(plan, leaves, torch.from_numpy(array))
        late = LateCopy(self.runtime, array, device.tensor, flight)
        self.late.add(late)
        return Snapshot(plan, None, flight, rest=Rest(late, copy_opaque(plan, leaves, self.fallbacks)))

    def _run_leaf_by_leaf(
        self, plan: Plan, leaves: Sequence[Tensor], lease: memoryview, host: HostSlab | None, stream: int
    ) -> Snapshot:
        """Run without device memory: torch copies each leaf to the host; blocks if that is pageable memory."""
        self.fallbacks.note("device memory", "no device memory for a slab; copying leaf by leaf")
        if host is None:
            flight = Flight(Events.make(self.runtime.make_event))
        else:
            flight = host.flight = Flight(host.events or host.make_events(self.runtime.make_event))
        gather_torch(plan, leaves, _bytes(lease))
        self.copies += len(plan.device_copies)
        self.copied_bytes += plan.payload_bytes
        self.runtime.mark_landed(flight, stream)
        return self._with_extras(plan, leaves, lease, flight, host)

    def _with_extras(
        self, plan: Plan, leaves: Sequence[Tensor], lease: memoryview, flight: Flight, host: HostSlab | None
    ) -> Snapshot:
        """Make the snapshot of a pack that may have leaves on the host and opaque leaves."""
        if plan.host_copies:
            gather_host(plan, leaves, _bytes(lease))
        opaque = copy_opaque(plan, leaves, self.fallbacks)
        return Snapshot(plan, lease, flight, host, Rest(None, opaque) if opaque else None, self.overflow)

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate device slabs for `slabs` packs of `nbytes` in flight."""
        with self.runtime.as_current():
            self.ring.reserve(nbytes, slabs)
            # Slabs count as in use until they are zeroed; without this wait the first packs would allocate more.
            self.runtime.synchronize_current()

    def warmup(self) -> None:
        """Compile, launch and check every configuration that a pack can get, and each transport to the host."""
        with self.runtime.as_current():
            if self.launcher is not None:
                try:
                    for config in self.configs.configs:
                        self_test(self, config)
                except Exception as error:  # noqa: BLE001 - as in _make_resident
                    self._give_up_triton(error)
            if self.launcher is not None:
                try:
                    for config in self.configs.configs:
                        self_test_of_runs(self, config)
                except Exception as error:  # noqa: BLE001 - as in _make_resident
                    self._give_up_passing_runs(error)
            if self.configs.direct_store_bytes:
                try:
                    self_test(self, self.configs.configs[0], direct=True)
                    if self.passes_runs:
                        self_test_of_runs(self, self.configs.configs[0], direct=True)
                except Exception as error:  # noqa: BLE001 - a driver may raise anything
                    self.fallbacks.note(
                        "direct store failed", f"the kernel can't store into pinned memory ({error}); copying all packs"
                    )
                    self._without_direct_store()

    def close(self) -> None:
        """Wait for every copy in flight and drop the device memory."""
        self.runtime.synchronize()
        self.staging.close()
        self.ring.close()
        self.residents.clear()


def _bytes(lease: memoryview) -> Tensor:
    return torch.frombuffer(lease, dtype=torch.uint8)  # keeps the lease itself alive; NumPy would take a new view
