"""Where the gather kernel can run, and an engine on a device that is simulated."""

from __future__ import annotations

import pytest
import torch

from spanpack import segments
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


@pytest.fixture(params=["runs passed", "addresses passed", "all stored"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Each way for what is to be copied to get to the kernel, however little it is."""
    rig = Rig()
    rig.way = request.param
    if request.param == "addresses passed":
        rig.engine.passes_runs = False
    elif request.param == "all stored":
        monkeypatch.setattr(segments, "MOST_PASSED", 0)
    return rig
