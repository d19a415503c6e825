"""What the tuner measures with: configurations and workloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import spanpack
from spanpack._size_classes import SIZE_CLASSES, LaunchConfig, size_class
from spanpack._tune_search import candidates
from spanpack._tune_workloads import awkward_workload, default_workloads
from spanpack.plan import Route
from spanpack.tiles import make_tiles
from tests.support.fake_measurer import CPU


def test_candidates_are_launchable_and_different() -> None:
    for quick in (False, True):
        configs = candidates(quick=quick)
        assert len(set(configs)) == len(configs)
        assert all(32 <= config.tile_bytes // (32 * config.num_warps) <= 256 for config in configs)


def test_the_workloads_cover_every_size_class() -> None:
    for workloads in (default_workloads(quick=True), default_workloads()):
        groups = {size_class(w.device_bytes, len(w.plan.segments)) for w in workloads}
        assert groups == set(SIZE_CLASSES)
        assert len({w.name for w in workloads}) == len(workloads)
        assert all(route is Route.KERNEL for w in workloads for route in w.plan.use.routes)


@pytest.mark.parametrize("config", [LaunchConfig(1024, 1), LaunchConfig(8192, 1)], ids=str)
def test_the_awkward_workload_meets_every_branch_of_the_kernel(config: LaunchConfig) -> None:
    workload = awkward_workload()
    leaves = workload.make_leaves(CPU)
    base = leaves[0].data_ptr()
    assert base % 16 == 0
    source, destination, row_bytes = (make_tiles(workload.plan.segments, config.tile_bytes)[:, i] for i in (1, 2, 4))
    leaf = make_tiles(workload.plan.segments, config.tile_bytes)[:, 0]
    source = source + np.array([tensor.data_ptr() - base for tensor in leaves])[leaf]
    runs = row_bytes == 0
    aligned16 = (source - destination) % 16 == 0
    aligned4 = (source % 4 == 0) & (destination % 4 == 0)
    assert (runs & aligned16).any()
    assert (runs & ~aligned16 & aligned4).any()
    assert (runs & ~aligned16 & ~aligned4).any()
    assert (~runs & ((source | destination | row_bytes) % 8 == 0)).any()
    assert (~runs & ((source | destination | row_bytes) % 8 == 4)).any()
    assert (~runs & ((source | destination | row_bytes) % 4 != 0)).any()


def test_the_awkward_workload_packs_alike_with_the_kernel() -> None:
    if not spanpack.gather.interpreted():
        pytest.skip("the kernel is compiled here; the GPU tests run it")
    workload = awkward_workload()
    leaves = workload.make_leaves(CPU)
    expected, found = (torch.full((workload.device_bytes + 64,), 0xA5, dtype=torch.uint8) for _ in range(2))
    spanpack.gather_torch(workload.plan, leaves, expected)
    spanpack.gather_triton(workload.plan, leaves, found, LaunchConfig(8192, 1))
    assert torch.equal(found, expected)
