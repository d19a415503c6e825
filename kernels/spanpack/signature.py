"""Recognise leaves that look like those a plan was made for: same dtypes, shapes, strides, devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor


class Signature(Protocol):
    """Whether tensors look like the ones it was made from; addresses play no part."""

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these leaves look like those it was made from; fast, but may reject some that `admits` accepts."""
        ...

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        """The same, exact and slower: inference mode and gradients make no difference."""
        ...


class PlanSignature(Signature, Protocol):
    """One that can also say what is wrong."""

    def mismatch(self, leaves: Any) -> str | None:
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
