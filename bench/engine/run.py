"""Measure the real engine on this GPU: stock, patched variants of stock, and ours; with and without a sender.

python -m bench.engine.run --out OUT [--engine FOLDER]

Each stage has its own process. The processes start in parallel, which takes minutes, and measure in turns: first the
hashed passes of all stages, then the table in descending order of requests, then the extras (`phases.py`). OUT gets
engine.json (rewritten as results come in), gap.json, profiles.tar, traces.tar and logs/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command_line import Parser, UsageError, check_folder, positive, positive_whole
from bench.commit import commit_of
from bench.engine.environment import REPOSITORY, check_engine, engine_environment
from bench.engine.model_folders import write_models
from bench.engine.phases import Phase, all_phases, turn_s
from bench.engine.report import merge, summary
from bench.engine.stages import EXTRAS, STAGES, VARIANTS
from bench.json_file import write_json

_NOTED_OPTIONS = ("stages", "requests", "variants", "rounds", "seconds", "extras")
SECONDS_APART = 4.0  # between two starts: an engine measures the GPU's free memory while it starts
GRACE_S = 15.0
# Shares of the remaining time while all stages still have the phase to do: thinker has the most to measure.
SHARES = {"thinker": 0.48, "tts": 0.25, "talker": 0.27}
# Only the Thinker has the extra `backlog`, since its payloads are the large ones.
STAGE_EXTRAS = {"thinker": EXTRAS, "tts": ("profile", "consumer", "traces"), "talker": ("profile", "traces")}


def say(*parts: object) -> None:
    print(f"[run {time.monotonic() - _STARTED:6.1f} s]", *parts, flush=True)


@dataclass
class Child:
    """A stage's process.

    Attributes
    ----------
    phases
        Phases still to do, each with its rank among all phases.
    turns
        Number of turns that it has been given.
    """

    stage: str
    process: subprocess.Popen[str]
    result: Path
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    turns: int = 0

    @property
    def ready(self) -> bool:
        return self.result.with_suffix(".ready").exists()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_idle(self) -> bool:
        """Whether all turns that it was given are over."""
        done = self.result.with_suffix(".turns")
        return (int(done.read_text() or 0) if done.exists() else 0) >= self.turns

    def go(self, phase: Phase, seconds: float) -> None:
        """Let the process do a phase for up to `seconds`."""
        assert self.process.stdin is not None
        self.turns += 1
        try:
            self.process.stdin.write(f"{seconds:.1f} {phase}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended by itself

    def end(self, patience_s: float = 0.0) -> int:
        """Let the process end by itself within `patience_s`, else kill it; returns its exit status."""
        try:
            if self.process.stdin is not None and not self.process.stdin.closed:
                self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.process.wait()


class Session:
    """All stages of one run of this program."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.scratch = scratch
        self.deadline = _STARTED + args.seconds
        self.children: list[Child] = []
        self.failures: list[dict[str, str]] = []
        self.skipped: list[dict[str, str]] = []
        (args.out / "logs").mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        environment = engine_environment(self.args.engine, self.scratch.parent)
        models = write_models(self.scratch.parent / "models")
        for number, stage in enumerate(self.args.stages):
            if number:
                time.sleep(SECONDS_APART)
            result = self.scratch / f"{stage}.json"
            command = [
                sys.executable, "-m", "bench.engine.stage_process", "--stage", stage,
                "--model", str(models[STAGES[stage].model]), "--out", str(result), "--scratch", str(self.scratch),
                "--requests", *map(str, self.args.requests), "--variants", *self.args.variants,
            ]  # fmt: skip
            with (self.args.out / "logs" / f"{stage}.log").open("w") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, cwd=REPOSITORY, env=environment
                )
            self.children.append(Child(stage, process, result, self._phases(stage)))
            say(f"{stage}: process {process.pid}")

    def wait_until_ready(self) -> None:
        """Wait for the engines that have not failed, but only as long as time is left to measure."""
        latest = time.monotonic() + 0.55 * (self.deadline - time.monotonic())
        while time.monotonic() < latest:
            if all(child.ready or not child.alive for child in self.children):
                break
            time.sleep(0.3)
        for child in self.children:
            say(f"{child.stage}:", "ready" if child.ready else "still starting" if child.alive else "FAILED to start")

    def measure(self) -> None:
        """Give the stages their turns. A stage that starts late catches up before anything less important is done."""
        while waiting := [child for child in self.children if child.phases and child.alive]:
            if time.monotonic() > self.deadline - GRACE_S:
                break
            ready = [child for child in waiting if child.ready]
            if ready:
                # The most important phase first; stages with the same phase in the order of SHARES.
                self._turn(min(ready, key=lambda child: (child.phases[0][0], list(SHARES).index(child.stage))), waiting)
            else:
                time.sleep(0.3)
        for child in self.children:
            self._finish(child)
        self.write()

    def _turn(self, child: Child, waiting: list[Child]) -> None:
        rank, phase = child.phases[0]
        rivals = [other.stage for other in waiting if any(at == rank for at, _ in other.phases)]
        profiles = sum(any(later.name == "profile" for _, later in other.phases) for other in waiting)
        share = SHARES[child.stage] / sum(SHARES[stage] for stage in rivals)
        seconds = turn_s(phase, self.deadline - time.monotonic() - GRACE_S, profiles, share)
        say(f"{child.stage}: {phase}, for up to {seconds:.0f} s")
        child.go(phase, seconds)
        self._watch(child)
        if child.is_idle:
            child.phases.pop(0)

    def _finish(self, child: Child) -> None:
        """End a process, and note the phases that it has not finished."""
        ready, alive, idle = child.ready, child.alive, child.is_idle
        status = child.end(patience_s=GRACE_S / 3 if ready and idle else 0.0)
        say(f"{child.stage}: exit status {status}")
        left = [str(phase) + " once more" * phase.is_repeated for _, phase in child.phases]
        if not ready or not alive:
            state = f"ended with status {status}" if not alive else "was still starting when the time was over"
            what = f"the process {state}, see logs/{child.stage}.log"
            self.failures.append(
                {"stage": child.stage, "at": left[0] if ready and left else "start", "traceback": what}
            )
        elif left and not idle:
            left[0] += ", unfinished"
            what = f"it was still at it when the time was over, see logs/{child.stage}.log"
            self.failures.append({"stage": child.stage, "at": left[0], "traceback": what})
        self.skipped += [{"stage": child.stage, "what": what} for what in left]

    def _phases(self, stage: str) -> list[tuple[int, Phase]]:
        """The phases of a stage, each with its rank among all phases."""
        phases = all_phases(self.args.requests, self.args.rounds, self.args.extras)
        return [(at, phase) for at, phase in enumerate(phases) if phase.name not in _other_extras(stage)]

    def write(self) -> dict[str, Any]:
        """Write what the stages have measured so far."""
        parts = [json.loads(child.result.read_text()) for child in self.children if child.result.exists()]
        options = {name: value for name, value in vars(self.args).items() if name in _NOTED_OPTIONS}
        found = merge(parts, self.args.commit or commit_of(REPOSITORY), options)
        engines = {part["stage"]: part["engine"] for part in parts}
        for name, notes in (("errors", self.failures), ("skipped", self.skipped)):
            found["engine"][name] += [{"engine": engines.get(note["stage"], "?"), **note} for note in notes]
        write_json(found["engine"], self.args.out / "engine.json")
        write_json(found["gap"], self.args.out / "gap.json", indent=None)
        return found["engine"]

    def pack(self) -> None:
        """Pack the raw profiles into one archive and the traces into another."""
        for name, files in (
            ("profiles", sorted(self.scratch.glob("profile-*.json.gz"))),
            ("traces", sorted(self.scratch.glob("traces/*"))),
        ):
            if files:
                with tarfile.open(self.args.out / f"{name}.tar", "w") as tar:
                    for file in files:
                        tar.add(file, arcname=file.name)

    def close(self) -> None:
        for child in self.children:
            child.end()

    def _watch(self, child: Child) -> None:
        """Wait for the end of the turn, and write results as they come in."""
        written = 0.0
        while child.alive and not child.is_idle and time.monotonic() < self.deadline - GRACE_S / 3:
            time.sleep(0.05)
            changed = child.result.stat().st_mtime if child.result.exists() else 0.0
            if changed > written:
                written = changed
                self.write()


def _other_extras(stage: str) -> set[str]:
    """Extras that are not for this stage."""
    return set(EXTRAS) - set(STAGE_EXTRAS[stage])


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="folder that carries the engine; default: it is installed")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", help="what to note as the commit, where there is no git checkout")
    parser.add_argument("--scratch", type=Path, help="folder to unpack and work in; default: a temporary one")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="at once; 64 at most")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--rounds", type=positive_whole, default=3, help="measured passes per cell, as far as time allows"
    )
    parser.add_argument("--seconds", type=positive, default=540.0, help="for everything, start included")
    parser.add_argument(
        "--extras", nargs="*", default=list(EXTRAS), choices=EXTRAS, help="beside the table; default: all"
    )
    args = parser.parse_args(arguments)
    if not all(1 <= requests <= 64 for requests in args.requests):
        parser.error(f"--requests must lie between 1 and 64, given: {args.requests}")
    if "stock" not in args.variants:
        parser.error("--variants needs stock: the others are compared with it")
    args.out = args.out.resolve()
    args.engine = args.engine and args.engine.resolve()
    try:
        _check_gpu()
        if args.engine:
            check_engine(args.engine)
        check_folder("--out", args.out)
        if args.scratch:
            check_folder("--scratch", args.scratch)
    except UsageError as error:
        parser.error(str(error))
    return args


def _check_gpu() -> None:
    import torch  # noqa: PLC0415  takes seconds, and --help does without

    if not torch.cuda.is_available():
        raise UsageError("needs a CUDA GPU, torch sees none")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    base = args.scratch or Path(tempfile.gettempdir()) / "omni-runner-bench"
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base, prefix="session-") as folder:
        session = Session(args, Path(folder).resolve())
        try:
            session.start()
            session.wait_until_ready()
            session.measure()
        finally:
            session.close()
            found = session.write()
            session.pack()
    print(summary(found))
    return 1 if found["errors"] or not found["rows"] else 0


_STARTED = time.monotonic()

if __name__ == "__main__":
    raise SystemExit(main())
