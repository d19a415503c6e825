#!/usr/bin/env python3
"""Compare ways to bring a step's payload to the host: `python bench/snapshot.py`. See bench/README.md."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()  # the time limit `--total` includes the imports
REPOSITORY = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # run from a checkout, without installation; bench/ itself holds no top-level modules
    sys.path[0:1] = [str(REPOSITORY), str(REPOSITORY / "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import spanpack  # noqa: E402
from bench._snapshot import chart, results  # noqa: E402
from bench._snapshot.baselines import DeviceCopy, ForeachCopy, MemcpyBatch, OneCopy, TorchCat  # noqa: E402
from bench._snapshot.check import Checked, check  # noqa: E402
from bench._snapshot.engine_source import EngineSource  # noqa: E402
from bench._snapshot.machine import (  # noqa: E402
    CompileCounter,
    Machine,
    check_device,
    gpu_name,
    host_facts,
    open_machine,
)
from bench._snapshot.measure import Bench, Budget, Samples, row  # noqa: E402
from bench._snapshot.ours import Ours, OursStandalone  # noqa: E402
from bench._snapshot.provider import Provider, Unavailable  # noqa: E402
from bench._snapshot.scenarios import SCENARIO_NAMES, Scenario, make_scenario, trace_scenario  # noqa: E402
from bench._snapshot.stock import StockV1, StockV2  # noqa: E402
from bench.command_line import Parser, UsageError, check_file, positive, positive_whole  # noqa: E402
from bench.commit import commit_of  # noqa: E402
from bench.json_file import write_json  # noqa: E402
from omni_runner.trace import load_trace  # noqa: E402

PROVIDERS: dict[str, type[Provider]] = {
    provider.name: provider
    for provider in (
        Ours,
        OursStandalone,
        StockV1,
        StockV2,
        TorchCat,
        ForeachCopy,
        MemcpyBatch,
        OneCopy,
        DeviceCopy,
    )
}
_STOCK = (StockV1, StockV2)
# Relative shares of the total time, by default 1: here pinning, checking and the fewest calls take that much longer.
_SHARES = {"thinker_prefill_32k": 2.0}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    done: list[str] = []
    try:
        return _run(options, done)
    except KeyboardInterrupt:
        count = f"{len(done)} of {len(options.scenarios) + len(options.traces)} scenarios are in {options.file}"
        print(f"stopped; {count if done else 'no scenario is measured yet, nothing is written'}", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, done: list[str]) -> int:
    """Measure all scenarios, adding each to `done` once its results are written; returns the exit status."""
    machine = open_machine(options.device)
    document = _document(options, machine)
    compilations = CompileCounter()
    print(json.dumps({key: value for key, value in document.items() if key not in ("rows", "scenarios")}), flush=True)
    scenarios = _scenarios(options, machine)
    shares = [_SHARES.get(name, 1.0) for name in scenarios]
    skipped = []
    for place, (name, make) in enumerate(scenarios.items()):
        clock = _Clock.start(options, shares[place] / sum(shares[place:]))
        if clock.allowed_s <= 0:
            skipped.append(name)
            continue
        scenario = make()
        about = document["scenarios"][scenario.name] = scenario.about()
        document["rows"] += _measure(machine, scenario, options, compilations, clock)
        del scenario
        _tidy(machine)
        about["seconds"] = clock.seconds()
        write_json(document, options.file)
        done.append(name)
        print(f"{name}: {about['seconds']}", flush=True)
    if done:
        print(f"\n{results.report(document)}\n\n{options.file}\n{_draw(document, options.file.with_suffix('.svg'))}")
    if skipped:
        print(f"skipped, no time was left of --total {options.total:g}: {', '.join(skipped)}")
    return 1 if not done or any("error" in row for row in document["rows"]) else 0


def _draw(document: results.Document, file: Path) -> str:
    """Draw the chart beside the results; returns its path, or the reason why there is none."""
    if not chart.is_possible():
        return "no chart: it needs matplotlib (requirements/bench.txt); snapshot_report.py --chart draws it later"
    chart.draw(document, file)
    return str(file)


@dataclass
class _Clock:
    """The time that one scenario may take, and how it was spent."""

    allowed_s: float
    started: float
    set_up_s: float = 0.0
    measured_s: float = 0.0

    @classmethod
    def start(cls, options: argparse.Namespace, share: float) -> _Clock:
        """Start a scenario, which may take `--seconds`, or its share of what is left of `--total` if that is less."""
        now = time.perf_counter()
        allowed_s = options.seconds
        if options.total is not None:
            allowed_s = min(allowed_s, (_STARTED + options.total - now) * share)
        return cls(allowed_s, now)

    def begin_measuring(self) -> float:
        """End the set-up; returns the seconds left for measuring."""
        self.set_up_s = time.perf_counter() - self.started
        return self.allowed_s - self.set_up_s

    def end_measuring(self) -> None:
        self.measured_s = time.perf_counter() - self.started - self.set_up_s

    def seconds(self) -> dict[str, float]:
        """Seconds for the results: set-up (the step, the providers and all checks), measuring, and in total."""
        total_s = time.perf_counter() - self.started
        return {"set_up": round(self.set_up_s, 2), "measured": round(self.measured_s, 2), "total": round(total_s, 2)}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    for option, known in (("--scenarios", SCENARIO_NAMES), ("--providers", PROVIDERS)):
        parser.add_argument(option, default=",".join(known), metavar="A,B,...", help=f"some of {' '.join(known)} (all)")
    parser.add_argument(
        "--calls", type=positive_whole, default=2000, help="of each provider, scenario and measure (2000)"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=22.0,
        help="for one scenario, its set-up and checks included; slow providers make fewer calls then (22)",
    )
    parser.add_argument(
        "--total",
        type=positive,
        metavar="SECONDS",
        help="for everything; the scenarios still to come share what is left, and are skipped when nothing is",
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a recorded trace as a scenario")
    parser.add_argument("--stock-wheel", type=Path, help="a wheel of vllm-omni 0.30, where it is not installed")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench" / "results", help="results go to OUT/GPU/")
    parser.add_argument("--commit", help="what to note as the commit, where there is no git checkout")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1 or cpu; cpu tries the program, its figures mean nothing"
    )
    options = parser.parse_args(arguments)
    options.scenarios = _choice(parser, options.scenarios, SCENARIO_NAMES)
    options.providers = _choice(parser, options.providers, PROVIDERS)
    if not (options.providers and (options.scenarios or options.trace)):
        parser.error("nothing to measure: expected a provider, and a scenario or a trace")
    try:
        check_device(options.device)
        options.traces = _traces(options.trace)
        options.file = results.file_in(options.out, gpu_name(torch.device(options.device)))
        check_file("--out", options.file)
        options.engine = _engine_source(options.stock_wheel)
    except UsageError as error:
        parser.error(str(error))
    return options


def _choice(parser: argparse.ArgumentParser, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    chosen = list(dict.fromkeys(name for name in given.split(",") if name))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def _traces(paths: Sequence[Path]) -> dict[str, Path]:
    """Paths of recorded traces by scenario name. Each is read here as a check, and again when it is measured."""
    found: dict[str, Path] = {}
    for path in paths:
        try:
            name = trace_scenario(load_trace(path)).name
        except ValueError as error:
            raise UsageError(f"--trace: {error}") from error
        if name in found:
            raise UsageError(f"--trace: {found[name]} and {path} would both be {name}; expected different names")
        found[name] = path
    return found


def _engine_source(wheel: Path | None) -> EngineSource | None:
    try:
        return EngineSource.from_wheel(wheel) if wheel is not None else EngineSource.installed()
    except Unavailable as reason:
        if wheel is not None:
            raise UsageError(f"--stock-wheel: {reason}") from reason
        print(f"stock_v1 and stock_v2 are left out: {reason}", flush=True)
        return None


def _document(options: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    engine = options.engine
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "spanpack": spanpack.__version__,
        "vllm_omni": None if engine is None else f"{engine.version} ({engine.origin})",
    }
    for package in ("triton", "cuda.bindings"):
        versions[package] = results.version_of(package)
    return {
        "bench": "snapshot",
        "gpu": gpu_name(machine.device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": options.commit or commit_of(REPOSITORY),
        "versions": versions,
        "host": host_facts(),
        "settings": {"calls": options.calls, "seconds": options.seconds, "total": options.total},
        "scenarios": {},
        "rows": [],
    }


def _scenarios(options: argparse.Namespace, machine: Machine) -> dict[str, Callable[[], Scenario]]:
    """A function that makes each scenario, by scenario name."""
    made: dict[str, Callable[[], Scenario]] = {
        name: partial(make_scenario, name, machine.device) for name in options.scenarios
    }
    return made | {name: partial(_trace_scenario, path, machine) for name, path in options.traces.items()}


def _trace_scenario(path: Path, machine: Machine) -> Scenario:
    return trace_scenario(load_trace(path, machine.device))


def _measure(
    machine: Machine,
    scenario: Scenario,
    options: argparse.Namespace,
    compilations: CompileCounter,
    clock: _Clock,
) -> list[dict[str, Any]]:
    """The rows of one scenario. Every provider is checked before any of them is timed."""
    checked: dict[str, Checked] = {}
    providers: list[Provider] = []
    notes: dict[str, str] = {}
    try:
        for name in options.providers:
            try:
                provider = _make(PROVIDERS[name], machine, scenario, options.engine)
                providers.append(provider)
                checked[name] = check(provider, machine, scenario)
            except Unavailable as reason:
                notes[name] = str(reason)
            except Exception as failure:  # noqa: BLE001  the others' figures are still worth having
                notes[name] = f"error: {type(failure).__name__}: {failure}"
                print(f"{scenario.name}, {name}: {notes[name]}", flush=True)
        able = [provider for provider in providers if provider.name in checked]
        gc.collect(1)  # garbage of the checks; older garbage was collected before this scenario
        machine.release_cached()
        gc.freeze()  # as the engine does after start-up
        bench = Bench(machine, scenario, able, compilations)
        bench.run(Budget(options.calls, clock.begin_measuring()))
        clock.end_measuring()
        for name, what in bench.failures.items():
            notes[name] = f"error: {what}"
            print(f"{scenario.name}, {name}: {what}", flush=True)
        return [
            _row(scenario, name, bench.samples.get(name), checked.get(name), notes.get(name))
            for name in options.providers
        ]
    finally:
        for provider in providers:
            provider.close()
        gc.unfreeze()


def _make(kind: type[Provider], machine: Machine, scenario: Scenario, engine: EngineSource | None) -> Provider:
    if kind not in _STOCK:
        return kind(machine, scenario)
    if engine is None:
        raise Unavailable("no vllm-omni to compare with")
    return kind(machine, scenario, engine)


def _row(
    scenario: Scenario, name: str, samples: Samples | None, checked: Checked | None, note: str | None
) -> dict[str, Any]:
    lands = checked is not None and PROVIDERS[name].lands
    found = row(scenario, name, samples or Samples(), checked.d2h_bytes if checked else 0, lands=lands)
    if samples is None:
        found |= {"pinned_allocations": None, "compilations": None}
    if note is not None:
        found["error" if note.startswith("error: ") else "note"] = note.removeprefix("error: ")
    return found


def _tidy(machine: Machine) -> None:
    gc.collect()
    machine.release_cached()


if __name__ == "__main__":
    sys.exit(main())
