"""The environment variables: what they mean and how bad values are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from omni_runner.errors import SettingsError
from omni_runner.settings import (
    _READERS,
    VARIABLES,
    Settings,
    asks_to_be_strict,
    unknown_variables,
    warnings_of_variables,
)


def test_nothing_set_is_off() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env(dict.fromkeys(VARIABLES, " ")) == Settings()
    assert not Settings().enabled


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), (" on ", True), ("0", False), ("no", False)])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("OMNI_RUNNER", "enabled"),
        ("OMNI_RUNNER_TRACE_SCRUB", "trace_scrub"),
    ],
)
def test_switches(name: str, field: str, text: str, value: bool) -> None:
    assert Settings.from_env({name: text}) == dataclasses.replace(Settings(), **{field: value})


def test_values() -> None:
    settings = Settings.from_env(
        {"OMNI_RUNNER_PINNED_MIB": "256", "OMNI_RUNNER_TRACE": "~/steps", "OMNI_RUNNER_TRACE_STEPS": "5"}
    )
    assert settings.pinned_budget_bytes == 256 * 1024 * 1024
    assert settings.trace_dir == Path.home() / "steps"
    assert settings.trace_steps == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OMNI_RUNNER", "2"),
        ("OMNI_RUNNER_STRICT", "maybe"),
        ("OMNI_RUNNER_PINNED_MIB", "0"),
        ("OMNI_RUNNER_PINNED_MIB", "1.5"),
        ("OMNI_RUNNER_PINNED_MIB", "-1"),
        ("OMNI_RUNNER_PINNED_MIB", "²"),
        ("OMNI_RUNNER_TRACE_STEPS", "all"),
        ("OMNI_RUNNER_TRACE_STEPS", "9" * 5000),
        ("OMNI_RUNNER_PINNED_MIB", "9" * 20),
    ],
)
def test_bad_values_are_named(name: str, text: str) -> None:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    with pytest.raises(SettingsError, match=f"{name}='?{re.escape(shown)}'?: expected") as caught:
        Settings.from_env({name: text})
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 120


def test_all_bad_values_are_named_at_once() -> None:
    environ = {"OMNI_RUNNER": "maybe", "OMNI_RUNNER_PINNED_MIB": "1", "OMNI_RUNNER_TRACE_STEPS": "-3"}
    with pytest.raises(SettingsError, match=r"^OMNI_RUNNER='maybe': .*; OMNI_RUNNER_TRACE_STEPS='-3': "):
        Settings.from_env(environ)


def test_a_home_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="OMNI_RUNNER_TRACE='~nobody-here/traces'"):
        Settings.from_env({"OMNI_RUNNER_TRACE": "~nobody-here/traces"})


def test_misspelt_and_former_variables_are_found() -> None:
    environ = {
        "OMNI_RUNNER": "1",
        "OMNI_RUNNER_STRCT": "1",
        "OMNI_RUNNER_UNTRACK": "0",
        "OMNI_RUNNER_XYZ": "",
        "PATH": "",
    }
    assert unknown_variables(environ) == {
        "OMNI_RUNNER_STRCT": "OMNI_RUNNER_STRICT",
        "OMNI_RUNNER_UNTRACK": "OMNI_RUNNER_TUNE_PYTHON",
        "OMNI_RUNNER_XYZ": "OMNI_RUNNER",
    }
    strict, untrack, _ = warnings_of_variables(environ)
    assert strict.startswith("OMNI_RUNNER_STRCT has no effect")
    assert untrack.endswith("is OMNI_RUNNER_TUNE_PYTHON meant?")
    assert warnings_of_variables({"OMNI_RUNNER": "1"}) == []


@pytest.mark.parametrize(
    ("environ", "strict"),
    [
        ({}, False),
        ({"OMNI_RUNNER_STRICT": "off"}, False),
        ({"OMNI_RUNNER_STRICT": " on "}, True),
        ({"OMNI_RUNNER_STRICT": "1", "OMNI_RUNNER_PINNED_MIB": "lots"}, True),
        ({"OMNI_RUNNER_STRICT": "ture"}, True),
    ],
)
def test_strict_is_read_by_itself(environ: dict[str, str], strict: bool) -> None:
    assert asks_to_be_strict(environ) is strict


def test_every_variable_is_read() -> None:
    assert set(_READERS) == set(VARIABLES)
