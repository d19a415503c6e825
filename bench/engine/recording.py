"""Record real steps of a stage as a trace of omni_runner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from omni_runner.trace import TraceStep
from omni_runner.trace_record import TraceWriter

_SNAPSHOT = "_snapshot_omni_output_tensors_for_async_output"


@contextmanager
def record(runner: Any, path: Path, about: dict[str, Any], steps: int) -> Iterator[None]:
    """Record the arguments of the runner's snapshot method in the first `steps` steps as a trace at `path`."""
    writer = TraceWriter()
    execute, snapshot = runner.execute_model, getattr(runner, _SNAPSHOT)
    scheduled: dict[str, int] = {}

    def watched_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.clear()
        scheduled.update(scheduler_output.num_scheduled_tokens)
        return execute(scheduler_output, *args, **kwargs)

    def watched_snapshot(**given: Any) -> Any:
        if len(writer) < steps:
            writer.add(_step(runner, scheduled, given))
        return snapshot(**given)

    runner.execute_model = watched_execute
    setattr(runner, _SNAPSHOT, watched_snapshot)
    try:
        yield
    finally:
        runner.execute_model = execute
        setattr(runner, _SNAPSHOT, snapshot)
    writer.save(path, about)


def _step(runner: Any, scheduled: dict[str, int], given: dict[str, Any]) -> TraceStep:
    request_ids = list(runner.input_batch.req_ids)
    return TraceStep(
        request_ids=tuple(request_ids),
        num_scheduled_tokens=tuple(scheduled[request_id] for request_id in request_ids),
        query_start_loc=tuple(torch.as_tensor(runner._snapshot_query_start_loc_cpu()).tolist()),
        needs_payload=tuple(runner._resolve_pooler_payload_req_ids(request_ids)[1]),
        include_hidden=runner._model_omni_pooler_payload_include_hidden(),
        hidden_states=given["hidden_states"],
        staged_hidden_states_cpu=given["staged_hidden_states_cpu"],
        multimodal_outputs=given["multimodal_outputs"],
        time_s=time.perf_counter(),
        use_async_omni_output=given["use_async_omni_output"],
    )
