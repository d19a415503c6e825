"""What several tests of packed steps begin with."""

from __future__ import annotations

import pytest

import spanpack
from omni_runner.packing import StepPacker
from tests.runner.packing_rig import UPSTREAM


@pytest.fixture
def packer() -> StepPacker:
    """Packs steps of the CPU by the engine's rules in their shortest form."""
    return StepPacker(spanpack.Packer("cpu"), UPSTREAM)
