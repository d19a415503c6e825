"""Random payloads, spans, strides, dtypes, consumers and rules on the GPU.

``SPANPACK_EXAMPLES=20000`` for them all, ``SPANPACK_FIRST_SEED`` for others; docs/testing.md runs them side by side.
"""

from __future__ import annotations

import pytest

from spanpack import Packer, gather_torch, gather_triton
from tests.support.differential import Gather, check_gather, check_pack, try_cases


def test_every_way_to_the_host_packs_what_the_oracle_says(any_packer: Packer) -> None:
    try_cases(lambda case: check_pack(case, any_packer), examples=1000)


@pytest.mark.parametrize("gather", [gather_torch, gather_triton], ids=["torch", "triton"])
def test_gathers_leave_gaps_untouched(packer: Packer, gather: Gather) -> None:
    try_cases(lambda case: check_gather(case, packer, gather), examples=200)
