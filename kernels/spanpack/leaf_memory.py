"""Whether a leaf's memory can be read: a kernel that is given a wrong address ends the process's use of the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LeafError

NESTED = "is a nested tensor; give the list of its parts, leaf.unbind()"

# A view into a storage that was freed has its own offset in bytes as its address, not 0. Lower addresses than this one
# are therefore looked into. Real ones are hardly ever as low, and freed storages hardly ever had so many bytes.
SUSPECT_ADDRESS = 1 << 33

_PACK_SOONER = "pack it before it is freed"
_PACK_OTHERS = "give the tensors it stands for"
_NARROW = {getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in range(1, 8)}


def check_memory(leaves: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Raise a LeafError for a leaf that has elements but no memory to read them from."""
    for index in indices:
        leaf = leaves[index]
        if not leaf.numel():
            continue
        is_freed = _is_freed(leaf)
        if is_freed or not leaf.data_ptr():
            why = f"its storage was freed; {_PACK_SOONER}" if is_freed else "it stands for other tensors; pack those"
            raise LeafError(f"leaf {index}, a {type(leaf).__name__}, has no memory of its own: {why}")


def why_unpackable(leaf: Tensor) -> str | None:
    """Why a leaf can't be packed, and what to do about it; None if it can."""
    if leaf.is_nested:
        return NESTED
    if leaf.dtype in _NARROW:
        return f"is {str(leaf.dtype).removeprefix('torch.')}, narrower than a byte; give leaf.view(torch.uint8)"
    if leaf.layout != torch.strided or leaf.is_quantized or not leaf.numel():
        return None
    if _is_freed(leaf):
        return f"is a {type(leaf).__name__} whose storage was freed; {_PACK_SOONER}"
    try:
        has_address = leaf.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # inside a function transform such as vmap, or traced
        has_address = False
    return None if has_address else f"is a {type(leaf).__name__} without memory of its own; {_PACK_OTHERS}"


def _is_freed(leaf: Tensor) -> bool:
    """Whether a tensor with elements had memory before and has none now."""
    try:
        return leaf.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):  # it never had a storage
        return False
