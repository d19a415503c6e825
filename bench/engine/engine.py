"""One stage of the real engine in this process: its config, its weights, its parts."""

from __future__ import annotations

import importlib.metadata
import zlib
from pathlib import Path
from typing import Any

import torch
import vllm_omni  # noqa: F401  patches vllm, so it must come before vllm's own modules
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm_omni.engine.arg_utils import OmniEngineArgs

from bench.engine.stages import Stage

MAX_REQUESTS = 64
_GRAPH_SIZES = [1, 2, 4, 8, 16, 32, MAX_REQUESTS]


def engine_version() -> str:
    """Version of vllm-omni as `0.30`."""
    return ".".join(importlib.metadata.version("vllm-omni").split(".")[:2])


def engine_config(stage: Stage, model: Path, *, kv_gib: float = 4.0, eager: bool = False) -> VllmConfig:
    """Config as the pipelines deploy it: asynchronous scheduling, chunked transfer to a next stage.

    Decode steps run as CUDA graphs. Compilation is off: start-up is minutes faster, and the output path is the same.
    """
    fields: dict[str, Any] = {
        **stage.config,
        "model": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "seed": 0,
        "max_num_seqs": MAX_REQUESTS,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "worker_type": "ar",
        "async_scheduling": True,
        "async_chunk": True,
        "engine_output_type": "latent",
        # As a sender the scheduler does not wait for chunks of an earlier stage.
        "stage_connector_spec": {"name": "SharedMemoryConnector", "extra": {"role": "sender"}},
        "scheduler_cls": "vllm_omni.core.sched.omni_ar_scheduler.OmniARAsyncScheduler",
        "enforce_eager": eager,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [] if eager else _GRAPH_SIZES,
            "cudagraph_num_of_warmups": 1,
        },
    }
    if engine_version() not in ("0.24", "0.26"):
        # Compile the engine's Triton kernels when they are first used, not all at the start: saves over 80 s.
        fields["kernel_config"] = {"enable_jit_warmup": False}
    return OmniEngineArgs(**fields).create_engine_config(headless=False)


def start_engine(config: VllmConfig) -> EngineCore:
    """Build the engine with its stock worker and runner."""
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def runner_of(core: EngineCore) -> Any:
    return core.model_executor.driver_worker.worker.model_runner


@torch.no_grad()
def draw_weights(runner: Any) -> None:
    """Redraw the dummy weights: N(0, 0.02), norms 1, biases 0, the same in every run.

    vLLM's own dummy weights, including the norms, are within 1e-3 of zero: hidden states vanish and all tokens take the
    same experts.
    """
    model = getattr(runner.model, "runnable", runner.model)  # without the CUDA-graph wrapper
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.device.type != "cuda":
            continue
        if weight.ndim == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            random = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
            weight.normal_(0.0, 0.02, generator=random)
    torch.cuda.synchronize()
