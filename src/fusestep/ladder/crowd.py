"""Several requests at once, where that touches no time: they are made ready side by side, and timed one at a time.

A process of a ladder spends most of its life on what is not timed: a context on the device, the model, compilation, a
capture. On a GPU, a few do that together. Then each waits, doing nothing, until it is told that its turn has come,
warms up as it would by itself, and is timed while no other works. The loss curves of the gate are not timed at all and
run side by side as they are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from fusestep.ladder.processes import Reply, Workers
from fusestep.ladder.request import Request

#: Most processes at once; each has a host's gigabytes of libraries, and threads that compile.
MOST = 8

#: Of the GPU's free memory, what a crowd may take by what its first member took; and for each the context beside it.
#: The rest is for those that take more, since memory that runs short changes what is measured.
_SHARE, _MARGIN, _CONTEXT = 0.8, 1.25, 2**30

#: How often a process that ended before it was ready is noticed, in seconds; nothing is timed then.
_NOTICE_S = 0.05


@dataclass(frozen=True)
class Asked:
    """A request with what the ladder calls it, and the longest that it may take."""

    request: Request
    name: str
    key: str
    limit_s: float | None = None


def at_once(memory: dict[str, int] | None, cores: int | None = None) -> int:
    """How many processes fit beside each other.

    Args:
        memory: of a gate's process on a GPU: bytes that it `reserved`, and that were `free` beside it. None: one.
        cores: of the host; by default those of this one.
    """
    if memory is None:
        return 1
    cores = cores or os.cpu_count() or 1
    each = _MARGIN * memory["reserved"] + _CONTEXT
    return max(1, min(MOST, cores // 2, int(_SHARE * (memory["free"] + memory["reserved"]) / each)))


class Crowd:
    """Workers side by side; a context manager that ends them all."""

    def __init__(self) -> None:
        self._workers: list[Workers] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def run(self, asked: Sequence[Asked]) -> list[Reply]:
        """The replies to all of them, in their order; those that are timed are timed in that order, too."""
        while len(self._workers) < len(asked):
            self._workers.append(self._stack.enter_context(Workers()))
        workers = self._workers[: len(asked)]
        for worker in workers:
            # Here and not in a thread: Linux ends a worker with the thread that started it.
            worker.start()
        # A name without a file, which goes when nobody has it open.
        name = f"\0fusestep-ladder-{os.getpid()}-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(name)
            listener.listen(len(asked))
            pool = stack.enter_context(ThreadPoolExecutor(len(asked)))
            try:
                futures = [
                    # One that hangs holds those behind it up, which must not count against them.
                    pool.submit(worker.run, _in_turn(one.request, name, place, len(asked)), _later(one.limit_s, place))
                    for place, (worker, one) in enumerate(zip(workers, asked, strict=True))
                ]
                ready = _gather(listener, futures, stack)
                for place, future in enumerate(futures):
                    if place in ready:
                        with contextlib.suppress(BrokenPipeError):  # it is gone, as its reply tells
                            ready[place].sendall(b"1")
                    wait([future])
            except BaseException:
                self._stack.close()  # else the threads would wait for what goes on in their workers
                self._workers.clear()
                raise
            return [future.result() for future in futures]


def _in_turn(request: Request, name: str, place: int, count: int) -> Request:
    return replace(request, beside=count, turn=(name, place) if request.task == "time" else None)


def _later(limit_s: float | None, place: int) -> float | None:
    return None if limit_s is None else limit_s * (place + 1)


def _gather(
    listener: socket.socket, futures: Sequence[Future[Any]], stack: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """The lines to all processes that are ready for their turn, once each is that or has ended."""
    ready: dict[int, socket.socket] = {}
    while any(place not in ready and not future.done() for place, future in enumerate(futures)):
        if not select.select([listener], [], [], _NOTICE_S)[0]:
            continue
        line = stack.enter_context(listener.accept()[0])
        told = line.recv(16)
        if told:  # else it ended at once
            ready[int(told)] = line
    return ready
