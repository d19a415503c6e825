"""Figures of one cell of the table: a variant at a number of requests, with or without the sender."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench.engine.probes import Span, quantiles, steady, step_times_us, wall_us

WARMUP_STEPS = 15  # at the start of a measured pass, left out of its figures
# Figures of a row, each given as p50 and p99 of the wall time in microseconds.
TIMED = ("sample_tokens", "snapshot", "output_object", "builder", "get_output", "execute_model", "schedule", "update")


@dataclass(frozen=True)
class Pass:
    """The results of one measured pass. `engine_cpu_us` is that of the thread that steps the engine."""

    spans: Mapping[str, Sequence[Span]]
    seconds: float
    tokens: int
    chunks: int = 0
    backlog: int = 0
    pinned_bytes: int | None = None
    process_cpu_us: float = 0.0
    engine_cpu_us: float = 0.0
    path: Mapping[str, int] = field(default_factory=dict)
    gc_us: Sequence[float] = ()


@dataclass
class Cell:
    """Pools the passes of one cell: quantiles are over the steps of all passes."""

    passes: list[Pass] = field(default_factory=list)
    times_us: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_us: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, taken: Pass, warmup_steps: int) -> None:
        self.passes.append(taken)
        steps = taken.spans.get("execute_model", ())
        self.times_us["step"] += step_times_us(steps, warmup_steps)
        for key in TIMED:
            self.times_us[key] += wall_us(taken.spans.get(key, ()), warmup_steps)
        count = max(len(steps), 1)
        for key in ("sample_tokens", "builder"):
            cpu = [span.cpu_ns / 1e3 for span in taken.spans.get(key, ())]
            self.cpu_us[key] += steady(cpu, warmup_steps)
        self.cpu_us["sender"].append(sum(span.cpu_ns for span in taken.spans.get("send", ())) / 1e3 / count)
        self.cpu_us["engine"].append(taken.engine_cpu_us / count)
        self.cpu_us["process"].append(taken.process_cpu_us / count)

    def figures(self, *, sender: bool) -> dict[str, Any]:
        """The figures of a row: rates over whole passes, times of steady decode steps."""
        seconds = sum(taken.seconds for taken in self.passes)
        path: Counter[str] = Counter()
        for taken in self.passes:
            path.update(taken.path)
        gc_us = [pause for taken in self.passes for pause in taken.gc_us]
        pinned = [taken.pinned_bytes for taken in self.passes if taken.pinned_bytes is not None]
        return {
            "tokens_per_s": round(sum(taken.tokens for taken in self.passes) / seconds, 1),
            "chunks_per_s": round(sum(taken.chunks for taken in self.passes) / seconds, 1) if sender else None,
            **{f"{key}_us": quantiles(self.times_us[key]) for key in ("step", *TIMED)},
            "pinned_bytes": max(pinned, default=None),
            "backlog": max(taken.backlog for taken in self.passes),
            # CPU time of the threads and of the process, mean per step.
            "cpu_us": {key: round(fmean(values), 1) for key, values in self.cpu_us.items() if values},
            # Garbage collection pauses over whole passes: a full collection visits every live payload.
            "gc_us": {"longest": round(max(gc_us, default=0.0), 1), "total": round(sum(gc_us), 1)},
            "steps": len(self.times_us["step"]),
            "passes": len(self.passes),
            "path": dict(path),
        }
