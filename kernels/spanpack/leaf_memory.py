"""Whether a leaf's memory can be read: a kernel that is given a wrong address ends the process's use of the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LeafError

WHY_NOT_NESTED = "is a nested tensor; give the list of its parts, leaf.unbind()"

# A view into a storage that was freed has its own offset in bytes as its address, not 0. So leaves at addresses below
# this one are looked into: few real ones are as low, and no storage that was freed had so many bytes.
SUSPECT_ADDRESS = 1 << 40

_LOST = "whose storage was freed or shrunk; pack it before"
_STANDS_FOR_OTHERS = "without memory of its own; give the tensors it stands for, outside of transforms such as vmap"
_NARROW = {getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in range(1, 8)}


def check_memory(leaves: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Raise a LeafError for a leaf that has elements but no memory to read them from."""
    for index in indices:
        why_not = _why_unreadable(leaves[index])
        if why_not:
            raise LeafError(f"leaf {index} is a {type(leaves[index]).__name__} {why_not}")


def why_unpackable(leaf: Tensor) -> str | None:
    """Why a leaf can't be packed, and what to do about it; None if it can."""
    if leaf.is_nested:
        return WHY_NOT_NESTED
    if leaf.dtype in _NARROW:
        return f"is {str(leaf.dtype).removeprefix('torch.')}, narrower than a byte; give leaf.view(torch.uint8)"
    if leaf.layout != torch.strided or leaf.is_quantized:
        return None
    why_not = _why_unreadable(leaf)
    return f"is a {type(leaf).__name__} {why_not}" if why_not else None


def _why_unreadable(leaf: Tensor) -> str | None:
    """Why the elements of a strided leaf can't be read from memory; None if they can, or if it has none."""
    if not leaf.numel():
        return None
    try:
        has_address = leaf.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # inside a function transform, or traced
        return _STANDS_FOR_OTHERS
    if _is_cut_off(leaf):
        return _LOST
    return None if has_address else _STANDS_FOR_OTHERS


def _is_cut_off(leaf: Tensor) -> bool:
    """Whether a strided leaf's storage ends before its last element."""
    last = leaf.storage_offset() + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
    try:
        return leaf.untyped_storage().nbytes() < (last + 1) * leaf.itemsize
    except (RuntimeError, NotImplementedError):  # it never had a storage
        return False
