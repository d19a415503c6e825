"""Checks of a packer's input and their error messages, all of them off the hot path."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .backends import wrong_device
from .errors import InputError, LeafError
from .leaf_memory import why_unpackable
from .plan import Plan
from .tree import Node


def check_leaves(found: Sequence[Node], leaves: Sequence[Tensor], device: torch.device) -> None:
    """Raise for leaves that a packer of this device can't pack."""
    for node in found:
        for index in node.leaves:
            leaf = leaves[index]
            if leaf.device.type != "cpu" and leaf.device != device:
                raise wrong_device(repr(node.path), leaf.device, device)
            why_not = why_unpackable(leaf)
            if why_not:
                raise LeafError(f"{node.path!r} {why_not}")


def check_fit(plan: Any, leaves: Any) -> None:
    """Raise if `plan` is not a `Plan`, or if leaves differ from those it was made for; the message says how."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}; give one from spanpack.make_plan")
    why_not = plan.signature.mismatch(leaves)
    if why_not:
        these = f"these {len(leaves)} leaves" if isinstance(leaves, Sized) else "these leaves"
        raise LeafError(
            f"{these} differ from those of the plan ({len(plan.use.routes)}): {why_not}; make a plan for them"
        )


def check_integer(name: str, given: Any, least: int) -> None:
    """Raise unless the argument `name` is an integer of at least `least`."""
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or given < least:
        raise InputError(f"{name}={given!r}; give an integer of at least {least}")
