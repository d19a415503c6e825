"""The examples that the README shows run, and print what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OUTPUT = """\
first [0.0, 1.0, 2.0, 3.0] [7, 8] torch.bfloat16
second [4.0, 5.0] [9] torch.bfloat16
"""
ROOT = Path(__file__).parents[2]


def test_standalone_example() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "standalone.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == OUTPUT


def test_the_readme_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "standalone.py").read_text().split('"""\n', 1)[1].strip()
    readme = (ROOT / "README.md").read_text()
    assert code in readme
    assert OUTPUT in readme
