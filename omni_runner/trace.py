"""Read traces: recorded steps of an AR stage, with the inputs of their payload snapshots.

A trace named ``PATH`` consists of two files. ``PATH.json`` holds, for each step, the host metadata and the payload
trees; ``PATH.safetensors`` holds the tensors that the trees name, contiguous, each distinct content once.
docs/traces.md describes every field. Nothing here needs vLLM or a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from omni_runner.errors import TraceError
from omni_runner.trace_checks import (
    check_node,
    check_requests,
    check_rows,
    flag,
    malformed,
    request_ids,
    seconds,
    whole_numbers,
)

FORMAT = 1
_TREE_FIELDS = ("hidden_states", "staged_hidden_states_cpu", "multimodal_outputs")
# A strided source whose memory block would be this much larger than its data (e.g. one row of each of many
# pages) is rebuilt as contiguous instead, because the recorded offsets are untrusted input.
_MAX_BLOCK_FACTOR = 8
_MAX_BLOCK_SLACK_BYTES = 64 << 20
_MOST_NAMES = 10


@dataclass(frozen=True)
class TraceStep:
    """One recorded step.

    Attributes
    ----------
    request_ids : tuple of str
        Requests of the batch, in the order of their rows.
    num_scheduled_tokens : tuple of int
        Rows of each request, same order.
    query_start_loc : tuple of int
        First row of each request, then the end of the last; further entries are padding.
    needs_payload : tuple of str
        The requests that have a downstream consumer.
    include_hidden : bool
        Whether the model wants its hidden rows in the payload.
    hidden_states : Tensor or None
        ``[rows, hidden_size]``, CUDA-graph padding rows included.
    staged_hidden_states_cpu : Tensor or None
        Host copy of the hidden rows that prefix caching makes.
    multimodal_outputs : object
        The payload tree of the model: dicts, lists, tuples, tensors and plain values.
    time_s : float
        Start of the step, in seconds after the first.
    use_async_omni_output : bool
        Whether the engine took its asynchronous output path.
    elements : tuple of int or None
        Sparse audio routing only: for each request in `needs_payload`, its index in per-request lists.
    """

    request_ids: tuple[str, ...]
    num_scheduled_tokens: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    needs_payload: tuple[str, ...]
    include_hidden: bool
    hidden_states: Tensor | None
    staged_hidden_states_cpu: Tensor | None
    multimodal_outputs: Any
    time_s: float = 0.0
    use_async_omni_output: bool = True
    elements: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """Recorded steps and what is known of their origin (``stage``, ``model``, versions, ...)."""

    about: Mapping[str, Any]
    steps: tuple[TraceStep, ...]
    source: str = "memory"

    @property
    def stage(self) -> str:
        """Name of the recorded stage, ``"?"`` if the trace does not say."""
        return str(self.about.get("stage", "?"))


def trace_files(path: str | Path) -> tuple[Path, Path]:
    """Return the JSON and the safetensors file of a trace, given its path with or without either suffix."""
    base = Path(path)
    if base.suffix in (".json", ".safetensors"):
        base = base.with_suffix("")
    return base.parent / f"{base.name}.json", base.parent / f"{base.name}.safetensors"


def load_trace(path: str | Path, device: torch.device | str = "cpu") -> Trace:
    """Read a trace and rebuild its payload trees.

    Tensors have the strides they were recorded with, and views of one memory block are again views of one
    block. Contents that occur in several steps share memory: treat them as read-only.

    Parameters
    ----------
    path : str or Path
        The trace, with or without the suffix of one of its two files.
    device : torch.device or str
        Device for tensors that were recorded on an accelerator. Host tensors stay on the host.

    Raises
    ------
    TraceError
        A file is missing, unreadable or truncated, has another format, names a missing tensor, has no steps, or has
        a malformed or inconsistent step.
    """
    json_file, tensor_file = trace_files(path)
    if not os.path.exists(json_file):
        raise TraceError(_why_absent(Path(path), json_file))
    document = _read_document(json_file)
    tensors = _read_tensors(tensor_file)
    steps = []
    for number, raw in enumerate(document["steps"]):
        with _blame(f"{json_file}: step {number}"):
            steps.append(_build_step(raw, _TreeBuilder(tensors, torch.device(device), tensor_file)))
    about = {key: value for key, value in document.items() if key not in ("format", "steps")}
    return Trace(about=about, steps=tuple(steps), source=str(json_file.with_suffix("")))


def _why_absent(path: Path, json_file: Path) -> str:
    """Return what a path names instead of a trace."""
    if os.path.isdir(path):
        names = sorted(file.stem for file in path.glob("*.json") if file.with_suffix(".safetensors").is_file())
        others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        found = f"name a trace in it: {', '.join(names[:_MOST_NAMES])}{others}" if names else "there is no trace in it"
        return f"{path} is a folder; {found}"
    if os.path.exists(path) and path.suffix != ".safetensors":
        return f"{path} is no trace; expected its .json or .safetensors file, or their name without the ending"
    return _missing(json_file)


def _missing(file: Path) -> str:
    return f"cannot read trace: {file} is missing (a trace is a .json and a .safetensors file)"


def _read_document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"cannot read trace {file}: {error.strerror or error}") from error
    except (RecursionError, ValueError) as error:
        raise TraceError(f"{file} is not JSON ({error}); is it the .json file of a trace, and complete?") from error
    if not isinstance(document, dict) or "format" not in document:
        raise TraceError(f"{file} has no field 'format': not a trace")
    if document["format"] != FORMAT:
        raise TraceError(f"{file} has format {document['format']!r}, this version reads format {FORMAT}")
    if not isinstance(document.get("steps"), list):
        raise TraceError(f"{file} has no list 'steps': not a complete trace")
    if not document["steps"]:
        raise TraceError(f"{file} has no steps")
    return document


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise TraceError(_missing(file))
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise TraceError(f"{file} is damaged or truncated: {error}") from error


@contextmanager
def _blame(where: str) -> Iterator[None]:
    """Convert the exceptions of a malformed step to a TraceError that names its location."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error
    except KeyError as error:
        raise TraceError(f"{where}: field {error} is missing") from error
    except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: malformed ({str(error).partition(chr(10))[0]})") from error


def _build_step(raw: Any, builder: _TreeBuilder) -> TraceStep:
    if not isinstance(raw, dict):
        raise malformed("the step", raw, "an object")
    for name in _TREE_FIELDS:
        check_node(raw[name], name)
    builder.collect_blocks([raw[name] for name in _TREE_FIELDS])
    step = TraceStep(
        request_ids=request_ids(raw, "request_ids"),
        num_scheduled_tokens=whole_numbers(raw["num_scheduled_tokens"], "num_scheduled_tokens"),
        query_start_loc=whole_numbers(raw["query_start_loc"], "query_start_loc"),
        needs_payload=request_ids(raw, "needs_payload"),
        include_hidden=flag(raw["include_hidden"], "include_hidden"),
        time_s=seconds(raw.get("time_s", 0.0), "time_s"),
        use_async_omni_output=flag(raw.get("use_async_omni_output", True), "use_async_omni_output"),
        elements=None if raw.get("elements") is None else whole_numbers(raw["elements"], "elements"),
        **{name: builder.build(raw[name]) for name in _TREE_FIELDS},
    )
    check_requests(step)
    check_rows(step)
    return step


@dataclass
class _Block:
    """The memory that several recorded tensors of one step were views of."""

    first_byte: int
    end_byte: int
    data_bytes: int
    memory: Tensor | None = None

    @property
    def worth_rebuilding(self) -> bool:
        limit = _MAX_BLOCK_FACTOR * self.data_bytes + _MAX_BLOCK_SLACK_BYTES
        return self.end_byte - self.first_byte <= limit


@dataclass
class _TreeBuilder:
    """Rebuilds the trees of one step from their JSON nodes."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    tensor_file: Path
    blocks: dict[int, _Block] = field(default_factory=dict)

    def collect_blocks(self, nodes: Sequence[Any]) -> None:
        """Find the extent of every memory block from which a strided tensor was taken."""
        found = [node for root in nodes for node in _tensor_nodes(root)]
        strided = {node["storage"] for node in found if "storage" in node and not self._is_plain(node)}
        for node in found:
            if node.get("storage") not in strided:
                continue
            first, end = _byte_range(node, self._content(node))
            data_bytes = self._content(node).nbytes
            block = self.blocks.setdefault(node["storage"], _Block(first, end, 0))
            # Aligned down, so that a source's address keeps its alignment.
            block.first_byte = min(block.first_byte, first) // 256 * 256
            block.end_byte = max(block.end_byte, end)
            block.data_bytes += data_bytes

    def build(self, node: Mapping[str, Any]) -> Any:
        """Return the value of a JSON node that `check_node` has accepted."""
        if "tensor" in node:
            return self._tensor(node)
        if "dict" in node:
            return {key: self.build(item) for key, item in node["dict"]}
        if "list" in node:
            return [self.build(item) for item in node["list"]]
        if "tuple" in node:
            return tuple(self.build(item) for item in node["tuple"])
        return node.get("value")  # None where it is unsupported

    def _content(self, node: Mapping[str, Any]) -> Tensor:
        try:
            return self.tensors[node["tensor"]]
        except KeyError:
            raise TraceError(f"tensor {node['tensor']!r} is not in {self.tensor_file}") from None

    def _is_plain(self, node: Mapping[str, Any]) -> bool:
        """Whether a tensor is contiguous, the only layout that needs no memory block."""
        return "stride" not in node or tuple(node["stride"]) == self._content(node).stride()

    def _tensor(self, node: Mapping[str, Any]) -> Tensor:
        content = self._content(node)
        device = torch.device("cpu") if node.get("device", "cpu") == "cpu" else self.device
        block = self.blocks.get(node.get("storage", -1))
        if block is None or not block.worth_rebuilding or content.numel() == 0:
            return content.to(device)
        if block.memory is None:
            # Rounded up, so that the size of every dtype divides it.
            length_bytes = (block.end_byte - block.first_byte) // 16 * 16 + 16
            block.memory = torch.zeros(length_bytes, dtype=torch.uint8, device=device)
        stride = tuple(node["stride"])
        offset = node["storage_offset"] - block.first_byte // content.itemsize
        view = block.memory.view(content.dtype).as_strided(content.shape, stride, offset)
        _writable(view).copy_(_writable(content, like=stride))
        return view


def _tensor_nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "tensor" in node:
        yield node
    for item in node.get("list") or node.get("tuple") or [pair[1] for pair in node.get("dict", ())]:
        yield from _tensor_nodes(item)


def _byte_range(node: Mapping[str, Any], content: Tensor) -> tuple[int, int]:
    """Return the byte range that a recorded tensor covers in its memory block."""
    stride, offset = node["stride"], node["storage_offset"]
    if len(stride) != content.dim() or min([offset, *stride]) < 0:
        raise TraceError(f"tensor {node['tensor']!r} of rank {content.dim()} has stride {stride}, offset {offset}")
    last = offset + sum((size - 1) * step for size, step in zip(content.shape, stride, strict=True))
    return offset * content.itemsize, max(offset, last + 1) * content.itemsize


def _writable(tensor: Tensor, like: tuple[int, ...] | None = None) -> Tensor:
    """Drop the repetitions along expanded dimensions (stride 0), which torch does not allow writing to."""
    for dim, stride in enumerate(tensor.stride() if like is None else like):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
