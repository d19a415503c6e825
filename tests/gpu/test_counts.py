"""The headline claims: one launch and one copy per step, and in the steady state nothing else at all."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from spanpack import Batch, Packer, Placement
from spanpack._runtime import NativeRuntime
from tests.support.gpu import DIRECT_STORE, MakePacker, count, device_work, hold_up, kernels_compiled, pinned_memory
from tests.support.random_cases import random_case

IDS = [f"r{i}" for i in range(64)]
RULES = {"tts.bos": Placement.INVARIANT, "tts.eos": Placement.SHARED}
STEADY_STEPS = 1000  # what the counters are watched over; enough for any rare path to be met


def payload() -> dict[str, object]:
    """A decode step of 64 requests, about 1 MiB in eight leaves and three dtypes."""
    make = torch.randn(3, 64, 2048, device="cuda").bfloat16()
    return {
        "hidden_states": {"layers": {0: make[0], 24: make[1]}, "output": make[2]},
        "codes": [torch.randint(0, 2048, (1, 16), device="cuda") for _ in IDS],
        "done": torch.zeros(64, dtype=torch.bool, device="cuda"),
        "tts": {"bos": torch.randn(1, 1, 2048, device="cuda"), "eos": torch.randn(1, 1, 2048, device="cuda")},
        "rate": 24000,
    }


def batch() -> Batch:
    return Batch(IDS, [1] * 64, consumers=IDS[::2])


def test_the_runtime_library_is_called_directly(make_packer: MakePacker) -> None:
    if torch.version.hip:
        pytest.skip("not measured on ROCm")
    engine = make_packer()._engine
    assert engine is not None
    assert isinstance(engine.runtime, NativeRuntime)


def test_one_launch_and_one_copy_per_step_in_the_profile(packer: Packer) -> None:
    tree = payload()
    packer.pack(tree, batch(), RULES).wait()  # brings the descriptors to the device
    with device_work() as work:
        for _ in range(20):
            packer.pack(tree, batch(), RULES).wait()
    assert count(work, "gather_tiles") == 20
    assert count(work, "DtoH") == 20
    assert sum(work.values()) == 40, work


def test_the_direct_store_needs_no_copy_at_all(make_packer: MakePacker) -> None:
    packer = make_packer(configs=DIRECT_STORE)
    tree = payload()
    packer.pack(tree, batch(), RULES).wait()
    with device_work() as work:
        for _ in range(20):
            packer.pack(tree, batch(), RULES).wait()
    assert count(work, "gather_tiles") == 20
    assert sum(work.values()) == 20, work
    assert packer.stats().copies == 0


def test_new_addresses_of_a_few_leaves_cost_nothing(packer: Packer) -> None:
    trees = [{"x": torch.randn(64, 2048, device="cuda"), "y": torch.zeros(64, device="cuda")} for _ in range(5)]
    packer.pack(trees[0], batch()).wait()
    uploads = packer.stats().uploads  # of the spans, which are too many to be passed
    with device_work() as work:
        for tree in trees:
            packer.pack(tree, batch()).wait()
    assert sum(work.values()) == 10, work
    assert packer.stats().uploads == uploads == 1


def test_a_few_runs_need_nothing_on_the_device(packer: Packer) -> None:
    everyone = Batch(IDS, [1] * 64)
    with device_work() as work:
        for _ in range(5):
            packer.pack({"x": torch.randn(64, 2048, device="cuda")}, everyone).wait()
    assert count(work, "gather_runs") == 5
    assert count(work, "DtoH") == 5
    assert packer.stats().uploads == 0


def test_new_addresses_of_many_leaves_cost_one_upload(packer: Packer) -> None:
    trees = [payload() for _ in range(5)]
    packer.pack(payload(), batch(), RULES).wait()
    with device_work() as work:
        for tree in trees:
            packer.pack(tree, batch(), RULES).wait()
    assert count(work, "HtoD") == 5
    assert sum(work.values()) == 15, work


def test_a_pack_never_synchronises_and_never_waits(any_packer: Packer) -> None:
    tree = payload()
    any_packer.pack(tree, batch(), RULES).wait()
    hold_up(200)  # measures the clock first
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        packed = any_packer.pack(tree, batch(), RULES)
        elapsed_s = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not packed.done()
    assert elapsed_s < 0.1
    packed.wait()


def test_waiting_behind_a_200_ms_kernel_sleeps(any_packer: Packer) -> None:
    tree = payload()
    any_packer.pack(tree, batch(), RULES).wait()
    hold_up(200)
    packed = any_packer.pack(tree, batch(), RULES)
    wall, cpu = time.perf_counter(), time.thread_time()
    packed.wait()
    wall_s, cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
    assert wall_s > 0.1, "the kernel was not slow enough for this test to say anything"
    assert cpu_s < 0.02


def test_the_steady_state_allocates_nothing_and_starts_no_thread(any_packer: Packer) -> None:
    tree = payload()
    any_packer.reserve(1 << 21, slabs=4)

    def resources() -> dict[str, object]:
        stats = any_packer.stats()
        return {
            "pinned memory": pinned_memory(),
            "device blocks": torch.cuda.memory_stats()["allocation.all.allocated"],
            "slabs": (stats.pinned_allocations, stats.device_allocations, stats.pinned_bytes, stats.device_bytes),
            "uploads": stats.uploads,
            "fallbacks": stats.fallbacks,
            "Python threads": threading.active_count(),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "kernels": kernels_compiled(any_packer),
        }

    def steps(number: int) -> None:
        for _ in range(number):
            any_packer.pack(tree, batch(), RULES).views()

    steps(20)
    before = resources()
    steps(STEADY_STEPS)
    assert resources() == before


def test_500_random_payloads_compile_nothing(make_packer: MakePacker) -> None:
    packer = make_packer()
    before = kernels_compiled(packer)
    assert before > 0
    for seed in range(500):
        case = random_case(random.Random(seed))
        packer.pack(case.payload("cuda"), case.batch(), case.rules).wait()
    assert kernels_compiled(packer) == before
    assert packer.stats().launches > 250  # some have no consumers, or nothing to copy
