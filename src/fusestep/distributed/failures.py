"""Failures of one rank, told to all, and ranks that are dead or slow, by name.

Every rank has a thread that beats: it writes into the store how far its rank has come, looks whether anyone wrote down
a failure, and looks after its neighbour, the next rank. The first failure that is written counts:

- a rank that raises writes what it raised;
- a neighbour whose process is gone (told at once on one machine), or which has not beaten for `timeout`, is dead;
- where this rank itself has come no further for `timeout`, the rank that is furthest behind is slow.

Then every rank ends: with PeerError where its program still gets to raise, and with the process where it waits in a
collective that will never end. No rank outlives another's failure by more than `timeout` and a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed

from fusestep.errors import UserError

#: Seconds that the program has to end by itself, once a failure is known, before its process is ended.
GRACE = 2.0

#: How `fusestep.distributed.checkpoint.together` tells of another rank's error.
_BY_ANOTHER = re.compile(r"process (\d+) failed ")

#: Functions in which a program waits for others, and how many frames of its stack are looked at for them.
_WAITING, _INNERMOST = ("_engine_run_backward", "synchronize", "_wait_until"), 4

_is_ending = False

#: In the place of a rank where none is at fault alone.
NOBODY = -1

#: Exit statuses: of a failure that a person can mend, and of all others.
MENDABLE, BROKEN = 2, 1


class PeerError(UserError):
    """Another rank failed, and so this one ends.

    Attributes:
        rank: the one that failed.
        status: with which this process should exit.
        is_spoken: whether this rank is one that tells the person, so that not all say the same.
    """

    def __init__(self, sentence: str, rank: int, status: int, is_spoken: bool) -> None:
        super().__init__(sentence)
        self.rank = rank
        self.status = status
        self.is_spoken = is_spoken


@dataclass(frozen=True)
class Whereabouts:
    """A process, and how far its program has come.

    Attributes:
        host, space: the machine, and on it the space that `pid` counts in (containers have their own).
        place: how many places the program has passed; the same number is the same place on every rank.
        words: what it does there.
        since: seconds that it has been there.
        beat: how often this was written.
        waits: whether it waits for others, as far as its stack tells.
    """

    host: str
    space: str
    pid: int
    place: int = 0
    words: str = "starting"
    since: float = 0.0
    beat: int = 0
    waits: bool = False

    @classmethod
    def of_this_process(cls) -> Whereabouts:
        space = ""
        with contextlib.suppress(OSError):  # elsewhere than on Linux there is one space
            space = str(Path("/proc/self/ns/pid").readlink())
        return cls(socket.gethostname(), space, os.getpid())

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> Whereabouts:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Failure:
    """What ended the world: whose fault it was and what to say."""

    rank: int
    sentence: str
    status: int


class Watch:
    """Beats, listens and looks after a neighbour while it is entered.

    Args:
        store: for the watch's own use, on a connection of its own.
        rank, size: of this process; local_rank: on its machine.
        timeout: seconds without progress or a sign of life.
        ending: see `launch.join`.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, ending: Callable[[], str], *, local_rank: int
    ) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._ending, self._local_rank = ending, local_rank
        self._me = Whereabouts.of_this_process()
        self._arrived = time.monotonic()
        self._patience = timeout
        self._interval = min(1.0, timeout / 10)
        self._beats = 0
        self._program = threading.get_ident()
        self._failure: Failure | None = None
        self._has_left = threading.Event()
        self._knows = threading.Event()
        self._neighbour = (rank + 1) % size
        self._neighbour_beat, self._neighbour_heard = -1, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fusestep-watch", daemon=True)

    # For the program

    def at(self, words: str, *, patience: float = 0.0) -> None:
        """The program has come to its next place; every rank passes the same places in the same order.

        Args: patience: seconds that it may stay here, where that is longer than the time-out.
        """
        self._me = replace(self._me, place=self._me.place + 1, words=words)
        self._arrived = time.monotonic()
        self._patience = max(patience, self._timeout)

    def check(self) -> None:
        """Raises: PeerError if a rank has failed."""
        if self._failure is not None:
            raise self._peer_error(self._failure)

    def leave(self) -> None:
        """This rank is done; from now on nobody misses it."""
        self._has_left.set()
        if self._thread.is_alive():
            self._thread.join()
        self._store.set(f"left/{self._rank}", "")

    def __enter__(self) -> Watch:
        global _is_ending
        _is_ending = False
        if self._size > 1:
            self._beat()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _is_ending
        try:
            if error is not None and self._size > 1:
                _is_ending = True
                with _deaf_to_the_launcher():
                    self._tell(error)
        finally:
            self._has_left.set()
            if self._thread.is_alive():
                self._thread.join(GRACE)

    def _tell(self, error: BaseException) -> None:
        """Write down what this rank raised, unless another rank's failure came first, which is raised then."""
        if isinstance(error, PeerError):
            return
        if _comes_from_others(error, self._rank):
            # Whose fault it was is found out by then.
            self._knows.wait(3 * self._interval + GRACE)
        if self._failure is None:
            what = str(error) if isinstance(error, UserError) else _first_line(error)
            if isinstance(error, KeyboardInterrupt):
                what = "it was interrupted"
            status = MENDABLE if isinstance(error, UserError) else BROKEN
            self._write(Failure(self._rank, f"rank {self._rank} ({self._me}) failed: {what}", status))
        failure = self._failure
        if failure is not None and failure.rank != self._rank:
            raise self._peer_error(failure) from error

    def _peer_error(self, failure: Failure) -> PeerError:
        return PeerError(self._told(failure), failure.rank, failure.status, self._speaks_of(failure))

    def _speaks_of(self, failure: Failure) -> bool:
        """Whether this rank tells the person: the first one on its machine does, or else the second."""
        first = self._rank - self._local_rank
        return self._rank == (first + 1 if failure.rank == first else first)

    def _told(self, failure: Failure) -> str:
        """The sentence to its end, which it may have already."""
        sentence = failure.sentence.rstrip(".")
        return sentence + ("." if "--resume" in sentence else self._ending())

    # The thread

    def _run(self) -> None:
        while not self._has_left.wait(self._interval):
            try:
                self._beat()
                self._look()
            except (distributed.DistError, RuntimeError) as error:
                if self._has_left.is_set():
                    return
                self._failure = Failure(
                    0,
                    f"rank {self._rank} ({self._me}) no longer reaches the launcher's store, on the machine of rank 0 "
                    f"({_first_line(error)}): rank 0 or its torchrun has ended",
                    BROKEN,
                )
            if self._failure is not None:
                self._knows.set()
                self._end_after_a_while(self._failure)
                return

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", self._now().to_text())

    def _now(self) -> Whereabouts:
        since = time.monotonic() - self._arrived
        return replace(self._me, since=since, beat=self._beats, waits=_waits_for_others(self._program))

    def _look(self) -> None:
        if self._store.check(["failure"]):
            self._failure = Failure(**json.loads(self._store.get("failure")))
            return
        self._look_after_neighbour()
        if self._failure is None and time.monotonic() - self._arrived > self._patience:
            self._write(self._slowest())

    def _look_after_neighbour(self) -> None:
        rank = self._neighbour
        if not self._store.check([f"beat/{rank}"]) or self._store.check([f"left/{rank}"]):
            self._neighbour_heard = time.monotonic()
            return
        found, now = self._whereabouts(rank), time.monotonic()
        if found.beat != self._neighbour_beat:
            self._neighbour_beat, self._neighbour_heard = found.beat, now
        silent = now - self._neighbour_heard
        is_here = (found.host, found.space) == (self._me.host, self._me.space)
        if is_here and _is_gone(found.pid) and not self._store.check(["failure"]):
            self._write(
                Failure(
                    rank,
                    f"rank {rank} ({found}) ended without a word, last heard of while {found.words}; it was killed, "
                    "as when memory runs out, or crashed: look at its own output",
                    BROKEN,
                )
            )
        elif silent > self._timeout:
            self._write(
                Failure(
                    rank,
                    f"rank {rank} ({found}) has given no sign of life for {silent:.1f} s, last while {found.words}; "
                    "its process hangs or its machine is gone",
                    BROKEN,
                )
            )

    def _slowest(self) -> Failure:
        """The rank that is furthest behind; where all are at one place, the one that does not wait or came last."""
        found = [self._whereabouts(rank) for rank in range(self._size)]
        found[self._rank] = self._now()  # where those of others are as of their last beat
        order = sorted(range(self._size), key=lambda r: (found[r].place, found[r].waits, found[r].since))
        rank, next_one = order[0], found[order[1]]
        last = found[rank]
        about = f"it has been {last.words} for {last.since:.1f} s"
        if next_one.place > last.place:
            sentence = f"rank {rank} ({last}) is slow: {about}, and others wait for it while {next_one.words}"
        elif next_one.waits > last.waits:
            sentence = f"rank {rank} ({last}) is slow: {about}, and others wait there for it"
        elif next_one.since - last.since > 2 * self._interval:
            late = next_one.since - last.since
            sentence = f"rank {rank} ({last}) is slow: {about}, and came there {late:.1f} s after the others"
        else:
            rank = NOBODY
            sentence = f"all {self._size} ranks have been {last.words} for {last.since:.1f} s and none is behind"
        return Failure(rank, f"{sentence}; --timeout is {self._timeout:g}", BROKEN)

    def _whereabouts(self, rank: int) -> Whereabouts:
        return Whereabouts.from_text(self._store.get(f"beat/{rank}"))

    def _write(self, failure: Failure) -> None:
        """Make this the failure of all, unless there is one already."""
        text = self._store.compare_set("failure", "", json.dumps(asdict(failure)))
        self._failure = Failure(**json.loads(text))

    def _end_after_a_while(self, failure: Failure) -> None:
        """End the process, unless the program does so by itself."""
        if self._has_left.wait(GRACE):
            return
        if failure.rank == self._rank or self._speaks_of(failure):
            sys.stdout.flush()
            print(f"fusestep: {self._told(failure)}", file=sys.stderr, flush=True)  # noqa: T201
        # The program waits in a collective, which nothing raises out of.
        os._exit(failure.status)


def is_ending() -> bool:
    """Whether a failure ends this process's work, of which it is about to tell."""
    return _is_ending


@contextlib.contextmanager
def _deaf_to_the_launcher() -> Iterator[None]:
    """Without SIGTERM for a while: a launcher sends it when one process has failed, to those who would say why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _waits_for_others(thread: int) -> bool:
    """Whether a thread of this process waits in a collective, a backward pass that holds some, or for its GPU."""
    frame = sys._current_frames().get(thread)
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        if frame.f_code.co_name in _WAITING or "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def wait_for(store: Any, keys: list[str], seconds: float) -> bool:
    """Whether all keys are in the store within so many seconds."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except distributed.DistError:
        return False
    return True


def _comes_from_others(error: BaseException, rank: int) -> bool:
    """Whether an error of a rank may be the echo of another's: a connection that broke, an action done together."""
    text = str(error)
    told = _BY_ANOTHER.match(text)
    if told is not None and int(told[1]) != rank:
        return True
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and any(name in text.lower() for name in ("gloo", "nccl", "peer"))
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, though perhaps nobody has asked for its exit status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return Path("/proc/self/stat").exists()
