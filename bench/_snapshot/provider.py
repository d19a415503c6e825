"""The interface of providers: ways to copy a step's payload to the host and hand it to a builder."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from bench._snapshot.machine import Machine
from bench._snapshot.scenarios import Scenario
from omni_runner.builder_thread import BuilderThread
from omni_runner.reference import Payloads
from omni_runner.trace import TraceStep


class Unavailable(Exception):
    """A provider can't run here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The only field of the engine's scheduler output that its builder reads."""

    total_num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step as `sample_tokens` has it when it takes the snapshot: host metadata copied, tensors live.

    Making it is not timed, since the engine does the same for every provider.
    """

    trace: TraceStep
    request_ids: list[str]
    index: dict[str, int]
    counts: np.ndarray[Any, np.dtype[np.int32]]  # [num_requests]
    query_start_loc: Tensor  # [>= num_requests + 1] int32, on the CPU
    scheduler_output: SchedulerOutput

    @classmethod
    def of(cls, step: TraceStep) -> StepInput:
        ids = list(step.request_ids)
        return cls(
            trace=step,
            request_ids=ids,
            index={request_id: place for place, request_id in enumerate(ids)},
            counts=np.array(step.num_scheduled_tokens, dtype=np.int32),
            query_start_loc=torch.tensor(step.query_start_loc, dtype=torch.int32),
            scheduler_output=SchedulerOutput(sum(step.num_scheduled_tokens)),
        )

    def snapshot_by(self, runner: Any) -> Any:
        """Take a V1 runner's snapshot, stock or packed, by calling its methods as `sample_tokens` does."""
        runner._maybe_run_eager_omni_postprocess_before_async_output(**self.hook_arguments)
        return runner._snapshot_omni_output_tensors_for_async_output(
            use_async_omni_output=True,
            hidden_states=self.trace.hidden_states,
            staged_hidden_states_cpu=None,
            multimodal_outputs=self.trace.multimodal_outputs,
        )

    @property
    def hook_arguments(self) -> dict[str, Any]:
        """Arguments for the engine's eager postprocess hook."""
        return {
            "hidden_states": self.trace.hidden_states,
            "multimodal_outputs": self.trace.multimodal_outputs,
            "num_scheduled_tokens_np": self.counts,
            "scheduler_output": self.scheduler_output,
            "req_ids_output_copy": self.request_ids,
            "query_start_loc_cpu": self.query_start_loc,
        }

    def builder_arguments(self, snapshot: Any) -> dict[str, Any]:
        """Arguments for the engine's builder, given the engine's tensor snapshot or its replacement."""
        return {
            "scheduler_output": self.scheduler_output,
            "hidden_states": snapshot.hidden_states,
            "staged_hidden_states_cpu": snapshot.staged_hidden_states_cpu,
            "multimodal_outputs": snapshot.multimodal_outputs,
            "req_ids_output_copy": self.request_ids,
            "req_id_to_index_output_copy": self.index,
            "valid_sampled_token_ids": [],
            "logprobs_lists": None,
            "prompt_logprobs_dict": {},
            "num_nans_in_logits": None,
            "kv_connector_output": None,
            "ec_connector_output": None,
            "cudagraph_stats": None,
            "kv_extracted_req_ids": None,
            "num_scheduled_tokens_np": self.counts,
            "query_start_loc_cpu": self.query_start_loc,
            "postprocess_already_applied": True,
            "prefix_cache_step_id": None,
        }


@dataclass(slots=True)
class Work:
    """A builder's work on one step.

    Attributes
    ----------
    build : callable
        Waits for the bytes and makes the payloads.
    join : callable
        Waits until the work is done; raises the exception of the work, if any.
    is_over : callable
        Whether its thread or job has finished as well; asked once `ready_ns` is set.
    failure : BaseException, optional
        The exception of the work, for callers that don't join.
    ready_ns : int
        When the work was done or had failed, by `perf_counter_ns`; 0 before.
    """

    build: Callable[[], Any]
    join: Callable[[], Any] = field(default=lambda: None)
    is_over: Callable[[], bool] = field(default=lambda: True)
    output: Any = None
    failure: BaseException | None = None
    ready_ns: int = 0

    def run(self) -> Any:
        """Run on the builder's thread."""
        try:
            self.output = self.build()
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self.ready_ns = time.perf_counter_ns()
        return self.output

    def on_thread(self, thread: BuilderThread) -> Work:
        """Queue the work on a thread."""
        job = thread.submit(self.run)
        self.join = job.result
        self.is_over = lambda: job.settled
        return self


class Provider(ABC):
    """A way to deliver payloads, made for one scenario; holds whatever a long-running engine would hold.

    `take` and `hand_over` together are what the engine's main thread does in a step, and are timed as such.

    Attributes
    ----------
    name : str
        Name in the results.
    builds : bool
        Whether its builder makes per-request payloads. If not, only the leaves' bytes can be checked.
    owns_bytes : bool
        Whether the sources may be overwritten right after the call. False for the ceilings.
    lands : bool
        Whether bytes reach the host.
    hands_over : bool
        Whether steps are handed to a builder. False for the ceilings.
    """

    name: ClassVar[str]
    builds: ClassVar[bool] = True
    owns_bytes: ClassVar[bool] = True
    lands: ClassVar[bool] = True
    hands_over: ClassVar[bool] = True

    def __init__(self, machine: Machine, scenario: Scenario) -> None:
        self.machine = machine
        self.scenario = scenario

    @abstractmethod
    def take(self, step: StepInput) -> Any:
        """Queue everything that brings the step's bytes to the host; returns the provider's handle."""

    @abstractmethod
    def is_landed(self, taken: Any) -> bool:
        """Whether the bytes are on the host."""

    @abstractmethod
    def d2h_bytes(self, taken: Any) -> int:
        """Bytes that were copied from the device to the host for the step."""

    def hand_over(self, step: StepInput, taken: Any, *, only_wait: bool) -> Work:
        """Hand the step to the builder as in production; with `only_wait` it only waits for the bytes."""
        del step, taken, only_wait
        return Work(lambda: None)

    def payloads(self, step: StepInput, work: Work) -> Payloads:
        """The flat payloads that the builder made, one per request, in the order of the requests."""
        raise NotImplementedError(f"{self.name} makes no payloads")

    def leaf_bytes(self, taken: Any) -> list[Tensor]:
        """For providers that build nothing: each device leaf's bytes on the host, ``uint8``."""
        raise NotImplementedError(f"{self.name} shows its payloads instead")

    def own_pinned_allocations(self) -> int:
        """Pinned allocations that the provider counts itself."""
        return 0

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """End threads and drop memory."""
