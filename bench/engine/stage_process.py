"""Run one stage in its own process: start its engine, then wait for turns and measure.

`bench.engine.run` starts this program and writes a line to its standard input for each turn: the number of seconds and
the phase. The number of finished turns is written to a file beside the results. The program ends when its input ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch

from bench.engine.bench import Bench
from bench.engine.engine import draw_weights, engine_config, engine_version, runner_of, start_engine
from bench.engine.phases import Phase
from bench.engine.plan import Plan
from bench.engine.stages import STAGES, VARIANTS


def say(*parts: object) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s]", *parts, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", required=True, choices=list(STAGES))
    parser.add_argument("--model", required=True, type=Path, help="model folder")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--scratch", required=True, type=Path, help="folder for profiles and traces")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    stage = STAGES[args.stage]
    config = engine_config(stage, args.model)
    core = start_engine(config)
    draw_weights(runner_of(core))
    bench = Bench(args.stage, stage, core, config)
    say("engine up, asynchronous output:", bench.runner._should_use_async_omni_output())
    facts = {
        "engine": engine_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("vllm-omni", "vllm", "torch", "triton")},
    }
    plan = Plan(bench, args, facts, say)
    args.out.with_suffix(".ready").touch()
    for turns, line in enumerate(iter(sys.stdin.readline, ""), start=1):
        seconds, _, phase = line.strip().partition(" ")
        plan.turn(Phase.parse(phase), float(seconds))
        args.out.with_suffix(".turns").write_text(str(turns))
    say("done;", len(plan.result["errors"]), "errors, skipped:", plan.result["skipped"] or "nothing")
    return 1 if plan.result["errors"] else 0


def _leave(status: int) -> NoReturn:
    """End the process immediately, since the engine's threads don't end by themselves."""
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
