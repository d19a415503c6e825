"""The gather kernel and its torch reference: the same bytes from every source, and no byte elsewhere.

The kernel runs compiled on a GPU, interpreted elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spanpack import ColumnSpec, Packer, Plan, gather_torch, gather_triton, make_plan
from spanpack.config import DEFAULT_CONFIGS, LaunchConfig
from tests.support.compare import assert_same, assert_slab, poisoned
from tests.support.leaves import DTYPES, LeafRecipe, layouts_of

OFFSETS = (0, 1, 3, 5, 7, 8, 15)  # each alignment class of 16-, 8-, 4- and 1-byte lanes, and odd ones
LENGTHS = range(1, 34)  # up to two 16-byte lanes and a byte: every head, body and tail
CONFIGS = (LaunchConfig(64, 1), *DEFAULT_CONFIGS)  # the first makes tiles of what is one tile otherwise
GUARD_BYTES = 64

each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def numbered(nbytes: int, device: str) -> Tensor:
    """Bytes of which neighbours differ and that do not repeat at a power of two, ``[nbytes] uint8``."""
    return (torch.arange(nbytes, device=device) % 251).to(torch.uint8)


def check(plan: Plan, leaves: list[Tensor], columns: list[Tensor], config: LaunchConfig) -> None:
    """Both gathers fill a poisoned slab with these columns."""
    slab = poisoned(plan.device_bytes + GUARD_BYTES, leaves[0].device)
    gather_torch(plan, leaves, slab)
    assert_slab(slab, plan, columns)
    slab = poisoned(plan.device_bytes + GUARD_BYTES, leaves[0].device)
    gather_triton(plan, leaves, slab, config)
    assert_slab(slab, plan, columns)


def stretches(device: str) -> list[Tensor]:
    base = numbered(16 + max(LENGTHS), device)
    return [base[offset : offset + length] for offset in OFFSETS for length in LENGTHS]


@each_config
def test_odd_offsets_and_lengths_at_aligned_destinations(kernel_device: str, config: LaunchConfig) -> None:
    leaves = stretches(kernel_device)
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    check(plan, leaves, leaves, config)


@each_config
def test_odd_offsets_and_lengths_at_odd_destinations(kernel_device: str, config: LaunchConfig) -> None:
    leaves = stretches(kernel_device)
    plan = make_plan(leaves, [ColumnSpec.stack(range(len(leaves)), leaves)])
    check(plan, leaves, [torch.cat(leaves)], config)


@each_config
@pytest.mark.parametrize("beyond", [-1, 0, 1, 5, 16], ids="{:+d} bytes".format)
def test_lengths_around_a_whole_number_of_tiles(kernel_device: str, config: LaunchConfig, beyond: int) -> None:
    length = 2 * config.tile_bytes + beyond
    base = numbered(length + 16, kernel_device)
    leaves = [base[offset : offset + length] for offset in (0, 1, 4)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    check(plan, leaves, leaves, config)


@each_config
def test_strided_rows_of_odd_width(kernel_device: str, config: LaunchConfig) -> None:
    leaves = []
    for width in (1, 2, 3, 4, 7, 8, 12, 16, 24, 33):
        for gap, offset in ((1, 0), (5, 1), (8, 4), (16, 8)):
            base = numbered(9 * (width + gap) + offset, kernel_device)[offset:]
            leaves.append(base.view(9, width + gap)[:, :width])
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    check(plan, leaves, leaves, config)


@each_config
def test_strided_rows_longer_than_a_tile(kernel_device: str, config: LaunchConfig) -> None:
    width = config.tile_bytes + 24
    leaf = numbered(3 * (width + 8), kernel_device).view(3, -1)[:, :width]
    plan = make_plan([leaf], [ColumnSpec(0, np.array([2, 0]), np.array([1, 2]))])
    check(plan, [leaf], [leaf[[2, 0, 1]]], config)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_layout_of_every_dtype(kernel_device: str, dtype: torch.dtype) -> None:
    recipes = [
        LeafRecipe(dtype, shape, layout, seed=100 + i)
        for layout in layouts_of(dtype)
        for i, shape in enumerate([(), (5,), (3, 7), (2, 3, 4), (2, 2, 3, 2), (0, 3), (3, 0)])
    ]
    leaves = [recipe.make(kernel_device) for recipe in recipes]
    expected = [recipe.make() for recipe in recipes]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    check(plan, leaves, expected, CONFIGS[1])


def test_channels_last_images(kernel_device: str) -> None:
    leaf = numbered(2 * 3 * 4 * 5, kernel_device).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    plan = make_plan([leaf], [ColumnSpec.whole(0, leaf, copies=2)])
    check(plan, [leaf], [torch.cat([leaf, leaf])], CONFIGS[1])


@pytest.mark.parametrize("gather", [gather_torch, gather_triton], ids=["torch", "triton"])
def test_nothing_to_copy_writes_nothing(kernel_device: str, gather) -> None:  # type: ignore[no-untyped-def]
    leaves = [torch.empty(0, device=kernel_device), torch.empty(4, 0, 2, device=kernel_device)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    slab = poisoned(GUARD_BYTES, kernel_device)
    gather(plan, leaves, slab)
    assert_slab(slab, plan, leaves)


def test_gathering_leaves_the_sources_as_they_are(kernel_device: str) -> None:
    leaf = LeafRecipe(torch.float32, (6, 5), "transposed", seed=3).make(kernel_device)
    before = leaf.clone()
    slab = poisoned(leaf.nbytes, kernel_device)
    gather_triton(make_plan([leaf], [ColumnSpec.whole(0, leaf)]), [leaf], slab)
    assert torch.equal(leaf.view(torch.int32), before.view(torch.int32))


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_beside_leaves_that_are_moved_as_objects(kernel_device: str) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    leaves = [torch.eye(4, device=kernel_device).to_sparse(), numbered(50, kernel_device), quantized.to(kernel_device)]
    plan = make_plan(leaves, [ColumnSpec.whole(i, leaf) for i, leaf in enumerate(leaves)])
    slab = poisoned(plan.device_bytes + GUARD_BYTES, kernel_device)
    gather_triton(plan, leaves, slab)
    empty = torch.empty(0, dtype=torch.uint8)
    assert_slab(slab, plan, [empty, leaves[1], empty])
    packer = Packer(kernel_device, backend="triton")
    found = packer.run(plan, leaves)
    assert_same(found.column(0), torch.eye(4).to_sparse())
    assert_same(found.column(1), leaves[1].cpu())
    assert_same(found.column(2), quantized)
    assert packer.stats().launches == 1


def test_rows_of_a_negated_leaf_are_those_of_the_whole() -> None:
    """Torch negates a complex zero to either zero, depending on where it stands in a vector."""
    leaf = torch._neg_view(torch.zeros(2, 17, dtype=torch.complex64))
    whole = leaf.resolve_neg().view(torch.uint8)
    snapshot = Packer("cpu").run(make_plan([leaf], [ColumnSpec(0, np.array([1, 0]), np.array([1, 1]))]), [leaf])
    assert torch.equal(snapshot.column(0).view(torch.uint8), whole[[1, 0]])
