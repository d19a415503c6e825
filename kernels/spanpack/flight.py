"""Flights: a pack on its way to the host, and the two events that mark its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.cuda import Event

from .prepared import pointer


class Events(NamedTuple):
    """The two events of a flight, made once per pinned slab, since making an event costs seven times a record.

    Attributes
    ----------
    packed
        Complete once the gather has read every leaf.
    landed
        Complete once the slab's bytes are on the host. Waiting for it sleeps rather than spins.
    packed_handle, landed_handle
        Their raw handles as prepared arguments, see `prepare_function`.
    """

    packed: Event
    landed: Event
    packed_handle: Any
    landed_handle: Any

    @classmethod
    def make(cls, make_event: Callable[..., Event]) -> Events:
        """Make both events; `make_event` takes the keyword ``blocking``."""
        packed, landed = make_event(blocking=False), make_event(blocking=True)
        return cls(packed, landed, pointer(packed.cuda_event), pointer(landed.cuda_event))


class Fetched(NamedTuple):
    """A tensor on its way to the host.

    Attributes
    ----------
    tensor
        The tensor on the host, in pinned memory that is reused once this tensor and its views have died. Do not read it
        before waiting for `landed`.
    landed
        Recorded after the copy; ``landed.synchronize()`` sleeps until the bytes are there.
    """

    tensor: Tensor
    landed: Event


class Flight:
    """One pack on its way from the leaves to the host.

    Its events are recorded again only for a later pack into the same slab, which starts only once this one is done.

    Attributes
    ----------
    events
        The events that mark its progress.
    done
        Whether the host has seen `landed` complete; from then on no runtime call is needed to check.
    """

    __slots__ = ("done", "events")

    def __init__(self, events: Events) -> None:
        self.events = events
        self.done = False

    @property
    def landed(self) -> Event:
        """See `Events`."""
        return self.events.landed

    def is_done(self) -> bool:
        """Whether the bytes have landed; never blocks."""
        if not self.done:
            self.done = self.events.landed.query()
        return self.done

    def wait(self) -> None:
        """Sleep until the bytes have landed."""
        if not self.done:
            self.events.landed.synchronize()
            self.done = True
