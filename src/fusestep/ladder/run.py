"""Run a ladder: gate every rung, time the rungs in interleaved rounds, compare them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusestep.ladder import environment, gate, work
from fusestep.ladder.ceilings import Ceilings
from fusestep.ladder.journal import Journal
from fusestep.ladder.plan import LadderConfig, Plan, plan
from fusestep.ladder.processes import ENVIRONMENT, Reply, Workers
from fusestep.ladder.results import Ladder, Round, RungResult, compare
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
    then every rung is timed in several rounds, in an order drawn anew for each. A rung that cannot run says why, and
    the others go on.

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
    orders = orders_of_rounds(plan.rungs, plan.rounds, plan.seed)
    on_gpu = torch.device(plan.device).type == "cuda"
    total = len(results) + 1 + on_gpu + plan.rounds * len(results)
    notes = list(plan.notes)
    with Workers() as workers:
        done = 0

        def ask(request: Request, key: str, text: str) -> Reply:
            """The reply to a request: the journal's, or a worker's."""
            nonlocal done
            kept = journal.kept(key)
            if kept is None:
                progress(done / total, text)
            done += 1
            return kept or workers.run(request)

        def ask_rung(request: Request, name: str, key: str, text: str) -> Reply | None:
            """Run a request for a rung; a failure is noted, and nothing more is asked of that rung."""
            nonlocal done
            if results[name].failure is not None:
                done += 1
                return None
            reply = ask(request, key, text)
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
            reply = ask(replace(plan.request(Recipe()), task="ceilings"), key, "ceilings: large products and a copy")
            journal.keep({key: reply})
            ceilings = None if reply.done is None else Ceilings(**reply.done)
            if reply.failed is not None:
                notes.append(f"The device's ceilings could not be measured: {reply.failed}")
        for number, order in enumerate(orders, start=1):
            measured: dict[str, Reply] = {}
            for name in order:
                key = f"round {number}: {name}"
                request = plan.request(results[name].recipe)
                reply_or_none = ask_rung(request, name, key, f"round {number} of {plan.rounds}: timing {name}")
                if reply_or_none is not None:
                    measured[key] = reply_or_none
                    if reply_or_none.done is not None:
                        rounds = (*results[name].rounds, Round.from_reply(reply_or_none.done))
                        results[name] = replace(results[name], rounds=rounds)
            journal.keep(measured)
        progress(1.0, "done")
    if len(journal.sittings) > 1:
        notes.append(f"Measured in {len(journal.sittings)} sittings, begun {', '.join(journal.sittings)}.")
    return Ladder(
        plan={
            **plan.as_dict(),
            "order": orders,
            "tokens_per_step": plan.tokens,
            "gate_data": gate.DATA,
            "method": METHOD,
            "flops_formula": work.FLOPS_FORMULA,
            "bytes_formula": work.BYTES_FORMULA,
            "worker_environment": {**ENVIRONMENT, **{k: os.environ[k] for k in ENVIRONMENT if k in os.environ}},
        },
        environment=here,
        rungs=_compared(results, rungs),
        notes=tuple(notes),
        ceilings=ceilings,
    )


def _before(plan: Plan, rung: Rung, recipe: Recipe) -> RungResult:
    """A rung of which nothing is measured yet."""
    flops = work.flops_per_step(plan.model, plan.batch)
    moved = work.bytes_per_step(plan.model, plan.parameters, plan.batch, recipe.precision)
    return RungResult(rung, recipe, plan.tokens, flops=flops, moved=moved)


def orders_of_rounds(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """The order of the rungs in each round, shuffled anew, so that none always comes first or after the same one."""
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
        curve = ask(plan.gate_request(result.recipe), name, f"gate: {name}", f"gate: {name} trains on text")
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
    """The results with their comparisons over the first rung and over the one before."""
    ordered = list(results.values())
    places = {rung.name: place for place, rung in enumerate(rungs)}

    def comparison(this: RungResult, other: RungResult) -> Any:
        between = rungs[places[other.rung.name] + 1 : places[this.rung.name] + 1]
        return compare(this, other, [rung.fused for rung in between if rung.fused is not None])

    return tuple(
        result
        if place == 0
        else replace(
            result,
            over_first=comparison(result, ordered[0]),
            over_previous=comparison(result, ordered[place - 1]),
        )
        for place, result in enumerate(ordered)
    )
