"""What a ladder asks for, answered by its journal, by a worker, or by a crowd of them; and how far the ladder is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fusestep.ladder.crowd import Asked, Crowd
from fusestep.ladder.journal import Journal
from fusestep.ladder.processes import Reply, Workers
from fusestep.ladder.progress import Remaining

#: Called with the share of the work that is done and what is being done now.
Progress = Callable[[float, str], None]


class Jobs:
    """Asks workers, or the journal, and tells how far the ladder is and how long it still takes.

    Args:
        workers, crowd: that answer one request, and several at once.
        jobs: as `fusestep.ladder.progress.Remaining` takes them.

    Attributes: at_once: how many requests `ahead` may run beside each other.
    """

    def __init__(
        self, workers: Workers, crowd: Crowd, journal: Journal, progress: Progress, jobs: Sequence[tuple[str, str]]
    ) -> None:
        self._workers, self._crowd, self._journal, self._progress = workers, crowd, journal, progress
        self._remaining, self._total, self._done = Remaining(jobs), len(jobs), 0
        self._ahead: dict[str, Reply] = {}
        self.at_once = 1

    def ahead(self, asked: Sequence[Asked], text: str) -> None:
        """Run requests that are asked for next, several at once where that may be; what they came to waits for `ask`.

        What fails beside others is left to `ask`, which runs it by itself: what it failed of may be its company. What
        took too long did so by itself.
        """
        left = [one for one in asked if self._journal.kept(one.key) is None]
        crowds = -(-len(left) // self.at_once)
        # As equal as can be: 9 by at most 4 are 3, 3, 3. What would be alone is left to `ask`.
        for some in (left[number::crowds] for number in range(crowds)):
            if len(some) == 1:
                continue
            self._tell(f"{text} {', '.join(one.name for one in some)}")
            start = time.monotonic()
            replies = self._crowd.run(some)
            seconds = (time.monotonic() - start) / len(some)
            for one, reply in zip(some, replies, strict=True):
                if reply.failed is None or reply.is_late:
                    self._ahead[one.key] = reply
                    self._count(one.request.task, one.name, seconds)

    def ask(self, asked: Asked, text: str) -> Reply:
        """The reply to a request: the journal's, one that came ahead, or a worker's."""
        if asked.key in self._ahead:
            return self._ahead.pop(asked.key)
        kept = self._journal.kept(asked.key)
        seconds = None
        if kept is None:
            self._tell(text)
            start = time.monotonic()
            # Without a limit it is left out, as it was before there were any.
            one, limit_s = asked.request, asked.limit_s
            kept = self._workers.run(one) if limit_s is None else self._workers.run(one, limit_s)
            seconds = time.monotonic() - start
        self._count(asked.request.task, asked.name, seconds)
        return kept

    def skip(self, kind: str, name: str) -> None:
        """A job that falls away."""
        self._count(kind, name, None)

    def _tell(self, text: str) -> None:
        left = self._remaining.in_words()
        self._progress(self._done / self._total, text + (f", {left}" if left else ""))

    def _count(self, kind: str, name: str, seconds: float | None) -> None:
        self._done = min(self._done + 1, self._total)
        self._remaining.done(kind, name, seconds)
