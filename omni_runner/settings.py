"""The environment variables of omni_runner, read in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from omni_runner.errors import SettingsError

_DEFAULT_TRACE_STEPS = 32
MOST_TRACE_STEPS = 10**9
_MOST_PINNED_MIB = 1 << 24  # 16 TiB
_SHOWN = 40  # characters of an invalid value
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}

_REPLACED = {"OMNI_RUNNER_UNTRACK": "OMNI_RUNNER_TUNE_PYTHON"}

#: name -> (what it does, default as shown to users)
VARIABLES: dict[str, tuple[str, str]] = {
    "OMNI_RUNNER": ("1 switches the drop-in on for every AR stage of the deployment", "0"),
    "OMNI_RUNNER_STRICT": (
        "1 refuses to start where the drop-in cannot be used, instead of serving stock",
        "0",
    ),
    "OMNI_RUNNER_PINNED_MIB": (
        "most pinned memory that one stage's packer may hold, in MiB",
        "1024",
    ),
    "OMNI_RUNNER_TUNE_PYTHON": (
        "0 keeps Python's own settings of garbage collection and of thread switching",
        "1",
    ),
    "OMNI_RUNNER_TRACE": ("folder into which each packed AR stage writes a trace of its first steps", "no trace"),
    "OMNI_RUNNER_TRACE_STEPS": ("how many steps to record", str(_DEFAULT_TRACE_STEPS)),
    "OMNI_RUNNER_TRACE_SCRUB": (
        "1 records random values in place of the real ones, so that the trace can be shared",
        "0",
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    Attributes
    ----------
    enabled : bool
        ``OMNI_RUNNER``: the entry point switches a whole deployment over.
    pinned_budget_bytes : int or None
        ``OMNI_RUNNER_PINNED_MIB`` in bytes; None means the packer's default.
    tune_python : bool
        ``OMNI_RUNNER_TUNE_PYTHON``: apply `interpreter`, and exclude accumulating payloads from garbage collection.
    trace_dir : Path or None
        ``OMNI_RUNNER_TRACE``: where to record steps; None records nothing.
    trace_steps : int
        ``OMNI_RUNNER_TRACE_STEPS``.
    trace_scrub : bool
        ``OMNI_RUNNER_TRACE_SCRUB``.
    """

    enabled: bool = False
    pinned_budget_bytes: int | None = None
    tune_python: bool = True
    trace_dir: Path | None = None
    trace_steps: int = _DEFAULT_TRACE_STEPS
    trace_scrub: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables; an empty one counts as unset.

        Raises
        ------
        SettingsError
            Variables have invalid values; the message names each of them and the values it allows.
        """
        values: dict[str, Any] = {}
        problems = []
        for name, read in _READERS.items():
            try:
                values[name] = read(environ, name)
            except SettingsError as error:
                problems.append(str(error))
        if problems:
            raise SettingsError("; ".join(problems))
        pinned_mib = values["OMNI_RUNNER_PINNED_MIB"]
        return cls(
            enabled=values["OMNI_RUNNER"],
            pinned_budget_bytes=None if pinned_mib is None else pinned_mib << 20,
            tune_python=values["OMNI_RUNNER_TUNE_PYTHON"],
            trace_dir=values["OMNI_RUNNER_TRACE"],
            trace_steps=values["OMNI_RUNNER_TRACE_STEPS"] or _DEFAULT_TRACE_STEPS,
            trace_scrub=values["OMNI_RUNNER_TRACE_SCRUB"],
        )


def asks_to_be_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``OMNI_RUNNER`` is on, regardless of other variables.

    Raises
    ------
    SettingsError
        Its value is invalid.
    """
    return _switch(environ, "OMNI_RUNNER")


def asks_to_be_strict(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``OMNI_RUNNER_STRICT`` is on, regardless of other variables; an invalid value counts as on."""
    try:
        return _switch(environ, "OMNI_RUNNER_STRICT")
    except SettingsError:
        return True


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that look like ours but are not, each with the name that is probably meant."""
    names = sorted(name for name in environ if name.startswith("OMNI_RUNNER") and name not in VARIABLES)
    return {name: _REPLACED.get(name) or next(iter(get_close_matches(name, VARIABLES)), "") for name in names}


def warnings_of_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return one warning line for each of `unknown_variables`."""
    return [
        f"{name} has no effect: it is none of omni-runner's variables" + (f"; is {meant} meant?" if meant else "")
        for name, meant in unknown_variables(environ).items()
    ]


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = _text(environ, name)
    if text is None:
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # a container without HOME, or no such user
        raise SettingsError(f"{name}={text!r}: expected a path whose ~ stands for a home directory") from error


def _switch(environ: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = _text(environ, name)
    if text is None:
        return default
    if text.lower() not in _WORDS:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(_WORDS)}")
    return _WORDS[text.lower()]


def whole_number(text: str) -> int | None:
    """Return the number that ASCII digits stand for; None for any other text, or more digits than `int` accepts."""
    try:
        return int(text) if text.isascii() and text.isdecimal() else None
    except ValueError:
        return None


def shortened(text: str) -> str:
    """Return a text for an error message, cut after 40 characters."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _positive(environ: Mapping[str, str], name: str, *, most: int) -> int | None:
    text = _text(environ, name)
    if text is None:
        return None
    number = whole_number(text)
    if number is None or not 0 < number <= most:
        raise SettingsError(f"{name}={shortened(text)!r}: expected a whole number from 1 to {most}")
    return number


_READERS: dict[str, Callable[[Mapping[str, str], str], Any]] = {
    "OMNI_RUNNER": _switch,
    "OMNI_RUNNER_STRICT": _switch,
    "OMNI_RUNNER_PINNED_MIB": partial(_positive, most=_MOST_PINNED_MIB),
    "OMNI_RUNNER_TUNE_PYTHON": partial(_switch, default=True),
    "OMNI_RUNNER_TRACE": _path,
    "OMNI_RUNNER_TRACE_STEPS": partial(_positive, most=MOST_TRACE_STEPS),
    "OMNI_RUNNER_TRACE_SCRUB": _switch,
}
