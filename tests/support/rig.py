"""The engine of the hot path, set up on the simulated device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spanpack import ColumnSpec, Packer, Plan, Snapshot, make_plan
from spanpack.config import ConfigTable
from spanpack.cuda import CudaEngine
from spanpack.overflow import Overflow
from spanpack.pool import HostPool
from spanpack.stats import Fallbacks
from tests.support.fake_device import FakeDevice, FakeLauncher

ROWS, WIDTH = 6, 40


class Rig:
    """An engine, and the parts of it that tests inspect.

    `way` says how the kernel is told what to copy, in tests that choose this.
    """

    way = "runs passed"

    def __init__(
        self,
        budget_bytes: int = 1 << 30,
        slabs_per_class: int = 8,
        configs: ConfigTable | None = None,
        overflow_bytes: int = 0,
    ) -> None:
        self.device = FakeDevice()
        self.launcher = FakeLauncher(self.device)
        self.overflow = Overflow(overflow_bytes)
        self.pool = HostPool(budget_bytes, slabs_per_class, pin=False)
        self.fallbacks = Fallbacks()
        self.engine = CudaEngine(
            self.device,  # type: ignore[arg-type]
            self.pool,
            self.fallbacks,
            self.launcher,  # type: ignore[arg-type]
            configs,
            self.overflow,
        )

    def pack(self, leaf: torch.Tensor, plan: Plan | None = None, stream: int = 1) -> Snapshot:
        """Pack one leaf on a stream; the host does not wait."""
        self.device.stream = stream
        return self.engine.run(plan or whole(leaf), [leaf])

    def drive(self, packer: Packer) -> None:
        """Let a packer of CPU tensors run on this engine."""
        packer._engine, packer._device_type = self.engine, "cpu"


def whole(leaf: torch.Tensor) -> Plan:
    return make_plan([leaf], [ColumnSpec.whole(0, leaf)])


def rows(leaf: torch.Tensor, starts: list[int], counts: list[int]) -> Plan:
    return make_plan([leaf], [ColumnSpec(0, np.array(starts), np.array(counts))])


def numbers(seed: int) -> torch.Tensor:
    """``[ROWS, WIDTH] int32``, different for every seed."""
    return torch.arange(ROWS * WIDTH, dtype=torch.int32).reshape(ROWS, WIDTH) + 1000 * seed


# For tests of descriptors on the device: if there are only a few runs, they are passed and need no descriptors.
with_descriptors = pytest.mark.parametrize("rig", ["addresses passed", "all stored"], indirect=True)
