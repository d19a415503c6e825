"""The engine's AR runner, made without a model, a device or its `__init__`, and one step of this runner."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """The settings of a stage that its payloads depend on."""

    output_type: str | None = "latent"
    async_chunk: bool = True
    sender: bool = True
    include_hidden: bool = True
    client_keys: tuple[str, ...] = ()


def make_runner(cls: type[Any], stage: Stage) -> Any:
    """Make a runner of the engine's class or a subclass, with the attributes that its snapshot and builder read."""
    connector = {"name": "SharedMemoryConnector", "extra": {"role": "sender"}} if stage.sender else None
    config = SimpleNamespace(
        engine_output_type=stage.output_type,
        async_chunk=stage.async_chunk,
        enable_return_routed_experts=False,
        stage_connector_config=connector,
        stage_id=0,
    )
    runner = object.__new__(cls)
    vars(runner).update(
        model_config=config,
        vllm_config=SimpleNamespace(model_config=config),
        _async_chunk=stage.async_chunk,
        omni_prefix_cache=None,
        supports_mm_inputs=False,
        requests={},
        model=SimpleNamespace(
            has_postprocess=False,
            omni_pooler_payload_include_hidden=stage.include_hidden,
            omni_client_multimodal_output_keys=stage.client_keys,
        ),
        model_intermediate_buffer={},
        _downstream_payload_cache={},
        _pooler_payload_include_hidden_flag=stage.include_hidden,
        _omni_payload_copy_stream=object(),  # made once per runner; not used without device tensors
        get_omni_connector_output=lambda: None,  # drained by the builder in older versions
        device=torch.device("cpu"),
    )
    return runner


@dataclass(frozen=True)
class StepInput:
    """The inputs of one step from the model and the scheduler.

    Attributes
    ----------
    request_ids
        Request ids in batch order.
    scheduled
        Number of scheduled tokens of each request.
    scheduled_total
        Their sum as reported by the scheduler.
    final_stages
        Last stage of each request: 0 if nobody wants its payload, None if it is not known yet.
    """

    request_ids: tuple[str, ...]
    scheduled: tuple[int, ...]
    scheduled_total: int
    final_stages: tuple[int | None, ...]


def take_snapshot(runner: Any, step: StepInput, hidden: Tensor, payload: Any) -> tuple[Any, dict[str, Any]]:
    """Run the first half of a step, in the order of `sample_tokens`.

    Returns
    -------
    snapshot
        The engine's snapshot, or the object that our runner returns instead.
    arguments
        Arguments for ``_build_omni_model_runner_output_from_snapshot``, to be called after
        ``snapshot.async_payload.wait()``.
    """
    runner.model_intermediate_buffer = {
        request: {} if stage is None else {"omni_final_stage_id": stage}
        for request, stage in zip(step.request_ids, step.final_stages, strict=True)
    }
    request_ids = list(step.request_ids)
    host = {
        "num_scheduled_tokens_np": np.array(step.scheduled, dtype=np.int32),
        "scheduler_output": SimpleNamespace(total_num_scheduled_tokens=step.scheduled_total),
        "query_start_loc_cpu": torch.tensor([0, *np.cumsum(step.scheduled)], dtype=torch.int32),
    }
    postprocessed = runner._maybe_run_eager_omni_postprocess_before_async_output(
        hidden_states=hidden, multimodal_outputs=payload, req_ids_output_copy=request_ids, **host
    )
    snapshot = runner._snapshot_omni_output_tensors_for_async_output(
        use_async_omni_output=True, hidden_states=hidden, staged_hidden_states_cpu=None, multimodal_outputs=payload
    )
    return snapshot, {
        "hidden_states": snapshot.hidden_states,
        "staged_hidden_states_cpu": snapshot.staged_hidden_states_cpu,
        "multimodal_outputs": snapshot.multimodal_outputs,
        "req_ids_output_copy": list(request_ids),
        "req_id_to_index_output_copy": {request: i for i, request in enumerate(request_ids)},
        "valid_sampled_token_ids": [[i] for i in range(len(request_ids))],
        "logprobs_lists": None,
        "prompt_logprobs_dict": {},
        "num_nans_in_logits": None,
        "kv_connector_output": None,
        "ec_connector_output": None,
        "cudagraph_stats": None,
        "kv_extracted_req_ids": None,
        "postprocess_already_applied": postprocessed,
        **host,
    }
