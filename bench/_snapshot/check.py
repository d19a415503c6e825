"""Checks the bytes that a provider delivers, before anything is timed.

The step's tensors are written behind a long kernel on the producing stream just before the call, and overwritten right
after it. A provider that does not wait for that stream, or reads its sources too late, delivers other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench._snapshot.machine import Machine
from bench._snapshot.provider import Provider, StepInput, Work
from bench._snapshot.scenarios import Scenario, map_tensors, random_like, tensors_of
from omni_runner.difference import difference
from omni_runner.reference import Payloads, reference_payloads
from omni_runner.replay import compare_payloads
from omni_runner.trace import TraceStep

_ROUNDS = 5  # more than the slots of any provider's ring
_LARGE_BYTES = 64 << 20
_LARGE_ROUNDS = 2  # comparing large payloads takes long
_HOLD_US = 2000.0
_SCRIBBLE = 0xA5


class WrongBytes(Exception):
    """The bytes that a provider delivered differ from the reference."""


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes
    ----------
    d2h_bytes : float
        Bytes copied from the device to the host, averaged over the kinds of steps.
    """

    d2h_bytes: float


def check(provider: Provider, machine: Machine, scenario: Scenario) -> Checked:
    """Compare a provider's bytes with the reference.

    Raises
    ------
    WrongBytes
        The bytes differ; the message lists the first differences.
    """
    copied = []
    rounds = _ROUNDS if scenario.payload_bytes < _LARGE_BYTES else _LARGE_ROUNDS
    if not provider.owns_bytes:
        rounds = 1  # there is nothing to compare
    kinds = len(scenario.distinct_steps)
    for number in range(-(-rounds // kinds) * kinds):  # each kind equally often: bytes are averaged
        step = scenario.step(number)
        device_leaves = [leaf for leaf in tensors_of(step) if leaf.device == machine.device]
        fresh = map_tensors(step, lambda leaf: random_like(leaf) if leaf.device == machine.device else leaf)
        fresh_leaves = [leaf for leaf in tensors_of(fresh) if leaf.device == machine.device]
        machine.synchronize()
        machine.occupy(_HOLD_US)
        if provider.owns_bytes:
            for leaf, source in zip(device_leaves, fresh_leaves, strict=True):
                leaf.copy_(source)
        given = StepInput.of(step)
        taken = provider.take(given)
        work = provider.hand_over(given, taken, only_wait=False)
        if provider.owns_bytes:
            for leaf in device_leaves:
                leaf.view(torch.uint8).fill_(_SCRIBBLE) if leaf.is_contiguous() and leaf.dim() else leaf.zero_()
        work.join()
        machine.synchronize()
        problems = _problems(provider, fresh, given, taken, work) if provider.owns_bytes else []
        if problems:
            raise WrongBytes(f"{provider.name}, {scenario.name}, round {number}: " + "; ".join(problems[:3]))
        copied.append(provider.d2h_bytes(taken) if provider.lands else 0)
    return Checked(sum(copied) / len(copied))


def _problems(provider: Provider, expected: TraceStep, given: StepInput, taken: Any, work: Work) -> list[str]:
    if provider.builds:
        if len(expected.needs_payload) == len(expected.request_ids):
            # Copy whole tensors to the host first: a copy for each request's rows would take most of the time.
            expected = map_tensors(expected, Tensor.cpu)
        reference = reference_payloads(expected)
        found = _consumers_only(reference, provider.payloads(given, work))
        if _is_same(reference, found):
            return []
        return compare_payloads(expected.request_ids, reference, found)
    device = provider.machine.device
    leaves = [leaf for leaf in tensors_of(expected) if leaf.device == device]
    return [
        f"leaf {index}: {problem}"
        for index, (leaf, found) in enumerate(zip(leaves, provider.leaf_bytes(taken), strict=True))
        if (problem := _leaf_problem(leaf.reshape(-1).view(torch.uint8), found))
    ]


def _leaf_problem(expected: Tensor, found: Tensor) -> str:
    """Describe how a leaf differs, or return ""; compares on the device, where that takes almost no time."""
    if _is_equal(expected, found.to(expected.device)):
        return ""
    return difference(expected.cpu(), found) or "the bytes change while they are read"


def _is_same(reference: Payloads, found: Payloads) -> bool:
    """Whether the payloads are the same; quick, whereas `compare_payloads` describes what differs."""
    return all(
        (expected is None and payload is None)
        or (
            expected is not None
            and payload is not None
            and expected.keys() == payload.keys()
            and all(_is_equal(tensor, payload[key]) for key, tensor in expected.items())
        )
        for expected, payload in zip(reference, found, strict=True)
    )


def _is_equal(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))


def _consumers_only(reference: Payloads, found: Payloads) -> Payloads:
    """Drop the payloads of requests without a consumer, which Model Runner V2 builds as well."""
    return [None if expected is None else payload for expected, payload in zip(reference, found, strict=True)]
