"""The passes that are run on a live engine: hashed, measured, lagging, profiled."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

from bench.engine.cells import WARMUP_STEPS, Cell, Pass
from bench.engine.consumer import consume_chunks
from bench.engine.digests import Trail, request_index, signature
from bench.engine.engine import runner_of
from bench.engine.pinned import PinnedMemory
from bench.engine.probes import Probes
from bench.engine.prompts import RequestMaker
from bench.engine.sender import Sender
from bench.engine.stages import Stage
from bench.engine.timeline import Profile, profiled_steps
from bench.engine.variants import Variants, resolve

WARM_PASS_STEPS = 12  # of the warm-up before a measured pass
HASHED_STEPS = 16


class Bench:
    """A live engine of one stage, and the passes that run on it.

    Parameters
    ----------
    name, stage
        The stage and its name.
    core, config
        Its engine, started with the stock runner, and its config.
    """

    def __init__(self, name: str, stage: Stage, core: EngineCore, config: VllmConfig) -> None:
        self.stage = stage
        self.runner = runner_of(core)
        self._core = core
        self._scheduler = core.scheduler
        self._requests = RequestMaker(core, config, name, stage.greedy)
        self.pinned = PinnedMemory(self.runner)
        self.probes = Probes(self.runner, core.scheduler)
        self.sender = Sender(core.scheduler, resolve(stage.next_stage_input), self.probes)
        self.variants = Variants(self.runner)
        self._passes = 0
        self._trail: Trail | None = None
        self._watch_outputs()

    def hashed(self, variant: str, requests: int, *, sender: bool, steps: int = HASHED_STEPS) -> Trail:
        """Run seeded requests; returns their tokens, payloads and, with the sender, chunks."""
        self.variants.apply(variant)
        self.sender.reset()
        self.sender.switch(sender)
        self._trail = self.sender.trail = Trail()
        try:
            self.run(requests, steps, seeded=True)
            if sender:
                self.sender.settle(20.0)
            return self._trail
        finally:
            self._trail = self.sender.trail = None
            self._quiet()

    def measured(self, variant: str, requests: int, *, sender: bool, consumer: bool = False) -> Pass:
        """Run a measured pass after a short warm-up pass. With `consumer`, another process takes the chunks."""
        self._prepare(variant, requests, sender=sender)
        with consume_chunks() if consumer else nullcontext():
            return self._measure(variant, requests)

    def _measure(self, variant: str, requests: int) -> Pass:
        path_before = packed_path_counts(self.runner)
        self.pinned.start()
        self.probes.start()
        cpu_ns, own_cpu_ns = time.process_time_ns(), time.thread_time_ns()
        seconds = self.run(requests, self.stage.steps + WARMUP_STEPS)
        cpu_ns, own_cpu_ns = time.process_time_ns() - cpu_ns, time.thread_time_ns() - own_cpu_ns
        self.probes.stop()
        taken = Pass(
            spans={key: list(spans) for key, spans in self.probes.spans.items()},
            seconds=seconds,
            tokens=requests * (self.stage.steps + WARMUP_STEPS),
            chunks=self.sender.chunks,
            backlog=self.sender.backlog,
            pinned_bytes=self.pinned.peak_bytes(ours=variant == "ours"),
            process_cpu_us=cpu_ns / 1e3,
            engine_cpu_us=own_cpu_ns / 1e3,
            path={name: count - path_before.get(name, 0) for name, count in packed_path_counts(self.runner).items()},
            gc_us=list(self.probes.gc_us),
        )
        self._quiet()
        return taken

    def lagging(self, variant: str, requests: int, steps: int, stock: Trail, *, stuck: bool) -> dict[str, Any]:
        """Run a pass whose payloads nobody ever takes (`stuck`), or the same pass without a lagging consumer.

        Returns
        -------
        dict
            `step_us`, `pinned_bytes`, `held` (payloads alive at the end) and, when stuck, `difference` (None if the
            payloads, read after the pass, equal those of `stock`).
        """
        self._prepare(variant, requests, sender=stuck)
        if stuck:
            self.sender.hold()
        self.pinned.start()
        self.probes.start()
        seconds = self.run(requests, steps, seeded=True)
        self.probes.stop()
        cell = Cell()
        tasks = self.sender.held() if stuck else []
        taken = Pass(
            spans={key: list(spans) for key, spans in self.probes.spans.items()},
            seconds=seconds,
            tokens=requests * steps,
            pinned_bytes=self.pinned.peak_bytes(ours=variant == "ours"),
            gc_us=list(self.probes.gc_us),
        )
        cell.add(taken, WARMUP_STEPS)
        report: dict[str, Any] = {**cell.figures(sender=False), "held": len(tasks)}
        if stuck:
            report["difference"] = _held_difference(tasks, stock)
        self._quiet()
        return report

    def profiled(self, variant: str, requests: int, *, sender: bool) -> Profile:
        """Profile a few decode steps; returns their kernels, copies and host spans."""
        self._prepare(variant, requests, sender=sender)
        with profiled_steps(self.probes) as recorder:
            self.run(requests, recorder.last_step + 12, on_step=recorder.on_step)
        self._quiet()
        return recorder.profile()

    def save_traces(self, path: Path, about: dict[str, Any]) -> None:
        """Record steps of the stock runner in which some requests are prefilled while others decode."""
        from bench.engine.recording import record  # noqa: PLC0415  needs safetensors, which no other pass does

        self.variants.apply("stock")
        with record(self.runner, path, about, steps=10):
            self.run(5, 12, steps_apart=2)

    def recover(self) -> None:
        """Abort whatever a failed pass left behind."""
        self.probes.stop()
        self._trail = self.sender.trail = None
        self._core.abort_requests(list(self._scheduler.requests))
        for _ in range(8):
            if not (self._scheduler.has_requests() or self._core.batch_queue):
                break
            self._core.step_fn()
        self._quiet()

    def run(
        self,
        requests: int,
        steps: int,
        *,
        seeded: bool = False,
        steps_apart: int = 0,
        on_step: Callable[[int], None] | None = None,
    ) -> float:
        """Decode `steps` tokens for requests that arrive together, or `steps_apart` steps apart; returns seconds."""
        torch.manual_seed(0)  # captured graphs of the code predictor draw from the global generator
        self._passes += 1
        prefix = f"n{self._passes}p{os.getpid()}"
        arriving = deque(self._requests.make(f"{prefix}-{index}", index, steps, seeded) for index in range(requests))
        start, done = time.perf_counter(), 0
        while arriving or self._scheduler.has_requests() or self._core.batch_queue:
            while arriving and (requests - len(arriving)) * steps_apart <= done:
                self._core.add_request(*arriving.popleft())
            if on_step is not None:
                on_step(done)
            self._core.step_fn()
            done += 1
            if done > 4 * steps + 200:
                raise RuntimeError(f"requests are unfinished after {done} engine steps, expected about {steps}")
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def _prepare(self, variant: str, requests: int, *, sender: bool) -> None:
        """Apply the variant and run a short pass, in which everything that is created on first use is created."""
        self.variants.apply(variant)
        self.pinned.drop_cache()
        self.sender.switch(sender)
        self.run(requests, WARM_PASS_STEPS)
        self.sender.reset()

    def _quiet(self) -> None:
        self.sender.switch(False)
        self.sender.reset()

    def _watch_outputs(self) -> None:
        update = self._scheduler.update_from_output

        def watched(scheduler_output: Any, model_output: Any) -> Any:
            if self._trail is not None:
                self._trail.add_step(model_output)
            return update(scheduler_output, model_output)

        self._scheduler.update_from_output = watched


def packed_path_counts(runner: Any) -> dict[str, int]:
    """How many steps our runner has packed, and how many it left to the engine, by reason; empty for stock."""
    stats = getattr(runner, "omni_runner_stats", None)
    if stats is None:
        return {}
    taken = asdict(stats())
    counts = {name: taken[name] for name in ("columns", "empty", "tokens_packed", "token_copies")}
    for kind in ("whole", "stock"):
        counts |= {f"{kind}: {reason}": count for reason, count in taken[kind].items()}
    pack = taken["pack"] or {}
    counts |= {f"fallback: {reason}": count for reason, count in pack.get("fallbacks", {}).items()}
    return counts


def _held_difference(tasks: list[Any], stock: Trail) -> str | None:
    """How the payloads that a stuck sender holds differ from those that stock yields; None if they are equal."""
    found = Trail()
    for task in tasks:
        if task.get("multimodal_output") is not None:
            index = request_index(task["request"].external_req_id)
            found.payloads[index].append(signature({"inter": task["multimodal_output"]}))
    expected = Trail()
    for index, payloads in stock.payloads.items():
        kept = [tuple(line for line in payload if line.startswith("inter.")) for payload in payloads]
        expected.payloads[index] = [payload for payload in kept if payload]
    return found.difference(expected)
