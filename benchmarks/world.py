"""What being one of a world costs: each way to spread a model over ranks beside the plain step, on the same sequences.

    python -m benchmarks world            a world of one: nothing is sent, all code runs

Models A and B of steps.py (the tutorials' mini GPT and its scale-up), fp32 weights, TrainStep. Plain and spread steps
take turns; times are the device's, of steps that are queued before they start. `over_plain` is what is compared: it
should not exceed 1.02. "ddp, wrapped" and "fsdp, sharded" replicate and shard in a world of one too, which the trainer
would not do: DistributedDataParallel and FSDP2 then still copy every gradient, and FSDP2 every weight. ranks.py has
several ranks.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from benchmarks import timing
from benchmarks.spread import PRECISIONS, mesh_of, sequences, train_step
from benchmarks.steps import MODELS as STEPS
from benchmarks.steps import Model
from fusestep.distributed.launch import World, join
from fusestep.distributed.mesh import Parallel
from fusestep.fp8.recipes import Recipe
from fusestep.ladder.timing import clock_of

MODELS = {"B": STEPS["b"], "A": STEPS["a"]}
#: What is asked of `--parallel` on each path, and whether it is done over one rank too.
PLAIN = "plain"
PATHS = {
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "tp=1": ("tp=1", False),
    "ddp, wrapped": ("ddp", True),
    "fsdp, sharded": ("fsdp", True),
}
#: Steps before any is timed (DDP takes eleven before its capture), rounds, and timed steps a round.
PREPARED, ROUNDS, TIMED = 14, 5, 3
#: Plain and spread steps compute the same but for the order of sums.
LOSS_WITHIN = 5e-3
TINY = {
    "MODELS": {"A": dataclasses.replace(MODELS["A"], config=dataclasses.replace(
        MODELS["A"].config, width=32, heads=2, layers=1, ffn_width=32, context=8), batch=2)},
    "PREPARED": 2,
    "ROUNDS": 2,
    "TIMED": 1,
}  # fmt: skip

COLUMNS = ("configuration", "precision", "mode", "path", "device ms", "plain ms", "over plain", "loss", "captured")
IDENTITY = ("configuration", "precision", "mode", "path", "ranks")
RATIOS = {"over_plain": "less"}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    times = [f"{row['device_ms']:.3f}", f"{row['plain_ms']:.3f}", f"{row['over_plain']:.3f}"]
    names = [row["configuration"], row["precision"], row["mode"], row["path"]]
    return [*names, *times, f"{row['loss']:.4f}", row["fallback"] or "yes"]


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (compared with the plain step, not with bytes)
    """Every path beside the plain step, for each model and precision."""
    with join(timing.DEVICE.type, 120.0) as world:
        for name, model in MODELS.items():
            for precision, recipe in PRECISIONS.items():
                settings = {"configuration": name, "precision": precision, "mode": "graph", "ranks": world.size}
                plain = Candidate(world, model, recipe, PLAIN)
                for path in PATHS:
                    yield {**settings, "path": path, **beside(world, plain, model, recipe, path)}
                del plain
                timing.free()


def beside(world: World, plain: Candidate, model: Model, recipe: Recipe | None, path: str) -> dict[str, Any]:
    """The times of a path and of the plain step, in turns."""
    try:
        candidate = Candidate(world, model, recipe, path)
    except RuntimeError as error:
        return {"failed": timing.in_words(error)}
    times: dict[str, list[float]] = {PLAIN: [], path: []}
    for _ in range(ROUNDS):
        times[PLAIN] += plain.device_ms()
        times[path] += candidate.device_ms()
    if abs(candidate.first_loss / plain.first_loss - 1) > LOSS_WITHIN:
        return {"failed": f"its loss is {candidate.first_loss} after {PREPARED} steps, that of the plain step "
                          f"{plain.first_loss}"}  # fmt: skip
    plain_ms, device_ms = statistics.median(times[PLAIN]), statistics.median(times[path])
    found = {
        "device_ms": device_ms,
        "device_ms_quartiles": statistics.quantiles(times[path], n=4)[::2],
        "plain_ms": plain_ms,
        "over_plain": device_ms / plain_ms,
        "loss": candidate.first_loss,
        "fallback": candidate.step.fallback,
    }
    del candidate
    timing.free()
    return found


class Candidate:
    """A step that has run until it is captured."""

    def __init__(self, world: World, model: Model, recipe: Recipe | None, path: str) -> None:
        self._clock = clock_of(world.device)
        asked, always = PATHS.get(path, ("none", False))
        parallel = Parallel.of(asked)
        mesh = mesh_of(world, parallel, {})
        self.step = train_step(model.config, mesh, parallel, recipe, world.device, graph=True, always=always)
        self._batch = sequences(model.config, model.batch, 0, 1, world.device)
        first: Tensor = self.step(*self._batch)
        for _ in range(PREPARED - 1):
            self.step(*self._batch)
        self.first_loss = float(first)

    def device_ms(self) -> list[float]:
        """Milliseconds of some steps, each queued before it starts where the device can be held."""
        clock, found = self._clock, []
        for _ in range(TIMED):
            clock.synchronize()
            # As long as the host needs for a replay, so that the device never waits for it within one.
            clock.hold(2.0)
            start = clock.mark()
            self.step(*self._batch)
            end = clock.mark()
            clock.synchronize()
            found.append(clock.elapsed_ms(start, end))
        return found
