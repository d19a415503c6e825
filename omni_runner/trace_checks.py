"""Check the fields of a recorded step (see docs/traces.md); a problem raises a TraceError that names the field."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from omni_runner.errors import TraceError

if TYPE_CHECKING:
    from omni_runner.trace import TraceStep

# Payloads nest three or four levels deep; traversing a tree takes some stack for each level.
_MAX_DEPTH = 32
_MAX_ROWS = 1 << 31
_NODE_KINDS = ("tensor", "dict", "list", "tuple", "value", "unsupported")
_LAYOUT = ("stride", "storage", "storage_offset")


def is_int64(value: int) -> bool:
    """Whether a trace can hold a whole number: one of up to 64 bits, with its sign."""
    return -(1 << 63) <= value < 1 << 63


def malformed(where: str, given: object, expected: str) -> TraceError:
    """Return the error for a field whose value is not as expected."""
    return TraceError(f"{where}: given {reprlib.repr(given)}, expected {expected}")


def _items(given: object, where: str, kind: type[Any], what: str) -> list[Any]:
    """Check that a field is a list of exactly one type: a bool is not a whole number."""
    if not isinstance(given, list):
        raise malformed(where, given, f"a list of {what}s")
    for place, item in enumerate(given):
        if type(item) is not kind:
            raise malformed(f"{where}[{place}]", item, f"a {what}")
    return given


def whole_numbers(given: object, where: str) -> tuple[int, ...]:
    """Read a field that must be a list of whole numbers."""
    return tuple(_items(given, where, int, "whole number"))


def flag(given: object, where: str) -> bool:
    """Read a field that must be true or false."""
    if not isinstance(given, bool):
        raise malformed(where, given, "true or false")
    return given


def seconds(given: object, where: str) -> float:
    """Read a field that must be a finite number."""
    if type(given) not in (int, float) or not abs(given) < math.inf:  # type: ignore[arg-type]
        raise malformed(where, given, "a number of seconds")
    return float(given)  # type: ignore[arg-type]


def request_ids(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read a field that must be a list of distinct strings."""
    ids = _items(raw[name], name, str, "text")
    repeated = next((request for place, request in enumerate(ids) if request in ids[:place]), None)
    if repeated is not None:
        raise TraceError(f"{name} names {repeated!r} twice")
    return tuple(ids)


def check_requests(step: TraceStep) -> None:
    """Check that the per-request fields are consistent."""
    requests = len(step.request_ids)
    if len(step.num_scheduled_tokens) != requests or len(step.query_start_loc) < requests + 1:
        raise TraceError(
            f"{requests} request ids need {requests} scheduled-token counts and at least {requests + 1} "
            f"start locations, got {len(step.num_scheduled_tokens)} and {len(step.query_start_loc)}"
        )
    unknown = sorted(set(step.needs_payload) - set(step.request_ids))
    if unknown:
        raise TraceError(f"needs_payload names {unknown[0]!r}, which is not in the batch")
    if step.elements is not None and len(step.elements) != len(step.needs_payload):
        raise TraceError(f"{len(step.elements)} elements for {len(step.needs_payload)} requests in needs_payload")
    if any(not 0 <= place < _MAX_ROWS for place in step.elements or ()):
        raise TraceError(f"elements {list(step.elements or ())} are not all places in a list")


def check_rows(step: TraceStep) -> None:
    """Check that the counts, the start locations and the hidden rows, if any, are consistent."""
    counts, hidden = step.num_scheduled_tokens, step.hidden_states
    if any(count < 0 for count in counts):
        raise TraceError(f"num_scheduled_tokens has the negative count {min(counts)}")
    starts = tuple(itertools.accumulate(counts, initial=0))
    if step.query_start_loc[: len(starts)] != starts:
        raise TraceError("query_start_loc is not the running sum of num_scheduled_tokens")
    for name in ("hidden_states", "staged_hidden_states_cpu"):
        value = getattr(step, name)
        if value is not None and not (isinstance(value, Tensor) and value.dim()):
            raise TraceError(f"{name} is not a tensor with rows")
    if not isinstance(step.multimodal_outputs, dict | None):
        raise TraceError(f"multimodal_outputs is a {type(step.multimodal_outputs).__name__}, not a dict")
    rows = hidden.shape[0] if hidden is not None and step.include_hidden else _MAX_ROWS
    if starts[-1] > rows:
        raise TraceError(f"num_scheduled_tokens add up to {starts[-1]}, past the {rows} rows")


def check_node(node: Any, where: str, depth: int = 0) -> None:
    """Check that a tree node and those below it have the form that docs/traces.md describes."""
    if depth > _MAX_DEPTH:
        raise TraceError(f"a tree is nested more than {_MAX_DEPTH} deep")
    kind = next((kind for kind in _NODE_KINDS if kind in node), None) if isinstance(node, dict) else None
    if kind is None:
        raise malformed(where, node, f"an object with one of {', '.join(_NODE_KINDS)}")
    content = node[kind]
    if kind == "tensor":
        _check_tensor_node(node, where)
    elif kind == "value":
        _check_value(content, where)
    elif kind in ("list", "tuple"):
        for place, item in enumerate(_items(content, f"{where}.{kind}", dict, "tree node")):
            check_node(item, f"{where}[{place}]", depth + 1)
    elif kind == "dict":
        for place, pair in enumerate(_items(content, f"{where}.dict", list, "pair of key and tree node")):
            if len(pair) != 2 or isinstance(pair[0], (dict, list)):
                raise malformed(f"{where}.dict[{place}]", pair, "a pair of key and tree node")
            check_node(pair[1], f"{where}.{pair[0]}", depth + 1)


def _check_tensor_node(node: Mapping[str, Any], where: str) -> None:
    for name in ("tensor", "device"):
        if not isinstance(node.get(name, ""), str):
            raise malformed(f"{where}.{name}", node[name], "a name")
    if not any(name in node for name in _LAYOUT):
        return
    missing = [name for name in _LAYOUT if name not in node]
    if missing:
        raise TraceError(f"{where}: a tensor has all of {', '.join(_LAYOUT)} or none, {missing[0]} is missing")
    whole_numbers(node["stride"], f"{where}.stride")
    for name in ("storage", "storage_offset"):
        if type(node[name]) is not int:
            raise malformed(f"{where}.{name}", node[name], "a whole number")


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, (dict, list)):
        raise malformed(where, value, "a plain value: null, a number, a text, true or false")
    if isinstance(value, int) and not is_int64(value):
        raise malformed(where, value, "a whole number of no more than 64 bits")
