"""Packers on the GPU: with each way of calling the device's runtime, and with each way to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spanpack import Packer
from spanpack._runtime import TorchRuntime, load_runtime
from spanpack.config import ConfigTable
from tests.support.gpu import COPY_ENGINE, DIRECT_STORE, MakePacker


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the selection for compute-sanitizer, see docs/testing.md."""
    config.addinivalue_line("markers", "sanitizer: part of the reduced selection for compute-sanitizer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a GPU, also what asks for it only through another fixture."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def make_packer(cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePacker]:
    """Makes warmed-up packers with the Triton kernel, and closes them.

    Whatever was tuned for this GPU is left aside: the tests choose the way to the host.
    """
    made: list[Packer] = []

    def make(runtime: Callable[..., Any] = load_runtime, configs: ConfigTable = COPY_ENGINE, **options: Any) -> Packer:
        monkeypatch.setattr("spanpack.packer.load_runtime", runtime)
        monkeypatch.setattr("spanpack.packer.load_configs", lambda *_: configs)
        packer = Packer(options.pop("device", cuda_device), backend="triton", **options)
        made.append(packer)
        packer.warmup()
        assert packer.backend == "triton", packer.stats().fallbacks
        return packer

    yield make
    for packer in made:
        packer.close()
    torch.cuda.synchronize()


@pytest.fixture(params=[load_runtime, TorchRuntime], ids=["native", "torch"])
def packer(request: pytest.FixtureRequest, make_packer: MakePacker) -> Packer:
    """Copies with the copy engine, with each runtime."""
    return make_packer(request.param)


@pytest.fixture(
    params=[(load_runtime, COPY_ENGINE), (TorchRuntime, COPY_ENGINE), (load_runtime, DIRECT_STORE)],
    ids=["native", "torch", "direct store"],
)
def any_packer(request: pytest.FixtureRequest, make_packer: MakePacker) -> Packer:
    """Each way to the host; of the direct store's packs no copies are counted."""
    return make_packer(*request.param)
