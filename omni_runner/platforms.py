"""Which platform vllm-omni runs on, and the worker class that it names for AR stages."""

from __future__ import annotations

from typing import Any

#: The AR worker that vllm-omni 0.24 to 0.30 names on CUDA, ROCm and MUSA.
STOCK_AR_WORKER = "vllm_omni.worker.gpu_ar_worker.GPUARWorker"
PACKED_AR_WORKER = "omni_runner.PackedGPUARWorker"

_NAMES = ("cuda", "rocm", "npu", "xpu", "musa")
# For each platform class, the AR worker that it named before `name_packed_ar_worker`.
_replaced: dict[type[Any], str] = {}


def current_platform() -> Any:
    """Return vllm-omni's current platform; the first call detects accelerators, without creating a CUDA context."""
    from vllm_omni.platforms import current_omni_platform  # noqa: PLC0415  imports the engine

    return current_omni_platform


def platform_name(platform: Any) -> str:
    """Return ``cuda``, ``rocm``, ``npu``, ``xpu``, ``musa``, ``out-of-tree`` or ``unspecified`` (no accelerator)."""
    for name in _NAMES:
        if getattr(platform, f"is_{name}")():
            return name
    return "out-of-tree" if platform.is_out_of_tree() else "unspecified"


def stock_ar_worker(platform: Any) -> str:
    """Return the dotted path of the AR worker that this platform uses without us."""
    if type(platform) in _replaced:
        return _replaced[type(platform)]
    try:
        return str(platform.get_omni_ar_worker_cls())
    except NotImplementedError:  # the unspecified platform of a machine without an accelerator
        return STOCK_AR_WORKER


def name_packed_ar_worker(platform: Any) -> None:
    """Make the platform name `PackedGPUARWorker` for AR stages; a second call changes nothing."""
    platform_cls = type(platform)
    if platform_cls in _replaced:
        return

    def get_omni_ar_worker_cls(cls: type[Any]) -> str:
        return PACKED_AR_WORKER

    _replaced[platform_cls] = stock_ar_worker(platform)
    platform_cls.get_omni_ar_worker_cls = classmethod(get_omni_ar_worker_cls)
