"""The compared variants, all in one live engine: the stock runner, two patched variants of it, and ours."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.engine.stages import VARIANTS
from omni_runner import interpreter

OURS = "omni_runner.PackedGPUARModelRunner"
# Modules from which the engine's builder takes `to_payload_element`: in 0.30, and in earlier versions.
_BUILDER_MODULES = ("vllm_omni.worker.output.payload_build", "vllm_omni.worker.gpu_ar_model_runner")
_BUILDER = "_build_omni_model_runner_output_from_snapshot"


class Variants:
    """Applies a variant to the live runner by replacing its class in place and by installing or removing the patch."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stock_cls = type(runner)
        self._patch = BatchedClones(self._stock_cls)

    def apply(self, variant: str) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")
        self._patch.install(variant in ("stock_batched_clones", "stock_tuned"))
        # The interpreter settings of ours belong to ours and to `stock_tuned` only.
        interpreter.restore(self)
        path = getattr(self._runner, "_omni_runner_path", None)
        if path is not None:
            interpreter.restore(path)
        if variant == "stock_tuned":
            interpreter.tune(self)
        cls = resolve(OURS) if variant == "ours" else self._stock_cls
        self._runner.__class__ = cls
        on_swap = getattr(cls, "on_swap", None)
        if on_swap is not None:
            on_swap(self._runner)


class BatchedClones:
    """The stock builder with one clone per payload key and step instead of one per request.

    Stock clones the elements of lists (for example a Thinker's embeddings) for each request separately. Here the first
    request that needs an element makes the copies for all requests with one call, and each request gets one row of
    them. This patch of a few lines removes most of the builder's torch calls, so ours has to be compared with it.
    """

    def __init__(self, runner_cls: type) -> None:
        self._runner_cls = runner_cls
        self._build = getattr(runner_cls, _BUILDER)
        modules = [module for name in _BUILDER_MODULES if (module := _module(name)) is not None]
        self._modules = [module for module in modules if hasattr(module, "to_payload_element")]
        if not self._modules:
            raise RuntimeError("to_payload_element is in none of " + ", ".join(_BUILDER_MODULES))
        self._stock_element = self._modules[0].to_payload_element
        self._step = threading.local()  # of the building thread: its step's number of requests and copies

    def install(self, on: bool) -> None:
        """Install or remove the patch."""
        setattr(self._runner_cls, _BUILDER, self._patched_builder() if on else self._build)
        element = self._patched_element() if on else self._stock_element
        for module in self._modules:
            module.to_payload_element = element

    def _patched_builder(self) -> Callable[..., Any]:
        build, step = self._build, self._step

        def patched(runner: Any, **given: Any) -> Any:
            step.requests, step.rows = len(given["req_ids_output_copy"]), {}
            return build(runner, **given)

        return patched

    def _patched_element(self) -> Callable[..., Any]:
        stock, step = self._stock_element, self._step

        def patched(
            element: Any, idx: int, start: int, end: int, pass_lists_through: bool = False, **lengths: Any
        ) -> Any:
            if type(element) is list and not pass_lists_through:
                held, rows = step.rows.get(id(element), (None, None))
                if held is None:
                    rows = _copies(element, step.requests)
                    step.rows[id(element)] = element, rows  # holding it keeps its id unique
                if rows is not None:
                    return rows[idx]
            return stock(element, idx, start, end, pass_lists_through, **lengths)

        return patched


def _copies(element: list[Any], requests: int) -> tuple[Tensor, ...] | None:
    """One copy per request of the step, made with one call; None where the elements don't fit one tensor."""
    if not element or not all(isinstance(item, Tensor) for item in element):
        return None
    first = element[0]
    if len(element) == 1:
        return first.unsqueeze(0).repeat(requests, *[1] * first.dim()).unbind(0)
    if len(element) < requests or any(item.shape != first.shape or item.dtype != first.dtype for item in element):
        return None
    return torch.stack(element[:requests]).unbind(0)


def resolve(path: str) -> Any:
    """The object at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
