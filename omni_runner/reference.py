"""The reference for packed payloads: the engine's payloads, computed by plain slicing, request by request.

It uses no plan, packer or builder, and no engine either: it implements the engine's rules again, so that a trace
can be checked where no engine is installed. Slow and obvious on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from omni_runner.trace import TraceStep

Payloads = list[dict[str, Tensor] | None]  # one per request, in batch order

SPARSE_PROTOCOL_KEYS = frozenset({"meta.req_id", "meta.sparse_audio"})
_EXPANDED_ROOTS = frozenset({"codes", "embed", "hidden_states", "ids", "meta"})


def reference_payloads(step: TraceStep) -> Payloads:
    """Return each request's payload of a step, on the host; None for a request without a consumer.

    The engine's rules: from a tensor whose first dimension is the number of hidden rows or of scheduled
    tokens, a request gets its span; from a list its element, or the first one if the list is too short;
    of anything else a copy.
    """
    total = sum(step.num_scheduled_tokens)
    hidden = step.hidden_states if step.include_hidden else None
    row_counts = {total} if hidden is None else {total, hidden.shape[0]}
    flat = flatten_payload(step.multimodal_outputs or {})
    elements = dict(zip(step.needs_payload, step.elements or (), strict=False))
    payloads: Payloads = []
    for place, request in enumerate(step.request_ids):
        if request not in step.needs_payload:
            payloads.append(None)
            continue
        start = step.query_start_loc[place]
        end = start + step.num_scheduled_tokens[place]
        payload: dict[str, Tensor] = {}
        if hidden is not None and step.elements is None:
            payload["hidden"] = _on_host(hidden[start:end])
        for key, value in flat.items():
            if key not in SPARSE_PROTOCOL_KEYS:
                payload.update(_share(key, value, elements.get(request, place), slice(start, end), row_counts))
        payloads.append(payload)
    return payloads


def _share(key: str, value: Any, element: int, span: slice, row_counts: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield what one request gets of one flat key: nothing, one tensor, or the tensors of a nested dict."""
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            yield from _share(f"{key}.{inner_key}", inner, element, span, row_counts)
        return
    if isinstance(value, list):
        value = value[element if element < len(value) else 0] if value else None
    elif isinstance(value, Tensor) and value.dim() and value.shape[0] in row_counts:
        value = value[span]
    item = _on_host(value) if isinstance(value, Tensor) else as_tensor(value)
    if item is not None:
        yield key, item


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def flatten_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Flatten a payload to the engine's keys: `codes.audio`, `hidden_states.layer_24`."""
    flat: dict[str, Any] = {}
    for root, value in payload.items():
        if root not in _EXPANDED_ROOTS or not isinstance(value, dict):
            flat[root] = value
            continue
        for key, item in value.items():
            if (root, key) == ("hidden_states", "layers") and isinstance(item, dict):
                flat.update({f"{root}.layer_{layer}": tensor for layer, tensor in item.items()})
            else:
                flat[f"{root}.{key}"] = item
    return flat


def as_tensor(value: Any) -> Tensor | None:
    """Convert a plain value to the tensor that the engine sends; None if the engine drops the value."""
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if isinstance(value, list | tuple):
        try:
            return torch.tensor(value)
        except (ValueError, TypeError, RuntimeError):
            return None
    return None
