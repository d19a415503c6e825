"""Workloads of the tuner: typical steps of the stages of a multimodal model, a few for each size class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .columns import ColumnSpec
from .plan import Plan
from .planner import make_plan

MakeLeaves = Callable[[torch.device], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Workload:
    """One pack to tune for.

    Attributes
    ----------
    name
        Name to report it by.
    plan
        What is packed.
    make_leaves
        Takes a device, returns leaves on it that look like those of the plan.
    """

    name: str
    plan: Plan
    make_leaves: MakeLeaves

    @property
    def device_bytes(self) -> int:
        """Bytes that are gathered on the device."""
        return self.plan.device_bytes


def _workload(name: str, make_leaves: MakeLeaves, columns: Sequence[ColumnSpec]) -> Workload:
    """A workload whose plan is made from meta tensors: planning does not read the leaves' memory."""
    return Workload(name, make_plan(make_leaves(torch.device("meta")), columns), make_leaves)


def default_workloads(*, quick: bool = False) -> list[Workload]:
    """Steps of a Thinker, a Talker and a TTS stage, and a pack of many leaves.

    Parameters
    ----------
    quick
        One workload per size class instead of several.
    """
    first = [
        _per_request("tts_decode_64", (1, 16), torch.int64, 64),
        _thinker("thinker_decode_32_of_64", [1] * 64, consumers=range(0, 64, 2)),
        _talker(64),
        _thinker("thinker_decode_64", [1] * 64),
        _thinker("thinker_decode_256", [1] * 256),
        _thinker("thinker_prefill_8k", [8192]),
    ]
    more = [
        _thinker("thinker_decode_1", [1]),
        _per_request("many_leaves_128", (16, 48), torch.bfloat16, 128),
        _talker(256),
        _thinker("thinker_decode_8", [1] * 8),
        _thinker("thinker_prefill_1k", [1] * 8 + [1024]),
        _thinker("thinker_mixed_64", [1] * 60 + [300, 600, 900, 1200]),
        _thinker("thinker_prefill_32k", [8192] * 4),
    ]
    return first if quick else first + more


def uniform_workload(nbytes: int, leaves: int = 16) -> Workload:
    """A workload of `nbytes` in equal parts from several leaves, for measurements by size alone."""
    return _per_request(f"{leaves} leaves", (nbytes // leaves,), torch.uint8, leaves)


def awkward_workload() -> Workload:
    """Odd lengths and offsets, 4-byte alignment, strided rows, inner spans: runs every branch of the kernel."""

    def make_leaves(device: torch.device) -> list[Tensor]:
        base = _random((1 << 18,), torch.uint8, device)
        return [
            base[:199999],
            base[7:40000],
            base[4:30004],
            base[4:40004].view(-1, 100)[:, :36],
            base[1:64001].view(64, 1000)[:, :333],
            base.view(-1, 512)[:, :64],
            base[: 3 << 16].view(3, 1 << 16)[:, : 1 << 15],
        ]

    columns = [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(make_leaves(torch.device("meta")))]
    columns.append(ColumnSpec(4, np.array([3, 40, 41]), np.array([1, 1, 20])))
    columns.append(ColumnSpec.whole(1, torch.empty(39993, dtype=torch.uint8, device="meta"), copies=3))
    return _workload("awkward", make_leaves, columns)


def _thinker(name: str, rows: Sequence[int], consumers: Sequence[int] | None = None) -> Workload:
    """Hidden states and two captured layers of a batch, and three embeddings copied to every consumer."""
    total = sum(rows)

    def make_leaves(device: torch.device) -> list[Tensor]:
        shapes = [(total, 2048)] * 3 + [(1, 1, 2048)] * 3
        return [_random(shape, torch.bfloat16, device) for shape in shapes]

    chosen = np.asarray(range(len(rows)) if consumers is None else consumers, dtype=np.int64)
    counts = np.asarray(rows, dtype=np.int64)
    starts = (np.cumsum(counts) - counts)[chosen]
    embedding = torch.empty(1, 1, 2048, device="meta")
    columns = [ColumnSpec(leaf, starts, counts[chosen]) for leaf in range(3)]
    columns += [ColumnSpec.whole(leaf, embedding, copies=len(chosen)) for leaf in range(3, 6)]
    return _workload(name, make_leaves, columns)


def _talker(requests: int) -> Workload:
    spans = np.arange(requests, dtype=np.int64), np.ones(requests, dtype=np.int64)
    return _workload(
        f"talker_decode_{requests}",
        lambda device: [_random((requests, 16), torch.int64, device)],
        [ColumnSpec(0, *spans)],
    )


def _per_request(name: str, shape: tuple[int, ...], dtype: torch.dtype, requests: int) -> Workload:
    one = torch.empty(shape, dtype=dtype, device="meta")
    return _workload(
        name,
        lambda device: [_random(shape, dtype, device) for _ in range(requests)],
        [ColumnSpec.stack(range(requests), [one] * requests)],
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of random bytes, which may be NaNs."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device).view(dtype).view(shape)
