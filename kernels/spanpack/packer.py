"""The packer: plans, backends, memory and the standalone API in one object."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ._runtime import load_runtime
from .backends import Backend, check_stream, resolve_backend, resolve_device, what_to_do
from .batch import Batch
from .checks import check_fit, check_integer, check_leaves
from .config import load_configs
from .cuda import CudaEngine
from .errors import ClosedError, DeviceError, InputError
from .gather import (
    copy_opaque,
    gather_host,
    gather_torch,
    gather_triton,
    interpreted,
)
from .launcher import Launcher
from .leaf_table import LeafTables
from .overflow import Overflow
from .packed_tree import PackedTree, TreeRecipe
from .placement import Rules, key_of, lower
from .plan import Plan
from .plan_cache import PlanCache
from .planner import plan_columns
from .pool import HostPool
from .snapshot import Rest, Snapshot
from .stats import Fallbacks, Stats
from .tree import flatten, nodes

Transport = Literal["auto", "copy"]
_MOST_TABLES = 16


class Packer:
    """Packs payloads of one device. Safe to call from several threads.

    Close it when it is no longer needed, or use it as a context manager: if it is only dropped, its pinned memory stays
    allocated until the garbage collector runs.

    Memory, and what happens when it runs out:

    * Pinned slabs have power-of-two sizes, at most `slabs_per_class` of each size and `pinned_budget_bytes` in total.
      Packs of more than 2 MiB use an idle slab of a larger size rather than pin a new one, which takes milliseconds. A
      slab belongs to its snapshot until the last view into it has died. Once half of a size class is held, each further
      snapshot is copied whole, when it is first read, to pageable slabs of up to `overflow_budget_bytes` in total,
      which are reused like the pinned ones; past that, every view is copied to its own memory.
    * A pack goes through one of up to four device slabs, which take at most 1 GiB of device memory together, unless
      packs in flight or a single pack need more. While the copies from all of them are in flight, the producing stream
      waits for the oldest one, counted in `Stats.stream_waits`; the host does not wait.
    * A pack that finds no pinned slab is *late*: its bytes stay in separate device memory until the snapshot is waited
      for, which copies them to pageable memory. At most 8 late packs wait at a time; a ninth first copies the oldest to
      the host, which blocks that call. Dropped snapshots do not count.
    * After the system has refused pinned memory, requests of that size or more are rejected without asking it, until
      pinned memory has been freed or 1,000 requests have been rejected.
    * Without device memory for a slab, torch copies leaf by leaf.

    Every path that is slower than one launch and one copy is counted in `Stats.fallbacks` and logged once.

    Parameters
    ----------
    device
        Where the leaves are; by default the current CUDA (or ROCm) device, or the CPU if there is none.
    backend
        ``"triton"``: one kernel launch gathers everything. ``"torch"``: torch copies gather, as the reference.
        ``"auto"``: Triton if it works, else torch, with one warning. On the CPU ``"auto"`` is ``"torch"``, and
        ``"triton"`` needs ``TRITON_INTERPRET=1``.
    pinned_budget_bytes
        Maximum pinned host memory for payloads; descriptors on their way to the device take up to 64 MiB more.
    slabs_per_class
        Maximum number of pinned slabs of one size.
    overflow_budget_bytes
        Maximum pageable memory for payloads that are kept long. One kept view keeps alive a slab with a whole step.
        With 0, every view is copied to its own memory at once, which takes several times as long.
    copy_stream
        Side stream for the copies to the host; by default a new one.
    tuned
        Launch configurations from ``python -m spanpack.tune``; by default the file that ``SPANPACK_TUNED`` names, then
        the one shipped for this GPU, then a heuristic.
    transport
        How packed bytes get to the host. ``"copy"``: the kernel packs into a device slab, which one copy on the side
        stream transfers. ``"auto"``: the same, except that the kernel stores packs up to a tuned size straight into the
        pinned slab, without a device slab and without a copy.

    Raises
    ------
    UnavailableError
        The backend was asked for by name and can't run here.
    DeviceError
        The device can't be served, or `copy_stream` is not a stream of it.
    InputError
        `backend` or `transport` is unknown, or a limit is not an integer in its range.

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
        overflow_budget_bytes: int = 1 << 29,
        copy_stream: torch.cuda.Stream | None = None,
        tuned: str | os.PathLike[str] | None = None,
        transport: Transport = "auto",
    ) -> None:
        if transport not in ("auto", "copy"):
            raise InputError(f"transport {transport!r}; choose 'auto' or 'copy'")
        check_integer("pinned_budget_bytes", pinned_budget_bytes, 0)
        check_integer("slabs_per_class", slabs_per_class, 1)
        check_integer("overflow_budget_bytes", overflow_budget_bytes, 0)
        self.device = resolve_device(device)
        if copy_stream is not None:
            if self.device.type == "cpu":
                raise DeviceError("copies to the host need a GPU, this packer serves cpu; leave copy_stream out")
            check_stream(copy_stream, self.device, "copy_stream")
        self._fallbacks = Fallbacks()
        self._use_triton = resolve_backend(backend, self.device, self._fallbacks)
        self._overflow = Overflow(overflow_budget_bytes)
        self._pool = HostPool(pinned_budget_bytes, slabs_per_class)
        self._lock = threading.Lock()
        self._recipes: PlanCache[TreeRecipe] = PlanCache()
        self._tables = LeafTables(_MOST_TABLES, self.device.type)
        self._packs = self._payload_bytes = self._host_launches = 0
        self._closed = False
        self._engine: CudaEngine | None = None
        self._device_type: str | None = None  # of leaves that the engine gathers; None without one or once closed
        if self.device.type == "cuda":
            runtime = load_runtime(self.device, copy_stream)
            launcher = Launcher(self.device, self._fallbacks) if self._use_triton else None
            configs = load_configs(torch.cuda.get_device_name(self.device), tuned)
            if transport == "copy":
                configs = replace(configs, direct_store_bytes=0)
            self._engine = CudaEngine(runtime, self._pool, self._fallbacks, launcher, configs, self._overflow)
            self._device_type = "cuda"

    @property
    def backend(self) -> str:
        """The backend that gathers: ``"triton"`` or ``"torch"``."""
        uses_triton = self._use_triton if self._engine is None else self._engine.launcher is not None
        return "triton" if uses_triton else "torch"

    def pack(
        self,
        payload: Any,
        batch: Batch,
        rules: Rules | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        after: torch.cuda.Event | None = None,
    ) -> PackedTree:
        """Take a snapshot of a payload for the consumers of a batch.

        Returns as soon as the work is queued. Right after the call, the payload's tensors may be freed, or overwritten
        by work on the producing stream, and its containers may be changed.

        Parameters
        ----------
        payload
            A tree of dict, list, tuple, named tuple, Mapping and dataclass with tensors and plain values. Mappings that
            are not dicts (OrderedDict, defaultdict, Counter) are returned as dicts. Every other value, including a
            NumPy array, is a plain value, which every request gets whole; pass ``torch.from_numpy(array)`` to divide
            the rows of an array among requests. Lists, arrays, sets, deques and bytearrays are copied, their items are
            not; values of other types are kept by reference, so later changes to them are visible.
        batch
            Which rows belong to which request.
        rules
            Placement by path (``{"embed.bos": Placement.INVARIANT}``), or a function from path to placement. Without
            a rule, a tensor whose first dimension is in ``per_token_rows`` is per-token and a list as long as the
            batch is per-request; any other leaf needs a rule.
        stream
            The producing stream, on which the gather is queued; by default the current stream of the packer's device.
            Another stream costs about 10 us on the host, and if sparse or quantized leaves were allocated on a third
            stream, the caller must keep those alive.
        after
            An event that the gather waits for on the device; the host does not wait. If it was recorded on a stream
            other than the producing one, that stream may proceed before the gather has read the tensors: overwrite
            none of them there before the snapshot is done.

        Returns
        -------
        PackedTree

        Raises
        ------
        InputError
            `batch` is not a `Batch`, `rules` is neither a mapping to rules nor a function, or the payload holds itself.
        PlacementError
            A leaf fits no rule, a rule does not fit its leaf, or a rule names a path without a leaf.
        LeafError
            A leaf is not plain bytes in memory: it is nested, of a dtype narrower than a byte, a wrapper, or freed.
        DeviceError
            A leaf, or the stream, is on a device that this packer does not serve.
        ClosedError
            The packer was closed.
        torch.cuda.OutOfMemoryError
            There is not enough device memory to make leaves contiguous that are strided within their rows, or lazily
            conjugated or negated; this takes as much device memory as they have bytes.
        """
        if not isinstance(batch, Batch):
            raise InputError(f"batch is a {type(batch).__name__}; give a spanpack.Batch")
        key = (batch.spans, None if rules is None or callable(rules) else key_of(rules))
        seen = self._recipes.look(payload, key)
        recipe = None if callable(rules) else seen.entry
        if recipe is None:
            spec = seen.spec or flatten(payload)[1]
            found = nodes(spec)
            check_leaves(found, seen.leaves, self.device)
            columns, placed = lower(found, seen.leaves, batch.spans, rules)
            plan = plan_columns(self._tables.look(seen.leaves), [(column,) for column in columns])
            recipe = TreeRecipe(plan, spec, batch.spans, tuple(placed))
            if not callable(rules):
                self._recipes.keep(seen, key, recipe, plan.signature)
        snapshot = self.run(recipe.plan, seen.leaves, validate=False, stream=stream, after=after)
        return PackedTree(snapshot, recipe, seen.values)

    def run(
        self,
        plan: Plan,
        leaves: Sequence[Tensor],
        *,
        validate: bool = True,
        stream: torch.cuda.Stream | None = None,
        after: torch.cuda.Event | None = None,
    ) -> Snapshot:
        """Run a plan: gather on the producing stream, copy to the host on the copy stream, return at once.

        Parameters
        ----------
        plan
            From `make_plan`.
        leaves
            Tensors that look like those the plan was made for; their addresses may differ.
        validate
            Whether to check that they do. Leave it on unless a `PlanCache` found the plan for exactly these leaves.
        stream, after
            See `pack`.

        Raises
        ------
        InputError
            `plan` is not a `Plan`; checked only with `validate`.
        LeafError
            The leaves differ from the plan's in number, dtype, shape, strides or device, or one has no memory.
        DeviceError
            A leaf, or the stream, is on a device that this packer does not serve.
        ClosedError
            The packer was closed.
        torch.cuda.OutOfMemoryError
            See `pack`.
        """
        if validate:
            try:
                fit = plan.signature.matches(leaves) or plan.signature.admits(leaves)
            except (AttributeError, TypeError, RuntimeError):  # not a plan, or not tensors
                fit = False
            if not fit:
                check_fit(plan, leaves)
        if stream is not None or after is not None:
            with self._behind(plan, leaves, stream, after):
                return self.run(plan, leaves, validate=False)
        with self._lock:
            if plan.device_type == self._device_type and plan.device_bytes:
                snapshot = self._engine.run(plan, leaves)  # type: ignore[union-attr] # not None here, see _device_type
            else:
                snapshot = self._run_on_host(plan, leaves)
            self._packs += 1
            self._payload_bytes += plan.payload_bytes
        return snapshot

    def reserve(self, nbytes: int, slabs: int = 2) -> None:
        """Allocate pinned and device slabs now, so that no pack has to: pinning 100 MB takes 80 ms.

        Parameters
        ----------
        nbytes
            Bytes of the largest pack, including alignment gaps.
        slabs
            How many packs of that size are in flight, or held by their views, at a time. Pinned slabs are
            bounded by the packer's limits, device slabs by four.

        Raises
        ------
        InputError
            `nbytes` is not an integer of at least 0, or `slabs` not one of at least 1.
        ClosedError
            The packer was closed.
        torch.cuda.OutOfMemoryError
            There is not enough device memory; what was allocated so far is kept.
        """
        check_integer("nbytes", nbytes, 0)
        check_integer("slabs", slabs, 1)
        with self._lock:
            self._check_open()
            if self._engine is not None:
                self._pool.reserve(nbytes, slabs)
                self._engine.reserve(nbytes, slabs)

    def warmup(self) -> None:
        """Compile every kernel variant that a pack can need and check its output, so that no step pays for it.

        If the kernel can't be compiled or launched, or yields wrong bytes, the packer falls back to the torch backend
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
            pinned_bytes=pool.held_bytes + engine.staging.held_bytes,
            pinned_peak_bytes=pool.peak_bytes + engine.staging.peak_bytes,
            pinned_allocations=pool.allocations + engine.staging.allocations,
            overflow_bytes=self._overflow.nbytes,
            device_bytes=engine.ring.nbytes + engine.late.device_bytes,
            device_allocations=engine.ring.allocations,
            slabs_in_use=pool.in_use,
            stream_waits=engine.ring.stream_waits,
            **common,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Wait for the copies in flight and free all memory; existing views stay valid. May be called repeatedly.

        Do not call it from a signal handler or a destructor: these may run inside a pack of the same thread, which
        holds the lock that `close` waits for, so it would deadlock.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._device_type = None
            try:
                if self._engine is not None:
                    self._engine.close()
                self._pool.close()
            finally:
                self._overflow.close()

    def __enter__(self) -> Packer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this packer was closed; make a new one")

    @contextmanager
    def _behind(
        self,
        plan: Plan,
        leaves: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
    ) -> Iterator[None]:
        """A context in which `stream` is current and its further work waits for `after`."""
        if self._engine is None:
            raise DeviceError(f"streams and events are a GPU's, this packer serves {self.device}; leave them out")
        if stream is not None:
            check_stream(stream, self.device, "stream")
        if after is not None and not hasattr(after, "cuda_event"):
            raise InputError(f"after is a {type(after).__name__}; give a torch.cuda.Event that was recorded")
        runtime = self._engine.runtime
        with runtime.as_current() if stream is None else runtime.on(stream):  # handle 0 is the current device's
            if after is not None:
                runtime.stream_wait(runtime.current_stream(), after)
            # The leaves may have been allocated on another stream.
            read = [] if stream is None else [leaves[index] for index in plan.use.kernel]
            try:
                yield
            except BaseException:  # queued work may still read them
                for leaf in read:
                    with suppress(Exception):  # would hide the first error, which may be about this leaf
                        runtime.hold(leaf)
                raise
            runtime.hold(*read)

    def _run_on_host(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        """Run a plan that gathers nothing on a device."""
        self._check_open()
        array = np.empty(plan.slab_bytes, dtype=np.uint8)
        slab = torch.from_numpy(array)
        if plan.device_type != "cpu":
            if plan.device_type != self.device.type:
                raise DeviceError(
                    f"leaves on {plan.device_type!r}, but this packer serves {str(self.device)!r}; "
                    f"{what_to_do(plan.device_type)}"
                )
            gather_host(plan, leaves, slab)
        elif self._use_triton and interpreted():
            gather_triton(plan, leaves, slab)
            self._host_launches += bool(plan.num_segments)
        else:
            gather_torch(plan, leaves, slab)
        opaque = copy_opaque(plan, leaves, self._fallbacks)
        return Snapshot(plan, array.data, rest=Rest(None, opaque) if opaque else None)
