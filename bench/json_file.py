"""Writing results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(document: Any, file: Path, indent: int | None = 1) -> None:
    """Write a JSON file atomically: an interrupted program leaves the earlier file or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")
    part.replace(file)
