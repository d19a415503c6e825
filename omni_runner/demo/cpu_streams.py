"""Stand-ins for CUDA streams and events: the asynchronous output path on a machine without a GPU.

The engine's asynchronous output needs nothing from the GPU except the order that streams and events keep. On
the CPU every operation has ended when its call returns, so objects that do nothing keep the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class StandInEvent:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing is under way."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class StandInStream:
    """A stream on which everything has already run."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, _: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


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
