"""Choice of a packer's device and backend."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .errors import DeviceError, InputError, UnavailableError
from .gather import interpreted, triton_available
from .stats import Fallbacks

Backend = Literal["auto", "triton", "torch"]
SERVED = "packers serve CUDA, ROCm and CPU tensors"


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A device with its index; by default the current CUDA (or ROCm) device, or the CPU if there is none.

    Raises
    ------
    DeviceError
        The device does not exist, or packers don't serve its type.
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
        elif resolved.index >= torch.cuda.device_count():
            raise DeviceError(f"device {str(device)!r}, but torch sees only {torch.cuda.device_count()} of them")
    elif resolved.type != "cpu":
        raise DeviceError(f"device {str(device)!r}: {SERVED}")
    return resolved


def wrong_device(leaf: str, found: torch.device, served: torch.device) -> DeviceError:
    """An error that says that a leaf is not on the device that its packer serves, and what to do."""
    return DeviceError(f"{leaf} is on {found}, this packer serves {served}; {what_to_do(found.type)}")


def what_to_do(device_type: str) -> str:
    """What to do about a leaf on a device of this type, which its packer does not serve; for error messages."""
    if device_type == "meta":
        return "a meta tensor has no bytes, give one that has"
    if device_type not in ("cuda", "cpu"):
        return f"{SERVED}: bring it to one of these first"
    return "use one packer per device"


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
    InputError
        There is no such backend.
    UnavailableError
        The backend was asked for by name and can't run here.
    """
    if backend not in ("auto", "triton", "torch"):
        raise InputError(f"backend {backend!r}; choose 'auto', 'triton' or 'torch'")
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
