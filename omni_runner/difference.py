"""Compare two tensors byte for byte."""

from __future__ import annotations

import torch
from torch import Tensor


def difference(expected: Tensor | None, found: Tensor | None) -> str:
    """Describe how two host tensors differ; an empty string if they do not.

    Compares dtype, shape and bytes, so NaN payloads and the sign of zero count.
    """
    if expected is None or found is None:
        return "" if expected is found else f"{_kind(expected)} against {_kind(found)}"
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"{_kind(expected)} against {_kind(found)}"
    if not expected.numel():
        return ""
    left, right = (_bytes(expected), _bytes(found))
    unequal = left != right
    count = int(unequal.sum())
    return f"{count} of {left.numel()} bytes differ, the first at {int(unequal.nonzero()[0])}" if count else ""


def _bytes(tensor: Tensor) -> Tensor:
    # Not .contiguous(): it returns a one-element tensor unchanged, whose stride view() may refuse.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
