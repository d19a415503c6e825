"""A runner that goes through the engine's real `sample_tokens`, on stand-ins for streams."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_runner import compat
from omni_runner.demo.cpu_streams import StandInEvent, StandInStream

UPSTREAM = compat.resolve()
STOCK = UPSTREAM.runner_cls
MINOR = tuple(int(part) for part in UPSTREAM.version.split(".")[:2])

REQUESTS = ["a", "b", "c", "d"]
ROWS = [3, 1, 2, 1]
TOKENS = sum(ROWS)
PADDING = 2  # rows that a CUDA graph adds
WIDTH = 8


def install_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For streams, events and the pipeline group."""
    monkeypatch.setattr(torch, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "current_stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    group = SimpleNamespace(world_size=1, is_last_rank=True)
    monkeypatch.setattr(UPSTREAM.runner_module, "get_pp_group", lambda: group)


def make_runner(
    cls: type[Any],
    *,
    consumers: str = "abcd",
    output_type: str = "latent",
    sender: bool = True,
    include_hidden: bool = True,
    **model: Any,
) -> Any:
    """A runner without `__init__`, with what a step reads on it."""
    runner = object.__new__(cls)
    connector = {"name": "SharedMemoryConnector", "extra": {"role": "sender"}} if sender else None
    config = SimpleNamespace(
        engine_output_type=output_type,
        async_chunk=True,
        enable_return_routed_experts=False,
        stage_connector_config=connector,
        stage_id=0,
        model_stage="thinker",
        model="some/model",
    )
    index = {name: i for i, name in enumerate(REQUESTS)}
    vars(runner).update(
        vllm_config=SimpleNamespace(model_config=config),
        model_config=config,
        model=SimpleNamespace(
            **{
                "has_postprocess": False,
                "use_async_omni_output": True,
                "omni_pooler_payload_include_hidden": include_hidden,
                **model,
            }
        ),
        device=torch.device("cpu"),
        requests={name: SimpleNamespace() for name in REQUESTS},
        model_intermediate_buffer={name: {"omni_final_stage_id": int(name in consumers)} for name in REQUESTS},
        omni_prefix_cache=None,
        supports_mm_inputs=False,
        use_async_scheduling=True,
        speculative_config=None,
        broadcast_pp_output=True,
        kv_connector_output=None,
        async_output_copy_stream=StandInStream(),
        query_start_loc=SimpleNamespace(cpu=torch.tensor([0, *np.cumsum(ROWS)])),
        input_batch=SimpleNamespace(
            req_ids=list(REQUESTS),
            req_id_to_index=index,
            sampling_metadata=SimpleNamespace(no_penalties=True, output_token_ids=[], max_num_logprobs=None),
            vocab_size=10,
            set_async_sampled_token_ids=lambda tokens, event: None,
        ),
        _async_chunk=True,
        _downstream_payload_cache={},
        _pooler_payload_include_hidden_flag=include_hidden,
        _omni_num_scheduled_tokens_np=np.array(ROWS, dtype=np.int32),
        _sample=lambda logits, metadata: SimpleNamespace(
            sampled_token_ids=torch.arange(len(REQUESTS))[:, None], logprobs_tensors=None
        ),
        _update_states_after_model_execute=lambda *_: None,
        _bookkeeping_sync=lambda *_: (
            {}, *([None] if MINOR >= (0, 28) else []), None, [[] for _ in REQUESTS], {}, list(REQUESTS), dict(index),
            [1],
        ),
        _run_post_sample_talker_mtp=lambda **arguments: arguments["multimodal_outputs"],
        eplb_step=lambda: None,
        get_omni_connector_output=lambda: "connector",
    )  # fmt: skip
    return runner


def payload(seed: int = 0) -> tuple[torch.Tensor, dict[str, Any]]:
    """Hidden rows with padding, and a payload with every kind of key."""
    random = torch.Generator().manual_seed(seed)
    rows = TOKENS + PADDING

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    hidden = draw(rows, WIDTH)
    hidden[TOKENS:] = float("nan")
    return hidden, {
        "hidden_states": {"layers": {0: draw(rows, WIDTH).bfloat16(), 24: draw(rows, WIDTH)}},
        "embed": {"bos": [draw(1, 1, WIDTH)], "prefill": [draw(n, WIDTH) for n in ROWS]},
        "codes": {"audio": torch.arange(TOKENS * 2).reshape(TOKENS, 2)},
        "sr": [torch.tensor(24000)],
        "meta": {"segment_end": [1, 0, 0, 1], "note": "dropped"},
        "scale": 0.5,
        "table": draw(3, 3),
    }


def set_batch(runner: Any, names: list[str], rows: list[int]) -> None:
    """What a step of `make_runner`'s runner reads about its batch."""
    index = {name: i for i, name in enumerate(names)}
    vars(runner).update(
        query_start_loc=SimpleNamespace(cpu=torch.tensor([0, *np.cumsum(rows)])),
        requests={name: SimpleNamespace() for name in names},
        _omni_num_scheduled_tokens_np=np.array(rows, dtype=np.int32),
        _sample=lambda logits, metadata: SimpleNamespace(
            sampled_token_ids=torch.arange(len(names))[:, None], logprobs_tensors=None
        ),
        _bookkeeping_sync=lambda *_: (
            {}, *([None] if MINOR >= (0, 28) else []), None, [[] for _ in names], {}, list(names), dict(index), [],
        ),
    )  # fmt: skip


def sample(runner: Any, hidden: torch.Tensor, multimodal: Any, **state: Any) -> Any:
    """One `sample_tokens` of the engine."""
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=TOKENS,
        num_scheduled_tokens=dict(zip(REQUESTS, ROWS, strict=True)),
    )
    state_cls = UPSTREAM.runner_module.ExecuteModelState
    fields = dict.fromkeys(state_cls._fields)
    fields.update(scheduler_output=scheduled, hidden_states=hidden, multimodal_outputs=multimodal)
    fields.update(state)
    runner.execute_model_state = state_cls(**fields)
    return runner.sample_tokens(None)


def run(runner: Any, hidden: torch.Tensor, multimodal: Any, **state: Any) -> dict[str, Any]:
    return vars(sample(runner, hidden, multimodal, **state).get_output())


def assert_same(actual: Any, expected: Any, where: str = "output") -> None:
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (actual, expected))
        assert torch.equal(left, right), where
    else:
        assert actual == expected, where
