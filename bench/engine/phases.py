"""The order of the work of all stages: the most important work comes first, since time may run out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PROFILE_S = 30.0  # reserved for a stage's profiler while further rounds are measured


@dataclass(frozen=True)
class Phase:
    """One kind of work of one stage.

    Attributes
    ----------
    name
        `verify`, `cells`, or one of `EXTRAS`.
    requests
        Number of requests, for `cells` only.
    is_repeated
        Whether it is a further round of a measurement that has been made before.
    """

    name: str
    requests: int | None = None
    is_repeated: bool = False

    def __str__(self) -> str:
        return self.name if self.requests is None else f"{self.name} {self.requests}"

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Parse the text that `str` made of a phase."""
        name, _, requests = text.partition(" ")
        return cls(name, int(requests) if requests else None)


def all_phases(requests: Sequence[int], rounds: int, extras: Collection[str]) -> list[Phase]:
    """All phases, the most important first.

    First the hashed passes for all numbers of requests, then the table in descending order of requests, then the
    extras, then further rounds. The profiler comes last, since a process may be slower after profiling.
    """
    falling = sorted(set(requests), reverse=True)
    phases = [Phase("verify"), *(Phase("cells", count) for count in falling)]
    phases += [Phase(extra) for extra in ("consumer", "backlog", "traces") if extra in extras]
    for _ in range(rounds - 1):
        phases += [Phase("cells", count, is_repeated=True) for count in falling]
        if "consumer" in extras:
            phases.append(Phase("consumer", is_repeated=True))
    if "profile" in extras:
        phases.append(Phase("profile"))
    return phases


def turn_s(phase: Phase, left_s: float, profiles: int, share: float) -> float:
    """Seconds for one stage's turn.

    Parameters
    ----------
    left_s
        Seconds left for all remaining work.
    profiles
        Number of stages that are still to be profiled.
    share
        This stage's share among those that still have this phase to do. Not used for the hashed passes, which get all
        the time they need, nor for the profiler, after which no more important figures follow.
    """
    if phase.is_repeated:
        left_s -= PROFILE_S * profiles
    return max(0.0, left_s if phase.name in ("verify", "profile") else left_s * share)
