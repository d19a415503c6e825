"""Payload trees: extract the tensors, keep the rest, and build trees from both.

A tree is made of dicts (any ``Mapping``), lists, tuples, named tuples and dataclasses. `flatten` walks it once and
returns its *leaves* (tensors), a hashable *spec* (containers, keys, positions of leaves and values) and its plain
*values*, copied so that later changes by the caller have no effect. Two trees with equal specs have their leaves in the
same places, which makes a plan reusable.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from .errors import InputError, LeafError

TreeSpec = tuple[Any, ...]  # flat, in walking order: LEAF, VALUE or (kind, *description) followed by the children

LEAF: Final = "leaf"
VALUE: Final = "value"
_PLAIN_KEYS: Final = frozenset({str, int, bytes, type(None)})  # no value of one type equals one of another
IMMUTABLE: Final = frozenset({str, bytes, int, float, bool, complex, type(None)})


def flatten(tree: Any) -> tuple[list[Tensor], TreeSpec, list[Any]]:
    """Split a payload tree into tensors, structure and plain values.

    Parameters
    ----------
    tree
        A tensor, a plain value, or a nesting of dict/Mapping, list, tuple, named tuple and dataclass.

    Returns
    -------
    leaves : list of Tensor
        The tensors, not copied, in walking order (dict order, list order).
    spec : TreeSpec
        Hashable structure; equal for trees that have the same containers, keys and kinds of nodes.
    values : list
        All that is neither container nor tensor, in walking order. Lists of plain values count as one value. Lists and
        NumPy arrays are copied; objects of other types are kept by reference.

    Raises
    ------
    InputError
        A container holds itself, or containers are nested deeper than Python's recursion limit.
    LeafError
        A set or deque holds tensors.
    """
    leaves: list[Tensor] = []
    spec: list[Any] = []
    values: list[Any] = []
    try:
        _walk(tree, leaves, spec, values)
    except RecursionError:
        raise InputError(_why_endless(tree)) from None
    return leaves, tuple(spec), values


def _why_endless(tree: Any) -> str:
    """Why a tree can't be walked to its end, determined without recursion and in walking order."""
    walks = [(id(tree), "", iter(_children_by_name(tree)))]
    while walks and len(walks) <= sys.getrecursionlimit():
        step = next(walks[-1][2], None)
        if step is None:
            walks.pop()
            continue
        name, child = step
        path = [*(walk[1] for walk in walks[1:]), name]
        for depth, (above, _, _) in enumerate(walks):
            if id(child) == above:
                holder = f"the container {'.'.join(path[:depth])!r}" if depth else "the payload"
                return f"{holder} holds itself, at {'.'.join(path)!r}; give a tree, without the reference back"
        children = _children_by_name(child)
        if children:
            walks.append((id(child), name, iter(children)))
    return "the payload is nested deeper than Python's recursion limit lets it be walked; give a flatter one"


def _children_by_name(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, (list, tuple)):
        names = getattr(node, "_fields", range(len(node)))
        return [(str(name), child) for name, child in zip(names, node, strict=True)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return []


def _walk(node: Any, leaves: list[Tensor], spec: list[Any], values: list[Any]) -> None:
    kind = type(node)
    if kind is dict:
        spec.append(_describe_keys(dict, node))
        children: Any = node.values()
    elif kind is list or kind is tuple:
        plain = copy_if_plain(node)
        if plain is not None:
            spec.append(VALUE)
            values.append(plain)
            return
        spec.append((kind, len(node)))
        children = node
    elif isinstance(node, Tensor):
        spec.append(LEAF)
        leaves.append(node)
        return
    else:
        described = _describe_other(node)
        if described is None:
            spec.append(VALUE)
            values.append(_copy_value(node))
            return
        head, children = described
        spec.append(head)
    for child in children:
        if type(child) is Tensor:  # the common case, without a call per tensor
            spec.append(LEAF)
            leaves.append(child)
        else:
            _walk(child, leaves, spec, values)


def copy_if_plain(node: Any) -> Any:
    """A non-empty list of immutable values, copied, or a non-empty tuple of such values; None for anything else."""
    kind = type(node)
    if (kind is list or kind is tuple) and node and IMMUTABLE.issuperset(map(type, node)):
        return list(node) if kind is list else node
    return None


def _describe_keys(kind: type, node: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Head token of a mapping, with the types of its keys if keys of another type might equal them."""
    keys = tuple(node)
    if _PLAIN_KEYS.issuperset(map(type, keys)):
        return kind, keys
    return kind, keys, tuple(map(_kind_of_key, keys))


def _kind_of_key(key: Any) -> Any:
    return (tuple, *map(_kind_of_key, key)) if type(key) is tuple else type(key)


def _describe_other(node: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """Head token and children of the less common containers; None for a plain value."""
    if isinstance(node, Mapping):
        return _describe_keys(Mapping, node), list(node.values())
    if isinstance(node, tuple):
        return (type(node), len(node), getattr(node, "_fields", None)), node
    if isinstance(node, list):
        return (list, len(node)), node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = tuple(field.name for field in dataclasses.fields(node))
        return (type(node), names, "dataclass"), [getattr(node, name) for name in names]
    return None


def _copy_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, bytearray):
        return bytearray(value)
    if isinstance(value, (set, frozenset, deque)):
        if any(isinstance(item, Tensor) for item in value):
            raise LeafError(f"the payload holds a {type(value).__name__} of tensors; give a list or a tuple instead")
        return value.copy()
    return value


def unflatten(spec: TreeSpec, leaves: Sequence[Any], values: Sequence[Any]) -> Any:
    """Build a tree from a spec: the inverse of `flatten`.

    Mappings that are not dicts become dicts. Values are copied again, so that every tree built from one spec
    owns its lists.

    Parameters
    ----------
    spec
        From `flatten`.
    leaves
        What to put where the tensors were, in walking order.
    values
        What to put where the plain values were, in walking order.

    Returns
    -------
    Any
        The tree.
    """
    return _build(iter(spec), iter(leaves), iter(values))


def _build(tokens: Iterator[Any], leaves: Iterator[Any], values: Iterator[Any]) -> Any:
    token = next(tokens)
    if token is LEAF:
        return next(leaves)
    if token is VALUE:
        value = next(values)
        return list(value) if type(value) is list else _copy_value(value)
    kind, described, *more = token
    if kind is dict or kind is Mapping:  # loops rather than comprehensions, which would double the depth of the calls
        mapping = {}
        for key in described:
            mapping[key] = _build(tokens, leaves, values)
        return mapping
    if more and more[0] == "dataclass":
        made = object.__new__(kind)  # sets its fields as they were, without running __init__
        for name in described:
            object.__setattr__(made, name, _build(tokens, leaves, values))
        return made
    children = [None] * described
    for index in range(described):
        children[index] = _build(tokens, leaves, values)
    if kind is list:
        return children
    return kind(*children) if more and more[0] is not None else kind(children)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A leaf, or a list or tuple of leaves only, and its position in its tree.

    Attributes
    ----------
    path
        Dotted keys, e.g. ``"hidden_states.layers.24"``.
    leaves
        Indices of its leaves in walking order.
    is_list
        Whether the node is a list or tuple of tensors rather than one tensor.
    """

    path: str
    leaves: tuple[int, ...]
    is_list: bool


def nodes(spec: TreeSpec) -> list[Node]:
    """The nodes of a spec in walking order; a list or tuple of leaves only is one node."""
    found: list[Node] = []
    _find_nodes(spec, 0, (), found, 0)
    return found


def _find_nodes(spec: TreeSpec, at: int, path: tuple[str, ...], found: list[Node], leaf: int) -> tuple[int, int]:
    """Add the nodes below position `at`; returns the position after them and the index of the next leaf."""
    token = spec[at]
    at += 1
    if token is VALUE:
        return at, leaf
    if token is LEAF:
        found.append(Node(".".join(path), (leaf,), False))
        return at, leaf + 1
    kind, described, *more = token
    if kind is dict or kind is Mapping or "dataclass" in more:
        names: Sequence[Any] | None = described
    else:
        names = more[0] if more else None  # the fields of a named tuple
    if names is None and described and all(child is LEAF for child in spec[at : at + described]):
        found.append(Node(".".join(path), tuple(range(leaf, leaf + described)), True))
        return at + described, leaf + described
    for key in range(described) if names is None else names:
        at, leaf = _find_nodes(spec, at, (*path, str(key)), found, leaf)
    return at, leaf
