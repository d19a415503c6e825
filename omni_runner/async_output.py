"""The asynchronous output of a packed runner.

`get_output` remains the engine's: it joins the builder thread, raises what the builder raised and finishes the sampled
tokens. This module changes three things: the builder thread is kept from step to step, `get_output` may be called
again, and `sampled_tokens` transfers the sampled tokens to the host (where it cannot, vLLM's base class does).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from omni_runner.builder_thread import BuilderThread
from omni_runner.errors import BuilderThreadClosed
from omni_runner.sampled_tokens import VLLM_FIELDS, Landed, PromisedTokens, SampledTokens, stores_only

if TYPE_CHECKING:
    from omni_runner.compat import Upstream

logger = logging.getLogger("vllm.omni_runner")

_LANDED = Landed()
# What vllm-omni's ``__init__`` stores besides what vLLM's does.
_BUILDER_FIELDS = frozenset(
    ("_model_runner_output_builder", "_background_exception", "_background_thread", "_cuda_device")
)
_OUTPUT_NAME = "OmniAsyncGPUModelRunnerOutput"
_EngineOutput: Any = object  # the real base is added by `make_async_output_cls`


class PackedAsyncOutputMixin(_EngineOutput):
    """Mixin to put before the engine's `OmniAsyncGPUModelRunnerOutput` in the MRO.

    Objects created without `__init__`, with attributes set by hand, behave like those of the engine's class.
    """

    builder_thread: ClassVar[BuilderThread | None]
    _sampled_tokens: ClassVar[SampledTokens | None]
    _engine_output_cls: ClassVar[type[Any]]  # vllm-omni's class, whose base is vLLM's

    # Defaults for objects created without __init__; all of these share one lock.
    _background_thread: Any = None
    _completion: threading.Lock = threading.Lock()
    _completed: Any = None
    _failure: tuple[BaseException, TracebackType | None] | None = None

    def __init__(
        self, *, model_runner_output_builder: Callable[[], Any], cuda_device: Any = None, **kwargs: Any
    ) -> None:
        self._completion = threading.Lock()
        if self.builder_thread is None:
            super().__init__(model_runner_output_builder=model_runner_output_builder, cuda_device=cuda_device, **kwargs)
            return
        fields = None if self._sampled_tokens is None else self._sampled_tokens.fields(kwargs)
        if fields is not None:
            self.__dict__.update(fields)
        else:  # skip vllm-omni's __init__, which starts a thread; vLLM's makes the same copies on the same stream
            super(self._engine_output_cls, self).__init__(model_runner_output=None, **kwargs)
        self._model_runner_output_builder = model_runner_output_builder
        self._background_exception: BaseException | None = None
        self._cuda_device = cuda_device
        try:
            # The engine's own function sets the device, builds the output and keeps an exception for get_output.
            self._background_thread = self.builder_thread.submit(self._build_and_keep_promise)
        except BuilderThreadClosed:
            self._background_thread = None  # get_output then builds the output, as in the engine's class

    def get_output(self) -> Any:
        """Wait for the output, finish its sampled tokens and return it.

        The first call does the work; every later call, from any thread, gets the same object or exception.
        """
        with self._completion:
            if self._failure is not None:
                failure, trace = self._failure
                raise failure.with_traceback(trace)
            if self._completed is None:
                try:
                    self._completed = super().get_output()
                except BaseException as failure:
                    # An interrupt while waiting for the builder is not the outcome: the next caller waits again.
                    if isinstance(failure, Exception) or self._background_thread is None:
                        self._failure = failure, failure.__traceback__
                    raise
            return self._completed

    def _build_and_keep_promise(self) -> None:
        """Run the engine's thread function on the builder thread, then replace `PromisedTokens` by the tensor."""
        self._build_output_in_background()
        promised = vars(self).get("sampled_token_ids_cpu")
        if type(promised) is PromisedTokens and promised.kept is not None:
            self.sampled_token_ids_cpu, self.async_copy_ready_event = promised.kept, _LANDED


def make_async_output_cls(
    engine_output_cls: type[Any],
    builder_thread: BuilderThread | None = None,
    sampled_tokens: SampledTokens | None = None,
) -> type[Any]:
    """Derive `PackedAsyncOutput` from the engine's class.

    Parameters
    ----------
    engine_output_cls : type
        vllm-omni's class.
    builder_thread : BuilderThread, optional
        Builds the outputs of this class in order; each runner has its own thread and class. Without it, or if the
        engine's ``__init__`` stores something unknown, each output starts its own thread, as the engine's outputs do.
    sampled_tokens : SampledTokens, optional
        Transfers the sampled tokens to the host, unless vLLM's ``__init__`` stores something unknown. vLLM's class
        then does.
    """
    vllm_output_cls = engine_output_cls.__mro__[1]
    if builder_thread is not None and not stores_only(engine_output_cls, VLLM_FIELDS | _BUILDER_FIELDS):
        logger.warning(
            "omni_runner: this version's asynchronous output keeps something unknown, so each output starts a thread "
            "of its own and copies the sampled tokens itself, as without this package"
        )
        builder_thread = sampled_tokens = None
    namespace = {
        "builder_thread": builder_thread,
        "_sampled_tokens": sampled_tokens if stores_only(vllm_output_cls, VLLM_FIELDS) else None,
        "_engine_output_cls": engine_output_cls,
        "__module__": __name__,
        "__doc__": PackedAsyncOutputMixin.__doc__,
    }
    return type("PackedAsyncOutput", (PackedAsyncOutputMixin, engine_output_cls), namespace)


class constructed_as:
    """Context manager in which `sample_tokens` constructs `output_cls` instead of the engine's class.

    The name is left alone if it is bound to another class, such as that of another runner in the middle of its own
    step: outputs of any class accept builders of any runner. One object serves all steps.
    """

    __slots__ = ("_engine_output_cls", "_namespace", "_output_cls")

    def __init__(self, upstream: Upstream, output_cls: type[Any]) -> None:
        self._namespace = vars(upstream.runner_module)
        self._engine_output_cls = upstream.async_output_cls
        self._output_cls = output_cls

    def __enter__(self) -> None:
        if self._namespace.get(_OUTPUT_NAME) is self._engine_output_cls:
            self._namespace[_OUTPUT_NAME] = self._output_cls

    def __exit__(self, *_: object) -> None:
        if self._namespace.get(_OUTPUT_NAME) is self._output_cls:
            self._namespace[_OUTPUT_NAME] = self._engine_output_cls


@functools.cache
def _installed_cls() -> type[Any]:
    from omni_runner.compat import resolve  # noqa: PLC0415  imports the engine, which this module does not need

    return make_async_output_cls(resolve().async_output_cls)


def __getattr__(name: str) -> Any:
    # PEP 562: the class derives from the installed engine's.
    if name == "PackedAsyncOutput":
        return _installed_cls()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
