"""Requests side by side, with workers that only write down when they did what."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from fusestep.ladder import crowd as module
from fusestep.ladder import turns
from fusestep.ladder.config import LadderConfig
from fusestep.ladder.crowd import Asked, Crowd, at_once
from fusestep.ladder.jobs import Jobs
from fusestep.ladder.journal import Journal
from fusestep.ladder.plan import plan
from fusestep.ladder.processes import Reply, Workers
from fusestep.ladder.rungs import recipe_of
from fusestep.ladder.worker import FORKS

pytestmark = pytest.mark.skipif(not FORKS, reason="only Linux forks workers, and only there several are run at once")

#: A worker: it makes ready for as long as its seed says, takes its turn, and "times" a while; seed 7 ends at once.
WORKER = f"""
import json, runpy, sys, time
take_turn = runpy.run_path({turns.__file__!r})["take_turn"]
for line in sys.stdin:
    request = json.loads(line)
    if request["seed"] == 7:
        sys.exit("broken on purpose")
    time.sleep(0.1 * request["seed"])
    ready = time.monotonic()
    if request["turn"] is not None:
        take_turn(tuple(request["turn"]))
    turn = time.monotonic()
    time.sleep(0.1)
    done = {{"ready": ready, "turn": turn, "end": time.monotonic(), "beside": request["beside"]}}
    print(json.dumps({{"done": done, "failed": None, "log": ""}}), flush=True)
"""

REQUEST = plan(LadderConfig(preset="tiny", device="cpu", natives="none")).request(recipe_of("adam"))


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(module, "Workers", functools.partial(Workers, [sys.executable, "-c", WORKER]))
        yield stack.enter_context(Crowd())


def asked(*seeds: int, **changes: Any) -> list[Asked]:
    return [Asked(replace(REQUEST, seed=seed, **changes), f"rung {seed}", f"{seed}") for seed in seeds]


def done(reply: Reply) -> dict[str, Any]:
    assert reply.done is not None, reply.failed
    return reply.done


def test_all_make_ready_at_once_and_are_timed_one_at_a_time_in_their_order(crowd: Crowd) -> None:
    replies = [done(reply) for reply in crowd.run(asked(3, 0, 2))]
    assert {reply["beside"] for reply in replies} == {3}
    assert min(reply["turn"] for reply in replies) >= max(reply["ready"] for reply in replies)
    for earlier, later in itertools.pairwise(replies):
        assert later["turn"] >= earlier["end"]


def test_one_that_ends_before_its_turn_keeps_nobody_waiting(crowd: Crowd) -> None:
    first, broken, last = crowd.run(asked(1, 7, 2))
    assert broken.failed == "its process ended with status 1: broken on purpose."
    assert done(last)["turn"] >= done(first)["end"]
    assert [reply.failed for reply in crowd.run(asked(0, 1))] == [None, None]  # its place has a new worker


def test_loss_curves_wait_for_no_turn(crowd: Crowd) -> None:
    one, other = (done(reply) for reply in crowd.run(asked(1, 0, task="gate")))
    assert other["turn"] < one["turn"] < one["end"]


def test_a_ladder_that_is_stopped_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Workers", functools.partial(Workers, [sys.executable, "-c", "input(); input()"]))
    monkeypatch.setattr(module, "_gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    begun = time.monotonic()
    with Crowd() as crowd:
        with pytest.raises(KeyboardInterrupt):
            crowd.run(asked(0, 1))
        assert crowd._workers == []
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("memory", "cores", "count"),
    [
        (None, 16, 1),
        ({"reserved": 3 << 30, "free": 130 << 30}, 16, 8),
        ({"reserved": 3 << 30, "free": 130 << 30}, 6, 3),
        ({"reserved": 23 << 30, "free": 115 << 30}, 16, 3),
        ({"reserved": 100 << 30, "free": 30 << 30}, 16, 1),
    ],
)
def test_as_many_as_the_memory_and_the_cores_allow(memory: dict[str, int] | None, cores: int, count: int) -> None:
    assert at_once(memory, cores) == count


class Table:
    """Stands in for a worker and a crowd: what was run, alone or together."""

    def __init__(self, reply: Callable[[Any, bool], Reply]) -> None:
        self.reply, self.ran = reply, []  # type: ignore[var-annotated]

    def run(self, asked: Any, limit_s: float | None = None) -> Any:
        assert limit_s is None
        if not isinstance(asked, Sequence):
            self.ran.append(asked.seed)
            return self.reply(asked, False)
        self.ran.append([one.request.seed for one in asked])
        return [self.reply(one.request, True) for one in asked]


def jobs_with(table: Table, said: list[str], **kept: Reply) -> Jobs:
    journal = Journal({}, {"date": "today"})
    journal.keep(kept)
    jobs = Jobs(
        cast(Any, table), cast(Any, table), journal, lambda _share, text: said.append(text), [("time", "rung 1")] * 5
    )
    jobs.at_once = 2
    return jobs


def test_what_fails_beside_others_is_run_again_by_itself_unless_it_took_too_long() -> None:
    def reply(request: Any, together: bool) -> Reply:
        if together and request.seed == 2:
            return Reply(failed="out of GPU memory.")
        if request.seed == 3:
            return Reply(failed="it took longer than 600 s.", is_late=True)
        return Reply(done={"seed": request.seed})

    said: list[str] = []
    table = Table(reply)
    jobs = jobs_with(table, said, **{"4": Reply(done={"kept": True})})
    jobs.ahead(asked(1, 2, 3, 5, 6, 8, 4), "round 1 of 2: making ready, then timing")
    came = [jobs.ask(one, "timing") for one in asked(1, 2, 3, 4, 5, 6)]
    assert [reply.done for reply in came] == [{"seed": 1}, {"seed": 2}, None, {"kept": True}, {"seed": 5}, {"seed": 6}]
    assert came[2].is_late
    assert table.ran == [[1, 5], [2, 6], [3, 8], 2]
    assert said[0] == "round 1 of 2: making ready, then timing rung 1, rung 5"


def test_one_at_a_time_nothing_is_run_ahead() -> None:
    table = Table(lambda request, _: Reply(done=json.loads(request.to_json())))
    jobs = jobs_with(table, [])
    jobs.at_once = 1
    jobs.ahead(asked(1, 2), "gate:")
    assert table.ran == []
