#!/usr/bin/env python3
"""Set up the project's own environment in .venv, or check an environment that the user provides.

    python3 scripts/setup_env.py                          # create .venv; does nothing if it is up to date
    python3 scripts/setup_env.py --check PYTHON pytest    # is PYTHON usable, and does it have these modules?

Python 3.8 or newer runs this script; .venv is made with Python 3.11, for which the wheels are pinned.
The installed packages are listed in requirements/. pip's output goes to .venv/setup.log; an error is reported in
one line on stderr, with exit status 1. pip's own configuration (pip.conf, PIP_* variables) is respected.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("requirements/cpu.txt", "requirements/dev.txt")
PROJECT = ("pyproject.toml", "kernels/spanpack/_version.py")  # what the project's own metadata is built from
OWN_PYTHON = "or use an environment of your own: make test PYTHON=/path/to/python"


class SetupError(Exception):
    """What went wrong and what to do about it, in one line."""


class Environment:
    """The managed environment in `root`/.venv.

    The log is the first file written into the folder and the stamp the last. A folder with a log was therefore made
    by this script; one without a stamp is left from an interrupted set-up and is built again from scratch.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / "setup.log"
        self.stamp = self.folder / "setup.json"

    def wanted(self) -> dict[str, str]:
        """The stamp of a finished set-up of this checkout; includes the path, as an environment can't be moved."""
        return {
            "requirements": self._digest(REQUIREMENTS),
            "project": self._digest(PROJECT),
            "root": str(self.root),
        }

    def found(self) -> dict[str, str]:
        """The stamp of the last finished set-up; empty if it is missing or the Python in .venv no longer exists."""
        try:
            return dict(json.loads(self.stamp.read_text())) if self.python.exists() else {}
        except (OSError, ValueError):
            return {}

    def set_up(self) -> None:
        """Bring .venv up to date with this checkout."""
        if self.found() == self.wanted():
            return
        with _locked(self.root / ".venv.lock") as lock:
            wanted, found = self.wanted(), self.found()
            if found == wanted:  # another process has just done it
                return
            if {**found, "project": ""} != {**wanted, "project": ""}:
                self._create(find_python(), lock)
                self._install_requirements(lock)
                self._write_stamp({**wanted, "project": ""})
            self._install_project(lock)
            self._write_stamp(wanted)

    def _digest(self, names: Sequence[str]) -> str:
        return hashlib.sha256(b"\0".join((self.root / name).read_bytes() for name in names)).hexdigest()

    def _create(self, python: str, lock: int) -> None:
        if self.folder.exists() and any(self.folder.iterdir()) and not self.log.exists():
            raise SetupError(f"{self.folder} was not made by this set-up: move it away, {OWN_PYTHON}")
        if self.folder.exists():
            self.stamp.unlink(missing_ok=True)
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.log.write_text(f"{python}\n")
        self._run([python, "-m", "venv", str(self.folder)], "could not create .venv", lock)

    def _install_requirements(self, lock: int) -> None:
        print("setup: installing the pinned packages into .venv, once: about a minute, 2.3 GB", file=sys.stderr)
        files = [argument for name in REQUIREMENTS for argument in ("-r", str(self.root / name))]
        # Wheels only: no download can run code or need a compiler. No bytecode in advance: most modules of the
        # engine are never imported, and compiling them takes longer than everything else.
        options = ["--no-deps", "--no-compile", "--only-binary=:all:"]
        self._run([*self._pip(), *options, *files], "could not install the pinned packages", lock)

    def _install_project(self, lock: int) -> None:
        options = ["--no-deps", "--no-index", "--no-build-isolation", "-e"]
        self._run([*self._pip(), *options, str(self.root)], "could not install the project itself", lock)

    def _pip(self) -> list[str]:
        return [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]

    def _run(self, command: Sequence[str], failure: str, lock: int) -> None:
        # With PYTHONPATH set, pip would regard the packages on it as installed. The child inherits the lock, so
        # that a pip that outlives this process still keeps other set-ups out.
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        with self.log.open("a+", errors="replace") as log:
            start = log.tell()
            done = subprocess.run(command, check=False, stdout=log, stderr=log, env=env, pass_fds=(lock,))
            log.seek(start)
            said = log.read()
        if done.returncode:
            reason = _reason(said) or f"exit status {done.returncode}"
            raise SetupError(f"{failure}: {reason} (log: {self.log})")

    def _write_stamp(self, wanted: dict[str, str]) -> None:
        unfinished = self.stamp.with_suffix(".tmp")
        unfinished.write_text(json.dumps(wanted, indent=1))
        unfinished.replace(self.stamp)


def _reason(said: str) -> str:
    """The reason for a failure according to pip's output, in one line; empty if it gives none."""
    if "connection broken by" in said:
        return "no connection to the package index"
    errors = [line for line in said.splitlines() if line.lower().startswith("error: ")]
    reason = errors[-1].split(" ", 1)[1].strip() if errors else ""
    if "torch==" in reason and "+cpu" in reason:
        reason += "; name an index that has PyTorch's CPU wheels in PIP_EXTRA_INDEX_URL or pip.conf"
    return reason


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock file exclusively; yields its descriptor."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up of this project", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def require_platform() -> None:
    """Raise SetupError if the pinned wheels can't be installed on this platform."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
        glibc = tuple(int(part) for part in libc.split()[1].split("."))
    except (ValueError, IndexError):  # musl
        glibc = (0,)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or glibc < (2, 28):
        raise SetupError(
            f"unsupported platform {platform.platform()}: the pinned wheels are for Linux on x86-64 with "
            f"glibc 2.28 or newer; {OWN_PYTHON}"
        )


def find_python() -> str:
    """The first Python 3.11 on PATH that can make virtual environments; its base Python if it is in one itself."""
    query = "import sys; print(getattr(sys, '_base_executable', sys.executable)); import ensurepip, venv"
    seen = []
    for name in ("python3.11", "python3", "python"):
        for folder in os.get_exec_path():
            path = Path(folder, name)
            if not os.access(path, os.X_OK):
                continue
            version = _output([str(path), "--version"]).strip()  # "Python 3.11.7"
            if version.startswith("Python 3.11."):
                answer = subprocess.run([str(path), "-c", query], check=False, capture_output=True, text=True)
                if answer.returncode == 0:
                    return answer.stdout.strip()
                version += " without the modules venv and ensurepip (Debian: package python3.11-venv)"
            seen.append(f"{path} is {version or 'broken'}")
    raise SetupError(f"no usable Python 3.11 on PATH ({'; '.join(seen)}): install one, {OWN_PYTHON}")


def check(python: str, modules: Sequence[str]) -> None:
    """Raise SetupError unless `python` is a Python 3.11 or newer that has `modules`; imports none of them."""
    query = (
        "import importlib.util, sys\n"
        "print(*sys.version_info[:2])\n"
        "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])\n"
    )
    found = _output([python, "-c", query, *modules]).splitlines()
    if len(found) != 2:
        raise SetupError(f"PYTHON={python} is not a Python that runs")
    version = tuple(int(part) for part in found[0].split())
    if version < (3, 11):
        raise SetupError(f"PYTHON={python} is Python {version[0]}.{version[1]}: 3.11 or newer is needed")
    if found[1]:
        raise SetupError(f"PYTHON={python} lacks {found[1].replace(' ', ', ')}: install it there")


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except OSError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--check", nargs="+", metavar=("PYTHON", "MODULE"), help="look at this one only")
    asked = parser.parse_args(arguments).check
    try:
        if asked:
            check(asked[0], asked[1:])
        else:
            require_platform()
            Environment(ROOT).set_up()
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the same command starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
