"""A plan: memory of a GPU, what is sent, the time of a step, and what a long run adds, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusestep.plan.duration import Duration, duration, flops
from fusestep.plan.line import Line, total
from fusestep.plan.long_run import checkpoint_bytes, gpu_hours, long_run, lost_share
from fusestep.plan.memory import memory, reserved
from fusestep.plan.rates import Rates, measured_rates
from fusestep.plan.traffic import messages
from fusestep.plan.work import Work

SCHEMA = 1


@dataclass(frozen=True)
class Estimate:
    """What was found.

    Attributes:
        work, rates: as given.
        memory: bytes a GPU, whose sum is the peak of what is allocated; reserved: with what the allocator adds.
        sent: every collective, its time were it alone, and its bytes.
        time: the lines of a step, in seconds.
        run: checkpoints, failures and, with a number of tokens, the whole run, in seconds.
        tokens: of the whole run, if it was asked for.
    """

    work: Work
    rates: Rates
    memory: tuple[Line, ...]
    reserved: Line
    sent: tuple[Line, ...]
    time: Duration
    run: tuple[Line, ...]
    tokens: float | None

    @property
    def peak_bytes(self) -> float:
        """Of memory that is allocated on a GPU."""
        return total(self.memory)

    @property
    def fits(self) -> bool:
        """Whether a GPU has the memory."""
        return self.reserved.amount <= self.rates.memory

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.seconds

    @property
    def sent_bytes(self) -> float:
        """That a GPU sends in a step."""
        return sum(line.sent or 0.0 for line in self.sent)

    @property
    def flops_per_gpu(self) -> float:
        """FLOP/s of the model on each GPU."""
        return flops(self.work) / self.seconds / self.work.gpus

    @property
    def used_figures(self) -> list[str]:
        """Names of all figures that a line uses."""
        lines = (*self.memory, self.reserved, *self.sent, *self.time.lines, *self.run)
        return sorted({name for line in lines for name in line.figures})

    def totals(self) -> dict[str, Any]:
        """The sums."""
        work, step = self.work, self.seconds
        found: dict[str, Any] = {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved.amount,
            "gpu_bytes": self.rates.memory,
            "fits": self.fits,
            "sent_bytes": self.sent_bytes,
            "step_seconds": step,
            "device_seconds": self.time.device,
            "host_seconds": self.time.host,
            "tokens_per_step": work.tokens,
            "tokens_per_second": work.tokens / step,
            "flops_per_gpu": self.flops_per_gpu,
            "checkpoint_bytes": checkpoint_bytes(work),
            "lost_share": lost_share(work, self.rates),
        }
        if self.tokens is not None:
            found["gpu_hours"] = gpu_hours(work, self.rates, step, self.tokens)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        return {
            "schema": SCHEMA,
            "model": {**vars(self.work.shape), "parameters": self.work.shape.parameters},
            "settings": self.work.as_dict(),
            "mesh": {name: value for name, value in vars(self.work.layout).items() if name != "node"},
            "memory": [line.as_dict("bytes") for line in (*self.memory, self.reserved)],
            "sent": [line.as_dict("seconds") for line in self.sent],
            "time": [line.as_dict("seconds") for line in self.time.lines],
            "run": [line.as_dict("seconds") for line in self.run],
            "totals": self.totals(),
            "figures": self.rates.as_dict(self.used_figures),
        }


def estimate(work: Work, rates: Rates | None = None, *, tokens: float | None = None) -> Estimate:
    """The plan of a step.

    Args:
        rates: None for those that come with the package, of one H200.
        tokens: of the whole run, for its length and cost.
    """
    rates = measured_rates() if rates is None else rates
    lines, time = memory(work, rates), duration(work, rates)
    sent = tuple(one.line(rates) for one in messages(work))
    run = long_run(work, rates, time.seconds, tokens)
    return Estimate(work, rates, lines, reserved(rates, lines), sent, time, run, tokens)
