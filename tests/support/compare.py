"""Compare bytes, never values: NaN payloads and -0.0 count, and there are no tolerances."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanpack import Plan

POISON = 0xA5  # fills a destination before anything is written; neither 0 nor 1, unusual as float, invalid as bool


def poisoned(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """A poisoned buffer, which shows what is written and what is not, ``[nbytes] uint8``."""
    return torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in order as bytes on the host, ``[nbytes] uint8``."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(found: Tensor, expected: Tensor, where: str = "tensor") -> None:
    """Assert the same dtype, rank, shape and bytes; for opaque tensors, the same kind and values."""
    assert isinstance(found, Tensor), f"{where}: {type(found).__name__} instead of a tensor"
    assert found.device.type == "cpu", f"{where}: on {found.device}"
    assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout), where
    if expected.layout != torch.strided or expected.is_quantized:
        expected = expected.cpu()
        assert found.is_quantized == expected.is_quantized, where
        assert torch.equal(_dense(found), _dense(expected)), where
    else:
        assert torch.equal(bytes_of(found), bytes_of(expected)), f"{where}: bytes differ"


def assert_slab(slab: Tensor, plan: Plan, columns: Sequence[Tensor]) -> None:
    """Assert that a poisoned slab holds these columns where the plan says, and that all other bytes are untouched."""
    found = slab.cpu()
    untouched = torch.ones(len(found), dtype=torch.bool)
    for index, (column, expected) in enumerate(zip(plan.columns, columns, strict=True)):
        place = slice(column.offset_bytes, column.offset_bytes + column.nbytes)
        assert torch.equal(found[place], bytes_of(expected)), f"column {index}"
        assert untouched[place].all(), f"column {index} overlaps another"
        untouched[place] = False
    assert (found[untouched] == POISON).all(), "bytes outside all columns were written"


def _dense(tensor: Tensor) -> Tensor:
    return tensor.int_repr() if tensor.is_quantized else tensor.to_dense()


def assert_same_tree(found: Any, expected: Any, where: str = "payload") -> None:
    """Assert the same containers, keys in the same order, the same tensors and the same plain values."""
    if isinstance(expected, Tensor):
        assert_same(found, expected, where)
        return
    assert type(found) is type(expected), f"{where}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        pairs = [(key, found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        pairs = [(index, *both) for index, both in enumerate(zip(found, expected, strict=True))]
    elif dataclasses.is_dataclass(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        pairs = [(name, getattr(found, name), getattr(expected, name)) for name in names]
    else:
        same = np.array_equal(found, expected) if isinstance(expected, np.ndarray) else found == expected
        assert same, f"{where}: {found!r} instead of {expected!r}"
        return
    for key, left, right in pairs:
        assert_same_tree(left, right, f"{where}.{key}")
