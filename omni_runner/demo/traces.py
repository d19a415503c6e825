"""The recorded steps that ship with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "data"
_STAGES = ("thinker", "talker", "tts", "tts_v2")


def shipped_traces() -> list[Path]:
    """Return the paths of the shipped traces, for `omni_runner.trace.load_trace`; see README.md beside them."""
    return [_FOLDER / stage for stage in _STAGES]
