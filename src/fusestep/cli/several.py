"""A command as one of the ranks that a launcher such as torchrun started."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import typer

from fusestep.cli.errors import exit_status
from fusestep.distributed.failures import BROKEN, MENDABLE, PeerError, is_ending
from fusestep.distributed.launch import launched_local_rank, launched_rank
from fusestep.errors import UserError

Plan = TypeVar("Plan")
Result = TypeVar("Result")


def as_one_of_several(who: str, planned: Callable[[], Plan], work: Callable[[Plan], Result]) -> Result:
    """Plan and work as one rank; rank 0 alone shows what happens.

    Where that fails the process ends at once, as threads of a broken group may never end; the rank that failed says
    why, and so does one on each machine.

    Args:
        who: the command, for its sentences.
        planned: what every rank does alike, so that one on each machine tells what is wrong with it.
    """
    rank = launched_rank()
    if rank > 0:
        logging.getLogger("fusestep").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _end_unless_telling)
    results: list[Result] = []
    statuses: list[int] = []

    def program() -> None:
        try:
            plan = planned()
        except UserError:
            if launched_local_rank() > 0:
                statuses.append(MENDABLE)
                return
            raise
        try:
            results.append(work(plan))
        except PeerError as error:
            statuses.append(error.status)
            if error.is_spoken:
                typer.echo(f"{who}: rank {rank} ends, since {error}", err=True)

    try:
        statuses.append(exit_status(f"{who}: rank {rank}", program))
    except Exception:
        traceback.print_exc()
        statuses.append(BROKEN)
    if not results:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[0])
    return results[0]


def _end_unless_telling(number: int, _frame: FrameType | None) -> None:
    """What SIGTERM does by default, but for a rank that tells of a failure and ends by itself."""
    if not is_ending():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
