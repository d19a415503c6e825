"""Where the gather kernel can run, and an engine on a device that is simulated."""

from __future__ import annotations

import pytest
import torch

from spanpack import gather
from spanpack.gather import interpreted, triton_available
from tests.support.rig import Rig


@pytest.fixture
def kernel_device() -> str:
    """``"cuda"`` with the kernel compiled, or ``"cpu"`` with it interpreted; skips where neither is possible."""
    if not triton_available():
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if not interpreted():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return "cpu"


@pytest.fixture(params=[gather.MOST_PASSED, 0], ids=["addresses passed", "addresses stored"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Both ways for the leaves' addresses to get to the kernel, whatever the number of leaves."""
    monkeypatch.setattr(gather, "MOST_PASSED", request.param)
    return Rig()
