"""The measuring loops: providers take turns in one process, in blocks of calls.

In most passes the calls are isolated: the inputs of a call are made, the device is synchronized (or, in the busy pass,
occupied by a long kernel), and the step is completed before the next one starts. A call therefore follows a thread
switch and other Python code, as in an engine, where a whole step lies between two snapshots. In the steady pass,
by contrast, calls follow each other directly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench._snapshot.machine import CollectionCounter, CompileCounter, Machine
from bench._snapshot.provider import Provider, StepInput
from bench._snapshot.scenarios import Scenario

BLOCK_CALLS = 50
FEWEST_CALLS = 20  # even for the slowest provider, and even when time is up
_WARMUP_CALLS = 100
_FIRST_WARMUP_S = 0.1  # for each provider
_WARMUP_S = 0.03  # in its later passes, mostly to find out what a call costs
_FEWEST_WARMUP_CALLS = 6
_STEADY_CALLS = 12  # in succession: few enough that their inputs are still in the core's cache when used
_LEAD_IN_CALLS = 2  # calls before those, not counted, as they follow the making of inputs or another provider
_BUSY_MARGIN_US = 80.0
_now = time.perf_counter_ns


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Attributes
    ----------
    calls : int
        Calls of each provider in each pass, unless time runs out.
    seconds : float
        Time for all passes and providers together, including warm-up. If it is short, only slow providers make fewer
        calls.
    """

    calls: int
    seconds: float


@dataclass
class Samples:
    """The measurements of one provider in one scenario; times in nanoseconds."""

    host: list[float] = field(default_factory=list)
    host_first: list[float] = field(default_factory=list)  # the first of each block, which follows another provider's
    host_steady: list[float] = field(default_factory=list)
    host_busy: list[float] = field(default_factory=list)
    landed: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    busy_calls: int = 0
    pinned_allocations: int | None = 0
    compilations: int | None = 0
    collections: int = 0  # garbage collections during the calls of `host`


@dataclass(frozen=True)
class _Pass:
    """One kind of measurement: its share of the time, who takes part, and a function that makes a block of calls."""

    share: float
    takes_part: Callable[[Provider], bool]
    block: Callable[[Provider, Samples, int], None]
    warmup_s: float = _WARMUP_S
    warmup_block: int = 1


class Bench:
    """Measures the providers of one scenario.

    Parameters
    ----------
    machine
        Where to measure.
    scenario
        What to measure.
    providers
        The providers, in any order.
    compilations
        Counts what Triton compiles.
    """

    def __init__(
        self, machine: Machine, scenario: Scenario, providers: Sequence[Provider], compilations: CompileCounter
    ) -> None:
        self._machine = machine
        self._scenario = scenario
        self._providers = list(providers)
        self._compilations = compilations
        self._collections = CollectionCounter()
        self._number = 0
        self._hold_us: dict[str, float] = {}
        self.samples = {provider.name: Samples() for provider in providers}
        self.failures: dict[str, str] = {}
        self._passes = (
            _Pass(0.28, lambda provider: provider.lands, self._idle_block, warmup_s=_FIRST_WARMUP_S),
            _Pass(0.12, lambda provider: provider.lands, self._steady_block, warmup_block=_STEADY_CALLS),
            _Pass(0.26, lambda provider: True, self._one_by_one(self._busy_call)),
            _Pass(0.15, lambda provider: provider.lands, self._one_by_one(self._landed_call)),
            _Pass(0.19, lambda provider: provider.builds, self._one_by_one(self._ready_call)),
        )

    def run(self, budget: Budget) -> None:
        """Measure everything; a provider that raises is left out from then on, and named in `failures`."""
        with self._collections:
            self._run(budget)

    def _run(self, budget: Budget) -> None:
        end = time.perf_counter() + budget.seconds
        for place, measured in enumerate(self._passes):
            # Time that earlier passes did not use goes to the later ones.
            share = measured.share / sum(later.share for later in self._passes[place:])
            costs_s = self._warm_up(measured)
            calls = share_calls(costs_s, (end - time.perf_counter()) * share, budget.calls)
            for name, count in _blocks(calls):
                self._block(measured, name, count)

    def _warm_up(self, measured: _Pass) -> dict[str, float]:
        """Warm the providers up; returns the seconds of one call with everything around it, by provider."""
        costs_s = {}
        for provider in list(self._providers):
            if not measured.takes_part(provider):
                continue
            scratch = Samples()
            durations_s: list[float] = []
            self._attempt(provider, partial(self._warm_calls, measured, provider, scratch, durations_s))
            if durations_s:
                settled = durations_s[len(durations_s) // 2 :]
                costs_s[provider.name] = sum(settled) / len(settled)
            if scratch.host:
                typical_us = sorted(scratch.host)[len(scratch.host) // 2] / 1000
                self._hold_us[provider.name] = 2 * typical_us + _BUSY_MARGIN_US
        return {name: cost for name, cost in costs_s.items() if name not in self.failures}

    def _warm_calls(self, measured: _Pass, provider: Provider, samples: Samples, durations_s: list[float]) -> None:
        count = measured.warmup_block
        end = time.perf_counter() + measured.warmup_s
        while len(durations_s) * count < _FEWEST_WARMUP_CALLS or (
            len(durations_s) * count < _WARMUP_CALLS and time.perf_counter() < end
        ):
            start = time.perf_counter()
            measured.block(provider, samples, count)
            durations_s.append((time.perf_counter() - start) / count)

    def _block(self, measured: _Pass, name: str, count: int) -> None:
        provider = next((provider for provider in self._providers if provider.name == name), None)
        if provider is None:
            return
        samples = self.samples[name]
        pinned, own = self._machine.pinned_allocations(), provider.own_pinned_allocations()
        compiled = self._compilations.count
        self._attempt(provider, partial(measured.block, provider, samples, count))
        # A provider's own counter sees allocations that torch's does not, and vice versa.
        grown = max(
            _difference(pinned, self._machine.pinned_allocations()) or 0, provider.own_pinned_allocations() - own
        )
        samples.pinned_allocations = None if pinned is None else (samples.pinned_allocations or 0) + grown
        samples.compilations = _sum(samples.compilations, _difference(compiled, self._compilations.count))

    def _attempt(self, provider: Provider, calls: Callable[[], None]) -> bool:
        try:
            calls()
        except Exception as failure:  # noqa: BLE001  one provider's trouble is a line in the results
            self.failures[provider.name] = f"{type(failure).__name__}: {failure}"
            self._providers.remove(provider)
            return False
        return True

    def _next_step(self) -> StepInput:
        self._number += 1
        return StepInput.of(self._scenario.step(self._number))

    def _one_by_one(
        self, call: Callable[[Provider, StepInput, Samples], None]
    ) -> Callable[[Provider, Samples, int], None]:
        def block(provider: Provider, samples: Samples, count: int) -> None:
            for _ in range(count):
                call(provider, self._next_step(), samples)

        return block

    def _idle_block(self, provider: Provider, samples: Samples, count: int) -> None:
        for place in range(count):
            step, collections = self._next_step(), self._collections
            self._machine.synchronize()
            before = collections.count
            start = _now()
            taken = provider.take(step)
            work = provider.hand_over(step, taken, only_wait=True)
            samples.host.append(_now() - start)
            samples.collections += collections.count - before
            work.join()
            if place == 0:
                samples.host_first.append(samples.host[-1])

    def _steady_block(self, provider: Provider, samples: Samples, count: int) -> None:
        """Make calls in quick succession, with only the wait for the first one's work between two calls."""
        for start in range(0, count, _STEADY_CALLS):
            wanted = min(_STEADY_CALLS, count - start)
            steps = [self._next_step() for _ in range(wanted + _LEAD_IN_CALLS)]
            self._machine.synchronize()
            times = [self._steady_call(provider, step) for step in steps]
            samples.host_steady += times[_LEAD_IN_CALLS:]

    @staticmethod
    def _steady_call(provider: Provider, step: StepInput) -> int:
        start = _now()
        taken = provider.take(step)
        work = provider.hand_over(step, taken, only_wait=True)
        end = _now()
        # Busy waiting: a thread that sleeps here would find its core and its caches cold afterwards.
        if provider.hands_over:
            while not (work.ready_ns and work.is_over()):
                time.sleep(0)  # lets the builder have the GIL
            if work.failure is not None:
                raise work.failure
        else:
            while not provider.is_landed(taken):
                pass
        return end - start

    def _busy_call(self, provider: Provider, step: StepInput, samples: Samples) -> None:
        machine = self._machine
        machine.occupy(self._hold_us.get(provider.name, _BUSY_MARGIN_US))
        machine.mark_start()
        start = _now()
        taken = provider.take(step)
        work = provider.hand_over(step, taken, only_wait=True)
        end = _now()
        was_busy = machine.mark_end()
        work.join()
        machine.synchronize()
        samples.busy_calls += 1
        if provider.lands:
            samples.host_busy.append(end - start)
        if was_busy:  # else the call outlasted the kernel, and the time between the marks includes host time
            samples.compute.append((machine.marked_us() or 0.0) * 1000)

    def _landed_call(self, provider: Provider, step: StepInput, samples: Samples) -> None:
        self._machine.synchronize()
        start = _now()
        taken = provider.take(step)
        while not provider.is_landed(taken):
            pass
        samples.landed.append(_now() - start)

    def _ready_call(self, provider: Provider, step: StepInput, samples: Samples) -> None:
        self._machine.synchronize()
        start = _now()
        taken = provider.take(step)
        work = provider.hand_over(step, taken, only_wait=False)
        work.join()
        samples.ready.append(work.ready_ns - start)


def share_calls(costs_s: Mapping[str, float], seconds: float, most: int) -> dict[str, int]:
    """Number of calls for each provider: up to `most`, and fewer for the slowest where time does not suffice.

    Parameters
    ----------
    costs_s
        Seconds per call, by provider.
    seconds
        Time for all providers together.
    most
        Number of calls of a provider that is quick enough.
    """
    calls = {}
    left_s = max(0.0, seconds)
    for place, (name, cost_s) in enumerate(sorted(costs_s.items(), key=lambda item: item[1])):
        fair_s = left_s / (len(costs_s) - place)
        count = min(most, max(FEWEST_CALLS, int(fair_s / cost_s)))
        calls[name] = count
        left_s = max(0.0, left_s - count * cost_s)
    return calls


def _blocks(calls: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Blocks of calls by provider, spread evenly over the whole pass; every round starts with another provider."""
    rounds = max((math.ceil(count / BLOCK_CALLS) for count in calls.values()), default=0)
    names = list(calls)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            count = calls[name] * (number + 1) // rounds - calls[name] * number // rounds
            if count:
                yield name, count


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def percentiles_us(samples_ns: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99.9 in microseconds, by nearest rank; None without samples."""
    if not samples_ns:
        return None
    ordered = sorted(samples_ns)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1000, 2)

    return {"p50": rank(0.5), "p90": rank(0.9), "p999": rank(0.999)}


def row(scenario: Scenario, name: str, samples: Samples, d2h_bytes: float, *, lands: bool) -> dict[str, Any]:
    """One row of the results."""
    compute = percentiles_us(samples.compute)
    return {
        "scenario": scenario.name,
        "provider": name,
        "host_us": percentiles_us(samples.host),
        "host_first_us": percentiles_us(samples.host_first),
        "host_steady_us": percentiles_us(samples.host_steady),
        "host_busy_us": percentiles_us(samples.host_busy),
        "landed_us": percentiles_us(samples.landed),
        "ready_us": percentiles_us(samples.ready),
        "compute_stream_us": compute and compute["p50"],
        "d2h_bytes": _plain(d2h_bytes) if lands else None,
        "payload_bytes": _plain(scenario.payload_bytes),
        "pinned_allocations": samples.pinned_allocations,
        "compilations": samples.compilations,
        "collections": samples.collections,
        "calls": {
            "host_us": len(samples.host),
            "host_first_us": len(samples.host_first),
            "host_steady_us": len(samples.host_steady),
            "host_busy_us": len(samples.host_busy),
            "landed_us": len(samples.landed),
            "ready_us": len(samples.ready),
        },
        "busy_share": round(len(samples.compute) / samples.busy_calls, 4) if samples.busy_calls else None,
    }


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else round(number, 1)
