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
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # from a checkout, without installing; bench/ itself holds no top-level modules
    sys.path[0:1] = [str(REPOSITORY), str(REPOSITORY / "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import spanpack  # noqa: E402
from bench._snapshot import results  # noqa: E402
from bench._snapshot.baselines import DeviceCopy, ForeachCopy, MemcpyBatch, OneCopy, TorchCat  # noqa: E402
from bench._snapshot.check import Checked, check  # noqa: E402
from bench._snapshot.engine_source import EngineSource  # noqa: E402
from bench._snapshot.machine import (  # noqa: E402
    CompileCounter,
    Machine,
    commit_of,
    gpu_name,
    host_facts,
    open_machine,
)
from bench._snapshot.measure import Bench, Budget, Samples, row  # noqa: E402
from bench._snapshot.ours import Ours, OursStandalone  # noqa: E402
from bench._snapshot.provider import Provider, Unavailable  # noqa: E402
from bench._snapshot.scenarios import SCENARIO_NAMES, Scenario, make_scenario, trace_scenario  # noqa: E402
from bench._snapshot.stock import StockV1, StockV2  # noqa: E402
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = open_machine(options.device)
    engine = _engine_source(options.stock_wheel)
    document = _document(options, machine, engine)
    file = results.file_in(options.out, document["gpu"])
    compilations = CompileCounter()
    print(json.dumps({key: value for key, value in document.items() if key not in ("rows", "scenarios")}), flush=True)
    for make in _scenarios(options, machine):
        start = time.perf_counter()
        scenario = make()
        document["scenarios"][scenario.name] = scenario.about()
        document["rows"] += _measure(machine, scenario, options, engine, compilations)
        results.write(document, file)
        print(f"{scenario.name}: {time.perf_counter() - start:.1f} s", flush=True)
        del scenario
        _tidy(machine)
    print(f"\n{results.table(document)}\n\n{results.targets_table(document)}\n\n{file}")
    return 1 if any("error" in row for row in document["rows"]) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, known in (("--scenarios", SCENARIO_NAMES), ("--providers", PROVIDERS)):
        parser.add_argument(option, default=",".join(known), metavar="A,B,...", help=f"some of {' '.join(known)} (all)")
    parser.add_argument("--calls", type=int, default=2000, help="of each provider, scenario and measure (2000)")
    parser.add_argument(
        "--seconds", type=float, default=22.0, help="for one scenario; slow providers make fewer calls then (22)"
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
    return options


def _choice(parser: argparse.ArgumentParser, given: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    chosen = [name for name in given.split(",") if name]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


def _engine_source(wheel: Path | None) -> EngineSource | None:
    try:
        return EngineSource.from_wheel(wheel) if wheel is not None else EngineSource.installed()
    except Unavailable as reason:
        if wheel is not None:
            raise SystemExit(f"--stock-wheel: {reason}") from reason
        print(f"stock_v1 and stock_v2 are left out: {reason}", flush=True)
        return None


def _document(options: argparse.Namespace, machine: Machine, engine: EngineSource | None) -> dict[str, Any]:
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
        "settings": {"calls": options.calls, "seconds": options.seconds},
        "scenarios": {},
        "rows": [],
    }


def _scenarios(options: argparse.Namespace, machine: Machine) -> list[Callable[[], Scenario]]:
    made: list[Callable[[], Scenario]] = [
        lambda name=name: make_scenario(name, machine.device) for name in options.scenarios
    ]
    return made + [lambda path=path: trace_scenario(load_trace(path, machine.device)) for path in options.trace]


def _measure(
    machine: Machine,
    scenario: Scenario,
    options: argparse.Namespace,
    engine: EngineSource | None,
    compilations: CompileCounter,
) -> list[dict[str, Any]]:
    """The rows of one scenario. Every provider is checked before any of them is timed."""
    checked: dict[str, Checked] = {}
    providers: list[Provider] = []
    notes: dict[str, str] = {}
    try:
        for name in options.providers:
            try:
                provider = _make(PROVIDERS[name], machine, scenario, engine)
                providers.append(provider)
                checked[name] = check(provider, machine, scenario)
            except Unavailable as reason:
                notes[name] = str(reason)
            except Exception as failure:  # noqa: BLE001  the others' figures are still worth having
                notes[name] = f"error: {type(failure).__name__}: {failure}"
                print(f"{scenario.name}, {name}: {notes[name]}", flush=True)
        able = [provider for provider in providers if provider.name in checked]
        _tidy(machine)
        gc.freeze()  # as the engine does once it is up
        bench = Bench(machine, scenario, able, compilations)
        bench.run(Budget(options.calls, options.seconds))
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
    machine.synchronize()
    if machine.compute is not None:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
