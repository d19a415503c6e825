"""Timers around the parts of a step's output path."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

# Methods of the runner and the names of their figures. The builder runs on a background thread.
RUNNER_METHODS = {
    "execute_model": "execute_model",
    "_snapshot_omni_output_tensors_for_async_output": "snapshot",
    "_build_omni_model_runner_output_from_snapshot": "builder",
}
SCHEDULER_METHODS = {"schedule": "schedule", "update_from_output": "update"}
OUTPUT_METHODS = {"__init__": "output_object", "get_output": "get_output"}
TAIL_STEPS = 3  # left out, as no further steps follow these


class Span(NamedTuple):
    """One call: its start and end, and the CPU time of its thread."""

    start_ns: int  # of time.perf_counter_ns
    end_ns: int
    cpu_ns: int
    thread: int


class Probes:
    """Times the calls of a live engine while `on`.

    The methods are looked up in the class at every call, since variants replace the class of the live runner.
    """

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self.on = False
        self.spans: defaultdict[str, list[Span]] = defaultdict(list)
        self.gc_us: list[float] = []  # garbage collection pauses, of any thread
        self._gc_start_ns = 0
        gc.callbacks.append(self._watch_gc)
        self._watched: set[type] = set()
        self._inside = threading.local()
        for name, key in RUNNER_METHODS.items():
            self._time_method(runner, name, key)
        for name, key in SCHEDULER_METHODS.items():
            self._time_method(scheduler, name, key)
        self._time_method(runner, "sample_tokens", "sample_tokens", then=self._watch_output)

    def start(self) -> None:
        self.spans.clear()
        self.gc_us.clear()
        self.on = True

    def stop(self) -> None:
        self.on = False

    def timed(self, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that it is timed under `key`; of nested calls under one key, only the outermost counts."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inside = self._inside.__dict__
            if not self.on or key in inside:
                return function(*args, **kwargs)
            inside[key] = True
            cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                end_ns = time.perf_counter_ns()
                span = Span(start_ns, end_ns, time.thread_time_ns() - cpu_ns, threading.get_ident())
                del inside[key]
                self.spans[key].append(span)

        return wrapper

    def _time_method(self, owner: Any, name: str, key: str, then: Callable[[Any], None] | None = None) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(type(owner), name)(owner, *args, **kwargs)

        timed = self.timed(key, call)

        def call_and_look(*args: Any, **kwargs: Any) -> Any:
            result = timed(*args, **kwargs)
            then(result)  # type: ignore[misc]
            return result

        setattr(owner, name, call_and_look if then else timed)

    def _watch_gc(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._gc_start_ns = time.perf_counter_ns()
        elif self.on:
            self.gc_us.append((time.perf_counter_ns() - self._gc_start_ns) / 1e3)

    def _watch_output(self, output: Any) -> None:
        """Time the class of asynchronous outputs, which first appears in the passes before a measured one."""
        output_cls = type(output)
        if output_cls in self._watched or not hasattr(output_cls, "get_output"):
            return
        self._watched.add(output_cls)
        for name, key in OUTPUT_METHODS.items():
            setattr(output_cls, name, self.timed(key, getattr(output_cls, name)))


def step_times_us(spans: Sequence[Span], warmup_steps: int) -> list[float]:
    """Times between consecutive starts of `execute_model`, in microseconds."""
    return steady([(after.start_ns - before.start_ns) / 1e3 for before, after in pairwise(spans)], warmup_steps)


def wall_us(spans: Sequence[Span], warmup_steps: int) -> list[float]:
    return steady([(span.end_ns - span.start_ns) / 1e3 for span in spans], warmup_steps)


def steady(values: list[float], warmup_steps: int) -> list[float]:
    """Drop the first and the last steps, unless that would leave none."""
    return values[warmup_steps:-TAIL_STEPS] or values


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50 and p99; None if there is no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 99)}
