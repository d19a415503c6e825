"""Random payloads, spans, strides, dtypes, consumers and rules: 2,000 examples, or ``SPANPACK_EXAMPLES``."""

from __future__ import annotations

import pytest

from spanpack import Packer, gather_torch, gather_triton
from spanpack.gather import interpreted
from tests.support.differential import check_gather, check_pack, try_cases


def test_the_torch_backend_packs_what_the_oracle_says() -> None:
    packer = Packer("cpu", backend="torch")
    try_cases(lambda case: check_pack(case, packer), examples=2000)


def test_the_torch_gather_leaves_gaps_untouched() -> None:
    packer = Packer("cpu", backend="torch")
    try_cases(lambda case: check_gather(case, packer, gather_torch), examples=200)


@pytest.mark.skipif(not interpreted(), reason="the kernel is compiled here; tests/gpu has the same test")
class TestInterpreted:
    """The Triton kernel under its interpreter, which takes about 1 ms per tile."""

    def test_the_kernel_packs_what_the_oracle_says(self) -> None:
        packer = Packer("cpu", backend="triton")
        try_cases(lambda case: check_pack(case, packer), examples=150)

    def test_the_kernel_leaves_gaps_untouched(self) -> None:
        packer = Packer("cpu", backend="torch")
        try_cases(lambda case: check_gather(case, packer, gather_triton), examples=60)
