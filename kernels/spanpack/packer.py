"""The packer: plans, backends, memory and the standalone API in one object."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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

    Close it when it is not needed any more, or use it as a context manager: dropped without, its pinned memory stays
    until the garbage collector comes by.

    Memory, and what happens when it runs out:

    * Pinned slabs come in powers of two, at most `slabs_per_class` of each, `pinned_budget_bytes` in all. Packs
      of more than 2 MiB take an idle slab of a larger size rather than pin one, which takes milliseconds. A slab
      belongs to its snapshot until the last view into it has died. Once half of a class is held, further
      snapshots are copied when they are first read, whole, into pageable slabs of up to `overflow_budget_bytes` in
      all, which are used again like the pinned ones; past that, every view gets memory of its own.
    * A pack goes through one of up to four device slabs, which take at most 1 GiB of device memory together, unless
      packs in flight or a single pack need more. When the copies of all of them are still on their way, the
      producing stream waits for the oldest, counted in `Stats.stream_waits`; the host does not.
    * A pack that finds no pinned slab is *late*: its bytes wait in device memory of its own until somebody waits for
      the snapshot, which copies them to pageable memory. At most 8 late packs wait at a time; before a ninth, the
      oldest is copied at once, which blocks that call. Snapshots that were dropped do not count.
    * Once the system has refused pinned memory, requests of that size or more are turned down without asking, until
      pinned memory was given up or 1,000 requests were turned down.
    * Without device memory, torch copies leaf by leaf.

    What is slower than one launch and one copy is counted in `Stats.fallbacks` and logged once.

    Parameters
    ----------
    device
        Where the leaves are; by default the current CUDA (or ROCm) device, or the CPU where there is none.
    backend
        ``"triton"``: one kernel launch gathers everything. ``"torch"``: torch copies do, the reference. ``"auto"``:
        Triton where it works, else torch, with one warning. On the CPU ``"auto"`` is ``"torch"``, and ``"triton"``
        needs ``TRITON_INTERPRET=1``.
    pinned_budget_bytes
        Most pinned host memory for payloads; descriptors on their way to the device take up to 64 MiB beside it.
    slabs_per_class
        Most pinned slabs of one size.
    overflow_budget_bytes
        Most pageable memory for payloads that are kept long. One kept view keeps a slab with a whole step in it; 0
        gives every view memory of its own at once, which takes several times as long.
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
        The device can't be served, or `copy_stream` is not one of it.
    InputError
        There is no such transport, or a limit is no such number.

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
        self._device_type: str | None = None  # of what the engine gathers; None without one and once it is closed
        if self.device.type == "cuda":
            runtime = load_runtime(self.device, copy_stream)
            launcher = Launcher(self.device) if self._use_triton else None
            configs = load_configs(torch.cuda.get_device_name(self.device), tuned)
            if transport == "copy":
                configs = replace(configs, direct_store_bytes=0)
            self._engine = CudaEngine(runtime, self._pool, self._fallbacks, launcher, configs, self._overflow)
            self._device_type = "cuda"

    @property
    def backend(self) -> str:
        """``"triton"`` or ``"torch"``: what gathers."""
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

        Returns as soon as the work is queued. The payload's tensors may be overwritten, by work on the producing
        stream, or freed and its containers changed right after the call.

        Parameters
        ----------
        payload
            A tree of dict, list, tuple, named tuple, Mapping and dataclass with tensors and plain values. Mappings that
            are no dicts (OrderedDict, defaultdict, Counter) come back as dicts. All that is no tensor, NumPy arrays
            too, is a plain value, which every request gets whole; ``torch.from_numpy(array)`` has the rows of an array
            dealt out. Lists, arrays, sets, deques and bytearrays are copied, their items are not; values of other types
            are kept by reference, so that later changes inside of them show.
        batch
            Whose rows are whose.
        rules
            Placement by path (``{"embed.bos": Placement.INVARIANT}``), or a function from path to placement. Where
            there is none, a tensor whose first dimension is in ``per_token_rows`` is per-token and a list as long as
            the batch is per-request; anything else must be named here.
        stream
            The producing stream: the gather is queued there. By default the current stream of the packer's device.
            Naming another costs the host some 10 us and, if sparse or quantized leaves were allocated on a third
            stream, leaves it to the caller to keep those.
        after
            An event that the gather waits for on the device; the host does not. Where it was recorded on another
            stream than the producing one, that stream may go on before the gather has read the tensors: overwrite
            nothing there before the snapshot is done.

        Returns
        -------
        PackedTree

        Raises
        ------
        InputError
            `batch` is no `Batch`, `rules` are neither a mapping to rules nor a function, or the payload holds itself.
        PlacementError
            A leaf that fits no rule, a rule that does not fit its leaf, or one for a path where there is no leaf.
        LeafError
            A leaf that is no bytes in memory: nested, of a dtype narrower than a byte, a wrapper, or freed.
        DeviceError
            A leaf, or the stream, is on a device that this packer does not serve.
        ClosedError
            The packer was closed.
        torch.cuda.OutOfMemoryError
            Leaves that are strided within their rows, or lazily conjugated or negated, are made contiguous on the
            device first: that takes as much device memory as they have bytes, and there was not that much.
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
            Whether to check that they do. Leave it on unless a `PlanCache` found the plan for these very leaves.
        stream, after
            See `pack`.

        Raises
        ------
        InputError
            `plan` is no `Plan`; told only with `validate`.
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
            except (AttributeError, TypeError, RuntimeError):  # things that are no plan, or no tensors
                fit = False
            if not fit:
                check_fit(plan, leaves)
        if stream is not None or after is not None:
            with self._behind(plan, leaves, stream, after):
                return self.run(plan, leaves, validate=False)
        with self._lock:
            if plan.device_type == self._device_type and plan.device_bytes:
                snapshot = self._engine.run(plan, leaves)  # type: ignore[union-attr] # there is one, see _device_type
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
            Of the largest pack, alignment gaps included.
        slabs
            How many packs of that size are in flight, or held by their views, at a time. Pinned slabs end at the
            packer's limits, device slabs at four.

        Raises
        ------
        InputError
            `nbytes` is no integer of at least 0, or `slabs` none of at least 1.
        ClosedError
            The packer was closed.
        torch.cuda.OutOfMemoryError
            There is not that much device memory. What could be allocated stays.
        """
        check_integer("nbytes", nbytes, 0)
        check_integer("slabs", slabs, 1)
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
        """Wait for the copies in flight and drop all memory; views that exist stay valid. Harmless when repeated.

        Not to be called from a signal handler or a destructor, which may run inside a pack of the same thread: it would
        wait for that pack's lock, and the pack for it.
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
        """Make `stream` the current one, and let what comes wait for `after`."""
        if self._engine is None:
            raise DeviceError(f"streams and events are a GPU's, this packer serves {self.device}; leave them out")
        if stream is not None:
            check_stream(stream, self.device, "stream")
        if after is not None and not hasattr(after, "cuda_event"):
            raise InputError(f"after is a {type(after).__name__}; give a torch.cuda.Event that was recorded")
        runtime = self._engine.runtime
        with nullcontext() if stream is None else runtime.on(stream):
            if after is not None:
                runtime.stream_wait(runtime.current_stream(), after)
            # The stream may be another than the one that the leaves were allocated on.
            read = [] if stream is None else [leaves[index] for index in plan.use.kernel]
            try:
                yield
            except BaseException:  # what was queued may still read them
                for leaf in read:
                    with suppress(Exception):  # which would hide the error, perhaps about this very leaf
                        runtime.hold(leaf)
                raise
            runtime.hold(*read)

    def _run_on_host(self, plan: Plan, leaves: Sequence[Tensor]) -> Snapshot:
        """A plan that nothing on a device is gathered for."""
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
