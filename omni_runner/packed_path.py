"""One runner's packed path: its state between steps, how a step is packed, and how its output is built."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

import spanpack
from omni_runner import interpreter
from omni_runner.async_output import constructed_as, make_async_output_cls
from omni_runner.builder import ChannelBuilder, ChannelRules
from omni_runner.builder_thread import BuilderThread
from omni_runner.compat import check_runner
from omni_runner.packing import PackedStep, PackedWhole, StepPacker
from omni_runner.sampled_tokens import SampledTokens
from omni_runner.settings import Settings
from omni_runner.stats import RunnerStats, StepCounters
from omni_runner.step import NotCovered, StepContext, StepReader
from omni_runner.warmup import warm_up

if TYPE_CHECKING:
    from omni_runner.compat import Upstream
    from omni_runner.trace_record import StepRecorder

logger = logging.getLogger("vllm.omni_runner")

LOG_EVERY_STEPS = 1000
CLOSE_TIMEOUT_S = 1.0
NO_METADATA = "the step's metadata did not come before its payload"
FOREIGN_SNAPSHOT = "the engine's snapshot helper has been replaced by something else"


# What the engine passed just before it requested the step's snapshot: the arguments of the eager postprocess hook,
# which are the same objects that the step's builder gets later, and whether the model's postprocess has run.
PendingStep: TypeAlias = tuple[Mapping[str, Any], bool]


class PackedPath:
    """State of one runner; creating it does not use the device, and the first step creates memory and plans.

    Parameters
    ----------
    upstream
        The resolved engine names.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.counters = StepCounters()
        self.builder_thread = BuilderThread()
        self._sampled_tokens = SampledTokens()
        self.output_cls = make_async_output_cls(upstream.async_output_cls, self.builder_thread, self._sampled_tokens)
        self.constructs_ours = constructed_as(upstream, self.output_cls)
        self._packs_tokens = self.output_cls._sampled_tokens is not None
        self.pending: PendingStep | None = None
        self._reader = StepReader(upstream)
        self._packer: spanpack.Packer | None = None
        self._steps: StepPacker | None = None
        self._channels: ChannelBuilder | None = None
        self._recorder: StepRecorder | None = None
        self._steps_seen = 0
        self._tunes_python = False

    def forget_step(self) -> None:
        """Drop the state of the step that has ended, including one that failed halfway."""
        self.pending = None
        self._sampled_tokens.forget()

    def take_pending(self, hidden_states: Tensor, multimodal_outputs: Any) -> PendingStep | None:
        """Return the metadata of the step that these tensors belong to; the metadata is returned only once."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        metadata = pending[0]
        is_of_these = (
            metadata["hidden_states"] is hidden_states and metadata["multimodal_outputs"] is multimodal_outputs
        )
        return pending if is_of_these else None

    def warm_up(self, runner: Any) -> None:
        """Compile the kernel and pin memory now, so that no step has to."""
        self._open(runner)
        assert self._packer is not None
        warm_up(self._packer, runner)

    def pack(
        self,
        runner: Any,
        pending: PendingStep,
        *,
        hidden_states: Tensor,
        multimodal_outputs: Any,
        others: Mapping[str, Any],
    ) -> PackedStep | PackedWhole:
        """Pack a step on the current stream; if it raises, the step's tensors are unchanged.

        Parameters
        ----------
        runner
            The engine's runner.
        pending
            The step's metadata.
        hidden_states, multimodal_outputs, others
            Arguments of the engine's snapshot method; `others` are passed on unchanged.
        """
        steps = self._steps or self._open(runner)
        self._steps_seen += 1
        if self._steps_seen % LOG_EVERY_STEPS == 0 and logger.isEnabledFor(logging.DEBUG):
            logger.debug("omni_runner: %s", self.stats())
        try:
            metadata, postprocessed = pending
            step = self._reader.read(
                runner,
                scheduler_output=metadata["scheduler_output"],
                request_ids=metadata["req_ids_output_copy"],
                num_scheduled_tokens=metadata["num_scheduled_tokens_np"],
                query_start_loc=metadata["query_start_loc_cpu"],
                multimodal_outputs=multimodal_outputs,
            )
            include_hidden = runner._model_omni_pooler_payload_include_hidden()
            if self._recorder is not None:
                self._record(step, hidden_states, multimodal_outputs, others, include_hidden)
            if step.consumers:
                _check_covered(runner, postprocessed)
            wants_tokens = self._packs_tokens and self._sampled_tokens.wanted
            tokens, awaited = self.upstream.sampled_tokens(runner) if wants_tokens else (None, False)
            packed = steps.pack(
                step,
                hidden_states=hidden_states if include_hidden else None,
                multimodal_outputs=multimodal_outputs,
                tokens=tokens,
                tokens_awaited=awaited,
            )
            if tokens is not None:
                self._sampled_tokens.expected = tokens, packed
            if step.consumers:
                self.counters.columns += 1
            else:
                self.counters.empty += 1
            return packed
        except NotCovered as reason:
            payload = runner._build_omni_async_snapshot_payload(
                hidden_states=hidden_states, multimodal_outputs=multimodal_outputs, **others
            )
            no_rows = torch.empty((0, *hidden_states.shape[1:]), dtype=hidden_states.dtype)
            tree = steps.pack_whole(payload, no_rows)
            self.counters.count_whole(str(reason))
            return tree

    def build(self, runner: Any, build_stock: Callable[..., Any], step: Mapping[str, Any]) -> Any:
        """Build the output of a packed step.

        Parameters
        ----------
        runner
            The engine's runner.
        build_stock
            The engine's builder.
        step
            Arguments of that builder; ``multimodal_outputs`` is the pack.
        """
        packed = step["multimodal_outputs"]
        try:
            packed.arrive()
            start_ns = time.perf_counter_ns()
            if isinstance(packed, PackedStep):
                output = self._build_columns(build_stock, step, packed)
                if packed.has_tokens:
                    packed.tokens()  # created before the release, for `PromisedTokens`
            else:
                output = _build_whole(build_stock, step, packed)
            packed.release()
            self.counters.add_builder_ns(time.perf_counter_ns() - start_ns)
            return output
        except BaseException:
            _give_back_prefix_step(runner, step)
            raise

    def stats(self) -> RunnerStats:
        """Return the counters as they are now."""
        pack = self._packer.stats() if self._packer is not None else None
        return self.counters.read(pack, self._sampled_tokens.packed, self._sampled_tokens.copied)

    def close(self) -> None:
        """Wait a bounded time for work in flight, then free the memory; harmless when repeated."""
        self._tunes_python = False
        interpreter.restore(self)
        finished = self.builder_thread.close(CLOSE_TIMEOUT_S)
        logger.debug("omni_runner: closing: %s", self.stats())
        if self._recorder is not None:
            try:
                self._recorder.close()
            except Exception:
                logger.warning("omni_runner: the trace could not be written", exc_info=True)
        # A builder that is still waiting may wait for a hung device; closing the packer would wait for it as well.
        if finished:
            self._sampled_tokens.close()
            if self._packer is not None:
                self._packer.close()

    def _build_columns(self, build_stock: Callable[..., Any], step: Mapping[str, Any], packed: PackedStep) -> Any:
        assert self._channels is not None
        # Build the channels first: the engine's builder may drain the connector, which cannot be done twice.
        with self.upstream.record_function("omni_runner:build_channels"):
            inter_stage_outputs, multimodal_outputs = self._channels.build(packed)
        # The engine builds everything but the payload: it is called as for a step without consumers.
        nobody: dict[str, Any] = {
            "multimodal_outputs": None,
            "req_ids_output_copy": [],
            "postprocess_already_applied": True,
        }
        output = build_stock(**{**step, **nobody})
        output.req_ids = step["req_ids_output_copy"]
        output.inter_stage_outputs = inter_stage_outputs
        output.multimodal_outputs = multimodal_outputs
        return output

    def _open(self, runner: Any) -> StepPacker:
        steps = self._steps or self._make_steps(runner)
        if self._tunes_python:
            interpreter.tune(self)
        return steps

    def _make_steps(self, runner: Any) -> StepPacker:
        check_runner(runner)
        settings = Settings.from_env()
        self._tunes_python = settings.tune_python
        rules = _channel_rules(self.upstream, runner, untracks=settings.tune_python)
        self._channels = ChannelBuilder(self.upstream, rules)
        self._packer = (
            spanpack.Packer(runner.device)
            if settings.pinned_budget_bytes is None
            else spanpack.Packer(runner.device, pinned_budget_bytes=settings.pinned_budget_bytes)
        )
        self._recorder = _make_recorder(settings, runner, self.upstream)
        fills_channels = bool(rules.client_keys) or not rules.is_text
        self._steps = StepPacker(self._packer, self.upstream, fills_channels=fills_channels)
        return self._steps

    def _record(
        self,
        step: StepContext,
        hidden_states: Tensor,
        multimodal_outputs: Any,
        others: Mapping[str, Any],
        include_hidden: bool,
    ) -> None:
        assert self._recorder is not None
        if not self._recorder.active:
            return
        staged = others.get("staged_hidden_states_cpu")
        try:
            written = self._recorder.record(
                cast(Any, step), hidden_states, staged, multimodal_outputs, include_hidden=include_hidden
            )
        except Exception:  # a failing trace must not fail a step
            logger.warning("omni_runner: recording the trace failed; no trace is written", exc_info=True)
            self._recorder = None
        else:
            if written is not None:
                logger.info("omni_runner: wrote the trace %s", written)


def _check_covered(runner: Any, postprocessed: bool) -> None:
    """Raise `NotCovered` if the engine does more with the step's payload than put it into the output."""
    if runner.omni_prefix_cache is not None:
        raise NotCovered("prefix caching merges cached payloads")
    if runner._should_accumulate_full_payload_output():
        raise NotCovered("full payloads are accumulated")
    if not postprocessed and runner._model_omni_flag(runner.model, "has_postprocess"):
        raise NotCovered("the model's postprocess runs in the builder")


def _build_whole(build_stock: Callable[..., Any], step: Mapping[str, Any], packed: PackedWhole) -> Any:
    """Call the engine's builder with what the engine's own snapshot would have given it."""
    payload = packed.payload()
    arguments = {
        **step,
        "multimodal_outputs": payload["multimodal_outputs"],
        "staged_hidden_states_cpu": payload.get("staged_hidden_states_cpu"),
    }
    if payload.get("hidden_states") is not None:
        arguments["hidden_states"] = payload["hidden_states"]
    return build_stock(**arguments)


def _channel_rules(upstream: Upstream, runner: Any, *, untracks: bool) -> ChannelRules:
    return ChannelRules(
        partitions=upstream.partitions_channels(runner),
        client_keys=upstream.client_output_keys(runner),
        is_text=runner.vllm_config.model_config.engine_output_type == "text",
        untracks=untracks,
        crosses_processes=_crosses_processes(runner),
        shares_channel=upstream.shares_channel,
    )


def _crosses_processes(runner: Any) -> bool:
    """Whether the engine runs its workers in separate processes, and therefore pickles their outputs."""
    config = getattr(runner.vllm_config, "parallel_config", None)
    return config is not None and (config.world_size > 1 or config.distributed_executor_backend in ("mp", "ray"))


def _give_back_prefix_step(runner: Any, step: Mapping[str, Any]) -> None:
    """Discard a failed step's entry in the prefix cache, unless it was consumed before the failure."""
    step_id = step.get("prefix_cache_step_id")
    if step_id is None or runner.omni_prefix_cache is None:
        return
    try:
        runner.omni_prefix_cache.discard_step(step_id)
    except Exception:  # noqa: BLE001  the cache raises for a step that was consumed before
        logger.debug("omni_runner: prefix cache step %s was consumed before its output failed", step_id)


def _make_recorder(settings: Settings, runner: Any, upstream: Upstream) -> StepRecorder | None:
    if settings.trace_dir is None:
        return None
    try:
        from omni_runner.trace_record import StepRecorder  # noqa: PLC0415  needs safetensors, which serving does not

        config = runner.model_config
        about = {"stage": config.model_stage, "model": config.model, "vllm_omni": upstream.version, "runner": "v1"}
        return StepRecorder(settings.trace_dir, settings.trace_steps, about, scrub=settings.trace_scrub)
    except Exception:  # a failing trace must not fail a step
        logger.warning("omni_runner: no trace can be recorded", exc_info=True)
        return None
