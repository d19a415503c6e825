"""Flights: a pack on its way, and the two events that tell how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch.cuda import Event


class Flight:
    """One pack on its way from the leaves to the host.

    Attributes
    ----------
    packed
        Event: the gather has read every leaf.
    landed
        Event: the slab's bytes are on the host. Waiting for it sleeps rather than spins.
    packed_handle, landed_handle
        Their raw handles.
    done
        The host has seen `landed`; from then on no runtime call is needed to ask.
    """

    __slots__ = ("_home", "done", "landed", "landed_handle", "packed", "packed_handle")

    def __init__(self, events: _Events, home: deque[_Events]) -> None:
        self.packed, self.landed, self.packed_handle, self.landed_handle = events
        self.done = False
        self._home = home

    def is_done(self) -> bool:
        """Whether the bytes have landed; never blocks."""
        if not self.done:
            self.done = self.landed.query()
        return self.done

    def wait(self) -> None:
        """Sleep until the bytes have landed."""
        if not self.done:
            self.landed.synchronize()
            self.done = True

    def __del__(self) -> None:
        self._home.append((self.packed, self.landed, self.packed_handle, self.landed_handle))


# Handles are kept beside their events because reading one costs a call.
_Events = tuple[Event, Event, int, int]


class FlightDeck:
    """Hands out flights and reuses their events: making an event costs seven times as much as recording one.

    Parameters
    ----------
    make_event
        Called with ``blocking=False`` for `packed` and ``blocking=True`` for `landed`.
    """

    def __init__(self, make_event: Callable[..., Event]) -> None:
        self._make_event = make_event
        self._idle: deque[_Events] = deque()

    def take(self) -> Flight:
        """A flight whose events nobody else refers to."""
        try:
            events = self._idle.popleft()
        except IndexError:
            packed, landed = self._make_event(blocking=False), self._make_event(blocking=True)
            events = (packed, landed, packed.cuda_event, landed.cuda_event)
        return Flight(events, self._idle)
