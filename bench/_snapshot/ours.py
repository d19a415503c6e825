"""The providers of this project: the drop-in runner's code path, and the packer on its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

import spanpack
from bench._snapshot.machine import Machine
from bench._snapshot.provider import Provider, StepInput, Work
from bench._snapshot.scenarios import Scenario, tree_paths
from bench._snapshot.stock import consumer_markers
from omni_runner.builder_thread import BuilderThread
from omni_runner.packing import PackedStep
from omni_runner.reference import SPARSE_PROTOCOL_KEYS, Payloads, as_tensor, flatten_payload
from omni_runner.runner import make_runner_cls, path_of
from omni_runner.trace import TraceStep

_RESERVED_SLABS = 3


class _EngineRunner:
    """The parts of the engine's runner that the drop-in uses: who consumes, and an output object to fill.

    The drop-in must not fall back here, so the engine's own snapshot method raises.
    """

    def __init__(self, scenario: Scenario, machine: Machine) -> None:
        step = scenario.steps[0]
        self._async_chunk = True
        self.device = machine.device
        self.model = None
        self.model_config = SimpleNamespace(engine_output_type="latent", async_chunk=True)
        self.vllm_config = SimpleNamespace(model_config=self.model_config)
        self.omni_prefix_cache = None
        self.hidden_size = step.hidden_states.shape[-1] if step.hidden_states is not None else 0
        self.dtype = step.hidden_states.dtype if step.hidden_states is not None else None
        self.max_num_reqs = len(step.request_ids)
        self.max_num_tokens = sum(step.num_scheduled_tokens)
        self._includes_hidden = step.include_hidden
        self._markers = consumer_markers(scenario)
        self._downstream_payload_cache: dict[str, bool] = {}

    def _maybe_run_eager_omni_postprocess_before_async_output(self, **step: Any) -> bool:
        return False

    def _snapshot_omni_output_tensors_for_async_output(self, **step: Any) -> Any:
        raise RuntimeError(f"the step was not packed: {path_of(self).stats()}")

    def _build_omni_model_runner_output_from_snapshot(self, **step: Any) -> Any:
        return SimpleNamespace(req_ids=step["req_ids_output_copy"])

    def _resolve_pooler_payload_req_ids(self, request_ids: list[str]) -> tuple[str, list[str]]:
        return "latent", [request_id for request_id in request_ids if self._has_consumer(request_id)]

    def _has_consumer(self, request_id: str) -> bool:
        known = self._downstream_payload_cache.get(request_id)
        if known is None:
            known = self._markers[request_id]["omni_final_stage_id"] > 0
            self._downstream_payload_cache[request_id] = known
        return known

    def _model_omni_pooler_payload_include_hidden(self) -> bool:
        return self._includes_hidden

    def _should_accumulate_full_payload_output(self) -> bool:
        return False

    def _should_use_async_omni_output(self) -> bool:
        return True

    @staticmethod
    def _model_omni_flag(model: Any, name: str) -> bool:
        return False


class _EngineRules:
    """The parts of `omni_runner.compat.Upstream` that a packed step uses, with the engine's rules reimplemented."""

    runner_cls = _EngineRunner
    runner_module = ModuleType("engine_rules")
    sparse_protocol_keys = SPARSE_PROTOCOL_KEYS
    shares_channel = True

    class async_output_cls:
        """Never instantiated: sampled tokens are not part of this benchmark."""

    @staticmethod
    def record_function(name: str) -> nullcontext[None]:
        return nullcontext()

    @staticmethod
    def snapshots_as_known() -> bool:
        return True

    @staticmethod
    def flatten_payload(payload: dict[str, Any]) -> dict[str, Any]:
        return flatten_payload(payload)

    @staticmethod
    def partition_flat_payload(payload: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(payload), {}  # the keys of these scenarios all go to the next stage

    @staticmethod
    def ensure_tensor_values(payload: dict[str, Any]) -> dict[str, Tensor]:
        wrapped = {key: value if isinstance(value, Tensor) else as_tensor(value) for key, value in payload.items()}
        return {key: value for key, value in wrapped.items() if value is not None}

    @staticmethod
    def resolve_sparse_routing(
        runner: Any, output_type: str, request_ids: list[str], consumer_ids: list[str], multimodal_outputs: Any
    ) -> tuple[list[str], dict[str, int], bool]:
        return consumer_ids, {}, False

    @staticmethod
    def sampled_tokens(runner: Any) -> tuple[None, bool]:
        return None, False

    @staticmethod
    def partitions_channels(runner: Any) -> bool:
        return True

    @staticmethod
    def client_output_keys(runner: Any) -> tuple[str, ...]:
        return ()


_RULES: Any = _EngineRules()


class Ours(Provider):
    """The methods that `PackedGPUARModelRunner` overrides, called as `sample_tokens` calls them.

    The hand-over is that of its asynchronous output: the builder is queued on the runner's builder thread.
    """

    name = "ours"

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        self._runner = make_runner_cls(_RULES)(scenario, machine)
        self._path = path_of(self._runner)
        self._path.warm_up(self._runner)

    def take(self, step: StepInput) -> Any:
        return step.snapshot_by(self._runner)

    def is_landed(self, taken: Any) -> bool:
        snapshot = taken.multimodal_outputs.snapshot
        return snapshot is None or snapshot.done()

    def d2h_bytes(self, taken: Any) -> int:
        packed = taken.multimodal_outputs
        if not isinstance(packed, PackedStep):
            raise RuntimeError("the step was packed whole, not in columns")
        return 0 if packed.snapshot is None else packed.snapshot.plan.device_bytes

    def hand_over(self, step: StepInput, taken: Any, *, only_wait: bool) -> Work:
        def build() -> Any:
            taken.async_payload.wait()
            if only_wait:
                return None
            return self._runner._build_omni_model_runner_output_from_snapshot(**step.builder_arguments(taken))

        return Work(build).on_thread(self._path.builder_thread)

    def payloads(self, step: StepInput, work: Work) -> Payloads:
        return work.output.inter_stage_outputs

    def own_pinned_allocations(self) -> int:
        pack = self._path.stats().pack
        return 0 if pack is None else pack.pinned_allocations

    def close(self) -> None:
        self._path.close()


class OursStandalone(Provider):
    """`spanpack.Packer.pack`, as a program without the engine uses it: a batch and rules per call, views as trees."""

    name = "ours_standalone"

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        super().__init__(machine, scenario)
        self._packer = spanpack.Packer(machine.device)
        self._packer.warmup()
        self._packer.reserve(int(scenario.payload_bytes), _RESERVED_SLABS)
        self._thread = BuilderThread("bench-standalone")
        self._rules = {
            path: spanpack.Placement.INVARIANT
            for step in scenario.distinct_steps
            for path, node in tree_paths(_whole_tree(step)[0])
            if _is_for_everyone(step, node)
        }

    def take(self, step: StepInput) -> spanpack.PackedTree:
        tree, per_token_rows = _whole_tree(step.trace)
        everyone = len(step.trace.needs_payload) == len(step.request_ids)
        batch = spanpack.Batch(
            step.request_ids,
            step.counts,
            step.query_start_loc,
            None if everyone else step.trace.needs_payload,
            per_token_rows,
        )
        return self._packer.pack(tree, batch, self._rules)

    def is_landed(self, taken: spanpack.PackedTree) -> bool:
        return taken.done()

    def d2h_bytes(self, taken: spanpack.PackedTree) -> int:
        return taken.snapshot.plan.device_bytes

    def hand_over(self, step: StepInput, taken: spanpack.PackedTree, *, only_wait: bool) -> Work:
        return Work(taken.wait if only_wait else taken.views).on_thread(self._thread)

    def payloads(self, step: StepInput, work: Work) -> Payloads:
        found: Payloads = []
        for request_id in step.request_ids:
            tree = work.output.get(request_id)
            if tree is not None:
                tree = {
                    key: value[0] if isinstance(value, list) else value for key, value in flatten_payload(tree).items()
                }
            found.append(tree)
        return found

    def own_pinned_allocations(self) -> int:
        return self._packer.stats().pinned_allocations

    def close(self) -> None:
        self._thread.close()
        self._packer.close()


def _whole_tree(step: TraceStep) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The payload including the stage's hidden rows, and the lengths that mark a tensor as per-token."""
    rows = sum(step.num_scheduled_tokens)
    if not step.include_hidden or step.hidden_states is None:
        return step.multimodal_outputs, (rows,)
    return {"hidden": step.hidden_states, **step.multimodal_outputs}, (rows, step.hidden_states.shape[0])


def _is_for_everyone(step: TraceStep, node: Any) -> bool:
    if isinstance(node, list):
        return len(node) != len(step.request_ids)
    return not node.dim() or node.shape[0] not in _whole_tree(step)[1]
