"""Recognise leaves that look like those a plan was made for: same dtypes, shapes, strides, devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor


class Signature(Protocol):
    """Tells whether tensors look like those it was made from; addresses are ignored."""

    def matches(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these leaves look like those it was made from; fast, but may reject some that `admits` accepts."""
        ...

    def admits(self, leaves: Sequence[Tensor]) -> bool:
        """Like `matches`, but exact and slower: inference mode and gradients make no difference."""
        ...


class PlanSignature(Signature, Protocol):
    """A signature that can also say how leaves differ."""

    def mismatch(self, leaves: Any) -> str | None:
        """How these differ from the leaves it was made from, in words; None if `admits` would be true."""
        ...


_is_nested = attrgetter("is_nested")


def guarded(check: Callable[..., bool], count: int) -> Callable[[Sequence[Tensor]], bool]:
    """Torch's guards for `count` tensors, kept from nested ones, for which the guards abort the process."""

    def matches(leaves: Sequence[Tensor]) -> bool:
        try:
            return len(leaves) == count and True not in map(_is_nested, leaves) and check(*leaves)
        except AttributeError:  # not a tensor
            return False

    return matches
