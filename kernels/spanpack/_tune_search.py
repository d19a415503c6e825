"""The search for the fastest configurations and transports on the current GPU.

The measurer is passed in, so the decisions themselves need no GPU and can be tested without one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch

from ._size_classes import SIZE_CLASSES, LaunchConfig, SizeClass, size_class
from ._tune_results import (
    COPY_ENGINE,
    DIRECT_STORE,
    MAPPED,
    MIN_GAIN,
    UPLOAD,
    Bench,
    CallTimes,
    ClassResult,
    Findings,
    Measurer,
    Times,
    Transport,
    TransportKind,
    TransportResult,
    TransportTimes,
)
from ._tune_workloads import Workload

TIE = 0.01  # of configurations within this of the best, the longest tile wins: it needs the fewest descriptors
FINALISTS = 3
CONFIRM_ROUNDS = 5


class TuneError(Exception):
    """Tuning makes no sense here: a default configuration does not work."""


Progress = Callable[[int, int, str], None]  # steps done, total steps, description of the next step


def candidates(*, quick: bool = False) -> list[LaunchConfig]:
    """Tile sizes and warps with 32 to 256 bytes per thread: two to sixteen 16-byte loads in flight."""
    tiles = (2048, 4096, 8192, 32768) if quick else (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    per_thread = (64, 256) if quick else (32, 64, 128, 256)
    return [LaunchConfig(tile, warps) for tile in tiles for warps in (1, 2, 4, 8) if tile // (32 * warps) in per_thread]


class Search:
    """One run of the tuner.

    Parameters
    ----------
    measurer
        Makes the benches.
    workloads
        What to tune for; size classes without workloads keep their configuration.
    sizes
        Workloads of increasing size to compare transports with.
    gate
        Workload that every configuration must pack correctly before it is measured.
    configs
        Configurations to try besides the defaults.
    progress
        Called before every step.
    """

    def __init__(
        self,
        measurer: Measurer,
        workloads: Sequence[Workload],
        sizes: Sequence[Workload],
        gate: Workload,
        configs: Sequence[LaunchConfig],
        progress: Progress,
    ) -> None:
        self.findings = Findings()
        self._measurer = measurer
        self._groups = _group(workloads)
        self._sizes = sizes
        self._gate = gate
        defaults = [group.default for group in SIZE_CLASSES]
        self._configs = list(dict.fromkeys([*defaults, *configs]))
        self._progress = progress
        self._done = 0
        self._total = len(self._configs) * (1 + len(self._groups)) + len(self._groups) + len(sizes)

    def run(self) -> Findings:
        """Run the search; Ctrl-C ends it early and keeps the findings so far.

        Raises
        ------
        TuneError
            A default configuration does not pack correctly.
        """
        try:
            self._check()
            for group, workloads in self._groups.items():
                self._tune(group, workloads)
            self._compare_transports()
            self.findings.complete = True
        except KeyboardInterrupt:
            pass
        return self.findings

    def _step(self, text: str) -> None:
        self._progress(self._done, self._total, text)
        self._done += 1

    def _check(self) -> None:
        bench = self._measurer.prepare(self._gate)
        for config in self._configs:
            self._step(f"checking: {config}")
            self._is_usable(config, [bench])
        for group in SIZE_CLASSES:
            if group.default in self.findings.rejected:
                why = self.findings.rejected[group.default]
                raise TuneError(f"the default configuration {group.default} does not work here: {why}")

    def _is_usable(self, config: LaunchConfig, benches: Iterable[Bench]) -> bool:
        """Whether a configuration packs these workloads correctly; one that does not is rejected for good."""
        if config in self.findings.rejected:
            return False
        try:
            if all(bench.is_correct(config) for bench in benches):
                return True
            why = "wrong bytes"
        except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
            why = _in_a_line(error)
        self.findings.reject(config, why)
        return False

    def _tune(self, group: SizeClass, workloads: Sequence[Workload]) -> None:
        names, benches = self._prepare(workloads)
        times: dict[LaunchConfig, Times] = {}
        first = [group.default, *(config for config in self._configs if config != group.default)]
        try:
            for config in first:
                self._step(f"{group.name}: {config}")
                if benches and self._is_usable(config, benches):
                    times[config] = _measure(benches, config)
            self._step(f"{group.name}: the best once more")
            times = self._confirm(group, benches, times)
        finally:  # also on Ctrl-C: keep the best so far
            if group.default in times:
                self._settle(group, names, times)
            elif group.default in self.findings.rejected:
                self.findings.skipped[group.name] = f"the default: {self.findings.rejected[group.default]}"

    def _prepare(self, workloads: Sequence[Workload]) -> tuple[list[str], list[Bench]]:
        """Names and benches of the workloads that fit in device memory."""
        names, benches = [], []
        for workload in workloads:
            try:
                benches.append(self._measurer.prepare(workload))
                names.append(workload.name)
            except torch.cuda.OutOfMemoryError:
                self.findings.skipped[workload.name] = "not enough memory"
        return names, benches

    def _confirm(
        self, group: SizeClass, benches: Sequence[Bench], times: dict[LaunchConfig, Times]
    ) -> dict[LaunchConfig, Times]:
        """Measure finalists again, alternating with the default; drop those that are not faster in every round."""
        default = group.default
        if default not in times:
            return times
        ranked = sorted(times, key=lambda config: times[config].relative_to(times[default]))
        finalists = [config for config in ranked if config != default][:FINALISTS]
        rounds = [{c: _measure(benches, c) for c in (default, *finalists)} for _ in range(CONFIRM_ROUNDS)]
        steady = [c for c in finalists if all(found[c].relative_to(found[default]) < 1 for found in rounds)]
        return {config: _median_times([found[config] for found in rounds]) for config in (default, *steady)}

    def _settle(self, group: SizeClass, names: Sequence[str], times: dict[LaunchConfig, Times]) -> None:
        default = times[group.default]
        score = {config: found.relative_to(default) for config, found in times.items()}
        best = min(score.values())
        config = group.default
        if best <= 1 - MIN_GAIN:
            config = max((c for c in score if score[c] <= best + TIE), key=lambda c: (c.tile_bytes, -score[c]))
        self.findings.classes[group.name] = ClassResult(group, config, times[config], default, tuple(names))

    def _compare_transports(self) -> None:
        """For each alternative transport, find the size up to which it is better; stop at the first where it is not."""
        contests: list[tuple[TransportKind, Transport, Transport]] = [
            ("direct_store", COPY_ENGINE, DIRECT_STORE),
            ("mapped_addresses", UPLOAD, MAPPED),
        ]
        for workload in self._sizes:
            self._step(f"transport: {workload.device_bytes} bytes")
            _, benches = self._prepare([workload] if contests else [])
            for bench in benches:
                contests = [
                    (kind, usual, other)
                    for kind, usual, other in contests
                    if self._is_better(workload, bench, kind, usual, other)
                ]

    def _is_better(
        self, workload: Workload, bench: Bench, kind: TransportKind, usual: Transport, other: Transport
    ) -> bool:
        group = size_class(workload.device_bytes, workload.plan.num_segments)
        tuned = self.findings.classes.get(group.name)
        config = tuned.config if tuned else group.default
        try:
            if not bench.is_correct(config, other):
                self.findings.unusable[kind] = "wrong bytes"
                return False
            result = TransportResult(kind, workload.device_bytes, config, *_in_turns(bench, config, usual, other))
        except Exception as error:  # noqa: BLE001 - a transport that fails on this GPU must not end the search
            self.findings.unusable[kind] = _in_a_line(error)
            return False
        self.findings.transports.append(result)
        return result.is_better


def _group(workloads: Sequence[Workload]) -> dict[SizeClass, list[Workload]]:
    groups: dict[SizeClass, list[Workload]] = {group: [] for group in SIZE_CLASSES}
    for workload in workloads:
        if workload.device_bytes:
            groups[size_class(workload.device_bytes, workload.plan.num_segments)].append(workload)
    return {group: members for group, members in groups.items() if members}


def _measure(benches: Iterable[Bench], config: LaunchConfig) -> Times:
    pairs = [(bench.stream_us(config, busy=False), bench.stream_us(config, busy=True)) for bench in benches]
    alone, busy = zip(*pairs, strict=True)
    return Times(alone, busy)


def _median_times(samples: Sequence[Times]) -> Times:
    return Times(
        tuple(map(statistics.median, zip(*(times.alone_us for times in samples), strict=True))),
        tuple(map(statistics.median, zip(*(times.busy_us for times in samples), strict=True))),
    )


def _in_turns(
    bench: Bench, config: LaunchConfig, usual: Transport, other: Transport
) -> tuple[TransportTimes, TransportTimes]:
    """Times of two transports, measured alternately so that drift affects both."""
    samples: dict[tuple[Transport, bool], list[CallTimes]] = {}
    for _ in range(CONFIRM_ROUNDS):
        for busy in (False, True):
            for transport in (usual, other):
                samples.setdefault((transport, busy), []).append(bench.call_us(config, transport, busy=busy))

    def median(transport: Transport, busy: bool) -> CallTimes:
        calls = samples[transport, busy]
        return CallTimes(
            statistics.median(call.host_us for call in calls), statistics.median(call.landed_us for call in calls)
        )

    first, second = (
        TransportTimes(
            median(transport, False), median(transport, True), bench.stream_us(config, transport, busy=False)
        )
        for transport in (usual, other)
    )
    return first, second


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
