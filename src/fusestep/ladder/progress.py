"""How long a ladder still takes, from how long its parts took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Remaining:
    """What is left of a list of jobs, by the jobs of the same kind that are done.

    Args: jobs: (kind, name) of each, in any order; kinds are "gate", "time", …

    A job takes what the last one of its kind and name took; else the median of its kind, else of all. Later jobs of a
    name have compiled code on the disk, so the last time tells more than the first.
    """

    jobs: Sequence[tuple[str, str]]
    _left: list[tuple[str, str]] = field(init=False)
    _seconds: dict[tuple[str, str], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._left = list(self.jobs)

    def done(self, kind: str, name: str, seconds: float | None) -> None:
        """A job is done, or falls away; `seconds` is None where it took none, so that it tells nothing."""
        if (kind, name) in self._left:
            self._left.remove((kind, name))
        if seconds is not None:
            self._seconds[kind, name] = seconds

    def seconds(self) -> float | None:
        """What the jobs that are left will take; None before any was done."""
        if not self._seconds:
            return None
        return sum(self._expected(kind, name) for kind, name in self._left)

    def in_words(self) -> str:
        """ "about 90 s left", or "" where nothing is known."""
        seconds = self.seconds()
        if seconds is None:
            return ""
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"

    def _expected(self, kind: str, name: str) -> float:
        known = self._seconds.get((kind, name))
        if known is not None:
            return known
        alike = [seconds for (other, _), seconds in self._seconds.items() if other == kind]
        return statistics.median(alike or list(self._seconds.values()))
