"""Rows of a ladder over ranks: what 1, 2, 4 … of the ranks that torchrun started do together, strong and weak.

    strong      the same batch, shared by more ranks        efficiency = t(1) / (n · t(n))
    weak        the same batch on each of more ranks        efficiency = t(1) / t(n)

t(1) is the time of the fewest ranks that make a row: one, or one tensor group. All rows train the same model from the
same weights by the trainer's own engine (`fusestep.distributed.parallelize`), one launch at a time. Rows of one batch
have to begin with the same loss, or they get no time. The share of communication is what a step takes longer than the
same work of a rank by itself, without any collective and with whole weights: 1 − t(alone) / t(n), so what is hidden
behind computing does not count. Tensor groups have no such counterpart, and no share.

While some ranks work the others wait at the store, so that nothing of theirs is in the times.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from fusestep import durable
from fusestep.data import open_source
from fusestep.distributed.launch import World
from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.distributed.parallelize import Spread, spread_gpt
from fusestep.errors import UserError
from fusestep.graph import TrainStep
from fusestep.ladder import environment
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam
from fusestep.tables import counted

SCHEMA = 1
JSON, CSV = "scaling.json", "scaling.csv"

#: Steps before any is timed, and rounds of timed steps.
WARM_UP, ROUNDS = 3, 5

#: How near the first losses of rows of one batch have to be: they differ in the order of sums only.
LOSS_WITHIN = 1e-4


@dataclass(frozen=True)
class ScalingRow:
    """What some ranks did together.

    Attributes:
        kind: strong or weak.
        ranks, batch: how many, and the sequences of all of them in a step.
        ms: a step's time, of the slowest rank, the median of ROUNDS; low, high: the least and the most.
        efficiency: see the head of this file.
        alone_ms: a step of a rank's own part by itself, on all of these ranks at once; None with tensor groups.
        communication: the share of a step; None with tensor groups.
        loss: of the first step.
        failure: why there are no times, in words.
    """

    kind: str
    ranks: int
    batch: int
    loss: float
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None
    alone_ms: float | None = None
    communication: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Scaling:
    """All rows, and what they were measured with."""

    parallel: str
    precision: str
    model: dict[str, Any]
    environment: dict[str, Any]
    rows: tuple[ScalingRow, ...]
    left_out: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values with a `schema` number, as in scaling.json."""
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, folder: Path) -> list[Path]:
        """Write scaling.json and scaling.csv; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        table = io.StringIO()
        writer = csv.DictWriter(table, list(asdict(self.rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        texts: dict[Path, str | bytes] = {
            folder / JSON: json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n",
            folder / CSV: table.getvalue(),
        }
        durable.write_together(texts)
        return list(texts)


def scaling(
    world: World,
    parallel: Parallel,
    asked: str,
    config: GPTConfig,
    *,
    batch: int,
    steps: int,
    say: Callable[[str], None] = lambda _: None,
) -> Scaling:
    """Measure all rows; every rank calls this and gets them.

    Args:
        parallel, asked: how ranks share the work, and in the words of `--parallel`.
        config: of the model; its data are arithmetic sequences of its vocabulary.
        batch: sequences a step: of all ranks for strong rows, of each data rank for weak ones.
        steps: timed steps a round.
        say: told what is being measured.
    Raises: UserError for ranks that make no whole groups.
    """
    parallel.data_ranks(world.size)
    precision = "bf16" if world.device.type == "cuda" else "fp32"
    bench = _Bench(world, parallel, config, precision, steps, say)
    counts = rank_counts(world.size, parallel.tensor)
    rows: list[ScalingRow] = []
    left_out = []
    for kind in ("strong", "weak"):
        first: ScalingRow | None = None
        for ranks in counts:
            shares = ranks // parallel.tensor
            if kind == "strong" and batch % shares:
                left_out.append(f"strong, {ranks} ranks: {shares} of them cannot share {batch} sequences evenly")
                continue
            row = bench.row(kind, ranks, batch if kind == "strong" else batch * shares, first)
            first = first or row
            rows.append(row)
    described = environment.describe(world.device)
    return Scaling(asked, precision, config.to_dict(), described, tuple(rows), tuple(left_out))


def rank_counts(size: int, tensor: int) -> list[int]:
    """1, 2, 4 … tensor groups and all of them, in ranks."""
    groups, counts = 1, []
    while groups * tensor < size:
        counts.append(groups * tensor)
        groups *= 2
    return [*counts, size]


class _Bench:
    """The same step on more and more ranks."""

    def __init__(
        self,
        world: World,
        parallel: Parallel,
        config: GPTConfig,
        precision: str,
        steps: int,
        say: Callable[[str], None],
    ) -> None:
        self._world, self._parallel, self._config = world, parallel, config
        self._compute = torch.bfloat16 if precision == "bf16" else None
        self._steps, self._say = steps, say
        self._source = open_source("synthetic", seed=0) if config.vocab_size == 96 else None

    def row(self, kind: str, ranks: int, batch: int, first: ScalingRow | None) -> ScalingRow:
        """Time `ranks` ranks on a batch of all of them; `first` is the row of the fewest."""
        world, tensor = self._world, self._parallel.tensor
        self._say(f"{kind}: {counted(ranks, 'rank')}, {batch} sequences")
        world.watch.at(f"making a mesh of {ranks} ranks", patience=120.0)
        # All ranks take part in making groups, those that are not in them too.
        mesh = DeviceMesh(
            world.device.type,
            torch.arange(ranks).view(ranks // tensor, tensor),
            mesh_dim_names=(DATA, TENSOR),
        )
        is_in = world.rank < ranks
        world.watch.at(f"timing {ranks} ranks", patience=600.0)
        together = self._times(mesh, batch) if is_in else None
        answers = [one for one in world.gathered(together) if one is not None]
        loss = sum(one[0] for one in answers) / len(answers)
        alone_ms = None
        if tensor == 1 and ranks > 1:
            world.watch.at(f"timing {ranks} ranks alone", patience=600.0)
            apart = self._times(None, batch // ranks) if is_in else None
            alone_ms = max(statistics.median(one[1]) for one in world.gathered(apart) if one is not None)
        if kind == "strong" and first is not None and abs(loss / first.loss - 1) > LOSS_WITHIN:
            failure = f"its first loss is {loss:.6f} and that of {first.ranks} {first.loss:.6f}"
            return ScalingRow(kind, ranks, batch, loss, failure=failure)
        rounds = [max(times) for times in zip(*(one[1] for one in answers), strict=True)]
        ms = statistics.median(rounds)
        base = ms if first is None or first.ms is None else first.ms
        more = 1 if first is None else ranks / first.ranks
        return ScalingRow(
            kind,
            ranks,
            batch,
            loss,
            ms,
            min(rounds),
            max(rounds),
            batch * self._config.context / ms * 1e3,
            base / (ms * more if kind == "strong" else ms),
            alone_ms,
            0.0 if ranks == 1 else None if alone_ms is None else max(0.0, 1 - alone_ms / ms),
        )

    def _times(self, mesh: DeviceMesh | None, batch: int) -> tuple[float, list[float]]:
        """(the first step's loss of this rank's part, milliseconds of a step in each round)."""
        world, device = self._world, self._world.device
        torch.manual_seed(0)
        model: GPT
        if mesh is None:
            model = GPT(self._config, device=device)
            module, loss_of = model, model.loss
            index, count = 0, 1
        else:
            spread: Spread = spread_gpt(
                self._config, mesh, self._parallel, device=device, dtype=torch.float32, compute=self._compute
            )
            model, module, loss_of = spread.model, spread.module, spread.loss  # type: ignore[assignment]
            index, count = mesh[DATA].get_local_rank(), mesh[DATA].size()
        optimizer = FusedAdam(model.parameters(), lr=3e-4, weight_decay=0.01, max_grad_norm=1.0)
        step = TrainStep(
            module,
            lambda _, tokens, targets: loss_of(tokens, targets),
            optimizer,
            autocast=self._compute,
            capture=False,
        )
        tokens, targets = self._batch(index * (batch // count), batch // count)
        first = float(step(tokens, targets))
        for _ in range(WARM_UP - 1):
            step(tokens, targets)
        rounds = []
        for _ in range(ROUNDS):
            if mesh is not None and mesh.size() > 1:
                distributed.barrier(group=mesh[DATA].get_group() if count > 1 else mesh[TENSOR].get_group())
            _wait_for(device)
            began = time.perf_counter()
            for _ in range(self._steps):
                step(tokens, targets)
            _wait_for(device)
            rounds.append((time.perf_counter() - began) * 1e3 / self._steps)
        world.watch.check()
        return first, rounds

    def _batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """This rank's sequences, by their numbers in the batch of all ranks."""
        context, device = self._config.context, self._world.device
        if self._source is not None:
            tokens, targets = self._source.batch(first, count, context)
        else:
            generator = torch.Generator()
            rows = [
                torch.randint(self._config.symbols, (context + 1,), generator=generator.manual_seed(first + row))
                for row in range(count)
            ]
            whole = torch.stack(rows)
            tokens, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        return tokens.to(device), targets.to(device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(parallel: Parallel, batch: int, steps: int) -> None:
    """Raises: UserError for what cannot be measured, before ranks meet."""
    if parallel.is_alone:
        raise UserError("several processes were started and --parallel says nothing of them; pass --parallel ddp.")
    for name, value in (("--batch", batch), ("--steps", steps)):
        if value < 1:
            raise UserError(f"{name} is {value}; pass 1 or more.")
