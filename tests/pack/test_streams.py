"""Packs behind a stream or an event that the caller names, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spanpack import (
    Batch,
    ColumnSpec,
    DeviceError,
    InputError,
    LeafError,
    Packer,
    Placement,
    Snapshot,
    cuda,
    gather,
    make_plan,
)
from tests.support.compare import assert_same
from tests.support.fake_device import FakeEvent, FakeStream
from tests.support.rig import Rig, numbers, whole

OTHER = 5  # handle of a stream that is not the current one


@pytest.fixture
def packer(rig: Rig) -> Packer:
    """A packer that runs on the rig's engine."""
    packer = Packer("cpu")
    packer._engine, packer._device_type = rig.engine, "cpu"
    return packer


def behind(**given: Any) -> dict[str, Any]:
    """Arguments that no type checker would let through, since the device is a simulated one."""
    return given


def test_the_gather_is_queued_on_the_stream_that_is_named(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    rig.device.block(OTHER)
    rig.device.enqueue(lambda: leaf.copy_(numbers(2)), OTHER)
    packed = packer.pack({"x": leaf}, Batch(["a"], [6]), **behind(stream=FakeStream(OTHER)))
    rig.device.run()
    assert not packed.done()
    assert rig.device.stream == 1  # the current one is what it was
    rig.device.unblock(OTHER)
    assert_same(packed.views()["a"]["x"], numbers(2))


def test_the_gather_waits_for_an_event_and_the_host_does_not(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    plan = whole(leaf)
    packer.run(plan, [leaf]).wait()
    waits = rig.device.host_waits
    written = FakeEvent(rig.device)
    rig.device.block(OTHER)
    rig.device.enqueue(lambda: leaf.copy_(numbers(2)), OTHER)
    rig.device.record(written, OTHER)
    snapshot = packer.run(plan, [leaf], **behind(after=written))
    rig.device.run()
    assert not snapshot.done()
    assert rig.device.host_waits == waits
    rig.device.unblock(OTHER)
    assert_same(snapshot.column(0), numbers(2))


def test_a_pack_while_another_device_is_current(rig: Rig, packer: Packer) -> None:
    """The simulated device takes no work while another one is current."""
    leaf = numbers(1)
    rig.device.current = 1
    snapshot = packer.run(whole(leaf), [leaf])
    assert rig.device.current == 1
    assert_same(snapshot.column(0), leaf)


def test_a_wait_is_queued_with_the_device_of_the_packer_current(rig: Rig, packer: Packer) -> None:
    """The simulated device takes no work while another one is current."""
    written = FakeEvent(rig.device)
    rig.device.record(written, OTHER)
    leaf = numbers(1)
    rig.device.current = 1
    snapshot = packer.run(whole(leaf), [leaf], **behind(after=written))
    assert rig.device.current == 1
    assert_same(snapshot.column(0), leaf)
    assert rig.device.stream_waits == 1


def test_an_event_and_a_stream_together(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    written = FakeEvent(rig.device)
    rig.device.block(3)
    rig.device.enqueue(lambda: leaf.copy_(numbers(2)), 3)
    rig.device.record(written, 3)
    snapshot = packer.run(whole(leaf), [leaf], **behind(stream=FakeStream(OTHER), after=written))
    rig.device.block(1)  # has nothing to do with it
    rig.device.unblock(3)
    assert_same(snapshot.column(0), numbers(2))


def test_leaves_of_another_stream_are_not_reused_before_they_are_read(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    packer.run(whole(leaf), [leaf], **behind(stream=FakeStream(OTHER)))
    assert any(held is leaf for held in rig.device.held)


@pytest.mark.parametrize("how", ["launch", "memory", "interrupt"])
def test_leaves_of_another_stream_are_not_reused_after_a_pack_that_failed(
    rig: Rig, packer: Packer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What it had queued may read them."""
    leaves = [numbers(1), numbers(2)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    packer.run(plan, leaves).wait()
    error: type[BaseException] = RuntimeError
    if how == "launch":
        rig.launcher.fail = RuntimeError("simulated")
    elif how == "memory":
        leaves[1], error = leaves[1].clone(), LeafError
        leaves[1].untyped_storage().resize_(0)
    else:

        def interrupt(*_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        error = KeyboardInterrupt
        monkeypatch.setattr(rig.device, "copy_to_host", interrupt)
    with pytest.raises(error):
        packer.run(plan, leaves, **behind(stream=FakeStream(OTHER)))
    assert any(held is leaves[0] for held in rig.device.held)
    assert rig.device.stream == 1


def test_an_error_is_not_hidden_by_what_holding_its_leaves_raises(
    rig: Rig, packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    leaf = numbers(1)
    rig.launcher.fail = RuntimeError("simulated")
    monkeypatch.setattr(rig.device, "hold", refuse)
    with pytest.raises(RuntimeError, match="simulated"):
        packer.run(whole(leaf), [leaf], **behind(stream=FakeStream(OTHER)))


def test_leaves_that_do_not_fit_are_refused_behind_a_stream_as_well(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    for leaves in ([], [leaf[:3]]):
        with pytest.raises(LeafError, match="differ from those of the plan"):
            packer.run(whole(leaf), leaves, **behind(stream=FakeStream(OTHER)))
    assert rig.device.held == []


@pytest.mark.parametrize("path", ["late", "torch", "leaf by leaf", "staged", "opaque"])
def test_slower_paths_run_on_the_stream_too(
    rig: Rig, packer: Packer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """They use torch's current stream, which is what is looked at here."""
    used: list[int] = []
    made: list[object] = []  # kept, as a real allocator frees in the order of the stream

    def spy(function: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*given: Any) -> Any:
            used.append(rig.device.stream)
            made.append(function(*given))
            return made[-1]

        return spied

    leaf = numbers(1).t() if path == "staged" else torch.eye(4).to_sparse() if path == "opaque" else numbers(1)
    if path == "late":
        monkeypatch.setattr(rig.pool, "acquire", lambda nbytes: None)
        monkeypatch.setattr(rig.device, "zeros", spy(rig.device.zeros))
    elif path == "torch":
        rig.engine._without_launcher()
        monkeypatch.setattr(cuda, "gather_torch", spy(gather.gather_torch))
    elif path == "leaf by leaf":
        rig.device.refuse_memory = True
        monkeypatch.setattr(cuda, "gather_torch", spy(gather.gather_torch))
    elif path == "staged":
        monkeypatch.setattr(cuda, "stage", spy(gather.stage))
    else:
        monkeypatch.setattr(cuda, "copy_opaque", spy(gather.copy_opaque))
    leaves = [numbers(2), leaf]
    plan = make_plan(leaves, [ColumnSpec.whole(i, one) for i, one in enumerate(leaves)])
    snapshot = packer.run(plan, leaves, **behind(stream=FakeStream(OTHER)))
    assert set(used) == {OTHER}
    assert_same(snapshot.column(1), leaf)


def test_the_stream_of_another_device_is_refused(rig: Rig, packer: Packer) -> None:
    leaf = numbers(1)
    for stream in (FakeStream(OTHER, torch.device("meta")), 5):
        with pytest.raises(DeviceError, match=r"stream .*, but this packer serves cpu; give a torch\.cuda\.Stream"):
            packer.run(whole(leaf), [leaf], **behind(stream=stream))
    assert rig.device.launches == 0


def test_what_is_no_event_is_refused(packer: Packer) -> None:
    leaf = numbers(1)
    with pytest.raises(InputError, match=r"after is a int; give a torch\.cuda\.Event"):
        packer.run(whole(leaf), [leaf], **behind(after=7))


@pytest.mark.parametrize("given", [{"stream": FakeStream(1)}, {"after": object()}], ids=["stream", "event"])
def test_a_packer_of_the_cpu_takes_neither(given: dict[str, Any]) -> None:
    packer = Packer("cpu")
    with pytest.raises(DeviceError, match="streams and events are a GPU's, this packer serves cpu; leave them out"):
        packer.pack({"x": torch.zeros(3)}, Batch(["a"], [3]), {"x": Placement.PER_TOKEN}, **given)
    assert packer.stats().packs == 0


def test_a_packer_of_the_cpu_has_no_stream_for_copies() -> None:
    with pytest.raises(DeviceError, match="need a GPU, this packer serves cpu; leave copy_stream out"):
        Packer("cpu", **behind(copy_stream=FakeStream(3)))


@pytest.mark.parametrize("given", [FakeStream(3, torch.device("cuda:1")), 5], ids=["other device", "number"])
def test_a_stream_for_copies_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    monkeypatch.setattr("spanpack.packer.resolve_device", lambda _: torch.device("cuda:0"))
    with pytest.raises(DeviceError, match=r"copy_stream .*serves cuda:0; give a torch\.cuda\.Stream\(device='cuda:0'"):
        Packer("cuda:0", **behind(copy_stream=given))


def test_without_either_no_context_is_entered(rig: Rig, packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Snapshot:
        raise AssertionError

    for name in ("on", "hold"):
        monkeypatch.setattr(rig.device, name, refuse)
    leaf = numbers(1)
    for _ in range(3):
        assert_same(packer.run(whole(leaf), [leaf]).column(0), leaf)
