"""A cache that finds what was planned for an earlier payload that looks like this one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from .leaf_table import LeafLooks
from .matcher import Matcher, compile_matcher
from .signature import Signature
from .tree import TreeSpec, flatten

EntryT = TypeVar("EntryT")


@dataclass(slots=True, eq=False)
class Sighting(Generic[EntryT]):
    """A payload split into its parts, and the entry found for it.

    Attributes
    ----------
    leaves
        Its tensors in walking order, then the `extra` ones.
    values
        Its plain values.
    spec
        Its structure; empty if the entry was found without walking the payload.
    entry
        The entry kept for payloads like this, or None.
    """

    leaves: Sequence[Tensor]
    values: list[Any]
    spec: TreeSpec
    entry: EntryT | None


@dataclass(slots=True, eq=False)
class _CachedEntry(Generic[EntryT]):
    key: Hashable
    match: Matcher | None
    signature: Signature
    entry: EntryT


class PlanCache(Generic[EntryT]):
    """Entries found by a key and by how a payload looks: its structure, its leaves' dtypes, shapes, strides, devices.

    Addresses and plain values are ignored. The least recently used entry is dropped first. Safe to use from several
    threads.

    Parameters
    ----------
    capacity
        Maximum number of pairs of structure and key. For each, up to four sets of shapes are kept.

    Examples
    --------
    >>> import torch
    >>> cache = PlanCache()
    >>> seen = cache.look({"hidden": torch.zeros(3)}, key="decode")
    >>> cache.keep(seen, "decode", "a plan")
    >>> cache.look({"hidden": torch.ones(3)}, key="decode").entry
    'a plan'
    """

    _SHAPES = 4
    _RECENT = 4

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._looks: OrderedDict[Hashable, list[_CachedEntry[EntryT]]] = OrderedDict()
        # Tried first, by a matcher instead of a walk. The list is replaced, never mutated.
        self._recent: list[_CachedEntry[EntryT]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._looks.values()))

    def look(self, tree: Any, key: Hashable, extra: tuple[Tensor, ...] = ()) -> Sighting[EntryT]:
        """Split a payload into its parts and find its entry.

        Parameters
        ----------
        tree
            As for `flatten`.
        key
            What else the entry depends on, such as the spans. Passing the same key object again is fastest.
        extra
            Tensors outside of the tree, appended to its leaves.
        """
        for look in self._recent:
            if look.key is key or look.key == key:
                found = look.match(tree) if look.match is not None else None
                if found is not None:
                    leaves = found[0] + extra
                    if look.signature.matches(leaves):
                        return Sighting(leaves, found[1], (), look.entry)
        walked, spec, values = flatten(tree)
        walked.extend(extra)
        with self._lock:
            return Sighting(walked, values, spec, self._find(spec, key, walked))

    def keep(self, seen: Sighting[EntryT], key: Hashable, entry: EntryT, signature: Signature | None = None) -> None:
        """Keep an entry for payloads like one for which `look` found none.

        Parameters
        ----------
        seen, key
            What `look` returned, and the key that it was given.
        entry
            What `look` finds from now on.
        signature
            Recognises the leaves, such as `Plan.signature`; by default one is made.
        """
        look = _CachedEntry(key, compile_matcher(seen.spec), signature or LeafLooks.of(seen.leaves), entry)
        with self._lock:
            looks = self._looks.setdefault((seen.spec, key), [])
            looks.insert(0, look)
            del looks[self._SHAPES :]
            while len(self._looks) > self._capacity:
                self._looks.popitem(last=False)
            self._bring_forward(look)

    def _find(self, spec: TreeSpec, key: Hashable, leaves: Sequence[Tensor]) -> EntryT | None:
        looks = self._looks.get((spec, key))
        if looks is not None:
            for look in looks:
                if look.signature.matches(leaves):
                    self._looks.move_to_end((spec, key))
                    self._bring_forward(look)
                    return look.entry
        return None

    def _bring_forward(self, look: _CachedEntry[EntryT]) -> None:
        recent = [look, *(other for other in self._recent if other is not look)]
        self._recent = recent[: self._RECENT]
