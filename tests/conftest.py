"""Where the tests run: on a GPU compiled, elsewhere under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Read by Triton when a kernel is defined: it must be set before spanpack is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import hypothesis
except ImportError:  # the tests that need it skip themselves
    pass
else:
    # The interpreter is slow and the machine may be shared: no deadlines. The same examples on every run.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("project")


@pytest.fixture
def cuda_device() -> torch.device:
    """The current CUDA device; skips the test where there is none."""
    if not CUDA:
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what asks for `cuda_device` with `gpu`, for `-m gpu`."""
    for item in items:
        if "cuda_device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is no GPU."""
    if item.get_closest_marker("gpu") and not CUDA:
        pytest.skip("no CUDA device")
