"""Find the fastest launch configurations and transports for this GPU: ``python -m spanpack.tune``.

Writes one JSON that `load_configs` reads, and a chart beside it. docs/tuning.md says what is searched and how.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from ._size_classes import size_class
from ._tune_measure import CudaMeasurer
from ._tune_report import Machine, chart, document, table
from ._tune_results import Findings, Measurer
from ._tune_search import Search, TuneError, candidates
from ._tune_workloads import Workload, awkward_workload, default_workloads, uniform_workload
from ._tuned_file import tuned_file_name, write_tuned
from .config import USER_FILE_VARIABLE, triton_version
from .gather import triton_available

__all__ = ["Workload", "main"]

ReadTrace = Callable[[str, torch.device], Sequence[Workload]]

INTERRUPTED = 130  # exit status that shells use after Ctrl-C
_TRANSPORT_BYTES = tuple(1 << power for power in range(12, 23, 2))  # 4 KiB to 4 MiB


@dataclass(frozen=True, slots=True)
class Job:
    """What to tune for, and where to write the results.

    Attributes
    ----------
    workloads
        What to tune for.
    out
        Path of the JSON; the chart is written beside it.
    quick
        Whether to try fewer configurations and sizes.
    """

    workloads: Sequence[Workload]
    out: Path
    quick: bool = False


def main(argv: Sequence[str] | None = None, *, read_trace: ReadTrace | None = None, prog: str = "tune") -> int:
    """Run the tuner from the command line.

    Parameters
    ----------
    argv
        Arguments; those of the process if None.
    read_trace
        Takes the path of a trace of a user's steps and a device; returns one workload for each kind of step, the most
        frequent first. This package does not depend on the format of traces. Raises OSError or ValueError.
    prog
        Name of the program in its usage.

    Returns
    -------
    int
        Exit status: 0, done; 1, the default configuration does not work here; 2, no GPU, no Triton or wrong usage; 130,
        ended by Ctrl-C, with the best results so far written.
    """
    args = _parser(prog).parse_args(argv)
    try:
        device = _device(args.device)
        machine = _machine(device)
        out = _out(args.out or Path(tuned_file_name(machine.gpu)))
        workloads = _workloads(args, read_trace, device)
    except _UsageError as error:
        return _fail(str(error), 2)
    measurer = CudaMeasurer(device)
    try:
        return tune(Job(workloads, out, args.quick), measurer, machine, sys.stdout)
    finally:
        measurer.close()


def tune(job: Job, measurer: Measurer, machine: Machine, stream: TextIO) -> int:
    """Search, print the table, write the JSON and the chart; returns the exit status as `main` does."""
    bar = ProgressBar(stream)
    print(f"Tuning for {machine.gpu}, Triton {machine.triton}, torch {machine.torch}", file=stream)
    sizes = [uniform_workload(nbytes) for nbytes in _TRANSPORT_BYTES[:: 2 if job.quick else 1]]
    search = Search(measurer, job.workloads, sizes, awkward_workload(), candidates(quick=job.quick), bar.show)
    try:
        findings = search.run()
    except TuneError as error:
        bar.end()
        return _fail(str(error), 1)
    bar.end()
    if not findings.classes:
        return _fail("nothing was measured, nothing is written", 1 if findings.complete else INTERRUPTED)
    print(f"\n{table(findings)}\n", file=stream)
    _write(job, machine, findings, stream)
    return 0 if findings.complete else INTERRUPTED


def _write(job: Job, machine: Machine, findings: Findings, stream: TextIO) -> None:
    write_tuned(job.out, document(machine, findings))
    picture = job.out.with_suffix(".svg")
    picture.write_text(chart(machine, findings), encoding="utf-8")
    if not findings.complete:
        print("Interrupted: what was not reached keeps its defaults.", file=stream)
    print(f"Wrote {job.out} and {picture}. To use it: {USER_FILE_VARIABLE}={job.out}", file=stream)


class _UsageError(Exception):
    """What was asked for can't be done here."""


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Find the fastest launch configurations for this GPU. Ctrl-C keeps the best so far.",
        epilog=f"The packer loads the result where {USER_FILE_VARIABLE} names it.",
    )
    parser.add_argument("--out", type=Path, help="the JSON to write (default: named after the GPU, in this folder)")
    parser.add_argument("--quick", action="store_true", help="fewer configurations, one workload of each size class")
    parser.add_argument("--trace", metavar="FILE", help="tune for the steps of a trace instead of the built-in ones")
    parser.add_argument("--device", metavar="N", type=int, help="number of the GPU (default: the current one)")
    return parser


def _device(index: int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise _UsageError("tuning needs a GPU, torch sees none")
    if not triton_available():
        raise _UsageError("tuning needs Triton, which can't be imported here")
    if index is not None and not 0 <= index < torch.cuda.device_count():
        raise _UsageError(f"there is no GPU {index}, torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _machine(device: torch.device) -> Machine:
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        triton=triton_version(),
        torch=str(torch.__version__),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


def _out(path: Path) -> Path:
    """The output file, checked to be writable before the search starts."""
    if path.suffix != ".json":
        raise _UsageError(f"--out {path}: expected a name that ends in .json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _UsageError(f"--out {path}: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise _UsageError(f"--out {path}: can't be written")
    return path


def _workloads(args: argparse.Namespace, read_trace: ReadTrace | None, device: torch.device) -> Sequence[Workload]:
    if args.trace is None:
        return default_workloads(quick=args.quick)
    if read_trace is None:
        raise _UsageError(f"to tune for a trace, run `omni-runner tune --trace {args.trace}`: that can read it")
    try:
        found = read_trace(args.trace, device)
    except (OSError, ValueError) as error:
        raise _UsageError(f"can't read the trace {args.trace}: {error}") from error
    chosen = most_frequent(found, 1 if args.quick else 3)
    if not chosen:
        raise _UsageError(f"no step of the trace {args.trace} packs anything on the device")
    return chosen


def most_frequent(workloads: Sequence[Workload], per_class: int) -> list[Workload]:
    """The first `per_class` workloads of each size class."""
    groups: defaultdict[str, list[Workload]] = defaultdict(list)
    for workload in workloads:
        if workload.device_bytes:
            groups[size_class(workload.device_bytes, workload.plan.num_segments).name].append(workload)
    return [workload for group in groups.values() for workload in group[:per_class]]


class ProgressBar:
    """A progress bar that redraws itself on a terminal; elsewhere one line for each stage.

    Parameters
    ----------
    stream
        Where to print.
    """

    _WIDTH = 30

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._stage = ""
        self._started = time.monotonic()

    def show(self, done: int, total: int, text: str) -> None:
        """Show that `done` of `total` steps are done; `text` is ``stage: detail`` of the next one."""
        if self._on_terminal:
            filled = self._WIDTH * done // max(total, 1)
            bar = "#" * filled + "." * (self._WIDTH - filled)
            print(f"\r[{bar}] {done}/{total} {text:<50.50}", end="", file=self._stream, flush=True)
            return
        stage = text.partition(":")[0]
        if stage != self._stage:
            self._stage = stage
            seconds = time.monotonic() - self._started
            print(f"{seconds:5.1f} s  step {done} of {total}: {stage}", file=self._stream, flush=True)

    def end(self) -> None:
        """Clear the bar from the terminal's line."""
        if self._on_terminal:
            print(f"\r{'':<{self._WIDTH + 70}}\r", end="", file=self._stream, flush=True)


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"tune: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
