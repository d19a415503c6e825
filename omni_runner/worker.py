"""`PackedGPUARWorker`: the engine's AR worker, with our runner in place of its own.

Serving does not depend on this package: if our runner cannot be used, the class acts as the engine's worker and
logs one warning; with ``OMNI_RUNNER_STRICT=1`` the stage does not start.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omni_runner.compat import check_runner
from omni_runner.eligibility import SUPPORTED_PLATFORMS, StageFacts, describe, reasons_against, runner_facts
from omni_runner.errors import StageRefused, UpstreamMismatch
from omni_runner.platforms import PACKED_AR_WORKER, current_platform, platform_name, stock_ar_worker
from omni_runner.settings import Settings, asks_to_be_strict, warnings_of_variables

if TYPE_CHECKING:
    from vllm_omni.worker.gpu_ar_worker import GPUARWorker as _StockWorker
else:
    _StockWorker = object  # the real base is added by `make_worker_cls`

logger = logging.getLogger("vllm.omni_runner.worker")  # below "vllm", so that the engine's handler shows it

_lock = threading.Lock()  # the engine resolves the workers of several stages at once
_made: dict[type[Any], type[Any]] = {}


def packed_worker_cls() -> type[Any]:
    """Return `PackedGPUARWorker`, derived from the current platform's AR worker; one class per process.

    Raises
    ------
    StageRefused
        In strict mode, if the packed runner cannot be used; the message says why.
    ImportError
        vllm-omni is not installed.
    """
    stock = _resolve(stock_ar_worker(current_platform()))
    with _lock:
        if stock not in _made:
            _made[stock] = make_worker_cls(stock)
        return _made[stock]


def make_worker_cls(stock: type[Any]) -> type[Any]:
    """Derive `PackedGPUARWorker` from the engine's worker `stock`, without our runner if it cannot be used."""
    refusal = ""
    namespace: dict[str, Any] = {}
    for warning in warnings_of_variables():
        logger.warning("omni_runner: %s", warning)
    try:
        namespace = _runner_choice(stock)
    except Exception as error:
        refusal = str(error) or type(error).__name__
        if asks_to_be_strict():
            raise StageRefused(f"OMNI_RUNNER_STRICT is set and the packed runner can't be used: {refusal}") from error
        logger.warning("omni_runner: AR stages run on the engine's own runner: %s", refusal)
    module, _, name = PACKED_AR_WORKER.rpartition(".")
    namespace |= {"_omni_runner_refusal": refusal, "__module__": module, "__doc__": PackedWorkerMixin.__doc__}
    return type(name, (PackedWorkerMixin, stock), namespace)


class PackedWorkerMixin(_StockWorker):
    """The engine's AR worker, which packs payloads if the engine makes its output asynchronously."""

    _omni_runner_refusal: str  # why this class runs the engine's own runner; "" if it does not
    _omni_runner_global: tuple[dict[str, Any], str, type[Any]] | None = None  # see `_runner_choice`

    def init_device(self) -> None:
        """Set up the device and create the runner."""
        # A plain vLLM model config has no worker type.
        if getattr(self.model_config, "worker_type", None) == "generation":
            raise StageRefused(
                f"{_stage(self)} is a generation stage: remove `worker_cls: {PACKED_AR_WORKER}` from it; "
                "only autoregressive stages have a packed runner"
            )
        with _swapped(self._omni_runner_global):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as the engine does, then log which path the stage takes, now that model and caches exist."""
        result = super().compile_or_warm_up_model()
        try:
            _log_path(self)
        except StageRefused:
            raise
        except Exception:
            logger.warning("omni_runner: cannot tell which path %s takes", _stage(self), exc_info=True)
        return result


def stage_reasons(worker: Any, *, last_pipeline_rank: bool) -> tuple[str, ...]:
    """Return why a started worker of ours does not take the packed path; empty if it does.

    Raises
    ------
    StageRefused
        In strict mode, if the runner lacks attributes that packing reads.
    """
    if worker._omni_runner_refusal:
        return (worker._omni_runner_refusal,)
    if worker.use_v2_model_runner:
        return reasons_against(StageFacts(v2_runner=True))
    runner = worker.model_runner
    facts = runner_facts(runner, platform=platform_name(current_platform()), last_pipeline_rank=last_pipeline_rank)
    reasons = reasons_against(facts)
    if not reasons:
        try:
            check_runner(runner)
        except UpstreamMismatch as mismatch:
            if asks_to_be_strict():
                raise StageRefused(f"OMNI_RUNNER_STRICT is set and steps can't be packed: {mismatch}") from mismatch
            return (str(mismatch),)
    if not reasons and not runner._should_use_async_omni_output():
        return ("the engine's own check declines, for a reason that omni_runner does not know",)
    return reasons


def _runner_choice(stock: type[Any]) -> dict[str, Any]:
    """Return class attributes that make a subclass of `stock` use our runner; raises if that is not possible.

    From 0.28 on the worker instantiates its `model_runner_cls`. In earlier versions `init_device` refers to the
    runner class by a global of its module, which is replaced while `init_device` runs.
    """
    Settings.from_env()  # raises for invalid settings
    platform = platform_name(current_platform())
    if platform not in SUPPORTED_PLATFORMS:
        raise StageRefused(f"platform {platform} is left alone")
    # Imported only for a supported platform: these modules import the engine's runner.
    from omni_runner import compat  # noqa: PLC0415
    from omni_runner.runner import PackedGPUARModelRunner  # noqa: PLC0415

    stock_runner = compat.resolve().runner_cls
    if hasattr(stock, "model_runner_cls"):
        if stock.model_runner_cls is not stock_runner:
            theirs, known = stock.model_runner_cls.__qualname__, stock_runner.__qualname__
            raise StageRefused(f"{stock.__qualname__} runs {theirs}, not {known}")
        return {"model_runner_cls": PackedGPUARModelRunner}
    function = inspect.unwrap(stock.init_device)
    for name in function.__code__.co_names:
        if function.__globals__.get(name) is stock_runner:
            swap = (function.__globals__, name, PackedGPUARModelRunner)
            return {"model_runner_cls": PackedGPUARModelRunner, "_omni_runner_global": swap}
    raise StageRefused(f"{stock.__qualname__} does not say how it picks its runner")


@contextmanager
def _swapped(swap: tuple[dict[str, Any], str, type[Any]] | None) -> Iterator[None]:
    """Give a module global another value within the context."""
    if swap is None:
        yield
        return
    namespace, name, value = swap
    before = namespace[name]
    namespace[name] = value
    try:
        yield
    finally:
        namespace[name] = before


def _resolve(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def _log_path(worker: Any) -> None:
    from vllm.distributed import get_pp_group, get_tp_group  # noqa: PLC0415  imports the engine

    pipeline = get_pp_group()
    stage = _stage(worker)
    if pipeline.world_size > 1:
        stage += f", pipeline rank {pipeline.rank_in_group}"
    reasons = stage_reasons(worker, last_pipeline_rank=pipeline.is_last_rank)
    # All tensor-parallel ranks take the same path: only the first one logs it at INFO.
    logger.log(logging.INFO if get_tp_group().is_first_rank else logging.DEBUG, "%s", describe(stage, reasons))


def _stage(worker: Any) -> str:
    # A plain vLLM model config has no stage id or name.
    config = worker.model_config
    return f"stage {getattr(config, 'stage_id', '?')} ({getattr(config, 'model_stage', None) or 'unnamed'})"
