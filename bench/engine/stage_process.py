"""One stage in a process of its own: starts its engine, waits for its turn, measures until its time is up.

Started by `bench.engine.run`, which writes the number of seconds to its standard input when it is its turn.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench.engine.bench import WARMUP_STEPS, Bench, save_traces
from bench.engine.cells import Cell
from bench.engine.digests import Trail
from bench.engine.engine import draw_weights, engine_config, engine_version, runner_of, start_engine
from bench.engine.stages import EXTRAS, STAGES, VARIANTS
from bench.engine.timeline import analyse

LAG_STEPS = 240
PROFILE_S = 30.0
STUCK_S = 60.0  # after which a process ends that should have finished one measurement long ago
CellKey = tuple[str, int, bool]  # variant, requests, sender


def say(*parts: object) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s]", *parts, flush=True)


class Plan:
    """What to measure, in order of importance, within a time limit. Every result is written at once.

    Parameters
    ----------
    bench
        The live engine.
    args
        The command line.
    seconds
        Time to measure in.
    """

    def __init__(self, bench: Bench, args: argparse.Namespace, seconds: float) -> None:
        self.bench = bench
        self.args = args
        self.deadline = time.monotonic() + seconds
        self.cells: defaultdict[CellKey, Cell] = defaultdict(Cell)
        self.equal: dict[tuple[str, int], bool] = {}
        self.result: dict[str, Any] = {
            "engine": engine_version(),
            "stage": args.stage,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": {name: version(name) for name in ("vllm-omni", "vllm", "torch", "triton")},
            "rows": [],
            "consumed": [],
            "verify": [],
            "backlog": [],
            "gap": {},
            "skipped": [],
            "errors": [],
        }

    def run(self) -> None:
        most, *fewer = sorted(self.args.requests, reverse=True)
        for requests in (most, *fewer):
            self._verify(requests)
            self._round(requests)
        if "consumer" in self.args.extras:
            self._consumed(most)
        if "backlog" in self.args.extras:
            self._backlog(most)
        if "traces" in self.args.extras:
            self._attempt("traces", 4, self._record_traces)
        # The profiler comes last, since it may go on costing time once it has been on; so time is kept for it.
        profiles = "profile" in self.args.extras
        end, self.deadline = self.deadline, self.deadline - (PROFILE_S if profiles else 0)
        for _ in range(self.args.rounds - 1):
            for requests in (most, *fewer):
                self._round(requests)
        self.deadline = end
        if profiles:
            self._profile(most)

    def _verify(self, requests: int) -> None:
        """Hash every token and every payload of every variant, and compare with stock's."""
        trails: dict[str, Trail] = {}

        def verify(variant: str) -> None:
            trail = trails[variant] = self.bench.hashed(variant, requests, sender=True)
            difference, chunk_difference = trail.difference(trails["stock"]), trail.chunk_difference(trails["stock"])
            payloads = sum(map(len, trail.payloads.values()))
            tensors = sum(len(entry) for entries in trail.payloads.values() for entry in entries)
            self.equal[variant, requests] = difference is None
            self.result["verify"].append(
                {
                    "variant": variant,
                    "requests": requests,
                    "tokens": sum(map(len, trail.tokens.values())),
                    "payloads": payloads,
                    "tensors": tensors,
                    "chunks": sum(map(len, trail.chunks.values())),
                    "difference": difference,
                    "chunk_difference": chunk_difference,
                }
            )
            say(f"verify {variant} {requests}: {payloads} payloads, {tensors} tensors:", difference or "equal;",
                f"{sum(map(len, trail.chunks.values()))} chunks:", chunk_difference or "equal")  # fmt: skip

        for variant in self.args.variants:
            if variant == "stock" or "stock" in trails:
                self._attempt(f"verify {variant} {requests}", 4, lambda variant=variant: verify(variant))

    def _round(self, requests: int) -> None:
        """Measure all variants, one after the other, without and with the sender."""

        def measure(variant: str, sender: bool) -> None:
            cell = self.cells[variant, requests, sender]
            cell.add(self.bench.measured(variant, requests, sender=sender), WARMUP_STEPS)
            figures = cell.figures(sender=sender)
            say(f"{variant} {requests}{' + sender' if sender else ''}: {figures['tokens_per_s']} tokens/s, step",
                figures["step_us"], "builder", figures["builder_us"], figures["path"])  # fmt: skip

        for sender in (False, True):
            for variant in self.args.variants:
                name = f"{variant} {requests} sender {sender}"
                self._attempt(name, 8, lambda variant=variant, sender=sender: measure(variant, sender))

    def _consumed(self, requests: int) -> None:
        """With the sender, and a process that takes its chunks."""

        def measure(variant: str) -> None:
            cell = Cell()
            cell.add(self.bench.measured(variant, requests, sender=True, consumer=True), WARMUP_STEPS)
            row = {"variant": variant, "sender": True, "requests": requests, **cell.figures(sender=True)}
            self.result["consumed"].append({**row, "payloads_equal": self.equal.get((variant, requests))})
            say(f"{variant} {requests} + sender and consumer: {row['tokens_per_s']} tokens/s, step", row["step_us"])

        for variant in self.args.variants:
            self._attempt(f"{variant} {requests} with a consumer", 8, lambda variant=variant: measure(variant))

    def _profile(self, requests: int) -> None:
        def profile(variant: str, sender: bool) -> None:
            taken = self.bench.profiled(variant, requests, sender=sender).to_json()
            name = f"{variant}{'_sender' if sender else ''}"
            self.result["gap"][name] = {"requests": requests, "sender": sender, **analyse(taken)}
            say(f"gap {name}:", self.result["gap"][name]["gap_us"], "idle", self.result["gap"][name]["idle_us"])
            raw = self.args.scratch / f"profile-{self.args.stage}-{name}.json.gz"
            raw.write_bytes(gzip.compress(json.dumps(taken).encode()))

        for variant in self.args.variants:
            for sender in (True, False):
                if variant != "stock_batched_clones":
                    name = f"profile {variant} sender {sender}"
                    self._attempt(name, 8, lambda variant=variant, sender=sender: profile(variant, sender))

    def _backlog(self, requests: int) -> None:
        """A consumer that lags without limit, for stock and ours."""
        trails: dict[str, Trail] = {}

        def reference() -> None:
            trails["stock"] = self.bench.hashed("stock", requests, sender=False, steps=LAG_STEPS)

        def lag(variant: str) -> None:
            before = self.bench.lagging(variant, requests, LAG_STEPS, trails["stock"], stuck=False)
            stuck = self.bench.lagging(variant, requests, LAG_STEPS, trails["stock"], stuck=True)
            self.result["backlog"].append(
                {
                    "variant": variant,
                    "requests": requests,
                    "held_payloads": stuck["held"],
                    "step_us": stuck["step_us"],
                    "step_us_without": before["step_us"],
                    "pinned_bytes": stuck["pinned_bytes"],
                    "pinned_bytes_without": before["pinned_bytes"],
                    "payloads_equal": stuck["difference"] is None,
                    "difference": stuck["difference"],
                }
            )
            say("backlog", self.result["backlog"][-1])

        self._attempt("backlog reference", 10, reference)
        for variant in self.args.variants:
            if variant != "stock_batched_clones" and trails:
                self._attempt(f"backlog {variant}", 14, lambda variant=variant: lag(variant))

    def _record_traces(self) -> None:
        about = {"stage": self.args.stage, "model": self.args.model.name, "vllm_omni": engine_version(), "runner": "v1"}
        save_traces(self.bench, self.args.scratch / "traces" / self.args.stage, about)

    def _attempt(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Do it if about so many seconds are left; a failure is noted and the next thing is tried."""
        if time.monotonic() + seconds > self.deadline:
            self.result["skipped"].append(name)
        else:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)  # says where; what has been measured is written
            try:
                action()
            except Exception:  # noqa: BLE001  what has been measured must not be lost with what fails
                traceback.print_exc()
                self.result["errors"].append({"at": name, "traceback": traceback.format_exc()})
                self.write()
                self.bench.recover()
            faulthandler.cancel_dump_traceback_later()
        self.write()

    def write(self) -> None:
        """Write everything measured so far, complete or not at all."""
        self.result["rows"] = [
            {
                "engine": self.result["engine"],
                "stage": self.args.stage,
                "variant": variant,
                "sender": sender,
                "requests": requests,
                **cell.figures(sender=sender),
                "payloads_equal": self.equal.get((variant, requests)),
            }
            for (variant, requests, sender), cell in self.cells.items()
            if cell.passes
        ]
        part = self.args.out.with_suffix(".part")
        part.write_text(json.dumps(self.result))
        part.replace(self.args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", required=True, choices=list(STAGES))
    parser.add_argument("--model", required=True, type=Path, help="model folder")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--scratch", required=True, type=Path, help="folder for profiles and traces")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="measured passes per cell, as far as time allows")
    parser.add_argument("--extras", nargs="*", default=[], choices=EXTRAS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    stage = STAGES[args.stage]
    config = engine_config(stage, args.model)
    core = start_engine(config)
    draw_weights(runner_of(core))
    bench = Bench(args.stage, stage, core, config)
    say("engine up, asynchronous output:", bench.runner._should_use_async_omni_output())
    args.out.with_suffix(".ready").touch()
    seconds = sys.stdin.readline().strip()  # our turn
    if not seconds:
        say("nobody wants us to measure")
        return 1
    plan = Plan(bench, args, float(seconds))
    plan.run()
    say("done;", len(plan.result["errors"]), "errors, skipped:", plan.result["skipped"] or "nothing")
    return 1 if plan.result["errors"] else 0


def _leave(status: int) -> NoReturn:
    """End at once: the engine's threads don't end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_STARTED = time.monotonic()

if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except Exception:  # noqa: BLE001  reported, and then the process ends whatever its threads do
        traceback.print_exc()
    _leave(status)
