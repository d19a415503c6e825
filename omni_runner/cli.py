"""``omni-runner``: the command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_runner.settings import MOST_TRACE_STEPS, shortened, whole_number

Main = Callable[[Sequence[str]], int]

_MOST_PASSES = 10_000  # takes minutes; the timings of all steps are kept for the medians
# Modules that may be missing, and the packages that have them.
_PACKAGES = {"numpy": "numpy", "safetensors": "safetensors", "torch": "torch", "vllm": "vllm", "vllm_omni": "vllm-omni"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes
    ----------
    what : str
        What the command does, shown in the overview.
    place : str
        ``module:function``; the function takes the command's arguments and returns its exit status.
    """

    what: str
    place: str


COMMANDS = {
    "doctor": Command("what is installed here, and would the drop-in be active?", "omni_runner.doctor:main"),
    "demo": Command(
        "the real engine with the stock runner and with ours, compared byte for byte",
        "omni_runner.demo.__main__:main",
    ),
    "tune": Command("find the fastest launch configuration for this GPU", "omni_runner.tuning:main"),
    "record": Command("record real steps of a deployment as a trace", "omni_runner.cli:record"),
    "replay": Command(
        "pack a trace's steps again: are the bytes right, and how long does it take?",
        "omni_runner.cli:replay",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 a negative result, 2 wrong usage or a missing package."""
    width = max(map(len, COMMANDS))
    overview = "\n".join(f"  {name.ljust(width)}  {command.what}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="omni-runner",
        description="Packed output payloads for the autoregressive stages of vLLM-Omni.",
        epilog=f"commands:\n{overview}\n\n`omni-runner COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", choices=COMMANDS, help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command")
    args = parser.parse_args(argv)
    if args.version:
        print(f"omni-runner {version()}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return run_command(args.command, args.arguments)


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Import a command and run it; a missing package is reported in one line."""
    command = COMMANDS[name]
    module_name, _, function_name = command.place.partition(":")
    try:
        function: Main = getattr(importlib.import_module(module_name), function_name)
        return function(arguments)
    except ModuleNotFoundError as error:
        missing = error.name
        problem = f"{missing} is not installed (pip install {_PACKAGES[missing]})" if missing in _PACKAGES else error
        print(f"omni-runner {name}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def version() -> str:
    """Return the version of the installed distribution, or of this checkout."""
    try:
        return importlib.metadata.version("omni-runner")
    except importlib.metadata.PackageNotFoundError:
        from spanpack._version import __version__  # noqa: PLC0415  imports torch

        return __version__


def why_unwritable(folder: Path, *, here: bool = True) -> str | None:
    """Return why no file can be written to a folder, which need not exist yet; None if one can.

    Permissions are checked only if the files will be written by this user on this host (`here`).
    """
    present = next((path for path in (folder, *folder.parents) if os.path.exists(path)), Path())
    if not os.path.isdir(present):
        return f"{present} is a file, not a folder"
    try:
        if here:
            tempfile.TemporaryFile(dir=present).close()
    except OSError as error:
        return f"{error.strerror} in {present}"
    return None


def _whole_number(parser: argparse.ArgumentParser, option: str, given: str, least: int, most: int) -> int:
    """Return an option's value; the parser rejects anything but a whole number in the range."""
    value = whole_number(given)
    if value is None or not least <= value <= most:
        parser.error(f"{option}: given {shortened(given)!r}, expected a whole number from {least} to {most}")
    return value


def record(argv: Sequence[str]) -> int:
    """``omni-runner record``: run a command with tracing on, or print the variables for it."""
    parser = argparse.ArgumentParser(
        prog="omni-runner record",
        description="Record the first steps of every packed AR stage, as a trace for `replay` and `tune --trace`. "
        "With a command (after --) it runs that with the variables set, OMNI_RUNNER=1 among them; without one it "
        "prints them.",
        epilog="example: omni-runner record --dir traces --steps 64 -- vllm-omni serve MODEL --omni",
    )
    parser.add_argument("--dir", default="traces", help="folder to write to (default: ./traces)")
    parser.add_argument("--steps", default="32", help="how many steps of each stage (default: 32)")
    parser.add_argument("--scrub", action="store_true", help="random values in place of the real ones")
    parser.add_argument("serve", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")
    args = parser.parse_args(argv)
    steps = _whole_number(parser, "--steps", args.steps, 1, MOST_TRACE_STEPS)
    if not args.dir.strip():
        parser.error(f"--dir: given {args.dir!r}, expected a folder")
    folder = Path(args.dir)
    obstacle = why_unwritable(folder, here=bool(args.serve))  # fail now rather than after a model has been loaded
    if obstacle:
        print(f"omni-runner record: cannot write to {folder}: {obstacle}", file=sys.stderr)
        return 2
    variables = {
        "OMNI_RUNNER": "1",
        "OMNI_RUNNER_TRACE": str(folder.absolute()),
        "OMNI_RUNNER_TRACE_STEPS": str(steps),
        "OMNI_RUNNER_TRACE_SCRUB": str(int(args.scrub)),
    }
    serve = args.serve[1:] if args.serve[:1] == ["--"] else args.serve
    if not serve:
        print("# Set these on every host that runs a stage; each AR stage then writes STAGE-PID.json and .safetensors.")
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"omni-runner record: cannot write to {folder}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        os.execvpe(serve[0], serve, {**os.environ, **variables})
    except OSError as error:
        print(f"omni-runner record: cannot run {serve[0]}: {error.strerror}", file=sys.stderr)
        return 2


def replay(argv: Sequence[str]) -> int:
    """``omni-runner replay``: pack recorded steps again, compare the payloads and measure."""
    parser = argparse.ArgumentParser(
        prog="omni-runner replay",
        description="Pack a trace's steps again, compare every payload with the reference and measure.",
        epilog="Exit status: 0 all bytes agree, 1 a difference, 2 the trace can't be read.",
    )
    parser.add_argument("trace", nargs="+", type=Path, help="a trace, with or without .json or .safetensors")
    parser.add_argument("--device", help="cpu, cuda:1, ... (default: the current GPU if there is one)")
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto", help="what packs")
    parser.add_argument("--passes", default="20", help="timed passes over the trace (default: 20)")
    args = parser.parse_args(argv)
    passes = _whole_number(parser, "--passes", args.passes, 0, _MOST_PASSES)
    if args.device and args.device.startswith("cpu:"):  # torch accepts any index for the one CPU
        parser.error(f"--device: given {args.device!r}, expected cpu, cuda or cuda:N")

    import spanpack  # noqa: PLC0415  imports torch, and safetensors for the traces
    from omni_runner.demo.report import traces_report  # noqa: PLC0415
    from omni_runner.errors import TraceError  # noqa: PLC0415
    from omni_runner.replay import default_device  # noqa: PLC0415
    from omni_runner.replay import replay as replay_trace  # noqa: PLC0415
    from omni_runner.trace import load_trace  # noqa: PLC0415

    device = default_device() if args.device is None else args.device
    try:
        packer = spanpack.Packer(device, backend=args.backend)
    except (AssertionError, RuntimeError, spanpack.SpanpackError) as error:  # torch's own for an unusable device
        print(f"omni-runner replay: cannot pack on {device}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 2
    try:
        traces = [load_trace(path, device) for path in args.trace]
        results = [replay_trace(trace, packer, timed_passes=passes) for trace in traces]
    except TraceError as error:
        print(f"omni-runner replay: {error}", file=sys.stderr)
        return 2
    packer.close()
    print(f"{results[0].backend} on {results[0].device}")
    print(traces_report([(path.stem, result) for path, result in zip(args.trace, results, strict=True)]))
    for path, result in zip(args.trace, results, strict=True):
        print(
            f"{path.stem}: p50 of a step: pack call {_microseconds(result.host_us)}, "
            f"bytes on the host {_microseconds(result.landed_us)}, payloads ready {_microseconds(result.ready_us)}"
        )
    return 0 if all(result.identical for result in results) else 1


def _microseconds(duration_us: float) -> str:
    """Format a duration; "-" if nothing was timed."""
    return f"{duration_us:.0f} us" if duration_us else "-"


if __name__ == "__main__":
    sys.exit(main())
