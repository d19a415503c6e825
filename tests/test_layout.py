"""The layout: `kernels/` beside Hugging Face's `kernels`, one-way imports, and what a wheel holds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> list[str]:
    """The lines that `code` prints in a new interpreter that sees the same packages as this one."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installed_version(distribution: str) -> str:
    """The version that is installed; skips the test where the distribution is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the distribution {distribution} is not installed")


def source_root(package: str) -> Path:
    """The folder that `package` is imported from."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not a package"
    return Path(spec.origin).parent.parent


# `find_spec("kernels")` finds our folder as a namespace even where Hugging Face's package is absent.


def test_import_kernels_is_hugging_face() -> None:
    version = installed_version("kernels")
    found, *path = run_python("import kernels; print(kernels.__version__, *kernels.__path__, sep='\\n')")
    assert found == version
    ours = (ROOT / "kernels", ROOT / "tests" / "kernels")
    assert not [entry for entry in path if Path(entry).resolve() in ours]


def test_kernels_is_only_a_source_root() -> None:
    content = {path.name for path in (ROOT / "kernels").iterdir()} - {"__pycache__"}
    assert content == {"spanpack"}
    assert not (ROOT / "tests" / "kernels").exists()


def test_no_tests_among_the_sources() -> None:
    sources = [path for name in ("kernels", "omni_runner") for path in (ROOT / name).rglob("*.py")]
    assert not [path for path in sources if path.name == "conftest.py" or path.name.startswith("test_")]


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_both_packages_come_from_one_place() -> None:
    checkout = (ROOT / "kernels", ROOT)
    places = tuple(source_root(name) for name in ("spanpack", "omni_runner"))
    assert places == checkout or places[0] == places[1]


def test_omni_runner_imports_without_the_engine() -> None:
    # None in sys.modules makes an import fail as if the package were absent.
    absent = "import sys; sys.modules.update(vllm=None, vllm_omni=None)"
    run_python(f"{absent}; import omni_runner; omni_runner.register")


def test_entry_points() -> None:
    installed_version("omni-runner")
    found = {
        (point.group, point.name): point.value for point in importlib.metadata.distribution("omni-runner").entry_points
    }
    assert found == {
        ("console_scripts", "omni-runner"): "omni_runner.cli:main",
        ("vllm.general_plugins", "omni_runner"): "omni_runner:register",
    }


def test_wheel_holds_the_two_packages(tmp_path: Path) -> None:
    installed_version("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"spanpack", "omni_runner"}


def test_no_paths_of_one_machine() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout, or no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    homes = r"/(?:root|home/\w+|Users/\w+|work)"
    path = re.compile(rf"(?<![\w.])(?:{re.escape(str(ROOT))}|{homes})/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text().splitlines()
        except (OSError, UnicodeDecodeError):  # removed but not staged; not a text
            continue
        found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if path.search(line)]
    assert not found
