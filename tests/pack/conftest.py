"""Where the gather kernel can run."""

from __future__ import annotations

import pytest
import torch

from spanpack.gather import interpreted, triton_available


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
