"""What being one of a world costs: each way to spread a model over ranks beside the plain step, on the same sequences.

    python -m benchmarks world                                        a world of one: nothing is sent, all code runs
    torchrun --nproc-per-node 2 -m benchmarks.world results.json      ranks with as much work each (weak scaling)

Models A and B of steps.py (the tutorials' mini GPT and its scale-up), fp32 weights. A mode is `graph` (TrainStep) or,
of several ranks, also `eager` (the same, one launch at a time). Plain and spread steps take turns; times are the
device's, of steps that are queued before they start. `over_plain` is what is compared: in a world of one it should not
exceed 1.02. "ddp, wrapped" and "fsdp, sharded" replicate and shard in a world of one too, which the trainer would not
do: DistributedDataParallel and FSDP2 then still copy every gradient, and FSDP2 every weight.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.steps import MODELS as STEPS
from benchmarks.steps import Model
from fusestep import TrainStep
from fusestep.distributed.groups import local_of
from fusestep.distributed.launch import World, join, launched_rank
from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.distributed.parallelize import Spread, replicate, shard, share_products
from fusestep.fp8 import DelayedScaling
from fusestep.fp8.recipes import Recipe
from fusestep.ladder.timing import clock_of
from fusestep.models import GPT
from fusestep.models.gpt import INITIAL_STD
from fusestep.optim import FusedAdam

MODELS = {"B": STEPS["b"], "A": STEPS["a"]}
PRECISIONS: dict[str, Recipe | None] = {"bf16": None, "fp8": DelayedScaling(amax_history_len=16)}
PLAIN, WRAPPED, SHARDED = "plain", "ddp, wrapped", "fsdp, sharded"
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


def paths(size: int) -> dict[str, str]:
    """What is asked of `--parallel` on each path."""
    forced = {WRAPPED: "ddp", SHARDED: "fsdp"} if size == 1 else {}
    return {"ddp": "ddp", "fsdp": "fsdp", f"tp={size}": f"tp={size}", **forced}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    times = [f"{row['device_ms']:.3f}", f"{row['plain_ms']:.3f}", f"{row['over_plain']:.3f}"]
    names = [row["configuration"], row["precision"], row["mode"], row["path"]]
    return [*names, *times, f"{row['loss']:.4f}", row["fallback"] or "yes"]


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (compared with the plain step, not with bytes)
    """Every path beside the plain step, for each model, precision and mode."""
    with join(timing.DEVICE.type, 120.0) as world:
        for name, model in MODELS.items():
            for precision, recipe in PRECISIONS.items():
                for mode in ("graph", "eager") if world.size > 1 else ("graph",):
                    settings = {"configuration": name, "precision": precision, "mode": mode, "ranks": world.size}
                    plain = Candidate(world, model, recipe, mode, PLAIN)
                    for path in paths(world.size):
                        world.watch.at(f"timing {path} of {name} in {precision}, {mode}")
                        yield {**settings, "path": path, **beside(world, plain, model, recipe, mode, path)}
                    del plain
                    timing.free()


def beside(world: World, plain: Candidate, model: Model, recipe: Recipe | None, mode: str, path: str) -> dict[str, Any]:
    """The times of a path and of the plain step, in turns."""
    try:
        candidate = Candidate(world, model, recipe, mode, path)
    except RuntimeError as error:
        if world.size > 1:  # the other ranks would wait
            raise
        return {"failed": timing.in_words(error)}
    times: dict[str, list[float]] = {PLAIN: [], path: []}
    for _ in range(ROUNDS):
        times[PLAIN] += plain.device_ms()
        times[path] += candidate.device_ms()
    if world.size == 1 and abs(candidate.first_loss / plain.first_loss - 1) > LOSS_WITHIN:
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

    def __init__(self, world: World, model: Model, recipe: Recipe | None, mode: str, path: str) -> None:
        torch.manual_seed(0)
        self._clock, self._host_ms = clock_of(world.device), 300.0
        parallel = Parallel.of(paths(world.size).get(path, "none"))
        # DistributedDataParallel's work on gradients stays on the stream that it was made on, which has to be one that
        # a graph can hold.
        with timing.on(timing.new_stream()):
            spread = built(world, model, recipe, parallel, shards=path == SHARDED)
            module, loss = spread.module, spread.loss
            if path == WRAPPED:
                module = loss = replicate(spread.model, spread.mesh[DATA])
        optimizer = FusedAdam(spread.model.parameters(), lr=1e-4, weight_decay=0.01, max_grad_norm=1.0)
        self.step = TrainStep(
            module,
            lambda _, tokens, targets: loss(tokens, targets),
            optimizer,
            autocast=torch.bfloat16,
            fp8_recipe=recipe,
            capture=mode == "graph",
        )
        # The ranks of a tensor group work on the same sequences.
        generator = torch.Generator().manual_seed(1 + (0 if parallel.tensor > 1 else world.rank))
        shape = (model.batch, model.config.context + 1)
        tokens = torch.randint(model.config.vocab_size, shape, generator=generator).to(world.device)
        self._batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        first: Tensor = self.step(*self._batch)
        for _ in range(PREPARED - 1):
            self.step(*self._batch)
        self.first_loss = float(first)

    def device_ms(self) -> list[float]:
        """Milliseconds of some steps, each queued before it starts where the device can be held."""
        clock, found = self._clock, []
        for _ in range(TIMED):
            clock.synchronize()
            # As long as the host needs for a step, so that the device never waits for it within one.
            clock.hold(2.0 if self.step.captures else 1.5 * self._host_ms + 2.0)
            began = clock.now()
            start = clock.mark()
            self.step(*self._batch)
            end = clock.mark()
            self._host_ms = (clock.now() - began) * 1e3
            clock.synchronize()
            found.append(clock.elapsed_ms(start, end))
        return found


def built(world: World, model: Model, recipe: Recipe | None, parallel: Parallel, *, shards: bool) -> Spread:
    """A model over the world, its values drawn on the device: the same for every path where nothing is sharded."""
    # The plain step is each rank's own, on a mesh of which it uses nothing.
    mesh = (Parallel.of("ddp") if parallel.is_alone else parallel).mesh(world.device.type, world.size)
    made = GPT(model.config, device="meta", dtype=torch.float32)
    share_products(made, mesh[TENSOR], parallel)
    if parallel.data == "fsdp" and (shards or mesh[DATA].size() > 1):
        shard(made, mesh[DATA], torch.bfloat16, recipe)
    made.to_empty(device=world.device)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                local_of(parameter).normal_(0.0, INITIAL_STD)
            else:
                local_of(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
    return Spread(made, mesh, parallel, has_main_grads=False)


def main() -> None:
    """As one of the ranks that torchrun started; rank 0 writes the results."""
    from benchmarks import parts

    parser = argparse.ArgumentParser(prog="torchrun … -m benchmarks.world")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    part = parts.load("world")
    if arguments.rehearse:
        parts.rehearse(part)
    if launched_rank() == 0:
        parts.measure(part, arguments.file, 1e6)
    else:
        for _ in part.rows(1.0):
            pass


if __name__ == "__main__":
    main()
