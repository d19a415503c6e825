"""``omni-runner tune``: spanpack's tuner, which can also use the recorded steps of a deployment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spanpack import Packer, Plan, Snapshot, tune


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuner and return its exit status."""
    return tune.main(argv, read_trace=read_workloads, prog="omni-runner tune")


def read_workloads(path: str, device: torch.device) -> list[tune.Workload]:
    """Return the workloads of packing a trace's steps, the most frequent kind of step first.

    Parameters
    ----------
    path
        The trace.
    device
        Device for its tensors.

    Raises
    ------
    TraceError
        The trace can't be read.
    """
    from omni_runner.replay import replay  # noqa: PLC0415  imports safetensors, which only traces need
    from omni_runner.trace import load_trace  # noqa: PLC0415

    trace = load_trace(path, device)
    packer = _NotingPacker(device)
    try:
        replay(trace, packer, timed_passes=0)
    finally:
        packer.close()
    ranked = sorted(packer.noted.items(), key=lambda item: -item[1][0])
    return [
        tune.Workload(f"{trace.stage}: {plan.device_bytes} bytes, {count}x", plan, _hold(leaves))
        for plan, (count, leaves) in ranked
    ]


def _hold(leaves: Sequence[Tensor]) -> Callable[[torch.device], Sequence[Tensor]]:
    return lambda _: leaves


class _NotingPacker(Packer):
    """A packer that records every plan that was run, how often, and the leaves of its first run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.noted: dict[Plan, tuple[int, Sequence[Tensor]]] = {}

    def run(self, plan: Plan, leaves: Sequence[Tensor], **options: Any) -> Snapshot:
        count, first = self.noted.get(plan, (0, tuple(leaves)))
        self.noted[plan] = count + 1, first
        return super().run(plan, leaves, **options)
