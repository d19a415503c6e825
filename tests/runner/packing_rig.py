"""The engine's rules in the shortest form, and tensors to tell apart."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch

from omni_runner.builder import ChannelRules
from omni_runner.reference import SPARSE_PROTOCOL_KEYS, as_tensor, flatten_payload

WIDTH = 4


ONE_LIST = ChannelRules(partitions=False)


def wire_tensors(payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in payload.items():
        tensor = value if isinstance(value, torch.Tensor) else as_tensor(value)
        if tensor is None:
            logging.getLogger("engine").warning("dropping %s", key)
        else:
            found[key] = tensor
    return found


def partition(payload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    client = {key: value for key, value in payload.items() if key in ("audio", "meta.segment_end")}
    return {key: value for key, value in payload.items() if key != "audio"}, client


UPSTREAM: Any = SimpleNamespace(
    flatten_payload=flatten_payload,
    partition_flat_payload=partition,
    ensure_tensor_values=wire_tensors,
    sparse_protocol_keys=SPARSE_PROTOCOL_KEYS,
)


def numbered(rows: int, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(rows * width).reshape(rows, width).to(dtype)
