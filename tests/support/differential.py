"""Run random cases through a packer and the gather functions; compare with the oracle of random_cases.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch import Tensor

from spanpack import Packer, Plan, flatten
from spanpack import packer as packer_module
from tests.support.compare import assert_same_tree, assert_slab, poisoned
from tests.support.leaves import scribble
from tests.support.random_cases import Case, random_case

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError:  # a GPU host may have only torch and pytest
    hypothesis = None  # type: ignore[assignment]


def _number(name: str, least: int) -> int | None:
    given = os.environ.get(name)
    if not given:
        return None
    if not given.isdecimal() or int(given) < least:
        raise pytest.UsageError(f"{name}={given!r}: expected a whole number of at least {least}")
    return int(given)


ASKED = _number("SPANPACK_EXAMPLES", 1)
FIRST_SEED = _number("SPANPACK_FIRST_SEED", 0)


def try_cases(check: Callable[[Case], None], examples: int) -> None:
    """Run a check on many cases: drawn and shrunk by hypothesis where it is installed, else seeded.

    The environment variable ``SPANPACK_EXAMPLES`` overrides the number of examples. ``SPANPACK_FIRST_SEED`` selects
    reproducibly which examples are drawn, so that parallel processes can try different ones.
    """
    examples = ASKED or examples
    if hypothesis is None:
        first = FIRST_SEED or 0
        for seed in range(first, first + examples):
            try:
                check(random_case(Random(seed)))
            except BaseException as error:
                error.add_note(f"found in random_case(Random({seed}))")
                raise
        return

    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.randoms(use_true_random=False))
    def run(source: Random) -> None:
        case = random_case(source)
        hypothesis.note(repr(case))
        check(case)

    if FIRST_SEED is not None:
        run = hypothesis.seed(FIRST_SEED)(run)
    run()


def check_pack(case: Case, packer: Packer) -> None:
    """Pack, overwrite all sources, then compare every byte that every consumer got, and the packer's counters.

    On the CPU the destination is filled with poison beforehand; a slab still holds the bytes of earlier cases.
    """
    payload = case.payload(packer.device.type)
    before = packer.stats()
    if packer.device.type == "cpu":
        numpy = _PoisonedNumpy()
        with mock.patch.object(packer_module, "np", numpy):
            packed = packer.pack(payload, case.batch(), case.rules)
        assert numpy.allocations == 1, "the destination was not made where this poisons it"
    else:
        packed = packer.pack(payload, case.batch(), case.rules)
    for leaf in flatten(payload)[0]:
        scribble(leaf)
    expected = case.expected()
    assert_same_tree(packed.views(), expected)
    after, plan = packer.stats(), packed.snapshot.plan
    engine = packer._engine
    launches = int(plan.device_bytes > 0) if packer.backend == "triton" else 0
    copies = int(plan.device_bytes > engine.configs.direct_store_bytes) if engine is not None else 0
    assert after.packs - before.packs == 1
    assert (after.launches - before.launches, after.copies - before.copies) == (launches, copies)


class _PoisonedNumpy:
    """NumPy whose `empty` returns poisoned memory, since fresh memory may happen to hold the right bytes."""

    def __init__(self) -> None:
        self.allocations = 0

    def empty(self, nbytes: int, dtype: type) -> np.ndarray[Any, Any]:
        assert dtype is np.uint8
        self.allocations += 1
        return poisoned(nbytes).numpy()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


Gather = Callable[[Plan, Any, Tensor], None]


def check_gather(case: Case, packer: Packer, gather: Gather) -> None:
    """Gather into a poisoned slab; assert that each column has the packer's bytes and all gaps are untouched."""
    device = packer.device.type
    payload = case.payload(device)
    snapshot = packer.pack(payload, case.batch(), case.rules).snapshot
    plan = snapshot.plan
    slab = poisoned(plan.device_bytes + 64, device)
    gather(plan, flatten(payload)[0], slab)
    assert_slab(slab, plan, [snapshot.column(index) for index in range(len(plan.columns))])
