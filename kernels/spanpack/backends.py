"""Which device and which backend a packer gets."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .errors import DeviceError, UnavailableError
from .gather import interpreted, triton_available
from .stats import Fallbacks

Backend = Literal["auto", "triton", "torch"]


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A device with its index; by default the current CUDA (or ROCm) device, or the CPU where there is none.

    Raises
    ------
    DeviceError
        It is not there, or of a kind that packers don't serve.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device {device!r} is none that torch knows; give e.g. 'cuda:0' or 'cpu'") from error
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"device {str(device)!r}, but torch sees no CUDA or ROCm device")
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
    elif resolved.type != "cpu":
        raise DeviceError(f"device {str(device)!r}: packers serve CUDA, ROCm and CPU tensors")
    return resolved


def check_stream(stream: Any, device: torch.device, name: str) -> None:
    """Raise a DeviceError unless `stream`, the argument `name`, is a stream of this device."""
    if getattr(stream, "device", None) != device:
        raise DeviceError(
            f"{name} {stream!r}, but this packer serves {device}; give a torch.cuda.Stream(device={str(device)!r})"
        )


def resolve_backend(backend: Backend, device: torch.device, fallbacks: Fallbacks) -> bool:
    """Whether to use Triton.

    Raises
    ------
    UnavailableError
        The backend was named and can't run here.
    """
    if backend not in ("auto", "triton", "torch"):
        raise UnavailableError(f"backend {backend!r}; choose 'auto', 'triton' or 'torch'")
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return False
    if device.type == "cpu" and not interpreted():
        raise UnavailableError("the Triton kernel runs on CPU tensors only with TRITON_INTERPRET=1 in the environment")
    if triton_available():
        return True
    if backend == "triton":
        raise UnavailableError("backend 'triton', but Triton can't be imported; install triton or use backend='torch'")
    fallbacks.note("no triton", "Triton can't be imported; gathering with torch copies")
    return False
