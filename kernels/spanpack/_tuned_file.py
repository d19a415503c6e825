"""Tuned files: one JSON of the tuner's results per GPU, read and checked here, written by `spanpack.tune`.

::

    {"format": 1, "gpu": "NVIDIA H200", "triton": "3.6.0", "torch": "2.11.0", "date": "2026-11-29", "complete": true,
     "direct_store_bytes": 65536,
     "classes": {"small": {"tile_bytes": 4096, "num_warps": 2, "gain": 0.0,
                           "alone_us": 2.2, "busy_us": 9.1, "default_alone_us": 2.2, "default_busy_us": 9.1, ...}}}

Further entries are informational and are not read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ._size_classes import SIZE_CLASSES, LaunchConfig

FORMAT = 1
MEASURED = ("alone_us", "busy_us", "default_alone_us", "default_busy_us", "gain")
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tuned:
    """Content of a tuned file.

    Attributes
    ----------
    gpu, triton
        What it applies to: exact name of the GPU, and the Triton version it was tuned with.
    classes
        Configurations by name of the size class.
    direct_store_bytes
        See `ConfigTable`; None if tuning ended before it was determined.
    """

    gpu: str
    triton: str
    classes: Mapping[str, LaunchConfig]
    direct_store_bytes: int | None


def tuned_file_name(gpu_name: str) -> str:
    """Name of the file for a GPU, such as ``nvidia_h200.json``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu_name.lower()).strip("_") + ".json"


def read_tuned(path: Path) -> Tuned:
    """Read and check a tuned file.

    Raises
    ------
    OSError
        The file can't be read.
    ValueError
        The content is not valid; the message says where.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"longer than {_MAX_FILE_BYTES} bytes")
    try:
        return parse_tuned(json.loads(path.read_text(encoding="utf-8")))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_tuned(path: Path, document: Mapping[str, object]) -> None:
    """Check a document and write it atomically; raises what `read_tuned` raises."""
    parse_tuned(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def parse_tuned(document: object) -> Tuned:
    """Check the content of a tuned file; raises ValueError."""
    top = _table(document, "the file")
    if top.get("format") != FORMAT:
        raise ValueError(f"format is {top.get('format')!r}, expected {FORMAT}")
    for name in ("torch", "date"):
        _text(top, name)
    if type(top.get("complete")) is not bool:
        raise ValueError(f"complete is {top.get('complete')!r}, expected true or false")
    classes = _table(top.get("classes"), "classes")
    return Tuned(
        gpu=_text(top, "gpu"),
        triton=_text(top, "triton"),
        classes={name: _config(name, _table(entry, f"classes.{name}")) for name, entry in classes.items()},
        direct_store_bytes=_threshold(top, "direct_store_bytes"),
    )


def _config(name: str, entry: Mapping[str, object]) -> LaunchConfig:
    if name not in {group.name for group in SIZE_CLASSES}:
        raise ValueError(f"no size class {name!r}, expected {', '.join(group.name for group in SIZE_CLASSES)}")
    for key in MEASURED:
        value = entry.get(key)
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise ValueError(f"classes.{name}.{key} is {value!r}, expected a number")
    return LaunchConfig(
        _power_of_two(entry, name, "tile_bytes", 64, 1 << 17), _power_of_two(entry, name, "num_warps", 1, 32)
    )


def _power_of_two(entry: Mapping[str, object], name: str, key: str, least: int, most: int) -> int:
    value = entry.get(key)
    if type(value) is not int or not least <= value <= most or value & (value - 1):
        raise ValueError(f"classes.{name}.{key} is {value!r}, expected a power of two from {least} to {most}")
    return value


def _threshold(top: Mapping[str, object], name: str) -> int | None:
    value = top.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} is {value!r}, expected a number of bytes or null")
    return value


def _text(top: Mapping[str, object], name: str) -> str:
    value = top.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, expected a text")
    return value


def _table(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} is a {type(value).__name__}, expected an object")
    return value
