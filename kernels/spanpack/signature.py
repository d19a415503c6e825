"""Recognise leaves that look like those a plan was made for: same dtypes, shapes, strides, devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor


class Signature(Protocol):
    """Whether tensors look like the ones it was made from; addresses play no part."""

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these leaves may be taken for those it was made from; fast, but may be stricter than need be."""
        ...

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        """The same, slower and without false alarms: inference mode and gradients make no difference."""
        ...


class PlanSignature(Signature, Protocol):
    """One that can also say what is wrong."""

    def misfit(self, leaves: Any) -> str | None:
        """How these differ from the leaves it was made from, in words; None if `admits` would be true."""
        ...


_is_nested = attrgetter("is_nested")


def guarded(check: Callable[..., bool], count: int) -> Callable[[Sequence[Tensor]], bool]:
    """Torch's guards for `count` tensors, without what they can't bear: a nested one makes them abort the process."""

    def matches(leaves: Sequence[Tensor]) -> bool:
        try:
            return len(leaves) == count and True not in map(_is_nested, leaves) and check(*leaves)
        except AttributeError:  # not even a tensor
            return False

    return matches


class _GuardSignature:
    """Torch's own tensor guards, which compare all leaves in one C++ call (64 leaves: 4 us, in Python 16)."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._plain = _PlainSignature(leaves)
        guards: Any = torch._C._dynamo.guards
        check = guards.TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.matches = guarded(check, len(leaves))

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        return self._plain.matches(leaves)


class _PlainSignature:
    """The same in Python, for empty sequences, sparse leaves and torch builds without the guards."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._facts = [_facts(leaf) for leaf in leaves]

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        if len(leaves) != len(self._facts) or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return False
        return [_facts(leaf) for leaf in leaves] == self._facts

    admits = matches


def _facts(leaf: Tensor) -> tuple[Any, ...]:
    if leaf.layout != torch.strided or leaf.is_quantized:
        return leaf.dtype, leaf.device, leaf.shape, leaf.layout
    return leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def make_signature(leaves: Sequence[Tensor]) -> Signature:
    """The fastest signature that can describe these leaves."""
    ordinary = all(type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.is_quantized for leaf in leaves)
    if leaves and ordinary:
        try:
            signature = _GuardSignature(leaves)
            if signature.matches(leaves):
                return signature
        except (AttributeError, TypeError, RuntimeError):
            pass
    return _PlainSignature(leaves)
