"""What a run of many days adds: checkpoints, failures, and the GPU hours of a number of tokens.

The best interval between checkpoints is √(2 · C · M) for checkpoints of C seconds and failures every M seconds; each
costs C / interval, half an interval a failure, and the restart. Source: Young 1974, doi:10.1145/361147.361115.
"""

from __future__ import annotations

import math

from fusestep.errors import UserError
from fusestep.plan.line import Line, gibibytes, tokens_in_words
from fusestep.plan.rates import Rates
from fusestep.plan.work import Work
from fusestep.tables import counted

_DAY = 86400.0


def checkpoint_bytes(work: Work) -> float:
    """All ranks' together: weights, moments and, of 16-bit weights, masters."""
    return (work.weight + 8 + (4 if work.weight == 2 else 0)) * work.shape.parameters


def saving_seconds(work: Work, rates: Rates) -> float:
    """How long a checkpoint takes, in which no step is taken."""
    return checkpoint_bytes(work) / (rates["storage"] * writing_nodes(work))


def writing_nodes(work: Work) -> int:
    """Machines that write: all where ranks have parts (those of the same share out what they write), else one."""
    has_parts = work.layout.shards > 1 or work.layout.tensor > 1
    return math.ceil(work.gpus / work.gpus_per_node) if has_parts else 1


def interval_seconds(work: Work, rates: Rates) -> float:
    """Between checkpoints, so that the least is lost."""
    return math.sqrt(2 * saving_seconds(work, rates) * between_failures(work, rates))


def between_failures(work: Work, rates: Rates) -> float:
    """Seconds between failures of any GPU of the run."""
    return rates["failures"] * 3600 / work.gpus


def lost_share(work: Work, rates: Rates) -> float:
    """The share of the time in which nothing is gained: saving, work that is done again, restarts."""
    every, apart = interval_seconds(work, rates), between_failures(work, rates)
    return saving_seconds(work, rates) / every + (every / 2 + rates["restart"]) / apart


def long_run(work: Work, rates: Rates, step: float, tokens: float | None) -> tuple[Line, ...]:
    """The lines, in seconds but for the last one, in GPU hours.

    Args: step: seconds of one. tokens: of the whole run; None: nothing is said of its length.
    Raises: UserError where failures leave no time to get on.
    """
    saving, apart, every = saving_seconds(work, rates), between_failures(work, rates), interval_seconds(work, rates)
    lost = lost_share(work, rates)
    lines = [
        Line(
            "a checkpoint",
            saving,
            "bytes of weights, masters and moments / (storage's rate · machines that write)",
            f"{gibibytes(checkpoint_bytes(work))} / (storage · {writing_nodes(work)})",
            ("storage",),
        ),
        Line(
            "between failures",
            apart,
            "GPU hours a failure / GPUs",
            f"{rates['failures']:,.0f} h / {work.gpus:,}: {_DAY / apart:.2f} a day",
            ("failures",),
        ),
        Line(
            "between checkpoints",
            every,
            "√(2 · a checkpoint · between failures)",
            f"√(2 · {saving:,.1f} s · {apart:,.0f} s): every {counted(max(1, round(every / step)), 'step')}",
            ("storage", "failures"),
        ),
    ]
    if tokens is not None:
        if lost >= 1:
            raise UserError(
                f"a failure every {apart:,.1f} s costs more time than there is between them, so this run never ends; "
                "plan fewer --gpus, quicker restarts or storage, or rarer failures (--failure-hours)."
            )
        steps = math.ceil(tokens / work.tokens)
        seconds = steps * step / (1 - lost)
        lines += [
            Line(
                "the whole run",
                seconds,
                "steps · step / (1 − share lost to checkpoints, work done again and restarts)",
                f"{counted(steps, 'step')} for {tokens_in_words(tokens)}, lost {lost:.1%}: {seconds / _DAY:,.1f} days",
                ("storage", "failures", "restart"),
            ),
        ]
    return tuple(lines)


def gpu_hours(work: Work, rates: Rates, step: float, tokens: float) -> float:
    """Of the whole run, losses included."""
    return long_run(work, rates, step, tokens)[-1].amount * work.gpus / 3600
