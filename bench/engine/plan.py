"""The measurements of one stage in its turns. Every result is written immediately."""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.engine.cells import WARMUP_STEPS, Cell
from bench.engine.digests import Trail
from bench.engine.phases import Phase
from bench.engine.timeline import analyse
from bench.json_file import write_json

if TYPE_CHECKING:
    from bench.engine.bench import Bench

LAG_STEPS = 240
STUCK_S = 60.0  # time limit of one measurement, after which the process is ended
# Seconds that a measurement is expected to take, until one of its kind has been timed here.
EXPECTED_S = {"cells": 6.0, "consumer": 6.0, "backlog reference": 8.0, "backlog": 14.0, "traces": 4.0, "profile": 8.0}
_STOCK_AND_OURS = ("stock", "ours")  # the only variants for which the costlier extras are run
_MARGIN = 1.2  # factor on the duration of the last one of its kind
CellKey = tuple[str, int, bool]  # variant, requests, sender


class Plan:
    """The measurements of one stage.

    Parameters
    ----------
    bench
        The live engine.
    args
        The command line of `stage_process`.
    facts
        Fields of the results file: `engine`, `gpu`, `versions`.
    say
        Prints a line to the log.
    """

    def __init__(
        self, bench: Bench, args: argparse.Namespace, facts: dict[str, Any], say: Callable[..., None] = print
    ) -> None:
        self.bench = bench
        self.args = args
        self.say = say
        self.deadline = 0.0  # of the turn
        self.cells: defaultdict[CellKey, Cell] = defaultdict(Cell)
        self.consumed: defaultdict[tuple[str, int], Cell] = defaultdict(Cell)
        self.equal: dict[tuple[str, int], bool] = {}
        self.took_s: dict[str, float] = {}
        self.done: set[str] = set()
        self.result: dict[str, Any] = {
            **facts,
            "stage": args.stage,
            "rows": [],
            "consumed": [],
            "verify": [],
            "backlog": [],
            "gap": {},
            "skipped": [],
            "errors": [],
        }

    def turn(self, phase: Phase, seconds: float) -> None:
        """Do a phase within about `seconds`; measurements for which there is no time are noted as skipped."""
        self.deadline = time.monotonic() + seconds
        most = max(self.args.requests)
        if phase.name == "cells":
            assert phase.requests is not None
            self._round(phase.requests)
        elif phase.name == "verify":
            for requests in sorted(self.args.requests, reverse=True):
                self._verify(requests)
        elif phase.name == "traces":
            self._attempt("traces", "traces", self._record_traces)
        else:
            {"consumer": self._consumer, "backlog": self._backlog, "profile": self._profile}[phase.name](most)

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
            self.say(f"verify {variant} {requests}: {payloads} payloads, {tensors} tensors:", difference or "equal;",
                     f"{sum(map(len, trail.chunks.values()))} chunks:", chunk_difference or "equal")  # fmt: skip

        for variant in self.args.variants:
            if variant == "stock" or "stock" in trails:
                self._attempt(f"verify {variant} {requests}", "verify", partial(verify, variant))

    def _round(self, requests: int) -> None:
        """Measure all variants, one after the other, without and with the sender.

        The order of the variants alternates between forwards and backwards, since a host's speed changes over time.
        """

        def measure(variant: str, sender: bool) -> None:
            cell = self.cells[variant, requests, sender]
            cell.add(self.bench.measured(variant, requests, sender=sender), WARMUP_STEPS)
            self._say_cell(f"{variant} {requests}{' + sender' if sender else ''}", cell)

        rounds = max(len(self.cells[variant, requests, False].passes) for variant in self.args.variants)
        for sender in (False, True):
            backwards = (rounds + sender) % 2
            for variant in self.args.variants[:: -1 if backwards else 1]:
                name = f"{variant} {requests} sender {sender}"
                kind = f"cells {requests} {sender}"
                self._attempt(name, kind, partial(measure, variant, sender))

    def _consumer(self, requests: int) -> None:
        """Measure all variants with the sender and a process that takes its chunks."""

        def measure(variant: str) -> None:
            cell = self.consumed[variant, requests]
            cell.add(self.bench.measured(variant, requests, sender=True, consumer=True), WARMUP_STEPS)
            self._say_cell(f"{variant} {requests} + sender and consumer", cell)

        for variant in self.args.variants:
            name = f"{variant} {requests} with a consumer"
            self._attempt(name, "consumer", partial(measure, variant))

    def _say_cell(self, name: str, cell: Cell) -> None:
        figures = cell.figures(sender=True)
        self.say(f"{name}: {figures['tokens_per_s']} tokens/s, step", figures["step_us"],
                 "builder", figures["builder_us"], figures["path"])  # fmt: skip

    def _profile(self, requests: int) -> None:
        def profile(variant: str, sender: bool) -> None:
            taken = self.bench.profiled(variant, requests, sender=sender).to_json()
            name = f"{variant}{'_sender' if sender else ''}"
            found = self.result["gap"][name] = {"requests": requests, "sender": sender, **analyse(taken)}
            self.say(f"gap {name}:", found["gap_us"], "idle", found["idle_us"])
            raw = self.args.scratch / f"profile-{self.args.stage}-{name}.json.gz"
            raw.write_bytes(gzip.compress(json.dumps(taken).encode()))

        for sender in (True, False):
            for variant in self.args.variants:
                if variant in _STOCK_AND_OURS:
                    name = f"profile {variant} sender {sender}"
                    self._attempt(name, "profile", partial(profile, variant, sender))

    def _backlog(self, requests: int) -> None:
        """Measure stock and ours with a consumer that lags without limit."""
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
                    "steps": stuck["steps"],
                    "steps_without": before["steps"],
                    "held_payloads": stuck["held"],
                    "step_us": stuck["step_us"],
                    "step_us_without": before["step_us"],
                    "gc_us": stuck["gc_us"],
                    "gc_us_without": before["gc_us"],
                    "pinned_bytes": stuck["pinned_bytes"],
                    "pinned_bytes_without": before["pinned_bytes"],
                    "payloads_equal": stuck["difference"] is None,
                    "difference": stuck["difference"],
                }
            )
            self.say("backlog", self.result["backlog"][-1])

        self._attempt("backlog reference", "backlog reference", reference)
        for variant in sorted(self.args.variants, key=lambda variant: variant != "ours"):  # ours matters most
            if variant in _STOCK_AND_OURS and trails:
                self._attempt(f"backlog {variant}", "backlog", partial(lag, variant))

    def _record_traces(self) -> None:
        about = {"stage": self.args.stage, "model": self.args.model.name, "runner": "v1"}
        about["vllm_omni"] = self.result["engine"]
        self.bench.save_traces(self.args.scratch / "traces" / self.args.stage, about)

    def _attempt(self, name: str, kind: str, action: Callable[[], None]) -> None:
        """Run `action` if there is time for as long as the last one of its kind took; a failure is noted, not raised.

        The hashed passes run however long they take, unless no time is left at all.
        """
        expected_s = 0.0
        if kind != "verify":
            expected_s = self.took_s.get(kind) or EXPECTED_S.get(kind) or EXPECTED_S[kind.split()[0]]
        start = time.monotonic()
        if start + expected_s >= self.deadline:
            if name not in self.done and name not in self.result["skipped"]:
                self.result["skipped"].append(name)
        else:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)  # prints where it hangs; earlier results are on disk
            try:
                action()
                self.took_s[kind] = _MARGIN * (time.monotonic() - start)
                self.done.add(name)
            except Exception:  # noqa: BLE001  what has been measured must not be lost with what fails
                traceback.print_exc()
                self.result["errors"].append({"at": name, "traceback": traceback.format_exc()})
                self.write()
                self.bench.recover()
            faulthandler.cancel_dump_traceback_later()
        self.write()

    def write(self) -> None:
        """Write everything measured so far, atomically."""
        self.result["rows"] = [
            self._row(variant, sender, requests, cell)
            for (variant, requests, sender), cell in self.cells.items()
            if cell.passes
        ]
        self.result["consumed"] = [
            self._row(variant, True, requests, cell)
            for (variant, requests), cell in self.consumed.items()
            if cell.passes
        ]
        write_json(self.result, self.args.out, indent=None)

    def _row(self, variant: str, sender: bool, requests: int, cell: Cell) -> dict[str, Any]:
        return {
            "engine": self.result["engine"],
            "stage": self.args.stage,
            "variant": variant,
            "sender": sender,
            "requests": requests,
            **cell.figures(sender=sender),
            "payloads_equal": self.equal.get((variant, requests)),
        }
