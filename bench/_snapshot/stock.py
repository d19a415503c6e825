"""Stock vllm-omni 0.30 in the engine's own code: snapshot and builder of the V1 runner and of Model Runner V2.

The engine's work on sampled tokens in the same place is left out for every provider.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench._snapshot.engine_source import EngineSource
from bench._snapshot.machine import Machine
from bench._snapshot.provider import Provider, StepInput, Unavailable, Work
from bench._snapshot.scenarios import Scenario, tree_tensors
from omni_runner.reference import Payloads

KNOWN_VERSION = "0.30"

_V1_MODULE = "worker.gpu_ar_model_runner"
_V1_NAMES = (
    "_to_cpu_contiguous",
    "_clone_cuda_tensor_payload",
    "_copy_tensor_payload_to_cpu",
    "_PackedTensorPayload",
    "_AsyncCPUPayloadSnapshot",
    "_snapshot_tensor_payload_to_cpu_async",
    "_OmniOutputTensorSnapshot",
    "_ensure_tensor_values",
)
_V1_METHODS = {
    "GPUARModelRunner": (
        "_request_final_stage_id",
        "_request_needs_downstream_stage_payload",
        "_resolve_pooler_payload_req_ids",
        "_model_omni_flag",
        "_runner_model_omni_flag",
        "_client_multimodal_output_keys",
        "_model_omni_pooler_payload_include_hidden",
        "_should_defer_full_payload_d2h",
        "_should_return_omni_routed_experts",
        "_maybe_run_eager_omni_postprocess_before_async_output",
        "_build_omni_async_snapshot_payload",
        "_get_or_create_omni_payload_copy_stream",
        "_snapshot_omni_output_tensors_for_async_output",
        "_resolve_req_hidden_states",
        "_build_omni_pooler_payload",
        "_build_multimodal_outputs",
        "_build_omni_step_outputs",
        "_build_omni_model_runner_output_from_snapshot",
    ),
    "OmniAsyncGPUModelRunnerOutput": ("_build_model_runner_output_once", "_build_output_in_background"),
}
_V2_METHODS = {
    "OmniARModelRunner": (
        "_retain_multimodal_outputs",
        "_release_multimodal_snapshot",
        "_build_async_chunk_outputs_from_mm",
    )
}
_V2_NAMES = (
    "_ASYNC_MM_SNAPSHOT_MAX_BUCKETS_PER_SLOT",
    "_copy_mm_to_snapshot_slot",
    "_has_cuda_tensor",
    "_async_copy_tensor",
    "_async_copy_mm_value",
    "_async_copy_mm",
    "_slice_pooler_value",
    "_ensure_tensor_values",
)


def _check_version(engine: EngineSource) -> None:
    if not engine.version.startswith(KNOWN_VERSION):
        raise Unavailable(f"vllm-omni {engine.version} ({engine.origin}); this compares with {KNOWN_VERSION}")


def _copied_bytes(tree: Any) -> int:
    """Bytes of the distinct host buffers in a snapshot: each was filled by one copy from the device."""
    if isinstance(tree, dict):
        tree = dict(tree)  # a plain dict: `tree_tensors` skips other classes
    buffers = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tree_tensors(tree)}
    return sum(buffers.values())


def _load_v1(engine: EngineSource, *, pinned: bool) -> SimpleNamespace:
    _check_version(engine)
    namespace: dict[str, Any] = {
        "__name__": "bench_stock_v1",
        "record_function_or_nullcontext": lambda name: nullcontext(),
        "is_pin_memory_available": lambda: pinned,
        "stage_sends_async_output": lambda model_config: True,  # as in a deployment with a connector
        "OmniModelRunnerOutput": SimpleNamespace,
    }
    engine.take(namespace, "data_entry_keys", ("_NESTED_KEYS", "flatten_payload"))
    engine.take(namespace, "utils.mm_outputs")
    engine.take(namespace, "worker.output.payload_build")
    engine.take(namespace, "worker.sparse_audio")
    engine.take(namespace, _V1_MODULE, _V1_NAMES, _V1_METHODS)
    return SimpleNamespace(**namespace)


class StockV1(Provider):
    """`GPUARModelRunner`: a clone and a copy per tensor, a thread per step, payloads built request by request."""

    name = "stock_v1"

    def __init__(self, machine: Machine, scenario: Scenario, engine: EngineSource) -> None:
        super().__init__(machine, scenario)
        self._engine = _load_v1(engine, pinned=machine.compute is not None)
        step = scenario.steps[0]
        config = SimpleNamespace(engine_output_type="latent", async_chunk=True)
        runner = self._engine.GPUARModelRunner()
        runner._async_chunk = True
        runner._downstream_payload_cache = {}
        runner._pooler_payload_include_hidden_flag = step.include_hidden
        runner._should_accumulate_full_payload_output = lambda: False
        runner.model = None
        runner.model_config = config
        runner.vllm_config = SimpleNamespace(model_config=config)
        runner.model_intermediate_buffer = consumer_markers(scenario)
        runner.omni_prefix_cache = None
        runner.requests = {}
        runner.supports_mm_inputs = False
        if machine.compute is None:
            runner._omni_payload_copy_stream = object()  # else the engine would make an unused CUDA stream
        self._runner = runner

    def take(self, step: StepInput) -> Any:
        return step.snapshot_by(self._runner)

    def is_landed(self, taken: Any) -> bool:
        event = taken.async_payload._ready_event
        return event is None or event.query()

    def d2h_bytes(self, taken: Any) -> int:
        return _copied_bytes(taken.async_payload.payload)

    def hand_over(self, step: StepInput, taken: Any, *, only_wait: bool) -> Work:
        def build() -> Any:
            taken.async_payload.wait()
            if only_wait:
                return None
            return self._runner._build_omni_model_runner_output_from_snapshot(**step.builder_arguments(taken))

        work = Work(build)
        output = self._engine.OmniAsyncGPUModelRunnerOutput()
        output._model_runner_output = None
        output._model_runner_output_builder = work.run
        output._background_exception = None
        output._cuda_device = self.machine.device if self.machine.compute is not None else None
        thread = threading.Thread(
            target=output._build_output_in_background, daemon=True, name="omni-async-output-builder"
        )

        def join() -> None:
            thread.join()
            if output._background_exception is not None:
                raise output._background_exception

        work.join = join
        work.is_over = lambda: not thread.is_alive()
        thread.start()
        return work

    def payloads(self, step: StepInput, work: Work) -> Payloads:
        return work.output.inter_stage_outputs


def consumer_markers(scenario: Scenario) -> dict[str, dict[str, int]]:
    """Per request, the marker that says whether its pipeline ends at this stage."""
    return {
        request_id: {"omni_final_stage_id": int(request_id in step.needs_payload)}
        for step in scenario.steps
        for request_id in step.request_ids
    }


def _load_v2(engine: EngineSource, *, pinned: bool) -> SimpleNamespace:
    _check_version(engine)
    namespace: dict[str, Any] = {
        "__name__": "bench_stock_v2",
        "PIN_MEMORY": pinned,
        "AsyncModelRunnerOutput": object,
    }
    engine.take(namespace, "data_entry_keys", ("_NESTED_KEYS", "flatten_payload"))
    engine.take(
        namespace,
        "utils.mm_outputs",
        ("_CLIENT_MM_ROOT_KEYS", "_CLIENT_MM_META_KEYS", "partition_flat_payload"),
    )
    engine.take(namespace, "worker_v2.output_snapshot")
    engine.take(namespace, "worker_v2.omni_ar_model_runner", _V2_NAMES, _V2_METHODS)
    engine.take(namespace, "worker_v2.native_output_worker")
    return SimpleNamespace(**namespace)


class _V2Output:
    """Replaces `OmniAsyncOutput`, without sampled tokens: copies in its constructor, builds in `get_output`."""

    def __init__(self, engine: SimpleNamespace, machine: Machine, step: StepInput, snapshot: Any) -> None:
        self._engine = engine
        self._step = step
        self.work: Work | None = None
        self.only_wait = False
        count = len(step.request_ids)
        self._starts = step.query_start_loc.numpy().copy()
        self._counts = np.array(step.counts, dtype=np.int32)
        self._total = int(self._starts[count])
        hidden = step.trace.hidden_states
        self._padded = self._total if hidden is None or not step.trace.include_hidden else hidden.shape[0]
        pinned = machine.compute is not None
        self.copy_event = torch.cuda.Event(blocking=True) if pinned else None
        with _on_stream(machine):
            self.host = engine._async_copy_mm(snapshot, self._total, copy_stream=machine.copy_stream, pin_memory=pinned)
            if self.copy_event is not None:
                self.copy_event.record(machine.copy_stream)

    def get_output(self) -> Any:
        assert self.work is not None
        return self.work.run()

    def build(self) -> Any:
        if self.copy_event is not None:
            self.copy_event.synchronize()
        outputs = None
        if not self.only_wait:
            outputs, _ = self._engine.OmniARModelRunner._build_async_chunk_outputs_from_mm(
                self.host, self._starts, self._counts, len(self._step.request_ids), self._total, self._padded
            )
        return SimpleNamespace(req_ids=self._step.request_ids, inter_stage_outputs=outputs, sampled_token_ids=None)


@contextmanager
def _on_stream(machine: Machine) -> Iterator[None]:
    """Make the copy stream current and let it wait for the producing stream; switches back at the end, as V2 does."""
    if machine.compute is None or machine.copy_stream is None:
        yield
        return
    try:
        torch.cuda.set_stream(machine.copy_stream)
        machine.copy_stream.wait_stream(machine.compute)
        yield
    finally:
        torch.cuda.set_stream(machine.compute)


class _Plane:
    """Receives the payloads that V2's worker publishes."""

    def enqueue_outputs(self, *, req_ids: list[str], inter_stage_outputs: Any, sampled_token_ids: Any) -> None:
        self.published = inter_stage_outputs


class StockV2(Provider):
    """`OmniARModelRunner`: one `cat` and one copy per dtype into a ring of four slots, a pool of one thread.

    Model Runner V2 leaves the stage's own hidden rows out of asynchronous payloads. They are put into its payload under
    their key, so that every provider moves the same bytes. V2 builds for every request, with or without a consumer.
    """

    name = "stock_v2"

    def __init__(self, machine: Machine, scenario: Scenario, engine: EngineSource) -> None:
        super().__init__(machine, scenario)
        self._engine = _load_v2(engine, pinned=machine.compute is not None)
        runner = self._engine.OmniARModelRunner()
        runner.model_config = SimpleNamespace(async_chunk=True)
        runner.main_stream = machine.compute
        runner._async_mm_snapshot_slots = [{} for _ in range(4)]
        runner._async_mm_snapshot_events = [None] * 4
        runner._async_mm_snapshot_pending = [False] * 4
        runner._async_mm_snapshot_cursor = 0
        self._runner = runner
        self._worker = self._engine.NativeOutputWorker(2)
        self._plane = _Plane()

    def take(self, step: StepInput) -> _V2Output:
        payload = step.trace.multimodal_outputs
        if step.trace.include_hidden:
            payload = {"hidden": step.trace.hidden_states, **payload}
        snapshot = self._runner._retain_multimodal_outputs(payload)
        output = _V2Output(self._engine, self.machine, step, snapshot)
        self._runner._release_multimodal_snapshot(self._runner._last_multimodal_snapshot_slot, output.copy_event)
        return output

    def is_landed(self, taken: _V2Output) -> bool:
        return taken.copy_event is None or taken.copy_event.query()

    def d2h_bytes(self, taken: _V2Output) -> int:
        return _copied_bytes(taken.host)

    def hand_over(self, step: StepInput, taken: _V2Output, *, only_wait: bool) -> Work:
        taken.only_wait = only_wait
        taken.work = Work(taken.build)
        future = self._worker.submit(taken, self._plane)._future
        taken.work.join = future.result
        taken.work.is_over = future.done
        return taken.work

    def payloads(self, step: StepInput, work: Work) -> Payloads:
        return self._plane.published

    def close(self) -> None:
        self._worker.close()
