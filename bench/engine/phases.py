"""What is done in which order, by all stages together: the more important things first, whatever the time allows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PROFILE_S = 30.0  # kept for a stage's profiler while further rounds are measured


@dataclass(frozen=True)
class Phase:
    """One kind of work of one stage.

    Attributes
    ----------
    name
        `verify`, `cells`, or one of `EXTRAS`.
    requests
        Of `cells`.
    is_repeated
        Whether it is a further round of what has been measured once.
    """

    name: str
    requests: int | None = None
    is_repeated: bool = False

    def __str__(self) -> str:
        return self.name if self.requests is None else f"{self.name} {self.requests}"

    @classmethod
    def parse(cls, text: str) -> Phase:
        """The phase that `str` made the text of."""
        name, _, requests = text.partition(" ")
        return cls(name, int(requests) if requests else None)


def all_phases(requests: Sequence[int], rounds: int, extras: Collection[str]) -> list[Phase]:
    """All phases, the most important first.

    The hashed passes of all numbers of requests, then the table from the most requests down, then the extras, then
    further rounds. The profiler comes last, since a process that has profiled may be slower from then on.
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
        For all that is still to come.
    profiles
        Stages that are still to be profiled.
    share
        Of this stage among those that still have this phase to come. The hashed passes get whatever they need, and in
        the last phase nobody is waited for whose figures count more.
    """
    if phase.is_repeated:
        left_s -= PROFILE_S * profiles
    return max(0.0, left_s if phase.name in ("verify", "profile") else left_s * share)
