"""Stand-ins for CUDA streams and events, to run the asynchronous output path on a machine without a GPU.

The engine's asynchronous output needs nothing from the GPU except the order that streams and events keep. On
the CPU every operation has ended when its call returns, so objects that do nothing keep the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class StandInEvent:
    """An event that has always completed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def wait(self, *_: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has completed."""
        return True


class StandInStream:
    """A stream on which everything has already run."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Return at once."""

    def wait_event(self, _: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def _current_stream(*_: Any) -> StandInStream:
    return StandInStream()


def _stream_context(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _ignore(*_: Any) -> None:
    pass


def install() -> None:
    """Put the stand-ins in place of torch's streams and events, in this process and for good."""
    stand_ins: dict[Any, dict[str, Any]] = {
        torch: {"Event": StandInEvent},
        torch.cuda: {
            "Event": StandInEvent,
            "Stream": StandInStream,
            "current_stream": _current_stream,
            "stream": _stream_context,
            "set_device": _ignore,
        },
    }
    for module, names in stand_ins.items():
        for name, value in names.items():
            setattr(module, name, value)
