"""Outputs of a decode step of the Qwen3-Omni and Qwen3-TTS stages, in the sizes of the released models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench._builder.engine import Stage, StepInput

THINKER_WIDTH, TALKER_WIDTH, TTS_WIDTH, CODEBOOKS = 2048, 1024, 2048, 16


@dataclass(frozen=True)
class Workload:
    """One stage: its settings, and a function that makes its output for a number of requests."""

    name: str
    stage: Stage
    make: Callable[[int], tuple[Tensor, dict[str, Any]]]

    def step(self, requests: int) -> StepInput:
        """Make a step in which every request decodes one token and the next stage wants its payload."""
        return StepInput(
            request_ids=tuple(f"request-{i}" for i in range(requests)),
            scheduled=(1,) * requests,
            scheduled_total=requests,
            final_stages=(2,) * requests,
        )


def _rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width).bfloat16()


def _codes(rows: int) -> Tensor:
    return torch.randint(0, 2048, (rows, CODEBOOKS))


def _thinker(requests: int) -> tuple[Tensor, dict[str, Any]]:
    embeddings = torch.randn(1, 3, THINKER_WIDTH).bfloat16()
    bos, eos, pad = embeddings.split(1, dim=1)
    layers = {0: _rows(requests, THINKER_WIDTH), 24: _rows(requests, THINKER_WIDTH)}
    embed = {"tts_bos": [bos], "tts_eos": [eos], "tts_pad": [pad]}
    return _rows(requests, THINKER_WIDTH), {"hidden_states": {"layers": layers}, "embed": embed}


def _talker(requests: int) -> tuple[Tensor, dict[str, Any]]:
    return _rows(requests, TALKER_WIDTH), {"codes": {"audio": _codes(requests)}}


def _tts(requests: int) -> tuple[Tensor, dict[str, Any]]:
    meta = {
        "codec_streaming": torch.ones(requests, dtype=torch.int8),
        "ref_code_len": [torch.tensor([i], dtype=torch.int32) for i in range(requests)],
    }
    return _rows(requests, TTS_WIDTH), {"codes": {"audio": [_codes(1) for _ in range(requests)]}, "meta": meta}


WORKLOADS = (
    Workload("thinker", Stage(), _thinker),
    Workload("talker", Stage(include_hidden=False), _talker),
    Workload("tts", Stage(include_hidden=False), _tts),
)
