"""`PackedGPUARModelRunner`: the engine's AR runner, which packs its asynchronous payloads once per step.

Every override is short: it calls the runner's `PackedPath` or the engine. A step that cannot be packed, or whose
packing fails, is handled by the engine.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from omni_runner.packed_path import FOREIGN_SNAPSHOT, NO_METADATA, PackedPath
from omni_runner.packing import PackedPayload
from omni_runner.stats import RunnerStats
from omni_runner.step import NotCovered

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

logger = logging.getLogger("vllm.omni_runner")

_EngineRunner: Any = object  # the real base is added by `make_runner_cls`


class PackedRunnerMixin(_EngineRunner):
    """Mixin to put before the engine's `GPUARModelRunner` in the MRO.

    Adds no state in `__init__`, so the class may be assigned to a live runner. A step's output is bit for bit that of
    the engine's own runner.
    """

    _omni_runner_upstream: ClassVar[Upstream]
    _omni_runner_path: PackedPath | None = None  # made by `path_of`

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and return an output that our builder thread completes."""
        path = path_of(self)
        try:
            with path.constructs_ours:
                return super().sample_tokens(*args, **kwargs)
        finally:
            path.forget_step()

    def _maybe_run_eager_omni_postprocess_before_async_output(self, **step: Any) -> bool:
        postprocessed = super()._maybe_run_eager_omni_postprocess_before_async_output(**step)
        path_of(self).pending = step, postprocessed
        return postprocessed

    def _snapshot_omni_output_tensors_for_async_output(
        self, *, use_async_omni_output: bool, hidden_states: Any, multimodal_outputs: Any, **others: Any
    ) -> Any:
        if use_async_omni_output:
            path = path_of(self)
            pending = path.take_pending(hidden_states, multimodal_outputs)
            if pending is None:
                path.counters.count_stock(NO_METADATA)
            elif not path.upstream.snapshots_as_known():
                path.counters.count_stock(FOREIGN_SNAPSHOT)
            else:
                try:
                    with path.upstream.record_function("omni_async_output:snapshot_cpu_payload"):
                        return path.pack(
                            self,
                            pending,
                            hidden_states=hidden_states,
                            multimodal_outputs=multimodal_outputs,
                            others=others,
                        )
                except NotCovered as reason:
                    path.counters.count_stock(str(reason))
                except Exception as failure:  # noqa: BLE001  the engine's own snapshot serves this step
                    path.counters.count_failure(failure)
        return super()._snapshot_omni_output_tensors_for_async_output(
            use_async_omni_output=use_async_omni_output,
            hidden_states=hidden_states,
            multimodal_outputs=multimodal_outputs,
            **others,
        )

    def _build_omni_model_runner_output_from_snapshot(self, **step: Any) -> Any:
        build_stock = super()._build_omni_model_runner_output_from_snapshot
        if isinstance(step["multimodal_outputs"], PackedPayload):
            return path_of(self).build(self, build_stock, step)
        return build_stock(**step)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then prepare for packing if steps will be packed."""
        super().load_model(*args, **kwargs)
        self.on_swap(self)

    @classmethod
    def on_swap(cls, runner: Any) -> None:
        """Prepare a runner that is about to use this class: compile kernels and pin memory now, not in a step."""
        try:
            if runner._should_use_async_omni_output():
                path_of(runner).warm_up(runner)
        except Exception:  # the first step tries again, and falls back if it has to
            logger.warning("omni_runner: preparing the packer failed", exc_info=True)

    def shutdown(self) -> None:
        """Wait up to a second for outputs in flight, then shut down as the engine does."""
        try:
            path_of(self).close()
        except Exception:  # the engine's own shutdown has to run in any case
            logger.warning("omni_runner: closing the packed path failed", exc_info=True)
        super().shutdown()

    def omni_runner_stats(self) -> RunnerStats:
        """Return the counters of this runner's packed path."""
        return path_of(self).stats()


def path_of(runner: Any) -> PackedPath:
    """Return a runner's packed path; created on first use, because the class may be assigned after `__init__`."""
    path: PackedPath | None = runner._omni_runner_path
    if path is None:
        path = runner._omni_runner_path = PackedPath(type(runner)._omni_runner_upstream)
    return path


@functools.cache
def make_runner_cls(upstream: Upstream) -> type[Any]:
    """Derive `PackedGPUARModelRunner` from the engine's runner; the same class for every call."""
    namespace = {
        "_omni_runner_upstream": upstream,
        "__module__": __name__,
        "__doc__": PackedRunnerMixin.__doc__,
    }
    return type("PackedGPUARModelRunner", (PackedRunnerMixin, upstream.runner_cls), namespace)


def __getattr__(name: str) -> Any:
    # PEP 562: the class derives from the installed engine's.
    if name == "PackedGPUARModelRunner":
        from omni_runner.compat import resolve  # noqa: PLC0415

        return make_runner_cls(resolve())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
