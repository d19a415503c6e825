"""Recognise leaves that look like those a plan was made for: same dtypes, shapes, strides, devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor


class Signature(Protocol):
    """Whether tensors look like the ones it was made from; addresses play no part."""

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these leaves may be taken for those it was made from."""
        ...


class _GuardSignature:
    """Torch's own tensor guards, which compare all leaves in one C++ call (64 leaves: 4 us, in Python 16)."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        guards: Any = torch._C._dynamo.guards
        self._check = guards.TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        return bool(self._check(*leaves))


class _PlainSignature:
    """The same in Python, for empty sequences, sparse leaves and torch builds without the guards."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._facts = [_facts(leaf) for leaf in leaves]

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        return len(leaves) == len(self._facts) and [_facts(leaf) for leaf in leaves] == self._facts


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


EntryT = TypeVar("EntryT")


class PlanCache(Generic[EntryT]):
    """Entries found by a key and by what the leaves look like; the least recently used one goes first.

    Parameters
    ----------
    capacity
        Most keys kept. Under one key up to four looks are kept.
    """

    _LOOKS = 4

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, list[tuple[Signature, EntryT]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def get(self, key: Hashable, leaves: Sequence[Tensor]) -> EntryT | None:
        """The entry put under `key` with leaves of the same dtypes, shapes, strides and devices, or None."""
        looks = self._entries.get(key)
        if looks is not None:
            for signature, entry in looks:
                if signature.matches(leaves):
                    self._entries.move_to_end(key)
                    return entry
        return None

    def put(self, key: Hashable, leaves: Sequence[Tensor], entry: EntryT) -> EntryT:
        """Keep an entry; returns it."""
        looks = self._entries.setdefault(key, [])
        looks.insert(0, (make_signature(leaves), entry))
        del looks[self._LOOKS :]
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry
