"""Every launch configuration that tuning may choose, compiled, on sizes that meet every branch of the kernel."""

from __future__ import annotations

import pytest
import torch

from spanpack import ColumnSpec, Packer, gather_torch, gather_triton, make_plan
from spanpack._tune_search import candidates
from spanpack.config import DEFAULT_CONFIGS, LaunchConfig, load_configs
from tests.support.compare import poisoned

CONFIGS = tuple(dict.fromkeys([*DEFAULT_CONFIGS, *candidates()]))


def odd_leaves() -> list[torch.Tensor]:
    """Runs and strided rows of odd places, lengths and widths, from 1 byte to some tiles of the longest kind."""
    base = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    runs = [
        base[offset : offset + length] for offset in (0, 1, 3, 4, 8) for length in (1, 15, 16, 17, 33, 4097, 70_001)
    ]
    rows = [
        base[offset:].unfold(0, width + gap, width + gap)[:50, :width]
        for offset, width, gap in ((0, 8, 8), (0, 64, 192), (4, 12, 4), (1, 7, 2), (0, 16_400, 16), (3, 333, 180))
    ]
    return [*runs, *rows]


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=pytest.mark.sanitizer if c in DEFAULT_CONFIGS else (), id=str(c)) for c in CONFIGS],
)
def test_a_configuration_gathers_the_same_bytes_as_torch(cuda_device: torch.device, config: LaunchConfig) -> None:
    leaves = odd_leaves()
    columns = [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)]
    columns.append(ColumnSpec.stack(range(35), leaves[:35]))  # the runs once more, at odd destinations
    plan = make_plan(leaves, columns)
    expected, found = (poisoned(plan.device_bytes + 64, cuda_device) for _ in range(2))
    gather_torch(plan, leaves, expected)
    gather_triton(plan, leaves, found, config)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=pytest.mark.sanitizer if c in DEFAULT_CONFIGS else (), id=str(c)) for c in CONFIGS],
)
def test_a_configuration_gathers_a_few_runs_too(cuda_device: torch.device, config: LaunchConfig) -> None:
    base = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    leaves = [base[offset : offset + length] for offset, length in ((0, 70_001), (1, 4097), (3, 17), (4, 33), (8, 1))]
    copies = (1, 3, 5, 7, 64)
    columns = [ColumnSpec.whole(i, leaf, n) for i, (leaf, n) in enumerate(zip(leaves, copies, strict=True))]
    plan = make_plan(leaves, columns)
    assert plan.passed_runs is not None
    expected, found = (poisoned(plan.device_bytes + 64, cuda_device) for _ in range(2))
    gather_torch(plan, leaves, expected)
    gather_triton(plan, leaves, found, config)
    assert torch.equal(found, expected)


def test_what_was_tuned_for_this_gpu_is_among_them(cuda_device: torch.device) -> None:
    assert set(load_configs(torch.cuda.get_device_name(cuda_device)).configs) <= set(CONFIGS)


@pytest.mark.skipif(torch.version.hip is not None, reason="Triton's launcher launches everything on ROCm")
def test_the_driver_launches_without_triton(cuda_device: torch.device) -> None:
    def never(*_: object) -> None:
        raise AssertionError("launched by Triton")

    base = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device=cuda_device)
    runs, rows, many = [base[:1000]], [base[:4096].view(64, 64)[:, :32]], [base[i : i + 100] for i in range(9)]
    with Packer(cuda_device, backend="triton") as packer:
        packer.warmup()
        engine = packer._engine
        assert engine is not None
        launcher = engine.launcher
        assert launcher is not None
        assert {variant for variant, _ in launcher._loaded} == {"passing runs", "passing addresses", "with a table"}
        launcher._loaded = {key: loaded._replace(run=never) for key, loaded in launcher._loaded.items()}
        engine.residents.clear()
        for leaves in (runs, rows, many):
            plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
            snapshot = packer.run(plan, leaves)
            assert all(torch.equal(snapshot.column(i), leaf.cpu()) for i, leaf in enumerate(leaves))
        assert packer.stats().fallbacks == {}
