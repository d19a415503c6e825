"""The two parts of the demo; each prints its results and returns whether it found no difference."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch

import spanpack
from omni_runner.demo.payload_log import compare
from omni_runner.demo.report import engine_report, traces_report
from omni_runner.demo.runs import RunFailed, missing_engine, run_both
from omni_runner.demo.traces import shipped_traces
from omni_runner.replay import default_device, replay
from omni_runner.trace import load_trace


def engine_part(*, prefix_caching: bool, chunked_prefill: bool) -> bool:
    """Run the real engine with both runners and return whether they agree; True if there is no engine."""
    reason = missing_engine()
    if reason:
        print(f"The real engine: skipped, {reason}\n", flush=True)
        return True
    options = ["--prefix-caching"] * prefix_caching + ["--chunked-prefill"] * chunked_prefill
    how = " and ".join(option.removeprefix("--").replace("-", " ") for option in options)
    print(f"The real engine, stock runner and packed runner{f', with {how}' if how else ''}:", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="omni-runner-demo-"))
    try:
        runs = run_both(folder, options)
    except RunFailed as error:
        print(f"  {error}\n", file=sys.stderr, flush=True)
        return False
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    comparison = compare(runs["stock"], runs["packed"])
    print(engine_report(runs["stock"], runs["packed"], comparison), flush=True)
    if comparison.differences:
        print(f"  both runs are kept in {folder}\n", flush=True)
        return False
    print(flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return True


def traces_part() -> bool:
    """Pack the recorded steps and return whether the payloads equal the reference."""
    device = default_device()
    with spanpack.Packer(device) as packer:
        how = {"triton": "the Triton kernel", "torch": "the torch backend"}[packer.backend]
        where = "the CPU" if device == "cpu" else torch.cuda.get_device_name(device)
        print(f"Recorded steps of real stages, packed by {how} on {where}, and plain slicing:", flush=True)
        replays = [(path.name, replay(load_trace(path, device), packer)) for path in shipped_traces()]
    print(traces_report(replays))
    return all(result.identical for _, result in replays)
