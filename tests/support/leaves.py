"""Recipes for tensors of every dtype and memory layout, the same on every device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

DTYPES: tuple[torch.dtype, ...] = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
COMPLEX = (torch.complex64, torch.complex128)
NEGATABLE = (torch.float32, torch.float64, *COMPLEX)

with warnings.catch_warnings():  # torch says once per process that complex32 is experimental
    warnings.simplefilter("ignore")
    torch.zeros(1, dtype=torch.complex32)

_POOL_BYTES = 1 << 20  # larger than any leaf of the random cases


@lru_cache(maxsize=8)
def _pool(device: str, kind: str) -> Tensor:
    """Random bytes from which each leaf takes a slice; unless `kind` says otherwise, any bits occur, also NaNs."""
    drawn = torch.randint(0, 256, (_POOL_BYTES,), generator=torch.Generator().manual_seed(11), dtype=torch.uint8)
    if kind == "bool":
        drawn &= 1
    elif kind == "finite":  # neither NaN nor zero when read as a floating-point number of any width
        drawn = (drawn & 0x87) | 0x38
    return drawn.to(device)


def _elements(count: int, dtype: torch.dtype, seed: int, device: str, kind: str) -> Tensor:
    """A new tensor with `count` elements."""
    nbytes = count * dtype.itemsize
    start = seed * 16 % (_POOL_BYTES - nbytes - 16) // 16 * 16
    return _pool(device, kind)[start : start + nbytes].clone().view(dtype)


Elements = Callable[[int], Tensor]
Shape = tuple[int, ...]


def _contiguous(elements: Elements, shape: Shape) -> Tensor:
    return elements(math.prod(shape)).view(shape)


def _offset(elements: Elements, shape: Shape) -> Tensor:
    count = math.prod(shape)
    return elements(count + 5)[3 : 3 + count].view(shape)


def _row_strided(elements: Elements, shape: Shape) -> Tensor:
    """Rows with gaps between them, narrowed from longer rows; for vectors, every third element."""
    if len(shape) < 2:
        return elements(3 * math.prod(shape))[::3].view(shape)
    rows, inner = shape[0], math.prod(shape[1:])
    return elements(rows * (inner + 3)).view(rows, inner + 3)[:, 2 : 2 + inner].unflatten(1, shape[1:])


def _column_strided(elements: Elements, shape: Shape) -> Tensor:
    """Every second element within the rows."""
    if not shape:
        return elements(2)[1]
    return elements(2 * math.prod(shape)).view(*shape[:-1], 2 * shape[-1])[..., ::2]


def _transposed(elements: Elements, shape: Shape) -> Tensor:
    return elements(math.prod(shape)).view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))


def _expanded_rows(elements: Elements, shape: Shape) -> Tensor:
    """One row that is expanded to many."""
    return elements(math.prod(shape[1:])).view(shape[1:]).expand(shape)


def _expanded_columns(elements: Elements, shape: Shape) -> Tensor:
    if not shape:
        return elements(1)[0]
    return elements(math.prod(shape[:-1])).view(*shape[:-1], 1).expand(shape)


def _overlapping_rows(elements: Elements, shape: Shape) -> Tensor:
    """Overlapping rows, each of which starts one element after the start of the previous one."""
    if not shape:
        return elements(1)[0]
    inner = math.prod(shape[1:])
    stride = torch.empty(shape[1:], device="meta").stride()
    return elements(shape[0] + inner).as_strided(shape, (1, *stride))


def _gradient(elements: Elements, shape: Shape) -> Tensor:
    return _contiguous(elements, shape).requires_grad_()


def _parameter(elements: Elements, shape: Shape) -> Tensor:
    return torch.nn.Parameter(_contiguous(elements, shape))


def _inference(elements: Elements, shape: Shape) -> Tensor:
    with torch.inference_mode():
        return _contiguous(elements, shape).clone()


def _negated(elements: Elements, shape: Shape) -> Tensor:
    return torch._neg_view(_contiguous(elements, shape))


def _conjugated(elements: Elements, shape: Shape) -> Tensor:
    return _row_strided(elements, shape).conj()


LAYOUTS: dict[str, Callable[[Elements, Shape], Tensor]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "row-strided": _row_strided,
    "column-strided": _column_strided,
    "transposed": _transposed,
    "expanded rows": _expanded_rows,
    "expanded columns": _expanded_columns,
    "overlapping rows": _overlapping_rows,
    "gradient": _gradient,
    "parameter": _parameter,
    "inference": _inference,
    "negated": _negated,
    "conjugated": _conjugated,
}


def layouts_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Layouts in which tensors of a dtype exist."""
    missing = set()
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        missing |= {"gradient", "parameter"}
    if dtype not in NEGATABLE:
        missing.add("negated")
    if dtype not in COMPLEX:
        missing.add("conjugated")
    return tuple(name for name in LAYOUTS if name not in missing)


@dataclass(frozen=True)
class LeafRecipe:
    """A tensor to be made. `seed` picks its contents."""

    dtype: torch.dtype
    shape: Shape
    layout: str
    seed: int

    def make(self, device: str = "cpu") -> Tensor:
        # Negating may change the bits of a NaN and the sign of a complex zero, depending on their position.
        kind = "finite" if self.layout in ("negated", "conjugated") else "bool" if self.dtype == torch.bool else "any"
        tensor = LAYOUTS[self.layout](lambda count: _elements(count, self.dtype, self.seed, device, kind), self.shape)
        assert (tensor.shape, tensor.dtype) == (self.shape, self.dtype)
        return tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} {self.layout}"


def scribble(tensor: Tensor) -> None:
    """Overwrite the whole storage that a tensor is a view of, as the next step does."""
    with torch.no_grad():
        storage = tensor.detach().untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(0x5A)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: object, *_: object) -> None:
        raise NotImplementedError(function)
