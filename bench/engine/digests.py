"""The output of a pass, reduced to digests that can be compared with those of another pass."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Signature = tuple[str, ...]  # one entry per tensor: path, dtype, shape and digest of the bytes


def signature(value: Any, request_id: str = "") -> Signature:
    """Describe all tensors and plain values of a payload, treating structs as dicts and omitting the request's id."""
    described = (f"{path} {_describe(leaf)}" for path, leaf in _leaves(value, ""))
    own_id = f" {request_id!r}" if request_id else None
    return tuple(line for line in described if own_id is None or not line.endswith(own_id))


@dataclass
class Trail:
    """Tokens, payloads and chunks of every request of a pass, in order, by the request's index."""

    tokens: defaultdict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    payloads: defaultdict[int, list[Signature]] = field(default_factory=lambda: defaultdict(list))
    chunks: defaultdict[int, list[Signature]] = field(default_factory=lambda: defaultdict(list))

    def add_step(self, output: Any) -> None:
        """Add one step's `OmniModelRunnerOutput`, before the scheduler sees it."""
        for request_id in output.req_ids:
            row, index = output.req_id_to_index[request_id], request_index(request_id)
            sampled = output.sampled_token_ids
            self.tokens[index].append([int(token) for token in sampled[row]] if sampled else [])
            client, inter = output.multimodal_outputs, output.inter_stage_outputs
            both = {"client": client[row] if client else None, "inter": inter[row] if inter else None}
            self.payloads[index].append(signature(both))

    def difference(self, stock: Trail) -> str | None:
        """Where tokens or payloads first differ from stock's; None if they are the same."""
        return _difference("tokens", self.tokens, stock.tokens) or _difference("payload", self.payloads, stock.payloads)

    def chunk_difference(self, stock: Trail) -> str | None:
        """Where the chunks handed to the connector first differ from stock's."""
        return _difference("chunk", self.chunks, stock.chunks)


def request_index(request_id: str) -> int:
    """Index of a request in its pass: its id ends in `-<index>`."""
    return int(request_id.rsplit("-", 1)[-1])


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "__struct_fields__"):  # a msgspec struct
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    elif value is not None:
        yield path, value


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    host = leaf.detach().to("cpu").contiguous()
    content = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else b""
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} {digest}"


def _difference(what: str, found: Mapping[int, list[Any]], stock: Mapping[int, list[Any]]) -> str | None:
    for index in sorted(found.keys() | stock.keys()):
        ours, theirs = found.get(index, []), stock.get(index, [])
        for step, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                only_ours = [entry for entry in one if entry not in other]
                only_theirs = [entry for entry in other if entry not in one]
                return f"{what} of request {index}, step {step}: {only_ours} where stock has {only_theirs}"[:600]
        if len(ours) != len(theirs):
            return f"{what} of request {index}: {len(ours)} where stock has {len(theirs)}"
    return None
