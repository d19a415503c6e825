"""Measures the pinned host memory that the output path uses."""

from __future__ import annotations

from typing import Any

import torch


class PinnedMemory:
    """Reads torch's pinned allocator, which all variants use, and subtracts what the engine held from the start."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.drop_cache()
        self._engine_bytes = self._read("current")

    def drop_cache(self) -> None:
        """Release the memory that earlier passes left in the allocator's cache."""
        if torch.cuda.is_available():
            torch._C._host_emptyCache()

    def start(self) -> None:
        """Measure the peak from here on."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()

    def peak_bytes(self, *, ours: bool) -> int | None:
        """Most pinned bytes since `start`, in use or cached, without our runner's slabs unless `ours` is measured."""
        if not torch.cuda.is_available():
            return None
        idle = 0 if ours else self._packer_bytes()
        return max(0, self._read("peak") - self._engine_bytes - idle)

    def _packer_bytes(self) -> int:
        path = vars(self._runner).get("_omni_runner_path")  # stays there when the runner's class is replaced
        pack = None if path is None else path.stats().pack
        return 0 if pack is None else pack.pinned_bytes

    @staticmethod
    def _read(moment: str) -> int:
        if not torch.cuda.is_available():
            return 0
        return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{moment}", 0))
