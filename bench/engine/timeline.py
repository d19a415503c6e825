"""A few decode steps under torch's profiler, and the gap between them.

Only the device side is profiled; host spans come from the bench's own timers, since profiling every torch call would
slow down the very code that is shown. `analyse` needs no GPU: it works on the output of `Profile.to_json`.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engine.probes import Probes, Span

FIRST_STEP, NUM_STEPS = 24, 14
SETTLING_STEPS = 3  # first steps under the profiler, left out of the figures
DRAWN_STEPS = 3
_HOST_LANES = ("execute_model", "sample_tokens", "snapshot", "output_object", "get_output", "update", "builder", "send")


@dataclass(frozen=True)
class Profile:
    """Times in microseconds since the profiler was started.

    Attributes
    ----------
    spans
        Calls on the host by name: `[start, end]`.
    device
        Kernels and copies: `[start, end, stream, kind, launch]`, where `kind` is kernel or copy.
    launches
        Calls that launched them, by launch number: `[start, is_graph]`.
    """

    spans: dict[str, list[list[float]]]
    device: list[list[Any]]
    launches: dict[int, list[float]]

    def to_json(self) -> dict[str, Any]:
        return {"spans": self.spans, "device": self.device, "launches": self.launches}


class Recorder:
    """Switches the profiler on and off as the steps of a pass go by."""

    last_step = FIRST_STEP + NUM_STEPS

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._synchronized_ns = 0
        self._origin_ns = 0  # start of the profiler by perf_counter_ns

    def on_step(self, step: int) -> None:
        if step == FIRST_STEP:
            self._profiler.start()
            self._origin_ns = time.perf_counter_ns()
            self._epoch_ns = time.time_ns() - time.perf_counter_ns()
            # Both clocks record this call, which aligns them: the profiler's may differ from the system's.
            self._synchronized_ns = time.perf_counter_ns()
            torch.cuda.synchronize()
            self._probes.start()
        elif step == self.last_step:
            self._probes.stop()
            torch.cuda.synchronize()
            self._profiler.stop()

    def profile(self) -> Profile:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        return read_trace(
            trace,
            spans=self._probes.spans,
            epoch_ns=self._epoch_ns,
            origin_ns=self._origin_ns,
            synchronized_ns=self._synchronized_ns,
        )


@contextmanager
def profiled_steps(probes: Probes) -> Iterator[Recorder]:
    yield Recorder(probes)
    probes.stop()


def read_trace(
    trace: dict[str, Any], *, spans: dict[str, list[Span]], epoch_ns: int, origin_ns: int, synchronized_ns: int
) -> Profile:
    """Convert a Chrome trace and the host's spans to one clock.

    Parameters
    ----------
    epoch_ns
        Nanoseconds to add to `perf_counter_ns` to get the time since 1970.
    origin_ns, synchronized_ns
        When the profiler was started and when the device was synchronized, by `perf_counter_ns`.
    """
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3 - epoch_ns / 1e3 - origin_ns / 1e3
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    seen = [event["ts"] + base_us for event in calls if event["name"] == "cudaDeviceSynchronize"]
    shift_us = min(seen) - (synchronized_ns - origin_ns) / 1e3 if seen else 0.0

    def moment(event: dict[str, Any], end: bool = False) -> float:
        return round(event["ts"] + (event["dur"] if end else 0) + base_us - shift_us, 2)

    launches = {
        event["args"]["correlation"]: [moment(event), "GraphLaunch" in event["name"]]
        for event in calls
        if "correlation" in event.get("args", {})
    }
    device = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = "copy" if "DtoH" in event["name"] else "kernel"
            arguments = event["args"]
            device.append(
                [moment(event), moment(event, end=True), arguments.get("stream"), kind, arguments.get("correlation")]
            )
    host = {
        key: [[round((at_ns - origin_ns) / 1e3, 1) for at_ns in (span.start_ns, span.end_ns)] for span in taken]
        for key, taken in spans.items()
    }
    used = {entry[4] for entry in device}
    return Profile(host, sorted(device), {number: call for number, call in launches.items() if number in used})


def analyse(profile: dict[str, Any]) -> dict[str, Any]:
    """Gaps between consecutive decode steps, and the lanes of a figure.

    A decode step's forward pass is the last CUDA graph that its `execute_model` launches. The gap is the time from the
    end of one forward pass to the start of the next; `idle_us` is the part of it in which no kernel runs.

    Returns
    -------
    dict
        `gap_us`, `idle_us`, `step_us`: one value per step. `lanes`: what to draw of `DRAWN_STEPS` typical steps.
    """
    launches = {int(number): call for number, call in profile["launches"].items()}
    kernels = [entry for entry in profile["device"] if entry[3] == "kernel"]
    forwards = _forward_passes(profile["spans"].get("execute_model", []), launches, kernels)[SETTLING_STEPS:]
    busy = _merged([(entry[0], entry[1]) for entry in kernels])
    gaps = [(before[1], after[0]) for before, after in pairwise(forwards)]
    found = {
        "gap_us": [round(end - start, 1) for start, end in gaps],
        "idle_us": [round(end - start - _overlap(busy, start, end), 1) for start, end in gaps],
        "step_us": [round(after[0] - before[0], 1) for before, after in pairwise(forwards)],
        "lanes": {},
    }
    if len(forwards) > DRAWN_STEPS:
        found["lanes"] = _lanes(profile, forwards, found["step_us"])
    return found


def _forward_passes(
    executions: Sequence[Sequence[float]], launches: dict[int, list[float]], kernels: Sequence[Sequence[Any]]
) -> list[tuple[float, float]]:
    of_launch = defaultdict(list)
    for start, end, _stream, _kind, launch in kernels:
        of_launch[launch].append((start, end))
    graphs = sorted((call[0], number) for number, call in launches.items() if call[1] and number in of_launch)
    forwards = []
    for execution_start, execution_end in executions:
        inside = [number for start, number in graphs if execution_start <= start < execution_end]
        if inside:
            times = of_launch[inside[-1]]
            forwards.append((min(start for start, _ in times), max(end for _, end in times)))
    return forwards


def _lanes(profile: dict[str, Any], forwards: list[tuple[float, float]], steps_us: list[float]) -> dict[str, Any]:
    """The lanes of those consecutive steps whose mean length is nearest to the median."""
    typical = median(steps_us) * DRAWN_STEPS
    first = min(range(len(steps_us) - DRAWN_STEPS + 1), key=lambda i: abs(sum(steps_us[i : i + DRAWN_STEPS]) - typical))
    origin = forwards[first][0]
    window = (origin, forwards[first + DRAWN_STEPS][0] + 0.02 * typical)  # up to just after the next one starts
    kernels = [(entry[0], entry[1]) for entry in profile["device"] if entry[3] == "kernel"]
    copies = [(entry[0], entry[1]) for entry in profile["device"] if entry[3] == "copy"]
    drawn = {
        "forward": [list(forward) for forward in forwards[first : first + DRAWN_STEPS + 1]],
        "kernels": _merged(kernels, slack=3.0),
        "copies": _merged(copies, slack=3.0),
        **{key: profile["spans"].get(key, []) for key in _HOST_LANES},
    }
    return {
        "end_us": round(window[1] - origin, 1),
        **{key: _cut(intervals, window, origin) for key, intervals in drawn.items()},
    }


def _merged(intervals: Sequence[tuple[float, float]], slack: float = 0.0) -> list[list[float]]:
    """Union of intervals; those closer than `slack` become one."""
    union: list[list[float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1] + slack:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return union


def _overlap(union: Sequence[Sequence[float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in union)


def _cut(intervals: Sequence[Sequence[float]], window: tuple[float, float], origin: float) -> list[list[float]]:
    low, high = window
    return [
        [round(max(start, low) - origin, 1), round(min(end, high) - origin, 1)]
        for start, end in intervals
        if end > low and start < high
    ]
