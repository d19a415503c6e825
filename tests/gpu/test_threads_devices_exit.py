"""Fresh threads, several GPUs, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spanpack import Batch, DeviceError, Fetcher, Packer
from tests.support.compare import assert_same
from tests.support.gpu import MakePacker, hold_up

BATCH = Batch(["a", "b"], [3, 1])
KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def other_device(cuda_device: torch.device) -> torch.device:
    """A second GPU; skips where there is only one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", (cuda_device.index + 1) % torch.cuda.device_count())


def in_fresh_thread(call):  # type: ignore[no-untyped-def]
    """Result of a call in a thread that has never used the GPU."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first launch"])
def test_packing_in_a_fresh_thread(make_packer: MakePacker, cuda_device: torch.device, warm: bool) -> None:
    packer = make_packer() if warm else Packer(cuda_device, backend="triton")
    leaf = torch.arange(4, device=cuda_device)
    torch.cuda.synchronize()
    for _ in range(3):
        views = in_fresh_thread(lambda: packer.pack({"x": leaf}, BATCH).views())
        assert views["a"]["x"].tolist() == [0, 1, 2]
    packer.close()


def test_growing_memory_in_a_fresh_thread(make_packer: MakePacker) -> None:
    packer = make_packer()
    in_fresh_thread(lambda: packer.reserve(1 << 22, slabs=3))
    leaf = torch.arange(4 * 100_000, device="cuda").view(4, -1)
    assert_same(packer.pack({"x": leaf}, BATCH).views()["b"]["x"], leaf[3:4])
    assert packer.stats().pinned_allocations >= 3


def test_eight_threads_share_one_packer(packer: Packer) -> None:
    def pack(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            leaf = torch.empty(4, 5000 + thread, dtype=torch.int32, device="cuda")
            for step in range(100):
                leaf.fill_(1000 * thread + step)
                tree = packer.pack({"x": leaf}, BATCH).views()["a"]
                assert (tree["x"] == 1000 * thread + step).all()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(pack, thread) for thread in range(8)]:
            done.result(timeout=120)
    assert packer.stats().packs == 800


def test_another_device_is_current(any_packer: Packer, cuda_device: torch.device, other_device: torch.device) -> None:
    leaf = torch.arange(4, device=cuda_device)
    torch.cuda.synchronize(cuda_device)
    with torch.cuda.device(other_device):
        views = any_packer.pack({"x": leaf}, BATCH).views()
        assert torch.cuda.current_device() == other_device.index
    assert views["b"]["x"].tolist() == [3]


def test_the_wait_for_an_event_while_another_device_is_current(
    any_packer: Packer, cuda_device: torch.device, other_device: torch.device
) -> None:
    leaf = torch.zeros(4, 1000, device=cuda_device)
    writer = torch.cuda.Stream(cuda_device)
    any_packer.pack({"x": leaf}, BATCH).wait()
    writer.wait_stream(torch.cuda.current_stream(cuda_device))
    hold_up(50, writer)
    with torch.cuda.stream(writer):
        leaf.fill_(6)
        written = writer.record_event()
    with torch.cuda.device(other_device):
        views = any_packer.pack({"x": leaf}, BATCH, after=written).views()
    assert (views["a"]["x"] == 6).all()


def test_a_tensor_is_fetched_while_another_device_is_current(
    cuda_device: torch.device, other_device: torch.device
) -> None:
    fetcher = Fetcher(cuda_device)
    leaf = torch.zeros(1000, dtype=torch.int64, device=cuda_device)
    torch.cuda.synchronize(cuda_device)
    hold_up(50)
    leaf.fill_(6)
    with torch.cuda.device(other_device):
        fetched = fetcher.fetch(leaf)
    assert fetched is not None
    fetched.landed.synchronize()
    assert (fetched.tensor == 6).all()
    fetcher.close()


def test_a_packer_for_the_second_gpu(make_packer: MakePacker, other_device: torch.device) -> None:
    packer = make_packer(device=other_device)
    leaf = torch.arange(4, device=other_device)
    torch.cuda.synchronize(other_device)
    assert packer.pack({"x": leaf}, BATCH).views()["a"]["x"].tolist() == [0, 1, 2]


def test_a_leaf_on_the_second_gpu_is_named(any_packer: Packer, other_device: torch.device) -> None:
    payload = {"here": torch.zeros(4, device="cuda"), "there": torch.zeros(4, device=other_device)}
    with pytest.raises(DeviceError, match=rf"there.*{other_device}.*this packer serves"):
        any_packer.pack(payload, BATCH)


def test_a_stream_of_the_second_gpu_is_refused(any_packer: Packer, other_device: torch.device) -> None:
    leaf = torch.arange(4, device="cuda")
    with pytest.raises(DeviceError, match="but this packer serves"):
        any_packer.pack({"x": leaf}, BATCH, stream=torch.cuda.Stream(other_device))


def test_closing_waits_for_what_is_in_flight(any_packer: Packer) -> None:
    leaf = torch.zeros(4, 1000, device="cuda")
    hold_up(50)
    leaf.fill_(6)
    packed = any_packer.pack({"x": leaf}, BATCH)
    any_packer.close()
    assert packed.done()
    any_packer.close()
    assert (packed.views()["a"]["x"] == 6).all()


EXIT = """
import threading, time, torch
from spanpack import Batch, Packer
packer = Packer("cuda")
leaf = torch.ones(4, 100_000, device="cuda")
batch = Batch(["a", "b"], [3, 1])
kept = packer.pack({"x": leaf}, batch).views()
torch.cuda._sleep(400_000_000)  # some 200 ms
packed = packer.pack({"x": leaf}, batch)
if WAITING:
    threading.Thread(target=packed.wait, daemon=True).start()
    time.sleep(0.05)
print("in flight" if not packed.done() else "landed", flush=True)
"""


@pytest.mark.parametrize("waiting", [False, True], ids=["nobody waits", "a thread waits"])
def test_the_process_exits_within_2_s_with_a_snapshot_in_flight(cuda_device: torch.device, waiting: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT.replace("WAITING", str(waiting))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{KERNELS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog = threading.Timer(120, process.kill)  # starting takes long on a cold machine; only the exit is timed
    watchdog.start()
    first_line = process.stdout.readline()
    began = time.perf_counter()
    errors = process.stderr.read()
    code = process.wait()
    elapsed_s = time.perf_counter() - began
    watchdog.cancel()
    assert (first_line, code) == ("in flight\n", 0), errors
    assert "Traceback" not in errors
    assert elapsed_s < 2
