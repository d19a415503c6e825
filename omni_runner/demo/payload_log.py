"""Collect, write, read and compare the outputs that the engine got from its runner, step by step."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_runner.difference import difference

CHANNELS = ("inter_stage_outputs", "multimodal_outputs")


class PayloadLog:
    """Collects step outputs.

    The last few outputs are held and copied only later, so that a payload whose memory is reused too early shows
    up as a difference.

    Parameters
    ----------
    hold : int
        How many steps' payloads stay alive.
    """

    def __init__(self, hold: int = 4) -> None:
        self._hold = hold
        self._held: deque[Any] = deque()
        self._steps: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}

    def add(self, output: Any) -> None:
        """Take the output object of one step, as the engine gets it."""
        self._held.append(output)
        if len(self._held) > self._hold:
            self._freeze(self._held.popleft())

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write ``path.json`` and ``path.safetensors``; `facts` must be JSON-serializable."""
        while self._held:
            self._freeze(self._held.popleft())
        save_file(self._tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps({**facts, "steps": self._steps}), encoding="utf-8")

    def _freeze(self, output: Any) -> None:
        number = len(self._steps)
        step: dict[str, Any] = {
            "request_ids": list(output.req_ids),
            "request_index": dict(output.req_id_to_index),
            "tokens": [list(tokens) for tokens in output.sampled_token_ids],
            "one_channel": output.inter_stage_outputs is output.multimodal_outputs,
        }
        for channel in CHANNELS:
            payloads = getattr(output, channel)
            if channel != CHANNELS[0] and step["one_channel"]:
                payloads = None
            step[channel] = payloads and [
                self._keep(f"{number}/{channel}/{place}", payload) for place, payload in enumerate(payloads)
            ]
        self._steps.append(step)

    def _keep(self, prefix: str, payload: Mapping[str, Tensor] | None) -> dict[str, str] | None:
        if payload is None:
            return None
        kept = {}
        for key, tensor in payload.items():
            kept[key] = f"{prefix}/{key}"
            self._tensors[kept[key]] = tensor.detach().clone().contiguous()
        return kept


@dataclass(frozen=True)
class Run:
    """One run of the engine, read back."""

    facts: Mapping[str, Any]
    steps: list[dict[str, Any]]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def load(path: Path) -> Run:
        """Read what `PayloadLog.save` wrote."""
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return Run(facts, facts.pop("steps"), load_file(path.with_suffix(".safetensors")))

    @property
    def requests(self) -> int:
        """Number of distinct requests."""
        return len({request for step in self.steps for request in step["request_ids"]})

    @property
    def payloads(self) -> int:
        """Number of payloads: one per step and request that has a consumer."""
        return sum(payload is not None for step in self.steps for payload in step[CHANNELS[0]] or ())

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads of the first channel."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if f"/{CHANNELS[0]}/" in name)


@dataclass(frozen=True)
class Comparison:
    """Outcome of comparing two runs; the differences name step, request and key."""

    tensors: int
    nbytes: int
    differences: list[str]


def compare(stock: Run, packed: Run) -> Comparison:
    """Compare every request's tokens and payload of every step."""
    differences = [f"packed, {text}" for text in left_to_engine(packed)]
    if len(stock.steps) != len(packed.steps):
        differences.append(f"stock took {len(stock.steps)} steps, packed {len(packed.steps)}")
    tensors = nbytes = 0
    for number, (theirs, ours) in enumerate(zip(stock.steps, packed.steps, strict=False)):
        differences += [
            f"step {number}, {field}: stock {theirs[field]}, packed {ours[field]}"
            for field in ("request_ids", "request_index", "tokens", "one_channel")
            if theirs[field] != ours[field]
        ]
        for channel in CHANNELS:
            left, right = _places(theirs, channel), _places(ours, channel)
            for place in left | right:
                if place in left and place in right:
                    expected, found = stock.tensors.get(left[place]), packed.tensors.get(right[place])
                    problem = difference(expected, found)
                    tensors += expected is not None
                    nbytes += 0 if expected is None else expected.nbytes
                else:
                    problem = f"only {'stock' if place in left else 'packed'} has it"
                if problem:
                    differences.append(f"step {number}, {channel}, {place}: {problem}")
    return Comparison(tensors, nbytes, differences)


def left_to_engine(packed: Run) -> list[str]:
    """List the steps of the packed run that took the engine's own snapshot: their outputs prove nothing."""
    stock_steps = packed.facts["counters"]["stock"]
    return [f"{count} steps were left to the engine's own snapshot: {reason}" for reason, count in stock_steps.items()]


def _places(step: dict[str, Any], channel: str) -> dict[str, str]:
    """Map each place in one step's channel to its tensor name, empty for a payload that is None."""
    payloads = step[channel]
    if payloads is None:
        return {"no list": ""}
    places = {}
    for request, payload in zip(step["request_ids"], payloads, strict=True):
        if payload is None:
            places[f"request {request}, no payload"] = ""
        for key, name in (payload or {}).items():
            places[f"request {request}, {key}"] = name
    return places
