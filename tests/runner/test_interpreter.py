"""Settings of the interpreter while a packed stage runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from omni_runner import interpreter
from omni_runner.interpreter import COLLECTION_THRESHOLDS, SWITCH_INTERVAL_S, restore, tune


class Stage:
    """Stands for a `PackedPath`."""


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(700, *COLLECTION_THRESHOLDS[0])
    sys.setswitchinterval(SWITCH_INTERVAL_S[0])
    before = list(interpreter._stages)
    interpreter._stages.clear()
    yield
    interpreter._stages.clear()
    interpreter._stages.update(before)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def settings() -> tuple[tuple[int, int, int], float]:
    return gc.get_threshold(), sys.getswitchinterval()


PYTHONS = (700, *COLLECTION_THRESHOLDS[0]), SWITCH_INTERVAL_S[0]
OURS = (700, *COLLECTION_THRESHOLDS[1]), SWITCH_INTERVAL_S[1]


def test_they_are_put_back_when_the_last_stage_is_closed() -> None:
    first, second = Stage(), Stage()
    tune(first)
    tune(first)
    tune(second)
    assert settings() == OURS
    restore(first)
    restore(first)
    assert settings() == OURS
    restore(second)
    assert settings() == PYTHONS
    tune(first)
    assert settings() == OURS


def test_a_stage_that_never_asked_puts_nothing_back() -> None:
    stage, other = Stage(), Stage()
    tune(stage)
    restore(other)
    assert settings() == OURS


@pytest.mark.skipif(gc.get_threshold()[2] == 0, reason="this Python has no threshold for full collections")
def test_values_that_somebody_has_chosen_stay() -> None:
    stage = Stage()
    gc.set_threshold(50_000, 20, 30)
    tune(stage)
    assert settings() == ((50_000, 20, 30), OURS[1])
    sys.setswitchinterval(0.25)
    restore(stage)
    assert settings() == ((50_000, 20, 30), 0.25)
