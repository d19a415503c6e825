"""Faults in the middle of a pack, on the simulated device: no later pack may touch what was queued before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch

from spanpack import Batch, LeafError, Packer
from spanpack.config import ConfigTable
from spanpack.launcher import Launch
from spanpack.pool import Shelf
from tests.support.compare import assert_same
from tests.support.fake_device import SIDE
from tests.support.leaves import Wrapper
from tests.support.rig import ROWS, Rig, numbers, whole, with_descriptors

OTHER = 5  # handle of a stream that is not the current one
BATCH = Batch(["a"], [ROWS])


@pytest.fixture
def packer(rig: Rig) -> Packer:
    return _packer_on(rig)


def _packer_on(rig: Rig) -> Packer:
    """A packer that runs on the rig's engine."""
    packer = Packer("cpu")
    rig.drive(packer)
    return packer


def _freed(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.clone()
    leaf.untyped_storage().resize_(0)
    return leaf


def _freed_view(leaf: torch.Tensor) -> torch.Tensor:
    """A view whose address is its offset in the storage that was freed, and not 0."""
    view = torch.cat([leaf, leaf])[len(leaf) :]
    view.untyped_storage().resize_(0)
    assert view.data_ptr() == leaf.nbytes
    return view


def test_a_tensor_without_memory_is_an_error_rather_than_a_wild_read(rig: Rig) -> None:
    leaf = Wrapper(numbers(1))
    with pytest.raises(LeafError, match="leaf 0 is a Wrapper without memory of its own"):
        rig.pack(leaf)
    assert rig.device.launches == 0
    assert rig.pool.in_use == 0


@pytest.mark.parametrize("path", ["kernel", "late", "torch"])
@pytest.mark.parametrize(
    ("model", "make", "message"),
    [
        (torch.clone, _freed, "leaf 0 is a Tensor whose storage was freed or shrunk; pack it before"),
        (torch.clone, _freed_view, "leaf 0 is a Tensor whose storage was freed or shrunk; pack it before"),
        (
            lambda leaf: torch.nn.Parameter(leaf.float()),
            lambda leaf: Wrapper(leaf.float()),
            "leaf 0 is a Wrapper without memory of its own; give the tensors it stands for",
        ),
    ],
    ids=["freed", "freed view", "wrapper"],
)
def test_so_is_one_that_is_taken_for_a_leaf_of_a_known_plan(
    rig: Rig, packer: Packer, model: Callable[..., Any], make: Callable[..., Any], message: str, path: str
) -> None:
    if path == "late":
        rig.pool.budget_bytes = 0
    elif path == "torch":
        rig.engine._without_launcher()
    leaf = model(numbers(1))
    for _ in range(2):
        packer.pack({"x": leaf}, BATCH).wait()
    launches = rig.device.launches
    with pytest.raises(LeafError, match=message):
        packer.pack({"x": make(numbers(1))}, BATCH)
    assert rig.device.launches == launches
    assert_same(packer.pack({"x": leaf}, BATCH).views()["a"]["x"], leaf.detach())
    gc.collect()
    assert rig.pool.in_use == rig.engine.staging.in_use == 0


@pytest.mark.parametrize("direct_store_bytes", [0, 1 << 20], ids=["copied", "stored directly"])
@pytest.mark.parametrize(
    "given",
    [(13, "Permission denied", "/cache/kernel"), (28, "No space left on device")],
    ids=["not allowed", "full"],
)
def test_a_kernel_that_can_not_be_compiled_at_the_first_pack_leaves_all_to_torch(
    given: tuple[Any, ...], direct_store_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of a cache that can be written, say; nothing was warmed up."""
    rig = Rig(configs=ConfigTable(direct_store_bytes=direct_store_bytes))
    packer = _packer_on(rig)

    def bind(*_: object) -> None:
        raise OSError(*given)  # made here: the traceback of one that lives on would hold the slab

    for name in ("bind", "bind_runs"):
        monkeypatch.setattr(rig.launcher, name, bind)
    for step in range(3):
        leaf = numbers(step)
        strided = numbers(step + 10).t().contiguous().t()
        views = packer.pack({"x": leaf, "y": strided}, BATCH).views()
        assert_same(views["a"]["x"], leaf)
        assert_same(views["a"]["y"], strided)
    assert packer.backend == "torch"
    assert rig.fallbacks.counts() == {"triton failed": 1, "strided": 3}
    warnings = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert warnings == [f"spanpack: the Triton kernel can't be used ({OSError(*given)}); gathering with torch copies"]
    assert (rig.device.launches, packer.stats().copies, packer.stats().direct_stores) == (0, 3, 0)
    del views
    gc.collect()
    assert rig.pool.in_use == rig.engine.staging.in_use == 0


def _keep_buffers(rig: Rig) -> list[torch.Tensor]:
    """All device memory made from now on, kept: a real allocator frees in the order of the stream."""
    kept: list[torch.Tensor] = []
    make_buffer = rig.device.empty

    def empty(nbytes: int) -> torch.Tensor:
        kept.append(make_buffer(nbytes))
        return kept[-1]

    rig.device.empty = empty  # type: ignore[method-assign]
    return kept


class _Interrupt:
    """Has every launch queued and then interrupted, until `over`."""

    def __init__(self, rig: Rig) -> None:
        self.over = False
        self._bind = rig.launcher.bind
        rig.launcher.bind = self.bind  # type: ignore[method-assign]

    def bind(self, *given: Any) -> Launch:
        queue = self._bind(*given)

        def launch(slab: int, stream: int, addresses: tuple[int, ...]) -> None:
            queue(slab, stream, addresses)
            if not self.over:
                raise KeyboardInterrupt

        return launch


@with_descriptors
def test_an_interrupted_late_pack_keeps_its_descriptors_until_they_were_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its kernel would find those of the next pack on their way, and read and write as they say."""
    device, kept = rig.device, _keep_buffers(rig)
    interrupt = _Interrupt(rig)
    device.block(1)
    with monkeypatch.context() as patched:
        patched.setattr(rig.pool, "acquire", lambda _: None)
        leaf = numbers(1)
        with pytest.raises(KeyboardInterrupt):
            rig.pack(leaf)
    interrupt.over = True
    _, interrupted = kept  # descriptors and slab of the late pack
    other = torch.arange(2000, dtype=torch.int32).view(2, 1000)
    snapshot = rig.pack(other)
    assert rig.engine.staging.allocations == 2
    device.unblock(1)
    device.run()
    assert torch.equal(interrupted, leaf.view(torch.uint8).flatten())
    assert_same(snapshot.column(0), other)
    rig.pack(leaf).wait()
    assert rig.engine.staging.allocations == 2  # once it is over, they are used again


@pytest.mark.parametrize("fail_at", range(4))
def test_a_slab_is_not_used_by_another_stream_while_it_is_zeroed_for_a_pack_that_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """For want of an event: there are two of the device slab and two of the pinned one."""
    make_event, calls = rig.device.make_event, []

    def fail(*, blocking: bool) -> Any:
        calls.append(blocking)
        if len(calls) > fail_at:
            raise RuntimeError("simulated")
        return make_event(blocking=blocking)

    rig.device.block(1)
    with monkeypatch.context() as patched:
        patched.setattr(rig.device, "make_event", fail)
        with pytest.raises(RuntimeError, match="simulated"):
            rig.pack(numbers(1), stream=1)
    _assert_packs_on_another_stream(rig)


def _assert_packs_on_another_stream(rig: Rig) -> None:
    """While stream 1 is held up: what is queued there comes between the gather and the copy."""
    leaf, device = numbers(9), rig.device
    device.block(SIDE)
    snapshot = rig.pack(leaf, stream=OTHER)
    device.run()
    device.unblock(1)
    device.run()
    device.unblock(SIDE)
    assert_same(snapshot.column(0), leaf)


def test_slabs_of_a_reservation_that_ran_out_of_memory_are_zeroed_before_they_are_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_buffer, made = rig.device.empty, []

    def empty(nbytes: int) -> torch.Tensor:
        if made:
            raise torch.cuda.OutOfMemoryError("simulated")
        made.append(nbytes)
        return make_buffer(nbytes)

    rig.device.block(1)
    with monkeypatch.context() as patched:
        patched.setattr(rig.device, "empty", empty)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            rig.engine.reserve(1 << 16, slabs=2)
    assert rig.engine.ring.allocations == 1
    _assert_packs_on_another_stream(rig)


@with_descriptors
def test_descriptors_first_used_on_another_stream_than_they_were_made_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had their memory before may still have work on the one that they were made on."""
    leaf, device = numbers(1), rig.device
    plan = whole(leaf)

    def refuse(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("simulated")

    with monkeypatch.context() as patched:
        patched.setattr(rig.engine.ring, "acquire", refuse)
        rig.pack(leaf, plan, stream=1).wait()  # leaf by leaf, with the descriptors made and not used
    resident = rig.engine.residents[plan]
    device.block(1)
    device.enqueue(resident.table.buffer.zero_, 1)
    snapshot = rig.pack(leaf, plan, stream=OTHER)
    device.run()
    assert not snapshot.done()
    device.unblock(1)
    assert_same(snapshot.column(0), leaf)
    assert device.held == [resident.table.buffer]


def test_an_interrupt_anywhere_in_a_pack_costs_no_pinned_memory() -> None:
    """It is raised where a real one may be: as a function of the pool, the engine or the snapshot begins or ends."""
    places = 0
    while True:
        rig = Rig(slabs_per_class=2)
        _keep_buffers(rig)
        leaf, other = numbers(1), numbers(2)
        plan = whole(leaf)
        rig.pack(leaf, plan).wait()
        if not _interrupted(places, lambda rig=rig, other=other, plan=plan: rig.pack(other, plan)):  # type: ignore[misc]
            break
        places += 1
        rig.device.run()
        snapshots = [rig.pack(leaf, plan) for _ in range(2)]
        for snapshot in snapshots:
            assert_same(snapshot.column(0), leaf)
        assert "pinned memory" not in rig.fallbacks.counts(), f"place {places}"
        del snapshot
        snapshots.clear()
        gc.collect()
        rig.pack(leaf, plan).wait()
        gc.collect()
        rig.device.run()
        assert (rig.pool.in_use, rig.pool.held_bytes) == (0, 2 << 16), f"place {places}"
    assert places > 10


def _interrupted(place: int, call: Callable[[], object]) -> bool:
    """Whether there are so many places in a call, where it then was interrupted."""
    left = place

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if "spanpack" not in frame.f_code.co_filename.split("/"):
            return None
        if event in ("call", "return"):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_slab_taken_and_not_leased_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(slabs_per_class=1)
    leaf = numbers(1)
    plan = whole(leaf)
    rig.pack(leaf, plan).wait()
    take = Shelf.take

    def interrupted(shelf: Shelf) -> None:
        assert take(shelf) is not None
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Shelf, "take", interrupted)
        with suppress(KeyboardInterrupt):
            rig.pack(leaf, plan)
    for _ in range(3):
        assert_same(rig.pack(leaf, plan).column(0), leaf)
    assert rig.fallbacks.counts() == {}
    assert rig.pool.allocations == 1


@pytest.mark.parametrize("warmed_up", [True, False])
def test_where_the_kernel_for_a_few_runs_fails_the_other_serves(
    warmed_up: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()

    def bind_runs(*_: object) -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr(rig.launcher, "bind_runs", bind_runs)
    if warmed_up:
        rig.engine.warmup()
    launches = rig.device.launches
    for step in range(3):
        leaf = numbers(step)
        assert_same(rig.pack(leaf).column(0), leaf)
    assert rig.device.launches == launches + 3
    assert rig.fallbacks.counts() == {"passing runs failed": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_launch_that_fails_of_a_few_runs_leaves_the_next_to_the_other_kernel() -> None:
    rig = Rig()
    leaf = numbers(1)
    plan = whole(leaf)
    rig.launcher.fail = RuntimeError("simulated")
    with pytest.raises(RuntimeError, match="simulated"):
        rig.pack(leaf, plan)
    for _ in range(2):
        assert_same(rig.pack(leaf, plan).column(0), leaf)
    assert rig.fallbacks.counts() == {"passing runs failed": 1}
    assert rig.device.uploads == 1


def test_memory_that_lacks_for_the_other_kernel_is_no_reason_to_give_this_one_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel for a few runs can't be loaded for want of device memory, say."""
    rig = Rig()
    leaf = numbers(1)

    def bind_runs(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(rig.launcher, "bind_runs", bind_runs)
        rig.device.refuse_memory = True
        assert_same(rig.pack(leaf).column(0), leaf)
    rig.device.refuse_memory = False
    assert_same(rig.pack(leaf).column(0), leaf)
    assert rig.engine.passes_runs
    assert rig.device.uploads == 0
