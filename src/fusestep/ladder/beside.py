"""The contenders while a ladder runs: their attempts, the check of their losses, and the rungs set against them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fusestep.ladder import gate
from fusestep.ladder.contenders import LIMIT_S, NATIVE_OF
from fusestep.ladder.crowd import Asked
from fusestep.ladder.gate import TOLERANCE
from fusestep.ladder.measured import Round
from fusestep.ladder.peers import place_of, version_of
from fusestep.ladder.plan import Plan
from fusestep.ladder.processes import Reply
from fusestep.ladder.results import Comparison, ContenderResult, RungResult, claim
from fusestep.ladder.rungs import Rung
from fusestep.ladder.words import ways_in_words

#: Of first losses, where the weights are rounded to BF16 at every step.
_TOLERANCE_OF_BF16_WEIGHTS = 0.01


class Jobs(Protocol):
    """As of `fusestep.ladder.run`."""

    def ask(self, asked: Asked, text: str) -> Reply: ...

    def skip(self, kind: str, name: str) -> None: ...


def before(plan: Plan) -> list[ContenderResult]:
    """The contenders of which nothing is measured yet; a peer that is not installed says so."""
    found = []
    for contender in plan.contenders():
        recipe = contender.attempts[0]
        flops, moved = plan.work_of(recipe)
        result = ContenderResult(contender, recipe, plan.tokens, flops=flops, moved=moved)
        if contender.library:
            absent = "not installed" if place_of(contender.library) is None else None
            result = replace(result, absent=absent, version=version_of(contender.library))
        found.append(result)
    return found


def timed(
    plan: Plan, result: ContenderResult, key: str, text: str, jobs: Jobs, profiled: bool
) -> tuple[ContenderResult, dict[str, Reply]]:
    """A contender after one more round, and the replies that came for it.

    While nothing of it is measured a failure takes it to its next attempt; later it ends it, since times of two
    attempts are not one contender's.
    """
    name, attempts = result.contender.name, result.contender.attempts
    if result.absent is not None or result.failure is not None:
        if result.absent is None:
            jobs.skip("time", name)
        return result, {}
    replies: dict[str, Reply] = {}
    for place in range(attempts.index(result.recipe), len(attempts)):
        recipe = attempts[place]
        attempt = _attempt(plan, result, place, key, profiled)
        reply = replies[attempt.key] = jobs.ask(attempt, text)
        if reply.done is not None:
            rounds = (*result.rounds, Round.from_reply(reply.done))
            return replace(result, recipe=recipe, rounds=rounds), replies
        said = (reply.failed or "").rstrip(".")
        if result.rounds or place == len(attempts) - 1:
            return replace(result, recipe=recipe, rounds=(), failure=f"{said}.", log=reply.log), replies
        setback = f"with {ways_in_words(recipe) or 'its parts'} it did not run ({said}), so it is measured without"
        result = replace(result, setbacks=(*result.setbacks, setback), log=reply.log)
    raise RuntimeError(f"{name} has no attempt left.")


def next_attempt(plan: Plan, result: ContenderResult, key: str, profiled: bool) -> Asked | None:
    """What `timed` asks for first in a round; None where it asks for nothing."""
    if result.absent is not None or result.failure is not None:
        return None
    return _attempt(plan, result, result.contender.attempts.index(result.recipe), key, profiled)


def _attempt(plan: Plan, result: ContenderResult, place: int, key: str, profiled: bool) -> Asked:
    request = replace(plan.request(result.contender.attempts[place]), profiled=profiled)
    named = key if place == 0 else f"{key}, attempt {place + 1}"
    return Asked(request, result.contender.name, named, LIMIT_S)


def checked(result: ContenderResult, first: RungResult) -> ContenderResult:
    """The contender with its first losses compared with those of the first rung."""
    if not result.rounds or not first.rounds:
        return result
    recipe = result.recipe
    tolerance = TOLERANCE[recipe.precision]
    if recipe.weights == "bf16":
        tolerance = max(tolerance, _TOLERANCE_OF_BF16_WEIGHTS)
    return replace(result, check=gate.check(result.rounds[0].opening, first.rounds[0].opening, tolerance))


def compared(
    rungs: Sequence[RungResult], contenders: Sequence[ContenderResult], registry: Sequence[Rung]
) -> tuple[RungResult, ...]:
    """The rungs with their comparisons: with the native of their precision, and with every peer.

    `registry` has every rung in order, also those that were not measured.
    """
    found = []
    for rung in rungs:
        chosen = [
            one
            for one in contenders
            if one.contender.kind == "peer" or one.contender.name == NATIVE_OF[rung.recipe.precision]
        ]
        beside: Mapping[str, Comparison] = {one.contender.name: _compare(rung, one, rungs, registry) for one in chosen}
        found.append(replace(rung, beside=beside))
    return tuple(found)


def _compare(
    rung: RungResult, contender: ContenderResult, rungs: Sequence[RungResult], registry: Sequence[Rung]
) -> Comparison:
    name = contender.contender.name
    obstacle = rung.obstacle or contender.obstacle
    if obstacle is None and len(rung.times) != len(contender.times):
        obstacle = f"{name} was not timed in the rounds of {rung.rung.name}"
    if obstacle is not None:
        return Comparison(name, None, "none", obstacle)
    # All parts of ours that are in this rung have to run as what they are, for its speed to be ours.
    within = itertools.takewhile(lambda one: one.name != rung.rung.name, registry)
    measured = {one.rung.name: one for one in rungs}
    fused = [
        one.fused
        for one in (*within, rung.rung)
        if one.fused is not None
        and (one.name in measured or not one.only_if_chosen)
        and (one.name not in measured or measured[one.name].unchanged is None)
    ]
    return claim(rung, contender, name, fused)
