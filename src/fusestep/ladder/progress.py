"""How long a ladder still takes, from how long its parts took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Remaining:
    """What is left of a list of jobs, by the same jobs that are done.

    Args: jobs: (kind, name) of each, in any order; kinds are "gate", "time", …

    A job takes what the last one of its kind and name took, and nothing is said before each that is left was done once:
    a loss curve tells nothing of a timing, and what compiles nothing of what does not. The first of a name compiles
    and is profiled, so by it the next takes at most as long.
    """

    jobs: Sequence[tuple[str, str]]
    _left: list[tuple[str, str]] = field(init=False)
    _seconds: dict[tuple[str, str], float] = field(init=False, default_factory=dict)
    _times: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        self._left = list(self.jobs)

    def done(self, kind: str, name: str, seconds: float | None) -> None:
        """A job is done, or falls away; `seconds` is None where it took none, so that it tells nothing."""
        if (kind, name) in self._left:
            self._left.remove((kind, name))
        self._times[kind, name] += 1
        if seconds is not None:
            self._seconds[kind, name] = seconds

    def seconds(self) -> float | None:
        """What the jobs that are left will take; None where one of them was not done yet."""
        if not set(self._left) <= self._seconds.keys():
            return None
        return sum(self._seconds[job] for job in self._left)

    def in_words(self) -> str:
        """ "about 90 s left", "at most about 4 min left", or "" where nothing is known."""
        seconds = self.seconds()
        if seconds is None:
            return ""
        bound = "at most " if any(self._times[job] < 2 for job in self._left) else ""
        return f"{bound}about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'} left"
