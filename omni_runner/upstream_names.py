"""The table for `compat`: every name of vllm-omni and vLLM that this package builds on."""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_VERSIONS = ("0.24", "0.26", "0.28", "0.30")  # of vllm-omni; each pairs with the vLLM of the same number

RUNNER = "the runner class"
OUTPUT = "the asynchronous output class"
WORKER = "the worker class"


@dataclass(frozen=True, kw_only=True)
class UpstreamName:
    """One upstream name: where it is found, and what must hold for it.

    Attributes
    ----------
    name : str
        The attribute or global.
    holder : str
        `RUNNER`, `OUTPUT` or `WORKER`; otherwise the runner method whose globals hold the name.
    seen_in : tuple of str
        The versions that have it.
    required : bool
        False if `Upstream` can handle versions without it.
    takes : tuple of str
        Parameters that we pass or read.
    uses : tuple of str
        Names that its code must use, because we rely on what it does with them.
    """

    name: str
    holder: str
    seen_in: tuple[str, ...] = KNOWN_VERSIONS
    required: bool = True
    takes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.holder in (RUNNER, OUTPUT, WORKER):
            return f"{self.name} of {self.holder}"
        return f"{self.name}, used by {self.holder}"


EAGER = "_maybe_run_eager_omni_postprocess_before_async_output"
SNAPSHOT = "_snapshot_omni_output_tensors_for_async_output"
BUILDER = "_build_omni_model_runner_output_from_snapshot"

NAMES: tuple[UpstreamName, ...] = (
    # Methods that we override. Other parameters are passed on unchanged.
    UpstreamName(name="sample_tokens", holder=RUNNER, uses=(EAGER, SNAPSHOT, BUILDER)),
    UpstreamName(
        name=EAGER,
        holder=RUNNER,
        takes=(
            "hidden_states",
            "multimodal_outputs",
            "num_scheduled_tokens_np",
            "scheduler_output",
            "req_ids_output_copy",
            "query_start_loc_cpu",
        ),
    ),
    UpstreamName(name=SNAPSHOT, holder=RUNNER, takes=("use_async_omni_output", "hidden_states", "multimodal_outputs")),
    UpstreamName(
        name=BUILDER,
        holder=RUNNER,
        takes=(
            "hidden_states",
            "staged_hidden_states_cpu",
            "multimodal_outputs",
            "req_ids_output_copy",
            "postprocess_already_applied",
        ),
    ),
    UpstreamName(name="load_model", holder=RUNNER),
    UpstreamName(name="shutdown", holder=RUNNER),
    # Methods that we call.
    UpstreamName(name="_should_use_async_omni_output", holder=RUNNER),
    UpstreamName(
        name="_build_omni_async_snapshot_payload", holder=RUNNER, takes=("hidden_states", "multimodal_outputs")
    ),
    UpstreamName(name="_resolve_pooler_payload_req_ids", holder=RUNNER),
    UpstreamName(name="_model_omni_pooler_payload_include_hidden", holder=RUNNER),
    UpstreamName(name="_should_accumulate_full_payload_output", holder=RUNNER),
    UpstreamName(name="_model_omni_flag", holder=RUNNER),
    UpstreamName(name="_client_multimodal_output_keys", holder=RUNNER, seen_in=("0.28", "0.30"), required=False),
    UpstreamName(name="_resolve_sparse_mm_routing", holder=RUNNER, seen_in=("0.24", "0.26"), required=False),
    # Helpers that we call.
    UpstreamName(name="record_function_or_nullcontext", holder=SNAPSHOT),
    UpstreamName(name="_snapshot_tensor_payload_to_cpu_async", holder=SNAPSHOT),
    UpstreamName(name="flatten_payload", holder=BUILDER),
    UpstreamName(name="partition_payload_list", holder=BUILDER),
    UpstreamName(name="_ensure_tensor_values", holder="_build_multimodal_outputs"),
    UpstreamName(name="resolve_sparse_mm_routing", holder=BUILDER, seen_in=("0.28", "0.30"), required=False),
    UpstreamName(name="stage_sends_async_output", holder=BUILDER, seen_in=("0.26", "0.28", "0.30"), required=False),
    # The asynchronous output, which we subclass: its own code joins the builder thread and finishes the tokens.
    UpstreamName(name="OmniAsyncGPUModelRunnerOutput", holder="sample_tokens"),
    UpstreamName(name="AsyncGPUModelRunnerOutput", holder="sample_tokens"),
    UpstreamName(name="__init__", holder=OUTPUT, takes=("model_runner_output_builder", "cuda_device")),
    UpstreamName(name="get_output", holder=OUTPUT, uses=("_background_thread", "join", "_background_exception")),
    UpstreamName(name="_build_output_in_background", holder=OUTPUT, uses=("_cuda_device", "_background_exception")),
    UpstreamName(
        name="_build_model_runner_output_once",
        holder=OUTPUT,
        uses=("_model_runner_output", "_model_runner_output_builder"),
    ),
    # The worker.
    UpstreamName(name="init_device", holder=WORKER),
    UpstreamName(name="compile_or_warm_up_model", holder=WORKER),
    UpstreamName(name="model_runner_cls", holder=WORKER, seen_in=("0.28", "0.30"), required=False),
)

# Instance attributes of a runner that we read. The class does not have them, so `check_runner` checks the instance.
ATTRIBUTES: tuple[str, ...] = (
    "_async_chunk",
    "_downstream_payload_cache",
    "device",
    "model",
    "model_config",
    "omni_prefix_cache",
    "vllm_config",
)
