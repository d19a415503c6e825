"""Where Triton is missing or broken, the package imports and torch gathers, with one warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spanpack

KERNELS = Path(spanpack.__file__).parents[1]

BLOCKER = """
import logging, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise {error}
sys.meta_path.insert(0, Blocker())
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
import torch, spanpack
"""
SERVE = """
for _ in range(3):
    packer = spanpack.Packer("cpu")
    views = packer.pack({"x": torch.arange(4)}, spanpack.Batch(["a", "b"], [3, 1])).views()
    assert views["b"]["x"].tolist() == [3]
print(packer.backend)
"""
NAMED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
try:
    spanpack.Packer("cpu", backend="triton")
except spanpack.UnavailableError as error:
    print(error)
"""
FALLS_BACK = """
from spanpack.backends import resolve_backend
from spanpack.stats import Fallbacks
fallbacks = Fallbacks()
for _ in range(3):
    assert not resolve_backend("auto", torch.device("cuda", 0), fallbacks)
print(fallbacks.counts())
"""


def lines_of(code: str, error: str = "ImportError('blocked')") -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(error=error) + code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(KERNELS), "TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_torch_backend_serves_on_the_cpu_without_a_word() -> None:
    assert lines_of(SERVE) == ["torch"]


def test_triton_by_name_is_refused() -> None:
    (line,) = lines_of(NAMED)
    assert "Triton can't be imported; install triton or use backend='torch'" in line


@pytest.mark.parametrize("error", ["ImportError('blocked')", "RuntimeError('broken installation')"])
def test_on_a_gpu_there_is_one_warning_and_a_count(error: str) -> None:
    warning, counts = lines_of(FALLS_BACK, error)
    assert warning == "WARNING spanpack: Triton can't be imported; gathering with torch copies"
    assert counts == "{'no triton': 3}"
