"""scripts/setup_env.py, with a stand-in for Python 3.11 and pip: what is done once, and what failures say."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Writes its pip commands to calls.txt; fails as pip does while a file `offline` exists beside it.
STAND_IN = """#!/bin/sh
case "$*" in
  --version) echo "Python 3.11.9" ;;
  -c*) echo "$0" ;;
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip"*)
    echo "$*" >> {home}/calls.txt
    if [ -e {home}/offline ]; then
      echo "Looking in links: /opt"
      echo "ERROR: No matching distribution found for aenum==3.1.16"
      exit 1
    fi
    sleep 0.2 ;;
esac
"""

SetUp = Callable[[], tuple[int, str]]


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup_env: ModuleType) -> Path:
    """A project folder, with the stand-in as the only Python on PATH."""
    for name in (*setup_env.REQUIREMENTS, *setup_env.PROJECT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    write_python(tmp_path / "bin" / "python3.11", STAND_IN.format(home=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "require_platform", lambda: None)
    return tmp_path


@pytest.fixture
def set_up(home: Path, setup_env: ModuleType, capsys: pytest.CaptureFixture[str]) -> SetUp:
    def run() -> tuple[int, str]:
        status = setup_env.main([])
        return status, capsys.readouterr().err

    return run


def write_python(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def pip_calls(home: Path) -> list[str]:
    """What pip was asked to install: the requirements or the project."""
    calls = (home / "calls.txt").read_text().splitlines() if (home / "calls.txt").exists() else []
    return ["project" if " -e " in call else "requirements" for call in calls]


def test_second_call_does_nothing(home: Path, set_up: SetUp) -> None:
    assert set_up()[0] == 0
    assert pip_calls(home) == ["requirements", "project"]
    assert set_up() == (0, "")
    assert pip_calls(home) == ["requirements", "project"]


def test_changed_metadata_installs_the_project_alone(home: Path, set_up: SetUp) -> None:
    set_up()
    (home / "pyproject.toml").write_text("changed")
    assert set_up() == (0, "")
    assert pip_calls(home) == ["requirements", "project", "project"]


def test_changed_requirements_start_afresh(home: Path, set_up: SetUp) -> None:
    set_up()
    (home / ".venv" / "left-over").touch()
    (home / "requirements" / "cpu.txt").write_text("changed")
    assert set_up()[0] == 0
    assert pip_calls(home) == ["requirements", "project"] * 2
    assert not (home / ".venv" / "left-over").exists()


def test_moved_checkout_starts_afresh(home: Path, set_up: SetUp) -> None:
    set_up()
    stamp = home / ".venv" / "setup.json"
    stamp.write_text(stamp.read_text().replace(str(home), "/elsewhere"))
    assert set_up()[0] == 0
    assert pip_calls(home) == ["requirements", "project"] * 2


def test_failed_download_is_one_line_and_leaves_no_stamp(home: Path, set_up: SetUp) -> None:
    (home / "offline").touch()
    status, said = set_up()
    assert status == 1
    progress, failure = said.splitlines()
    assert progress.startswith("setup: installing")
    assert "No matching distribution found for aenum==3.1.16" in failure
    assert str(home / ".venv" / "setup.log") in failure

    (home / "offline").unlink()
    assert set_up()[0] == 0
    assert pip_calls(home) == ["requirements", "requirements", "project"]


def test_two_at_once_install_once(home: Path, setup_env: ModuleType) -> None:
    both = [threading.Thread(target=setup_env.main, args=([],)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert pip_calls(home) == ["requirements", "project"]


def test_environment_of_somebody_else_is_left_alone(home: Path, set_up: SetUp) -> None:
    (home / ".venv").mkdir()
    (home / ".venv" / "pyvenv.cfg").touch()
    status, said = set_up()
    assert status == 1
    assert "was not made by this set-up" in said
    assert (home / ".venv" / "pyvenv.cfg").exists()


def test_wrong_python_is_one_line(home: Path, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "bin" / "python3.11").unlink()
    write_python(home / "bin" / "python3", "#!/bin/sh\necho Python 3.12.1\n")
    monkeypatch.setenv("PATH", str(home / "bin"))
    with pytest.raises(setup_env.SetupError, match=r"^no usable Python 3\.11 .*/python3 is Python 3\.12.*$"):
        setup_env.find_python()


def test_unsupported_platform_is_one_line(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "aarch64")
    with pytest.raises(setup_env.SetupError, match=r"^unsupported platform .*$"):
        setup_env.require_platform()


@pytest.mark.parametrize(
    ("python", "modules", "expected"),
    [
        (sys.executable, ["sys", "pytest"], ""),
        (sys.executable, ["sys", "no_such_module"], "lacks no_such_module"),
        ("/no/such/python", [], "is not a Python that runs"),
    ],
    ids=["usable", "lacks a module", "absent"],
)
def test_check(
    setup_env: ModuleType, capsys: pytest.CaptureFixture[str], python: str, modules: list[str], expected: str
) -> None:
    assert setup_env.main(["--check", python, *modules]) == bool(expected)
    assert expected in capsys.readouterr().err
