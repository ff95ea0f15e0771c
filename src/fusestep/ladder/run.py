"""Run a ladder: gate every rung, time rungs and contenders in interleaved rounds, compare them."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusestep.errors import UserError
from fusestep.ladder import beside, environment, gate
from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.config import LadderConfig
from fusestep.ladder.crowd import Asked, Crowd, at_once
from fusestep.ladder.jobs import Jobs, Progress
from fusestep.ladder.journal import Journal
from fusestep.ladder.measured import Round
from fusestep.ladder.plan import Plan, plan
from fusestep.ladder.processes import ENVIRONMENT, Reply, Workers
from fusestep.ladder.results import ContenderResult, Ladder, RungResult, compare
from fusestep.ladder.rungs import RUNGS, Recipe, Rung
from fusestep.ladder.statistics import METHOD
from fusestep.ladder.worker import FORKS
from fusestep.tables import counted


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

    Raises: UserError for a config that cannot be, or that is not the one to go on with, before anything runs; and where
        the first rung does not run, has no finite loss or one that is always 0, as soon as that is known, since every
        other is judged by it and compared with it. Nothing is kept then, unless it ran before: `resume` tries it again.
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
    with Workers() as workers, Crowd() as crowd:
        jobs = Jobs(workers, crowd, journal, progress, _jobs_of(plan, results, contenders, on_gpu=on_gpu))

        def ask_rung(asked: Asked, text: str) -> Reply | None:
            """Run a request for a rung; a failure is noted, and nothing more is asked of that rung."""
            name = asked.name
            if not _is_asked(results[name]):
                jobs.skip(asked.request.task, name)
                return None
            reply = jobs.ask(asked, text)
            if reply.failed is not None and name == first and not results[name].rounds:
                raise _without_first(journal, first, f"did not run: {reply.failed}")
            if reply.failed is not None:
                results[name] = replace(results[name], failure=reply.failed, log=reply.log, rounds=())
            return reply

        def ask_curve(asked: Asked, text: str) -> dict[str, Any] | None:
            reply = ask_rung(asked, text)
            if reply is None:
                return None
            curve = [] if reply.done is None else reply.done["losses"]
            wrong = next((step for step, loss in enumerate(curve, start=1) if not math.isfinite(loss)), None)
            if wrong is not None and asked.key == f"gate: {first}":
                raise _without_first(journal, first, f"has a loss that is not finite at step {wrong}")
            if reply.done is not None and gate.is_all_zero(curve) and asked.key == f"gate: {first}":
                raise _without_first(
                    journal, first, f"has a loss of 0 over {counted(len(curve), 'step')}, so nothing trains"
                )
            journal.keep({asked.key: reply})
            return reply.done

        _pass_gate(plan, results, ask_curve, jobs)
        ceilings = None
        if on_gpu:
            key = "ceilings"
            request = replace(plan.request(Recipe()), task="ceilings")
            reply = jobs.ask(Asked(request, key, key), "ceilings: large products and a copy")
            journal.keep({key: reply})
            ceilings = None if reply.done is None else Ceilings(**reply.done)
            if reply.failed is not None:
                notes.append(f"The device's ceilings could not be measured: {reply.failed}")
        for number, order in enumerate(orders, start=1):
            measured: dict[str, Reply] = {}
            this, profiled = f"round {number} of {plan.rounds}:", number == 1

            def key_of(name: str, number: int = number) -> str:
                return f"round {number}: {name}"

            def asked_of(rung: RungResult, key: str, profiled: bool = profiled) -> Asked:
                return Asked(replace(plan.request(rung.recipe), profiled=profiled), rung.rung.name, key)

            wanted = [
                beside.next_attempt(plan, contenders[name], key_of(name), profiled)
                if name in contenders
                else asked_of(results[name], key_of(name))
                for name in order
                if name in contenders or _is_asked(results[name])
            ]
            jobs.ahead([one for one in wanted if one is not None], f"{this} making ready, then timing")
            for name in order:
                text, key = f"{this} timing {name}", key_of(name)
                if name in contenders:
                    contenders[name], replies = beside.timed(plan, contenders[name], key, text, jobs, profiled)
                    measured |= replies
                    continue
                reply_or_none = ask_rung(asked_of(results[name], key), text)
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
            "within_base": _within_base(plan, rungs),
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


def _within_base(plan: Plan, rungs: Sequence[Rung]) -> list[str]:
    """The rungs whose changes are in the first one that is measured, since rungs are cumulative."""
    before = itertools.takewhile(lambda rung: rung.name != plan.rungs[0], rungs)
    return [rung.name for rung in before if not rung.only_if_chosen][1:]


def orders_of_rounds(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """The order of a round, shuffled anew for each, so that none always comes first or after the same one."""
    generator = random.Random(seed)
    return [generator.sample(list(names), len(names)) for _ in range(rounds)]


def _without_first(journal: Journal, first: str, why: str) -> UserError:
    """The end of a ladder whose first rung leads nowhere; of one without losses the journal has kept nothing."""
    goes_on = journal.kept(f"gate: {first}") is not None
    return UserError(
        f"{first}, which all rungs are compared with, {why.rstrip('.')}; mend that"
        + (" and go on by --resume" if goes_on else "")
        + ", or compare with a later rung by --base."
    )


def _is_asked(result: RungResult) -> bool:
    """Whether anything is still asked of a rung."""
    return result.failure is None and result.unchanged is None


def _pass_gate(
    plan: Plan, results: dict[str, RungResult], ask: Callable[[Asked, str], dict[str, Any] | None], jobs: Jobs
) -> None:
    """Fill in the losses and the verdict of every rung."""
    first, *others = plan.rungs

    def asked(name: str) -> Asked:
        return Asked(plan.gate_request(results[name].recipe), name, f"gate: {name}")

    def note(name: str, curve: dict[str, Any] | None) -> None:
        if curve is not None:
            results[name] = replace(results[name], losses=tuple(curve["losses"]), saturation=curve["saturation"])

    # The first by itself: it tells how many fit beside each other.
    curve = ask(asked(first), f"gate: {first} trains")
    note(first, curve)
    if curve is not None and FORKS:
        jobs.at_once = at_once(curve.get("memory"))
    jobs.ahead([asked(name) for name in others if _is_asked(results[name])], "gate:")
    for name in others:
        note(name, ask(asked(name), f"gate: {name} trains"))
    _judge(results, first, None)
    if all(result.verdict is None or result.verdict.is_settled for result in results.values()):
        jobs.skip("gate", first)
        return
    request = plan.gate_request(results[first].recipe, reverse=True)
    reordered = ask(
        Asked(request, first, f"gate: {first} reordered"), f"gate: {first} with its sums reordered, for the noise"
    )
    _judge(results, first, None if reordered is None else reordered["losses"])


def _judge(results: dict[str, RungResult], first: str, reordered: Sequence[float] | None) -> None:
    baseline = results[first].losses
    for name, result in list(results.items()):
        if result.losses and baseline:
            verdict = gate.judge(result.losses, baseline, reordered, result.recipe.precision)
            results[name] = replace(result, verdict=verdict)


def _compared(results: dict[str, RungResult], rungs: Sequence[Rung]) -> tuple[RungResult, ...]:
    """The results with their comparisons over the first rung and over the one before that changes anything."""
    ordered = list(results.values())
    places = {rung.name: place for place, rung in enumerate(rungs)}

    def is_in(rung: Rung) -> bool:
        """Whether a rung's change is in those above it, and changes anything."""
        result = results.get(rung.name)
        return not rung.only_if_chosen if result is None else result.unchanged is None

    def comparison(this: RungResult, other: RungResult) -> Any:
        changes = [rung for rung in rungs[places[other.rung.name] + 1 : places[this.rung.name] + 1] if is_in(rung)]
        fused = [rung.fused for rung in changes if rung.fused is not None]
        return compare(this, other, fused, is_next=len(changes) == 1)

    found = []
    for place, result in enumerate(ordered):
        if place == 0:
            found.append(result)
            continue
        previous = next(other for other in reversed(ordered[:place]) if other.unchanged is None)
        over_first, over_previous = comparison(result, ordered[0]), comparison(result, previous)
        found.append(replace(result, over_first=over_first, over_previous=over_previous))
    return tuple(found)
