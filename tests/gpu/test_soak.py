"""A long run, only when asked for: ``SPANPACK_SOAK=1``, or ``SPANPACK_SOAK=N`` for N steps."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from spanpack import Batch
from tests.support.gpu import MakePacker, kernels_compiled, pinned_memory

ASKED = os.environ.get("SPANPACK_SOAK", "0")
STEPS = 100_000 if ASKED in ("0", "1") else int(ASKED)
WARM_STEPS = 1000  # every number of requests has been met by then, and all memory is there
RSS_SLACK_BYTES = 16 << 20  # what Python's and the driver's own bookkeeping may move by

pytestmark = pytest.mark.skipif(ASKED == "0", reason="a soak of 100,000 steps; set SPANPACK_SOAK=1 to run it")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kept", [False, True], ids=["views dropped", "one request's views kept for a while"])
def test_memory_is_flat(make_packer: MakePacker, kept: bool) -> None:
    packer = make_packer()
    source = random.Random(0)
    buffers = [torch.empty(256, 1024, dtype=torch.int16, device="cuda") for _ in range(3)]
    ids = [f"r{i}" for i in range(64)]
    held: dict[int, tuple[int, torch.Tensor]] = {}

    def step(number: int) -> None:
        requests = source.randrange(1, 65)
        value = number % 30_000
        buffer = buffers[number % 3]
        buffer.fill_(value)
        batch = Batch(ids[:requests], [1] * requests, consumers=ids[: (requests + 1) // 2], per_token_rows=256)
        views = packer.pack({"hidden": buffer}, batch).views()
        assert (views["r0"]["hidden"] == value).all()
        if kept:
            if number % 100 in held:
                expected, view = held[number % 100]
                assert (view == expected).all()
            held[number % 100] = value, views["r0"]["hidden"]

    def memory() -> tuple[object, ...]:
        stats = packer.stats()
        return (
            pinned_memory(),
            torch.cuda.memory_reserved(),
            stats.pinned_bytes,
            stats.device_bytes,
            kernels_compiled(packer),
        )

    for number in range(WARM_STEPS):
        step(number)
    before, rss = memory(), resident_bytes()
    for number in range(WARM_STEPS, STEPS):
        step(number)
    assert memory() == before
    assert resident_bytes() - rss < RSS_SLACK_BYTES
