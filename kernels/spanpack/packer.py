"""The packer: plans, backends, memory and the standalone API in one object."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ._runtime import load_runtime
from .batch import Batch
from .config import load_configs
from .cuda import CudaEngine
from .errors import ClosedError, DeviceError, InputError, LeafError, UnavailableError
from .gather import (
    Launcher,
    copy_opaque,
    gather_host,
    gather_torch,
    gather_triton,
    interpreted,
    triton_available,
)
from .packed_tree import PackedTree, TreeRecipe
from .placement import Rules, lower
from .plan import Plan
from .plan_cache import PlanCache
from .planner import make_plan
from .pool import HostPool
from .snapshot import Snapshot
from .stats import Fallbacks, Stats
from .tree import Node, flatten, nodes

Backend = Literal["auto", "triton", "torch"]
Transport = Literal["auto", "copy"]


class Packer:
    """Packs payloads of one device. Safe to call from several threads.

    Parameters
    ----------
    device
        Where the leaves are; by default the current CUDA (or ROCm) device, or the CPU where there is none.
    backend
        ``"triton"``: one kernel launch gathers everything. ``"torch"``: torch copies do, the reference. ``"auto"``:
        Triton where it works, else torch, with one warning. On the CPU ``"auto"`` is ``"torch"``, and ``"triton"``
        needs ``TRITON_INTERPRET=1``.
    pinned_budget_bytes
        Most pinned host memory for payloads; descriptors on their way to the device take up to 64 MiB beside it. A pack
        that finds no slab within it lands in pageable memory instead, counted and logged once.
    slabs_per_class
        Most pinned slabs of one size (sizes are powers of two). Once half of them are held by views, the views of
        further snapshots are copied out, so that views kept for long do not pin memory without bound.
    copy_stream
        Side stream for the copies to the host; by default one of its own.
    tuned
        Launch configurations from ``python -m spanpack.tune``; by default the file that ``SPANPACK_TUNED`` names, then
        the one shipped for this GPU, then a heuristic.
    transport
        How packed bytes get to the host. ``"copy"``: the kernel packs into a device slab, which one copy on the side
        stream brings over. ``"auto"``: the same, but packs that are tuned to be small enough are stored by the kernel
        straight into the pinned slab, without a device slab and without a copy.

    Raises
    ------
    UnavailableError
        The backend was named and can't run here.
    DeviceError
        The device can't be served.
    InputError
        There is no such transport.

    Examples
    --------
    >>> import torch
    >>> packer = Packer("cpu")
    >>> snapshot = packer.pack({"hidden": torch.arange(4)}, Batch(["a", "b"], [3, 1]))
    >>> snapshot.views()["b"]["hidden"]
    tensor([3])
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        backend: Backend = "auto",
        pinned_budget_bytes: int = 1 << 30,
        slabs_per_class: int = 8,
        copy_stream: torch.cuda.Stream | None = None,
        tuned: str | os.PathLike[str] | None = None,
        transport: Transport = "auto",
    ) -> None:
        if transport not in ("auto", "copy"):
            raise InputError(f"transport {transport!r}; choose 'auto' or 'copy'")
        if pinned_budget_bytes < 0 or slabs_per_class < 1:
            raise InputError(
                f"pinned_budget_bytes={pinned_budget_bytes}, slabs_per_class={slabs_per_class}; "
                "expected at least 0 bytes and 1 slab"
            )
        self.device = _resolve_device(device)
        self._fallbacks = Fallbacks()
        self._use_triton = _resolve_backend(backend, self.device, self._fallbacks)
        self._pool = HostPool(pinned_budget_bytes, slabs_per_class)
        self._lock = threading.Lock()
        self._recipes: PlanCache[TreeRecipe] = PlanCache()
        self._packs = self._payload_bytes = self._host_launches = 0
        self._closed = False
        self._engine: CudaEngine | None = None
        if self.device.type == "cuda":
            runtime = load_runtime(self.device, copy_stream)
            launcher = Launcher(self.device) if self._use_triton else None
            configs = load_configs(torch.cuda.get_device_name(self.device), tuned)
            if transport == "copy":
                configs = replace(configs, direct_store_bytes=0)
            self._engine = CudaEngine(runtime, self._pool, self._fallbacks, launcher, configs)

    @property
    def backend(self) -> str:
        """``"triton"`` or ``"torch"``: what gathers."""
        uses_triton = self._use_triton if self._engine is None else self._engine.launcher is not None
        return "triton" if uses_triton else "torch"

    def pack(self, payload: Any, batch: Batch, rules: Rules | None = None) -> PackedTree:
        """Take a snapshot of a payload for the consumers of a batch.

        Returns as soon as the work is queued. The payload's tensors may be overwritten or freed and its containers
        changed right after the call.

        Parameters
        ----------
        payload
            A tree of dict, list, tuple, named tuple, Mapping and dataclass with tensors and plain values.
        batch
            Whose rows are whose.
        rules
            Placement by path (``{"embed.bos": Placement.INVARIANT}``), or a function from path to placement. Where
            there is none, a tensor whose first dimension is in ``per_token_rows`` is per-token and a list as long as
            the batch is per-request; anything else must be named here.

        Returns
        -------
        PackedTree

        Raises
        ------
        PlacementError
            A leaf that fits no rule, or a rule that does not fit its leaf.
        DeviceError
            A leaf on a device that this packer does not serve.
        ClosedError
            The packer was closed.
        """
        key = (batch.spans, None if rules is None or callable(rules) else tuple(rules.items()))
        seen = self._recipes.look(payload, key)
        recipe = None if callable(rules) else seen.entry
        if recipe is None:
            spec = seen.spec or flatten(payload)[1]
            found = nodes(spec)
            self._check_devices(found, seen.leaves)
            columns, placed = lower(found, seen.leaves, batch.spans, rules)
            plan = make_plan(seen.leaves, columns, self.device.type)
            recipe = TreeRecipe(plan, spec, batch.spans, tuple(placed))
            if not callable(rules):
                self._recipes.keep(seen, key, recipe)
        return PackedTree(self.run(recipe.plan, seen.leaves, validate=False), recipe, seen.values)

    def run(self, plan: Plan, leaves: Sequence[Tensor], *, validate: bool = True) -> Snapshot:
        """Run a plan: gather on the current stream, copy to the host on the copy stream, return at once.

        Parameters
        ----------
        plan
            From `make_plan`.
        leaves
            Tensors that look like those the plan was made for; their addresses may differ.
        validate
            Whether to check that they do. Leave it on unless a `PlanCache` found the plan for these very leaves.

        Raises
        ------
        LeafError
            The leaves differ from the plan's in number, dtype, shape, strides or device.
        DeviceError
            A leaf on a device that this packer does not serve.
        ClosedError
            The packer was closed.
        """
        if validate and not (plan.signature.matches(leaves) or plan.signature.admits(leaves)):
            raise LeafError(
                f"these {len(leaves)} leaves differ from those of the plan ({len(plan.routes)}) in number, dtype, "
                "shape, strides or device; make a plan for them"
            )
        with self._lock:
            self._check_open()
            if plan.device_type == "cpu":
                snapshot = self._run_on_host(plan, leaves)
            elif self._engine is None or plan.device_type != self.device.type:
                raise DeviceError(f"leaves on {plan.device_type!r}, but this packer serves {str(self.device)!r}")
            elif plan.device_bytes == 0:
                snapshot = self._run_host_part(plan, leaves)
            else:
                snapshot = self._engine.run(plan, leaves)
            if plan.has_opaque:
                self._fallbacks.note("opaque", "sparse and quantized leaves are copied one by one, as objects")
            self._packs += 1
            self._payload_bytes += plan.payload_bytes
        return snapshot

    def reserve(self, nbytes: int, slabs: int = 2) -> None:
        """Allocate pinned and device slabs for packs of up to `nbytes` now: pinning 100 MB takes 80 ms.

        Raises
        ------
        ClosedError
            The packer was closed.
        """
        with self._lock:
            self._check_open()
            if self._engine is not None:
                self._pool.reserve(nbytes, slabs)
                self._engine.reserve(nbytes, slabs)

    def warmup(self) -> None:
        """Compile every kernel variant that a pack can meet and check its bytes, so that no step pays for it.

        Where the kernel can't be compiled, launched, or yields wrong bytes, the packer goes over to the torch backend
        with one warning.

        Raises
        ------
        ClosedError
            The packer was closed.
        """
        with self._lock:
            self._check_open()
            if self._engine is not None:
                self._engine.warmup()

    def stats(self) -> Stats:
        """Counters since the packer was made."""
        engine, pool = self._engine, self._pool
        common = {
            "packs": self._packs,
            "payload_bytes": self._payload_bytes,
            "fallbacks": self._fallbacks.counts(),
        }
        if engine is None:
            return Stats(launches=self._host_launches, **common)  # type: ignore[arg-type]
        return Stats(
            launches=engine.launches,
            copies=engine.copies,
            direct_stores=engine.direct_stores,
            uploads=engine.uploads,
            copied_bytes=engine.copied_bytes,
            plans_resident=len(engine.residents),
            pinned_bytes=pool.pinned_bytes + engine.staging.pinned_bytes,
            pinned_peak_bytes=pool.peak_bytes + engine.staging.peak_bytes,
            pinned_allocations=pool.allocations + engine.staging.allocations,
            device_bytes=engine.ring.nbytes,
            device_allocations=engine.ring.allocations,
            slabs_in_use=pool.in_use,
            stream_waits=engine.ring.stream_waits,
            **common,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Wait for the copies in flight and drop all memory; views that exist stay valid. Harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._engine is not None:
                self._engine.close()
            self._pool.close()

    def __enter__(self) -> Packer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this packer was closed; make a new one")

    def _check_devices(self, found: Sequence[Node], leaves: Sequence[Tensor]) -> None:
        for node in found:
            for index in node.leaves:
                device = leaves[index].device
                if device.type != "cpu" and device != self.device:
                    raise DeviceError(
                        f"{node.path!r} is on {device}, this packer serves {self.device}; use one packer per device"
                    )

    def _run_on_host(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        array = np.empty(plan.slab_bytes, dtype=np.uint8)
        slab = torch.from_numpy(array)
        if self._use_triton and interpreted():
            gather_triton(plan, leaves, slab)
            self._host_launches += bool(len(plan.segments))
        else:
            gather_torch(plan, leaves, slab)
        return Snapshot(plan, array, opaque=copy_opaque(plan, leaves))

    def _run_host_part(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        array = np.empty(plan.slab_bytes, dtype=np.uint8)
        gather_host(plan, leaves, torch.from_numpy(array))
        return Snapshot(plan, array, opaque=copy_opaque(plan, leaves))


def _resolve_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device {device!r} is none that torch knows; give e.g. 'cuda:0' or 'cpu'") from error
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"device {str(device)!r}, but torch sees no CUDA or ROCm device")
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
    elif resolved.type != "cpu":
        raise DeviceError(f"device {str(device)!r}: packers serve CUDA, ROCm and CPU tensors")
    return resolved


def _resolve_backend(backend: Backend, device: torch.device, fallbacks: Fallbacks) -> bool:
    """Whether to use Triton."""
    if backend not in ("auto", "triton", "torch"):
        raise UnavailableError(f"backend {backend!r}; choose 'auto', 'triton' or 'torch'")
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return False
    if device.type == "cpu" and not interpreted():
        raise UnavailableError("the Triton kernel runs on CPU tensors only with TRITON_INTERPRET=1 in the environment")
    if triton_available():
        return True
    if backend == "triton":
        raise UnavailableError("backend 'triton', but Triton can't be imported; install triton or use backend='torch'")
    fallbacks.note("no triton", "Triton can't be imported; gathering with torch copies")
    return False
