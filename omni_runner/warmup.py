"""Preparation before the first step, so that no step compiles a kernel or pins memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import spanpack

DECODE_SLABS = 6  # steps in flight, and earlier ones whose views the sender still holds
PREFILL_SLABS = 2
SMALLEST_BYTES = 1 << 16
LARGEST_BYTES = 1 << 26  # device memory is scarce: a larger slab is allocated by the first step that needs it

# For a model that yields hidden rows: its own and two captured layers, and as many leaves for every request.
_PER_TOKEN_LEAVES = 3
_PER_REQUEST_LEAVES = 3


def warm_up(packer: spanpack.Packer, runner: Any) -> None:
    """Compile and check the kernel, and reserve slabs for the steps that this runner is expected to run.

    Parameters
    ----------
    packer
        The runner's packer.
    runner
        The engine's runner, with its model loaded.
    """
    packer.warmup()
    # If a runner lacks these attributes, `on_swap` handles the error, and slabs are allocated as steps need them.
    for nbytes, slabs in reservations(
        row_bytes=runner.hidden_size * runner.dtype.itemsize
        if runner._model_omni_pooler_payload_include_hidden()
        else 0,
        max_requests=runner.max_num_reqs,
        max_tokens=runner.max_num_tokens,
    ):
        packer.reserve(nbytes, slabs)


def reservations(*, row_bytes: int, max_requests: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield sizes and numbers of slabs, smallest first: for decode steps of every batch size, then a full prefill.

    Parameters
    ----------
    row_bytes
        Size of one hidden row; 0 for a model whose payload has none.
    max_requests, max_tokens
        The engine's limits for one step.
    """
    decode_bytes = (_PER_TOKEN_LEAVES + _PER_REQUEST_LEAVES) * row_bytes * max_requests
    prefill_bytes = decode_bytes + _PER_TOKEN_LEAVES * row_bytes * max_tokens
    nbytes = SMALLEST_BYTES
    while nbytes < min(2 * decode_bytes, LARGEST_BYTES):  # slabs come in powers of two
        yield nbytes, DECODE_SLABS
        nbytes *= 2
    yield max(nbytes, min(prefill_bytes, LARGEST_BYTES)), PREFILL_SLABS
