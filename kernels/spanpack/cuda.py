"""The hot path on a CUDA or ROCm device: one launch, one copy, two events.

Host cost of its parts on an H200 host, in microseconds: launch 5.0, copy 1.8, record 1.0 each, stream wait 0.9.
Everything else (descriptor upload, allocation, waiting for a slab) happens only when something has changed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._runtime import TorchRuntime
from .columns import ColumnSpec
from .config import ConfigTable, LaunchConfig
from .errors import DeviceError, LeafError
from .flight import Events, Flight
from .gather import Launcher, copy_opaque, gather_host, gather_torch, stage
from .plan import Plan, Route
from .planner import make_plan
from .pool import ByteArray, HostPool, HostSlab
from .ring import DeviceRing, DeviceSlab
from .snapshot import Snapshot
from .stats import Fallbacks
from .tiles import make_tiles

_address_of = Tensor.data_ptr
_MAX_RESIDENT = 128
_STAGING_BUDGET_BYTES = 1 << 26


class _Resident:
    """A plan's descriptors on the device: ``[num_leaves] int64`` addresses, then ``[num_tiles, 6] int64`` tiles."""

    __slots__ = ("_pack", "addresses", "buffer", "flight", "known", "launch", "stream", "upload")

    def __init__(self, plan: Plan, config: LaunchConfig, runtime: TorchRuntime, launcher: Launcher) -> None:
        tiles = make_tiles(plan.segments, config.tile_bytes)
        leaves = len(plan.routes)
        head = (leaves + 1) // 2 * 2  # keeps the tiles aligned to 16 bytes
        self.buffer = runtime.empty(8 * (head + tiles.size))
        self.addresses = self.buffer.data_ptr()
        self.launch = launcher.bind(config, len(tiles), self.addresses + 8 * head, self.addresses)
        self.known: tuple[int, ...] = ()  # the addresses that are on the device
        self.upload: np.ndarray[Any, np.dtype[np.int64]] | None = np.concatenate(
            [np.zeros(head, np.int64), tiles.ravel()]
        )
        self.stream = -1
        self.flight: Flight | None = None
        self._pack = struct.Struct(f"{leaves}q").pack_into

    def write(self, staging: ByteArray, addresses: tuple[int, ...]) -> int:
        """Put what the device lacks into `staging`; returns its length in bytes."""
        length = 8 * len(addresses)
        if self.upload is not None:
            length = self.upload.nbytes
            staging[:length] = self.upload.view(np.uint8)
            self.upload = None
        self._pack(staging.data, 0, *addresses)
        return length

    def upload_bytes(self, addresses: tuple[int, ...]) -> int:
        return self.upload.nbytes if self.upload is not None else 8 * len(addresses)


class CudaEngine:
    """Runs plans on one device. Not thread-safe: `Packer` holds a lock around it.

    Parameters
    ----------
    runtime
        The device's streams, events and copies.
    pool
        Pinned memory.
    fallbacks
        Where slower paths are counted.
    launcher
        Launches the compiled kernel; None to gather with torch copies.
    configs
        How packs of each size are launched.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        pool: HostPool,
        fallbacks: Fallbacks,
        launcher: Launcher | None,
        configs: ConfigTable | None = None,
    ) -> None:
        self.runtime = runtime
        self.configs = configs or ConfigTable()
        self.pool = pool
        self.staging = HostPool(_STAGING_BUDGET_BYTES, pin=pool.pin)  # of descriptors on their way to the device
        self.ring = DeviceRing(runtime)
        self.launcher = launcher
        self.fallbacks = fallbacks
        self.launches = self.copies = self.direct_stores = self.uploads = self.copied_bytes = 0
        self.residents: OrderedDict[Plan, _Resident] = OrderedDict()
        if launcher is None:
            self._without_launcher()

    def run(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        """Gather on the current stream of this device, copy on the copy stream."""
        if self.runtime.is_current():
            return self._run(plan, leaves)
        with torch.cuda.device(self.runtime.device):
            return self._run(plan, leaves)

    def _run(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        if plan.staged_leaves:
            self.fallbacks.note("strided", "leaves that are not contiguous within their rows are copied by torch first")
            leaves = stage(plan, leaves)
        stream = self.runtime.current_stream()
        host = self.pool.acquire(plan.slab_bytes)
        lease = host.lease(plan.slab_bytes) if host else None  # from here on an error gives the slab back
        if plan.device_bytes <= self.configs.direct_store_bytes and host is not None and lease is not None:
            return self._run_direct(plan, leaves, host, lease, stream)
        device = self._device_slab(plan, stream)
        if host is None or lease is None or device is None:
            return self._run_degraded(plan, leaves, host, lease, device, stream)
        flight = host.flight = device.flight = self._begin_flight(host)
        try:
            if not self._launch(plan, leaves, device.address, stream, flight):
                gather_torch(plan, leaves, device.tensor)
            self.runtime.bring_home(flight, host.address, device.address, plan.device_bytes, stream)
        except BaseException:
            # Both slabs may still be in use by what was queued, now or before: the flight has to end behind it.
            with suppress(RuntimeError):
                self.runtime.bring_home(flight, host.address, device.address, plan.device_bytes, stream)
            raise
        self.copies += 1
        self.copied_bytes += plan.device_bytes
        return self._snapshot(plan, leaves, lease, flight, host)

    def _run_direct(
        self, plan: Plan, leaves: Sequence[Tensor], host: HostSlab, lease: ByteArray, stream: int
    ) -> Snapshot:
        """The kernel stores into the pinned slab, which the device has mapped: no device slab and no copy."""
        flight = host.flight = self._begin_flight(host)
        try:
            if not self._launch(plan, leaves, host.address, stream, flight):
                gather_torch(plan, leaves, torch.from_numpy(lease))
        finally:  # also where it failed: what was queued may still write
            self.runtime.record(flight.landed, stream)
        self.direct_stores += 1
        return self._snapshot(plan, leaves, lease, flight, host)

    def _begin_flight(self, host: HostSlab | None) -> Flight:
        """A flight with the slab's events, made when it is first used; with events of its own without a slab."""
        if host is None:
            return Flight(Events.make(self.runtime.make_event))
        if host.events is None:
            host.events = Events.make(self.runtime.make_event)
        return Flight(host.events)

    def _launch(self, plan: Plan, leaves: Sequence[Tensor], slab: int, stream: int, flight: Flight) -> bool:
        """Launch the gather into the memory at `slab`; False where torch has to do it."""
        resident = self.residents.get(plan)
        if resident is None:
            resident = self._make_resident(plan, leaves)
            if resident is None:
                return False
        else:
            self.residents.move_to_end(plan)
        addresses = tuple(map(_address_of, leaves)) if plan.reads_every_leaf else _addresses(plan, leaves)
        try:
            if resident.stream != stream:
                self._change_stream(resident, stream)
            if resident.known != addresses:
                self._upload(resident, addresses, stream, flight)
            resident.launch(slab, stream)
        except BaseException:  # an interrupt from the keyboard as well
            del self.residents[plan]  # what the device has of it is not known any more
            raise
        resident.flight = flight
        self.launches += 1
        return True

    def _make_resident(self, plan: Plan, leaves: Sequence[Tensor]) -> _Resident | None:
        for index in plan.kernel_leaves:
            if leaves[index].device != self.runtime.device:
                raise DeviceError(
                    f"leaf {index} is on {leaves[index].device}, this packer serves {self.runtime.device}; "
                    "use one packer per device"
                )
            if not leaves[index].data_ptr() and leaves[index].numel():
                raise LeafError(
                    f"leaf {index}, a {type(leaves[index]).__name__}, has no memory of its own that a kernel could "
                    "read; pack the tensors that it wraps"
                )
        if self.launcher is None:
            return None
        config = self.configs.choose(plan.device_bytes, len(plan.segments))
        try:
            resident = _Resident(plan, config, self.runtime, self.launcher)
        except torch.cuda.OutOfMemoryError:
            self.fallbacks.note("device memory", "no device memory for descriptors; gathering with torch copies")
            return None
        except Exception as error:  # noqa: BLE001 - whatever a compiler, a driver or a read-only cache may raise
            self._give_up_triton(error)
            return None
        self.residents[plan] = resident
        while len(self.residents) > _MAX_RESIDENT:
            self.residents.popitem(last=False)
        return resident

    def _give_up_triton(self, error: Exception) -> None:
        self.fallbacks.note("triton failed", f"the Triton kernel can't be used ({error}); gathering with torch copies")
        self._without_launcher()
        self.residents.clear()

    def _without_launcher(self) -> None:
        self.launcher = None
        self.configs = replace(self.configs, direct_store_bytes=0)  # torch would store leaf by leaf, and block

    def _change_stream(self, resident: _Resident, stream: int) -> None:
        """Let a resident be read and written on another stream than before."""
        if resident.flight is not None:
            self.runtime.stream_wait(stream, resident.flight.landed)
            self.runtime.hold(resident.buffer)
        resident.stream = stream

    def _upload(self, resident: _Resident, addresses: tuple[int, ...], stream: int, flight: Flight) -> None:
        """Bring descriptors to the device on the producing stream, behind the kernels that still read the old ones."""
        nbytes = resident.upload_bytes(addresses)
        staging = self.staging.acquire(nbytes)
        if staging is None:
            pageable = np.empty(nbytes, dtype=np.uint8)
            length = resident.write(pageable, addresses)
            with torch.inference_mode():  # torch guards a buffer that was made in it
                self.runtime.upload_pageable(resident.buffer[:length], torch.from_numpy(pageable[:length]))
        else:
            staging.flight = flight  # not written again before this pack has landed
            self.staging.give_back(staging)
            length = resident.write(staging.array, addresses)
            self.runtime.upload(resident.addresses, staging.address, length, stream)
        resident.known = addresses
        self.uploads += 1

    def _device_slab(self, plan: Plan, stream: int) -> DeviceSlab | None:
        try:
            return self.ring.acquire(plan.device_bytes, stream)
        except torch.cuda.OutOfMemoryError:
            self.fallbacks.note("device memory", "no device memory for a slab; copying leaf by leaf")
            return None

    def _run_degraded(
        self,
        plan: Plan,
        leaves: Sequence[Tensor],
        host: HostSlab | None,
        lease: ByteArray | None,
        device: DeviceSlab | None,
        stream: int,
    ) -> Snapshot:
        """The same bytes by a slower path, where pinned memory, device memory or both were refused."""
        if host is None:
            why = (
                f"pinned memory refused by the system ({self.pool.refusal})"
                if self.pool.refusal
                else "no pinned slab free within the budget and the number of slabs per size"
            )
            self.fallbacks.note(
                "pinned memory", f"{why}; using pageable memory, filled when the snapshot is waited for"
            )
        flight = self._begin_flight(host)
        if device is None:  # leaf by leaf into the host slab; pageable memory makes these copies blocking
            array = np.empty(plan.slab_bytes, dtype=np.uint8) if lease is None else lease
            if host is not None:
                host.flight = flight
            gather_torch(plan, leaves, torch.from_numpy(array))
            self.copies += len(plan.device_runs)
            self.copied_bytes += plan.payload_bytes
            self.runtime.record(flight.landed, stream)
            return self._snapshot(plan, leaves, array, flight, host)
        device.flight = flight
        self.ring.detach(device)
        self.runtime.hold(device.tensor)  # no copy on the side stream holds it back when the snapshot is dropped
        if not self._launch(plan, leaves, device.address, stream, flight):
            gather_torch(plan, leaves, device.tensor)
        self.runtime.record(flight.packed, stream)
        self.runtime.record(flight.landed, stream)
        self.copies += 1
        self.copied_bytes += plan.device_bytes
        late = self._late_copy(plan, leaves, device)
        return Snapshot(plan, None, flight=flight, finish=late, opaque=copy_opaque(plan, leaves))

    def _late_copy(self, plan: Plan, leaves: Sequence[Tensor], device: DeviceSlab) -> Any:
        array = np.empty(plan.slab_bytes, dtype=np.uint8)
        gather_host(plan, leaves, torch.from_numpy(array))

        def finish() -> ByteArray:
            self.runtime.fetch(torch.from_numpy(array)[: plan.device_bytes], device.tensor[: plan.device_bytes])
            return array

        return finish

    def _snapshot(
        self, plan: Plan, leaves: Sequence[Tensor], lease: ByteArray, flight: Flight, host: HostSlab | None
    ) -> Snapshot:
        if plan.host_runs:
            gather_host(plan, leaves, torch.from_numpy(lease))
        opaque = copy_opaque(plan, leaves) if plan.has_opaque else None
        return Snapshot(plan, lease, flight=flight, slab=host, opaque=opaque)

    def reserve(self, nbytes: int, slabs: int) -> None:
        """Allocate device slabs for `slabs` packs of `nbytes` in flight."""
        with torch.cuda.device(self.runtime.device):
            self.ring.reserve(nbytes, slabs)
            # Whoever had this memory before may still have work on this stream; packs may come on any.
            torch.cuda.current_stream().synchronize()

    def warmup(self) -> None:
        """Compile, launch and check every configuration that a pack can be given."""
        try:
            with torch.cuda.device(self.runtime.device):
                for config in self.configs.configs if self.launcher is not None else ():
                    self._self_test(config)
        except Exception as error:  # noqa: BLE001 - as when a plan is first launched
            self._give_up_triton(error)

    def _self_test(self, config: LaunchConfig) -> None:
        """Pack runs, odd bytes and strided rows through one configuration and compare with torch."""
        assert self.launcher is not None
        base = torch.arange(1 << 15, device=self.runtime.device, dtype=torch.int32).view(torch.uint8)
        leaves = [
            base[:99999],
            base[7:4000],
            base[1:].view(-1)[: 64 * 1000].view(64, 1000)[:, :333],
            base.view(-1, 512)[:, :64],
        ]
        plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
        expected = torch.full((plan.device_bytes,), 0xA5, dtype=torch.uint8, device=self.runtime.device)
        found = expected.clone()
        gather_torch(plan, leaves, expected)
        resident = _Resident(plan, config, self.runtime, self.launcher)
        descriptors = np.empty(resident.upload_bytes(()), dtype=np.uint8)
        resident.write(descriptors, _addresses(plan, leaves))
        resident.buffer.copy_(torch.from_numpy(descriptors))
        resident.launch(found.data_ptr(), self.runtime.current_stream())
        if not torch.equal(found, expected):
            raise RuntimeError(f"{config} yields wrong bytes")

    def close(self) -> None:
        """Wait for every copy in flight and drop the device memory."""
        self.runtime.synchronize()
        self.staging.close()
        self.ring.close()
        self.residents.clear()


def _addresses(plan: Plan, leaves: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(
        _address_of(leaf) if route in (Route.KERNEL, Route.STAGED) else 0
        for leaf, route in zip(leaves, plan.routes, strict=True)
    )
