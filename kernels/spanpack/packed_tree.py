"""A packed payload tree: what `Packer.pack` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .batch import Spans
from .placement import Placed
from .plan import Plan
from .snapshot import Snapshot
from .tree import LEAF, TreeSpec, unflatten


@dataclass(frozen=True, eq=False)
class TreeRecipe:
    """How the columns of a plan become one tree per consumer; made once and reused for every step that looks alike."""

    plan: Plan
    spec: TreeSpec
    spans: Spans
    placed: tuple[Placed, ...]

    @cached_property
    def consumer_spec(self) -> TreeSpec:
        """The payload's structure as a consumer sees it: one tensor in place of a list of one per request."""
        single = {placed.node.leaves[0]: len(placed.node.leaves) for placed in self.placed if self._unwraps(placed)}
        spec: list[Any] = []
        leaf = skip = 0
        for token in self.spec:
            if token is LEAF:
                if skip:
                    skip -= 1
                else:
                    if leaf in single:
                        spec[-1] = LEAF  # in place of the list's own token
                        skip = single[leaf] - 1
                    else:
                        spec.append(LEAF)
                leaf += 1
            else:
                spec.append(token)
        return tuple(spec)

    @staticmethod
    def _unwraps(placed: Placed) -> bool:
        return placed.node.is_list and not placed.is_list


class PackedTree:
    """A payload on its way to the host.

    Attributes
    ----------
    snapshot
        Holds the bytes, by column.
    """

    __slots__ = ("_recipe", "_values", "snapshot")

    def __init__(self, snapshot: Snapshot, recipe: TreeRecipe, values: Sequence[Any]) -> None:
        self.snapshot = snapshot
        self._recipe = recipe
        self._values = values

    def wait(self) -> None:
        """Sleep until the bytes are on the host."""
        self.snapshot.wait()

    def done(self) -> bool:
        """Whether the device is done, see `Snapshot.done`."""
        return self.snapshot.done()

    def views(self) -> dict[str, Any]:
        """One payload tree per consumer, by request id; waits for the bytes.

        Returns
        -------
        dict
            In batch order. Each tree has the structure of the packed payload, with tensors on the host: per-token
            leaves hold the request's rows, per-request lists are replaced by the request's tensor, request-invariant
            leaves are a separate copy per request (`Placement.SHARED`: the same view for all). Tensors are zero-copy,
            keep the slab alive, and have their own storages: pickling one tree stores the bytes of that request only. A
            leaf that a `RowMap` does not give to a request is None in its tree.

        Raises
        ------
        ClosedError
            The tree was released.
        """
        pieces: dict[int, list[Tensor]] = {}
        recipe = self._recipe
        trees: dict[str, Any] = {}
        for consumer, index in enumerate(recipe.spans.consumers):
            leaves: list[Tensor | None] = []
            for placed in recipe.placed:
                sources = placed.sources[consumer]
                if sources is None:
                    leaves.append(None)
                    continue
                for column, piece in sources:
                    if column not in pieces:
                        pieces[column] = self.snapshot.pieces(column)
                    leaves.append(pieces[column][piece])
            trees[recipe.spans.request_ids[index]] = unflatten(recipe.consumer_spec, leaves, self._values)
        return trees

    def release(self) -> None:
        """Give up the hold on the slab; existing views stay valid and keep it alive."""
        self.snapshot.release()
