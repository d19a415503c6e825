"""Packed output payloads for the autoregressive stages of vLLM-Omni.

Importing this package imports nothing else, because vLLM loads :func:`register` in every process of every
installation. The classes are created on first access, as subclasses of those of the installed vllm-omni.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # not from typing, whose import costs more than this module
if TYPE_CHECKING:
    from typing import Any

    # Types of the names that are created on first access; each is a subclass of the installed engine's class.
    PackedGPUARModelRunner: type[Any]
    PackedGPUARWorker: type[Any]

__all__ = ["PackedGPUARModelRunner", "PackedGPUARWorker", "register"]


def register() -> None:
    """Switch every AR stage to `PackedGPUARWorker` if ``OMNI_RUNNER=1`` (``vllm.general_plugins`` entry point).

    Without the variable it does nothing. It never raises: any failure is logged as one warning and leaves the
    engine unchanged.
    """
    if os.environ.get("OMNI_RUNNER", "0") in ("", "0"):
        return
    try:
        # Imported late: most processes of most installations do not set OMNI_RUNNER.
        from omni_runner import plugin  # noqa: PLC0415

        plugin.activate()
    except Exception:  # vLLM calls this unguarded; serving must not break here
        import logging  # noqa: PLC0415

        logging.getLogger("vllm.omni_runner").warning(
            "omni_runner stays off: it could not be switched on", exc_info=True
        )


def __getattr__(name: str) -> Any:
    # PEP 562: the classes derive from the engine's, so creating them imports the engine.
    if name == "PackedGPUARWorker":
        from omni_runner.worker import packed_worker_cls  # noqa: PLC0415

        return packed_worker_cls()
    if name == "PackedGPUARModelRunner":
        from omni_runner.runner import PackedGPUARModelRunner  # noqa: PLC0415

        return PackedGPUARModelRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
