"""Extract the tensors of a payload with a known structure, several times faster than by walking it.

From the spec of a payload, `compile_matcher` generates a small function that unpacks exactly this structure and rejects
any other. A decode loop yields the same structure step after step, so recognising it has to be cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from .tree import IMMUTABLE, LEAF, VALUE, TreeSpec, copy_if_plain

Matcher = Callable[[Any], "tuple[tuple[Tensor, ...], list[Any]] | None"]


@lru_cache(maxsize=256)
def compile_matcher(spec: TreeSpec) -> Matcher | None:
    """A function that splits a tree of this structure as `flatten` does.

    Parameters
    ----------
    spec
        From `flatten`.

    Returns
    -------
    callable or None
        Takes a tree; returns its leaves and its values, or None for a tree of another structure. It does not check that
        leaves are tensors: the check of their dtypes and shapes does. None for structures that only `flatten` can
        split: those with anything but dicts, lists, tuples, tensors, immutable values and lists of those.
    """
    writer = _Writer()
    try:
        writer.node(spec, 0, "tree")
    except _Unsupported:
        return None
    leaves = "".join(f"{name}, " for name in writer.leaves)
    lines = [*writer.lines, f"return ({leaves}), [{', '.join(writer.values)}]"]
    source = "def match(tree):\n" + "".join(f"    {line}\n" for line in lines)
    scope: dict[str, Any] = {"immutable": IMMUTABLE, "copy_if_plain": copy_if_plain, **writer.keys}
    exec(compile(source, f"<matcher of {len(writer.leaves)} leaves>", "exec"), scope)
    matcher: Matcher = scope["match"]
    return matcher


class _Unsupported(Exception):
    pass


class _Writer:
    """Collects the source lines of one matcher. Names are numbered; keys are passed in as objects, never as text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.leaves: list[str] = []
        self.values: list[str] = []
        self.keys: dict[str, tuple[Any, ...]] = {}
        self._count = 0

    def node(self, spec: TreeSpec, at: int, name: str) -> int:
        """Write the lines that unpack the node at `spec[at]`; returns the position after that node."""
        token = spec[at]
        at += 1
        if token is LEAF:
            self.leaves.append(name)
            return at
        if token is VALUE:
            self.lines += [
                f"if type({name}) not in immutable:",
                f"    {name} = copy_if_plain({name})",
                f"    if {name} is None: return None",
            ]
            self.values.append(name)
            return at
        kind, described, *more = token
        if kind not in (dict, list, tuple) or more:
            raise _Unsupported
        count = len(described) if kind is dict else described
        self.lines.append(f"if type({name}) is not {kind.__name__} or {self._shape(name, described)}: return None")
        if count and kind is not dict and _only_leaves(spec[at : at + count]):
            self.leaves.append(f"*{name}")
            return at + count
        children = [self._name() for _ in range(count)]
        if children:
            self.lines.append(f"{', '.join(children)}, = {name}{'.values()' if kind is dict else ''}")
        for child in children:
            at = self.node(spec, at, child)
        return at

    def _shape(self, name: str, described: Any) -> str:
        """Condition for a container of another shape."""
        if isinstance(described, int):
            return f"len({name}) != {described}"
        keys = f"keys{len(self.keys)}"
        self.keys[keys] = described
        condition = f"tuple({name}) != {keys}"
        kinds = tuple(map(type, described))
        if set(kinds) <= {str}:
            return condition
        self.keys[f"{keys}_kinds"] = kinds  # 1, True and 1.0 are equal
        return f"{condition} or tuple(map(type, {name})) != {keys}_kinds"

    def _name(self) -> str:
        self._count += 1
        return f"node{self._count}"


def _only_leaves(tokens: Sequence[Any]) -> bool:
    return all(token is LEAF for token in tokens)
