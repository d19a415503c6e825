"""Write traces: :class:`TraceWriter` for steps in memory, :class:`StepRecorder` for a running stage."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from omni_runner.errors import TraceError
from omni_runner.step import StepContext
from omni_runner.trace import FORMAT, Trace, TraceStep, trace_files
from omni_runner.trace_checks import is_int64

DEFAULT_MAX_BYTES = 1 << 30
_LARGEST = 2**63 - 1
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class TraceWriter:
    """Collects steps, copied to the host, and writes them as a trace.

    Parameters
    ----------
    scrub : bool
        Replace the payload's values by random ones, so that the trace may be shared. Tensors keep shape, dtype
        and stride, and equal ones stay equal: floats become normally distributed, integers uniformly between the
        smallest and the largest value of their tensor. Request ids are renumbered, other strings become as many
        ``x``, plain numbers random ones of the same sign and no greater magnitude.

    Attributes
    ----------
    stored_bytes : int
        Size of the tensors kept so far.
    """

    def __init__(self, scrub: bool = False) -> None:
        self.scrub = scrub
        self.stored_bytes = 0
        self._steps: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._name_of: dict[bytes, str] = {}  # digest of the original content -> name
        self._alias_of: dict[str, str] = {}  # request id -> its replacement in a scrubbed trace
        self._random = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: TraceStep) -> None:
        """Copy one step, reading device tensors on the current stream and waiting for them."""
        storages: dict[int, int] = {}
        elements = {} if step.elements is None else {"elements": [int(place) for place in step.elements]}
        self._steps.append(
            {
                **elements,
                "time_s": step.time_s,
                "request_ids": [self._request_id(name) for name in step.request_ids],
                "num_scheduled_tokens": [int(rows) for rows in step.num_scheduled_tokens],
                "query_start_loc": [int(start) for start in step.query_start_loc],
                "needs_payload": [self._request_id(name) for name in step.needs_payload],
                "include_hidden": step.include_hidden,
                "use_async_omni_output": step.use_async_omni_output,
                "hidden_states": self._node(step.hidden_states, storages),
                "staged_hidden_states_cpu": self._node(step.staged_hidden_states_cpu, storages),
                "multimodal_outputs": self._node(step.multimodal_outputs, storages),
            }
        )

    def save(self, path: str | Path, about: Mapping[str, Any]) -> tuple[Path, Path]:
        """Write both files, each complete or not at all.

        Parameters
        ----------
        path : str or Path
            Path of the trace without suffix. The folder is created.
        about : mapping
            Origin of the trace: ``stage``, ``model``, versions. Must be JSON-serializable.

        Raises
        ------
        TraceError
            The files cannot be written.
        """
        first_s = self._steps[0]["time_s"] if self._steps else 0.0
        steps = [{**step, "time_s": round(step["time_s"] - first_s, 6)} for step in self._steps]
        origin = dict(about)
        if self.scrub and "model" in origin:
            origin["model"] = Path(str(origin["model"])).name  # without the folders of the recording machine
        origin |= {"scrubbed": self.scrub, "torch": torch.__version__}
        document = {"format": FORMAT, **origin, "steps": steps}
        json_file, tensor_file = trace_files(path)
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            # The tensors first, so that a reader that finds the JSON file finds them too.
            save_file(self._tensors, _beside(tensor_file))
            _beside(tensor_file).replace(tensor_file)
            _beside(json_file).write_text(json.dumps(document), encoding="utf-8")
            _beside(json_file).replace(json_file)
        except OSError as error:
            raise TraceError(f"cannot write trace {json_file}: {error.strerror or error}") from error
        return json_file, tensor_file

    def _request_id(self, name: str) -> str:
        return self._alias_of.setdefault(name, f"r{len(self._alias_of)}") if self.scrub else name

    def _node(self, value: Any, storages: dict[int, int]) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return self._tensor_node(value, storages)
        if isinstance(value, Mapping):
            return {"dict": [[key, self._node(item, storages)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self._node(item, storages) for item in value]}
        if isinstance(value, int) and not is_int64(value):
            return {"unsupported": "a whole number of more than 64 bits"}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": self._scrubbed_value(value) if self.scrub else value}
        return {"unsupported": type(value).__qualname__ if self.scrub else repr(value)[:200]}

    def _tensor_node(self, tensor: Tensor, storages: dict[int, int]) -> dict[str, Any]:
        tensor = tensor.detach()
        if tensor.layout != torch.strided or tensor.is_quantized or not _is_storable(tensor.dtype):
            return {"unsupported": f"{tensor.layout} tensor of {tensor.dtype}, shape {list(tensor.shape)}"}
        storage = tensor.untyped_storage().data_ptr()
        return {
            "tensor": self._store(tensor),
            "device": tensor.device.type,
            "stride": list(tensor.stride()),
            "storage": storages.setdefault(storage, len(storages)),
            "storage_offset": tensor.storage_offset(),
        }

    def _store(self, tensor: Tensor) -> str:
        """Store a copy of the tensor, once per content, and return its name."""
        copy = tensor.to("cpu", copy=True).contiguous()
        digest = hashlib.sha256(f"{copy.dtype}{tuple(copy.shape)}".encode())
        if copy.numel():
            digest.update(copy.reshape(-1).view(torch.uint8).numpy().data)
        name = self._name_of.setdefault(digest.digest(), f"t{len(self._tensors)}")
        if name not in self._tensors:
            self._tensors[name] = self._scrubbed_tensor(copy) if self.scrub else copy
            self.stored_bytes += copy.nbytes
        return name

    def _scrubbed_tensor(self, tensor: Tensor) -> Tensor:
        shape, generator = tensor.shape, self._random
        if tensor.numel() == 0:
            return tensor
        if tensor.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
        if tensor.is_complex() or tensor.is_floating_point():
            work_dtype = torch.complex64 if tensor.is_complex() else torch.float32
            return torch.randn(shape, dtype=work_dtype, generator=generator).to(tensor.dtype)
        signed = tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))  # torch lacks min() for the wider unsigned dtypes
        low, high = int(signed.min()), int(signed.max())
        if low >= _LARGEST:  # `randint` needs a bound above `low`
            return tensor
        return (
            torch.randint(low, min(high, _LARGEST - 1) + 1, shape, generator=generator)
            .to(signed.dtype)
            .view(tensor.dtype)
        )

    def _scrubbed_value(self, value: bool | int | float | str | None) -> bool | int | float | str | None:
        if isinstance(value, str):
            return self._alias_of.get(value, "x" * len(value))
        if isinstance(value, bool) or value is None:
            return value
        share = float(torch.rand((), generator=self._random))
        return int(value * share) if isinstance(value, int) else value * share


class StepRecorder:
    """Records the first steps of a running stage.

    The trace is written when `max_steps` steps have been recorded, or by :meth:`close`. Recording copies every
    tensor to the host and waits for it, so recorded steps are slow; later steps are not. Any call may raise; the
    caller has to protect serving from that.

    Parameters
    ----------
    directory : str or Path
        Folder for the trace, which is named after the stage and the process.
    max_steps : int
        How many steps to record.
    about : mapping
        Written into the trace: ``stage``, ``model``, versions.
    scrub : bool
        See :class:`TraceWriter`.
    max_bytes : int
        Recording ends early when the tensors reach this size.
    """

    def __init__(
        self,
        directory: str | Path,
        max_steps: int,
        about: Mapping[str, Any],
        *,
        scrub: bool = False,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self._path = Path(directory) / f"{about.get('stage', 'stage')}-{os.getpid()}"
        self._max_steps = max_steps
        self._about = dict(about)
        self._max_bytes = max_bytes
        self._writer: TraceWriter | None = TraceWriter(scrub)

    @property
    def active(self) -> bool:
        """Whether further steps are to be recorded."""
        return self._writer is not None

    def record(
        self,
        step: StepContext,
        hidden_states: Tensor | None,
        staged_hidden_states_cpu: Tensor | None,
        multimodal_outputs: Any,
        *,
        include_hidden: bool = True,
    ) -> Path | None:
        """Record one step and return the trace's JSON file if this step completed it."""
        if self._writer is None:
            return None
        starts, rows = [int(start) for start in step.starts], [int(count) for count in step.rows]
        request_ids = tuple(step.request_ids)
        self._writer.add(
            TraceStep(
                request_ids=request_ids,
                num_scheduled_tokens=tuple(rows),
                query_start_loc=(*starts, starts[-1] + rows[-1]) if starts else (0,),
                needs_payload=tuple(request_ids[place] for place in step.consumers),
                include_hidden=include_hidden,
                hidden_states=hidden_states,
                staged_hidden_states_cpu=staged_hidden_states_cpu,
                multimodal_outputs=multimodal_outputs,
                time_s=time.perf_counter(),
                elements=tuple(step.elements) if step.is_sparse else None,
            )
        )
        full = len(self._writer) >= self._max_steps or self._writer.stored_bytes >= self._max_bytes
        return self.close() if full else None

    def close(self) -> Path | None:
        """Write the recorded steps, if there are any; a second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is None or not len(writer):
            return None
        return writer.save(self._path, self._about)[0]


def save_trace(path: str | Path, trace: Trace, scrub: bool = False) -> tuple[Path, Path]:
    """Write `trace` to `path`; with `scrub` its contents become random (:class:`TraceWriter`)."""
    writer = TraceWriter(scrub)
    for step in trace.steps:
        writer.add(step)
    about = {key: value for key, value in trace.about.items() if key not in ("torch", "scrubbed")}
    return writer.save(path, about)


@cache
def _is_storable(dtype: torch.dtype) -> bool:
    """Whether this version of safetensors supports a dtype."""
    try:
        return load(save({"": torch.empty(0, dtype=dtype)}))[""].dtype is dtype
    except Exception:  # noqa: BLE001  it reports that by several exceptions
        return False


def _beside(file: Path) -> Path:
    return file.with_name(file.name + ".part")
