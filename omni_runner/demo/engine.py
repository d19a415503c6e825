"""vLLM on the CPU with the AR runner of vllm-omni, stock or packed. Imports vLLM.

Both runners differ from a deployment in the same ways: vLLM's CPU methods come first in the method resolution order,
streams and events are stand-ins (`cpu_streams`), asynchronous scheduling is on although vLLM switches it off on CPUs,
and no connector is attached. Steps overlap as on a GPU: the next one runs while the builder thread builds the payloads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

from omni_runner.demo.payload_log import PayloadLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

# Engine settings of a stage that sends its payload to the next stage in chunks.
_STAGE = {
    "engine_output_type": "latent",
    "async_chunk": True,
    "stage_connector_config": None,
    "custom_process_next_stage_input_func": None,
    "stage_id": 0,
    "model_stage": "thinker",
}


class DemoMixin:
    """What both runners need on a CPU, and the recording of outputs and timings.

    Attributes
    ----------
    log : PayloadLog
        Every step's output, as the engine gets it.
    builder_us : list of float
        CPU time of the thread that built the payloads, per step, in us.
    without_consumer : set of str
        Names of the requests whose payload no stage needs.
    prefix_rows : int
        Rows that requests took from the prefix cache when they arrived.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log = PayloadLog()
        self.builder_us: list[float] = []
        self.without_consumer: set[str] = set()
        self.prefix_rows = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then do what the Omni runner's `load_model`, which is not called, would do."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        runner._snapshot_prefix_cache_model_policy(runner.model)
        runner._pooler_payload_include_hidden_flag = True
        runner._resolve_duplex_sampling_hook(force=True)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Mark each request with the last stage that needs its payload, as the orchestrator does."""
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        buffer: dict[str, dict[str, Any]] = self.model_intermediate_buffer  # type: ignore[attr-defined]
        for request in scheduler_output.scheduled_new_reqs:
            last_stage = 0 if request.req_id in self.without_consumer else 1
            buffer.setdefault(request.req_id, {})["omni_final_stage_id"] = last_stage
            self.prefix_rows += request.num_computed_tokens
        return result

    def _build_omni_model_runner_output_from_snapshot(self, **kwargs: Any) -> Any:
        start_ns = time.thread_time_ns()
        output = super()._build_omni_model_runner_output_from_snapshot(**kwargs)  # type: ignore[misc]
        self.builder_us.append((time.thread_time_ns() - start_ns) / 1000)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and record the output at the moment when the engine takes it."""
        pending = super().sample_tokens(grammar_output)  # type: ignore[misc]
        take = pending.get_output

        def get_output() -> Any:
            output = take()
            self.log.add(output)
            return output

        pending.get_output = get_output
        return pending


def runner_class(kind: str) -> type[Any]:
    """Return the demo's runner class for ``"stock"`` or ``"packed"``."""
    base: Any = GPUARModelRunner
    if kind == "packed":
        from omni_runner.runner import PackedGPUARModelRunner  # noqa: PLC0415  not in the stock run

        base = PackedGPUARModelRunner
    return type("DemoRunner", (DemoMixin, CPUModelRunner, base), {})


class StockWorker(CPUWorker):
    """A CPU worker with the stock runner."""

    runner_kind = "stock"

    def init_device(self) -> None:
        """Create the Omni runner in place of vLLM's."""
        super().init_device()
        for name, value in _STAGE.items():
            object.__setattr__(self.vllm_config.model_config, name, value)
        self.model_runner = runner_class(self.runner_kind)(self.vllm_config, torch.device("cpu"))


class PackedWorker(StockWorker):
    """A CPU worker with the packed runner."""

    runner_kind = "packed"


def allow_async_scheduling() -> None:
    """Keep vLLM's CPU platform from switching asynchronous scheduling off, in this process and for good."""
    check = CpuPlatform.check_and_update_config

    def check_all_else(vllm_config: VllmConfig) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_all_else)
