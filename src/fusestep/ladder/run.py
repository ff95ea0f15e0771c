"""Run a ladder: gate every rung, time rungs and contenders in interleaved rounds, compare them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusestep.ladder import beside, environment, gate
from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.journal import Journal
from fusestep.ladder.measured import Round
from fusestep.ladder.plan import LadderConfig, Plan, plan
from fusestep.ladder.processes import ENVIRONMENT, Reply, Workers
from fusestep.ladder.progress import Remaining
from fusestep.ladder.results import ContenderResult, Ladder, RungResult, compare
from fusestep.ladder.rungs import RUNGS, Recipe, Rung
from fusestep.ladder.statistics import METHOD
from fusestep.ladder.worker import Request

#: Called with the share of the work that is done and what is being done now.
Progress = Callable[[float, str], None]


def ladder(
    config: LadderConfig | None = None,
    *,
    rungs: Sequence[Rung] = RUNGS,
    progress: Progress = lambda _share, _text: None,
    folder: Path | None = None,
    resume: bool = False,
) -> Ladder:
    """Measure what each rung buys.

    First every rung trains on the same text from the same seed, and its losses are compared with the first rung's;
    then all rungs, and what stands beside them, are timed in several rounds, in an order drawn anew for each. What
    cannot run says why, and the others go on.

    Args:
        config: what to measure; by default what this machine suits.
        rungs: the registry that the config's rungs are taken from.
        progress: told the share of the work that is done, and what comes next.
        folder: where what is measured is kept as it comes (see `fusestep.ladder.journal`); nowhere by default.
        resume: go on with what the folder holds, of the same config on the same machine.

    Raises: UserError for a config that cannot be, or that is not the one to go on with, before anything runs.
    """
    planned = plan(config or LadderConfig(), rungs)
    here = environment.describe(torch.device(planned.device))
    return run(planned, here, rungs, progress, Journal(planned.as_dict(), here, folder, resume=resume))


def run(plan: Plan, here: dict[str, object], rungs: Sequence[Rung], progress: Progress, journal: Journal) -> Ladder:
    """Measure what was planned, but for what the journal holds already; `here` is the environment."""
    by_name = {rung.name: rung for rung in rungs}
    results = {name: _before(plan, by_name[name], plan.recipe_of(name, rungs)) for name in plan.rungs}
    contenders = {result.contender.name: result for result in beside.before(plan)}
    orders = orders_of_rounds([*plan.rungs, *contenders], plan.rounds, plan.seed)
    on_gpu = torch.device(plan.device).type == "cuda"
    notes = list(plan.notes)
    first = plan.rungs[0]
    with Workers() as workers:
        jobs = _Jobs(workers, journal, progress, _jobs_of(plan, results, contenders, on_gpu=on_gpu))

        def ask_rung(request: Request, name: str, key: str, text: str) -> Reply | None:
            """Run a request for a rung; a failure is noted, and nothing more is asked of that rung."""
            if results[name].failure is not None or results[name].unchanged is not None:
                jobs.skip(request.task, name)
                return None
            reply = jobs.ask(request, name, key, text)
            if reply.failed is not None:
                results[name] = replace(results[name], failure=reply.failed, log=reply.log, rounds=())
            return reply

        def ask_curve(request: Request, name: str, key: str, text: str) -> dict[str, Any] | None:
            reply = ask_rung(request, name, key, text)
            if reply is None:
                return None
            journal.keep({key: reply})
            return reply.done

        _pass_gate(plan, results, ask_curve)
        ceilings = None
        if on_gpu:
            key = "ceilings"
            request = replace(plan.request(Recipe()), task="ceilings")
            reply = jobs.ask(request, key, key, "ceilings: large products and a copy")
            journal.keep({key: reply})
            ceilings = None if reply.done is None else Ceilings(**reply.done)
            if reply.failed is not None:
                notes.append(f"The device's ceilings could not be measured: {reply.failed}")
        for number, order in enumerate(orders, start=1):
            measured: dict[str, Reply] = {}
            for name in order:
                text = f"round {number} of {plan.rounds}: timing {name}"
                key = f"round {number}: {name}"
                if name in contenders:
                    contenders[name], replies = beside.timed(plan, contenders[name], key, text, jobs, number == 1)
                    measured |= replies
                    continue
                request = replace(plan.request(results[name].recipe), profiled=number == 1)
                reply_or_none = ask_rung(request, name, key, text)
                if reply_or_none is not None:
                    measured[key] = reply_or_none
                    if reply_or_none.done is not None:
                        rounds = (*results[name].rounds, Round.from_reply(reply_or_none.done))
                        results[name] = replace(results[name], rounds=rounds)
            journal.keep(measured)
        progress(1.0, "done")
    if len(journal.sittings) > 1:
        notes.append(f"Measured in {len(journal.sittings)} sittings, begun {', '.join(journal.sittings)}.")
    judged = tuple(beside.checked(result, results[first]) for result in contenders.values())
    return Ladder(
        plan={
            **plan.as_dict(),
            "order": orders,
            "tokens_per_step": plan.tokens,
            "gate_data": gate.DATA if plan.factory is None else "its own",
            "method": METHOD,
            **plan.formulas,
            "worker_environment": {**ENVIRONMENT, **{k: os.environ[k] for k in ENVIRONMENT if k in os.environ}},
        },
        environment=here,
        rungs=beside.compared(_compared(results, rungs), judged, rungs),
        notes=tuple(notes),
        ceilings=ceilings,
        contenders=judged,
    )


class _Jobs:
    """Asks workers, or the journal, and tells how far the ladder is and how long it still takes."""

    def __init__(self, workers: Workers, journal: Journal, progress: Progress, jobs: Sequence[tuple[str, str]]) -> None:
        self._workers, self._journal, self._progress = workers, journal, progress
        self._remaining, self._total, self._done = Remaining(jobs), len(jobs), 0

    def ask(self, request: Request, name: str, key: str, text: str, limit_s: float | None = None) -> Reply:
        """The reply to a request for a name: the journal's, or a worker's."""
        kept = self._journal.kept(key)
        seconds = None
        if kept is None:
            left = self._remaining.in_words()
            self._progress(self._done / self._total, text + (f", {left}" if left else ""))
            start = time.monotonic()
            # Without a limit it is left out, as it was before there were any.
            kept = self._workers.run(request) if limit_s is None else self._workers.run(request, limit_s)
            seconds = time.monotonic() - start
        self._count(request.task, name, seconds)
        return kept

    def skip(self, kind: str, name: str) -> None:
        """A job that falls away."""
        self._count(kind, name, None)

    def _count(self, kind: str, name: str, seconds: float | None) -> None:
        self._done = min(self._done + 1, self._total)
        self._remaining.done(kind, name, seconds)


def _jobs_of(
    plan: Plan, results: dict[str, RungResult], contenders: dict[str, ContenderResult], *, on_gpu: bool
) -> list[tuple[str, str]]:
    """Every job of a ladder, as `fusestep.ladder.progress.Remaining` takes them."""
    rungs = [name for name, result in results.items() if result.unchanged is None]
    others = [name for name, result in contenders.items() if result.absent is None]
    gates = [("gate", name) for name in (plan.rungs[0], *rungs)]
    times = [("time", name) for name in (*rungs, *others) for _ in range(plan.rounds)]
    return [*gates, *([("ceilings", "ceilings")] if on_gpu else []), *times]


def _before(plan: Plan, rung: Rung, recipe: Recipe) -> RungResult:
    """A rung of which nothing is measured yet."""
    flops, moved = plan.work_of(recipe)
    unchanged = None if plan.described is None else plan.described.unchanged.get(rung.name)
    is_own = plan.factory is not None
    return RungResult(rung, recipe, plan.tokens, flops=flops, moved=moved, unchanged=unchanged, is_own=is_own)


def orders_of_rounds(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """The order of a round, shuffled anew for each, so that none always comes first or after the same one."""
    generator = random.Random(seed)
    return [generator.sample(list(names), len(names)) for _ in range(rounds)]


def _pass_gate(
    plan: Plan, results: dict[str, RungResult], ask: Callable[[Request, str, str, str], dict[str, Any] | None]
) -> None:
    """Fill in the losses and the verdict of every rung."""
    first = plan.rungs[0]
    reordered = ask(
        plan.gate_request(results[first].recipe, reverse=True),
        first,
        f"gate: {first} reordered",
        f"gate: {first} with its sums reordered",
    )
    for name, result in list(results.items()):
        curve = ask(plan.gate_request(result.recipe), name, f"gate: {name}", f"gate: {name} trains")
        baseline = results[first].losses
        if name == first and curve is not None:
            baseline = tuple(curve["losses"])
        if curve is not None:
            verdict = (
                gate.judge(curve["losses"], baseline, reordered["losses"], result.recipe.precision)
                if baseline and reordered is not None
                else None
            )
            results[name] = replace(
                results[name], losses=tuple(curve["losses"]), verdict=verdict, saturation=curve["saturation"]
            )


def _compared(results: dict[str, RungResult], rungs: Sequence[Rung]) -> tuple[RungResult, ...]:
    """The results with their comparisons over the first rung and over the one before that changes anything."""
    ordered = list(results.values())
    places = {rung.name: place for place, rung in enumerate(rungs)}

    def comparison(this: RungResult, other: RungResult) -> Any:
        between = rungs[places[other.rung.name] + 1 : places[this.rung.name] + 1]
        left_out = {result.rung.name for result in ordered if result.unchanged is not None}
        fused = [rung.fused for rung in between if rung.fused is not None and rung.name not in left_out]
        return compare(this, other, fused)

    found = []
    for place, result in enumerate(ordered):
        if place == 0:
            found.append(result)
            continue
        previous = next(other for other in reversed(ordered[:place]) if other.unchanged is None)
        over_first, over_previous = comparison(result, ordered[0]), comparison(result, previous)
        found.append(replace(result, over_first=over_first, over_previous=over_previous))
    return tuple(found)
