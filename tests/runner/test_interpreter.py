"""Settings of the interpreter while a packed stage runs."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator

import pytest

from omni_runner import interpreter
from omni_runner.interpreter import (
    OLDER_THRESHOLDS,
    PYTHONS_SWITCH_INTERVAL_S,
    PYTHONS_THRESHOLDS,
    SWITCH_INTERVAL_S,
    restore,
    tune,
)


class Stage:
    """Stands for a `PackedPath`."""


@pytest.fixture(autouse=True)
def no_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: nobody has asked for anything, and all is as Python has it."""
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(*PYTHONS_THRESHOLDS[0])
    sys.setswitchinterval(PYTHONS_SWITCH_INTERVAL_S)
    monkeypatch.setattr(interpreter, "_stages", {})
    monkeypatch.setattr(interpreter, "_put_back", [])
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def settings() -> tuple[tuple[int, ...], float]:
    return gc.get_threshold(), sys.getswitchinterval()


PYTHONS = PYTHONS_THRESHOLDS[0], PYTHONS_SWITCH_INTERVAL_S
OURS = (PYTHONS_THRESHOLDS[0][0], *OLDER_THRESHOLDS), SWITCH_INTERVAL_S


def test_this_python_has_defaults_that_are_known() -> None:
    if sys.version_info < (3, 14):
        assert PYTHONS_THRESHOLDS[sys.version_info >= (3, 13)][1:] == (10, 10)


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


def test_they_are_put_back_when_a_stage_is_dropped() -> None:
    stage = Stage()
    tune(stage)
    del stage
    assert settings() == PYTHONS


def test_a_stage_that_never_asked_puts_nothing_back() -> None:
    stage, other = Stage(), Stage()
    tune(stage)
    restore(other)
    assert settings() == OURS


@pytest.mark.parametrize("chosen", [(50_000, 10, 10), (700, 20, 10), OURS[0]])
def test_values_that_somebody_has_chosen_stay(chosen: tuple[int, int, int]) -> None:
    stage = Stage()
    gc.set_threshold(*chosen)
    tune(stage)
    assert settings() == (chosen, SWITCH_INTERVAL_S)
    sys.setswitchinterval(0.25)
    restore(stage)
    assert settings() == (chosen, 0.25)


def test_values_that_are_put_back_by_somebody_else_stay() -> None:
    first, second = Stage(), Stage()
    tune(first)
    gc.set_threshold(*PYTHONS[0])
    sys.setswitchinterval(PYTHONS[1])
    tune(second)
    assert settings() == PYTHONS


def test_what_was_changed_is_said_and_nothing_else() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    interpreter.logger.addHandler(handler)
    interpreter.logger.setLevel(logging.INFO)
    try:
        first, second = Stage(), Stage()
        tune(first)
        tune(second)
        restore(first)
        restore(second)
        gc.set_threshold(9, 20, 30)
        sys.setswitchinterval(0.25)
        tune(first)
    finally:
        interpreter.logger.removeHandler(handler)
    assert len(said) == 1


def test_a_stage_that_ends_while_another_begins_does_not_wait_for_itself() -> None:
    class Ending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            restore(others.pop())

    others = [Stage()]
    handler = Ending()
    interpreter.logger.addHandler(handler)
    interpreter.logger.setLevel(logging.INFO)
    try:
        stage = Stage()
        tune(stage)
    finally:
        interpreter.logger.removeHandler(handler)
    assert settings() == OURS
