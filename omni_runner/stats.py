"""Counters of one packed runner."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import spanpack

logger = logging.getLogger("vllm.omni_runner")  # below "vllm", so that the engine's handler and level apply

MAX_REASONS = 64  # messages that vary from step to step must not grow the table, or the log, without bound
OTHER = "other"


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Counters of a packed runner since it was created.

    Attributes
    ----------
    columns
        Steps that were packed as columns (only what their consumers need) and built column by column.
    empty
        Steps without a consumer: nothing was packed.
    whole
        Steps packed whole and built by the engine, by reason.
    stock
        Steps that took the engine's own snapshot, by reason.
    builder_s
        Seconds spent on building the outputs of packed steps, waiting for the device excluded.
    tokens_packed
        Steps whose sampled tokens were in the pack.
    token_copies
        Steps whose sampled tokens this package copied separately. In all other steps the engine copied them.
    pack
        The packer's counters; None before the first packed step.
    """

    columns: int = 0
    empty: int = 0
    whole: Mapping[str, int] = field(default_factory=dict)
    stock: Mapping[str, int] = field(default_factory=dict)
    builder_s: float = 0.0
    tokens_packed: int = 0
    token_copies: int = 0
    pack: spanpack.Stats | None = None

    @property
    def steps(self) -> int:
        """Number of asynchronous steps, whichever path they took."""
        return self.columns + self.empty + sum(self.whole.values()) + sum(self.stock.values())


class StepCounters:
    """The live counters; safe to use from the engine's thread and the builder thread at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.columns = 0  # like `empty`, written only by the engine's thread
        self.empty = 0
        self._whole: Counter[str] = Counter()
        self._stock: Counter[str] = Counter()
        self._builder_ns = 0

    def count_whole(self, reason: str) -> None:
        """Count a step that was packed whole; the first step for each reason is logged."""
        if self._is_first(self._whole, reason):
            logger.info("omni_runner: packing whole payloads for the engine's own builder: %s", reason)

    def count_stock(self, reason: str) -> None:
        """Count a step left to the engine; the first step for each reason is logged."""
        if self._is_first(self._stock, reason):
            logger.warning("omni_runner: leaving the step to the engine's own snapshot: %s", reason)

    def count_failure(self, failure: Exception) -> None:
        """Count a step left to the engine because our code failed; the first for each cause is logged in full."""
        cause = _cause(failure)
        if self._is_first(self._stock, cause):
            logger.warning("omni_runner: packing failed, leaving the step to the engine: %s", cause, exc_info=failure)

    def add_builder_ns(self, duration_ns: int) -> None:
        """Add the time that one output took to build."""
        with self._lock:
            self._builder_ns += duration_ns

    def read(self, pack: spanpack.Stats | None, tokens_packed: int, token_copies: int) -> RunnerStats:
        """Return the counters as they are now."""
        with self._lock:
            return RunnerStats(
                columns=self.columns,
                empty=self.empty,
                whole=dict(self._whole),
                stock=dict(self._stock),
                builder_s=self._builder_ns / 1e9,
                tokens_packed=tokens_packed,
                token_copies=token_copies,
                pack=pack,
            )

    def _is_first(self, counts: Counter[str], reason: str) -> bool:
        with self._lock:
            if reason not in counts and len(counts) >= MAX_REASONS:
                reason = OTHER
            counts[reason] += 1
            return counts[reason] == 1


def _cause(failure: Exception) -> str:
    """Return the type and location of a failure, without its message, which may differ every time."""
    frames = traceback.extract_tb(failure.__traceback__, limit=-1)
    where = f" in {frames[-1].name}, {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(failure).__name__}{where}"
