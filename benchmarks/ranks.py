"""Whole training steps on two GPUs of one machine: every way to share the work, beside one GPU and plain PyTorch.

    python -m benchmarks ranks            all of it: ranks-a, ranks-b and ranks-d, the models of steps.py

- Ways: DDP, FSDP2, and two ranks that share each product (TP), with and without sequence parallelism, made as the
  trainer makes them; bf16 and FP8; one launch at a time (`eager`) and as one CUDA graph (`graph`). FP32 weights, norm
  clipped.
- `weak`: each rank adds a batch of its own, efficiency t(1) / t(n). `strong`: ranks share one batch, t(1) / (n · t(n)).
  t(1) is the step of one rank by itself on one batch, in the same mode, in turns with the other on all ranks at once.
- What is sent: `sent_ms` is the time of NCCL's kernels in a profile of a step, which includes waiting for each other.
  `exposed_ms` is what a step takes longer than the same work of a rank with nothing sent: with whole weights, by
  itself, on all ranks at once. Ranks that share products have no such counterpart.
- Plain PyTorch (`compiled`, weak alone): DDP under autocast and FSDP2 in bf16, with torch.compile and torch's fused
  AdamW, the norm clipped.
- Losses and the gradient's norm are compared with those of one rank on all of the same sequences; what differs fails.
- Beside each step stands what `fusestep plan` says of it.

A step's time is that of the slowest rank, over several steps in a row. Memory is the most that a rank reserved, in a
process that had freed what was before. Each case has a time limit (crew.py): one that hangs is ended and has failed.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks import timing
from benchmarks.crew import Crew
from benchmarks.spread import PRECISIONS, mesh_of, native_step, sequences, train_step
from benchmarks.steps import MODELS as STEPS
from benchmarks.steps import Model
from fusestep.distributed.launch import World
from fusestep.distributed.mesh import DATA, Parallel
from fusestep.fp8 import DelayedScaling
from fusestep.ladder import profiling
from fusestep.plan import Shape, Work, estimate

#: GPUs that a machine must have.
GPUS = 2
MODELS = {name: STEPS[name] for name in ("a", "b", "d")}
ONE, DDP, FSDP = "one rank", "ddp", "fsdp"
PATHS = (DDP, FSDP, f"tp={GPUS}", f"tp={GPUS},sp")
MODES = ("graph", "eager")
KINDS = ("weak", "strong")
#: Seconds that a case may take, and one that compiles.
LIMIT, COMPILING = 100.0, 280.0
#: How far a loss, and the first gradient's norm, may be from those of one rank: sums are in another order, and partial
#: sums are rounded before they are added up.
LOSS_WITHIN, NORM_WITHIN = {"bf16": 2e-3, "fp8": 1e-2}, {"bf16": 0.05, "fp8": 0.1}


@dataclasses.dataclass(frozen=True)
class Effort:
    """Steps before any is timed (DDP takes eleven before its capture), losses that are kept of them, rounds, and
    whether plain PyTorch is compiled.
    """

    prepared: int = 14
    losses: int = 6
    rounds: int = 5
    compiles: bool = True


EFFORT = Effort()
TINY = {
    "MODELS": dict.fromkeys(MODELS, dataclasses.replace(MODELS["a"], batch=2, steps=1, config=dataclasses.replace(
        MODELS["a"].config, width=32, heads=2, layers=1, ffn_width=32, context=8))),
    "MODES": ("graph",),
    "EFFORT": Effort(prepared=2, losses=2, rounds=2, compiles=False),
    "LIMIT": 30.0,
    "COMPILING": 30.0,
}  # fmt: skip

COLUMNS = ("configuration", "step ms", "of one", "sent", "exposed ms", "GB", "plan: ms", "GB", "over native", "loss")
IDENTITY = ("configuration", "precision", "mode", "path", "kind", "ranks")
RATIOS = {"efficiency": "more", "over_native": "more"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return bool(row["mode"] != "compiled")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""

    def shown(name: str, form: str, unit: float = 1.0) -> str:
        return "" if row[name] is None else form.format(row[name] / unit)

    return [
        ", ".join(row[name] for name in ("configuration", "precision", "path", "mode", "kind")),
        shown("step_ms", "{:.2f}"),
        shown("efficiency", "{:.3f}"),
        shown("sent_share", "{:.1%}"),
        shown("exposed_ms", "{:.2f}"),
        shown("peak_reserved_bytes", "{:.2f}", 1e9),
        shown("plan_ms", "{:.2f}"),
        shown("plan_reserved_bytes", "{:.2f}", 1e9),
        shown("over_native", "{:.2f}"),
        f"{row['loss']:.4f}",
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train on some ranks.

    Attributes:
        path: ONE, or as of `--parallel`. mode: "eager", "graph" or "compiled" (plain PyTorch's). kind: of KINDS.
    """

    name: str
    model: Model
    precision: str
    path: str
    mode: str
    kind: str
    ranks: int
    effort: Effort

    def __str__(self) -> str:
        return f"{self.name.upper()} in {self.precision}, {self.path}, {self.mode}, {self.kind}"

    @property
    def total(self) -> int:
        """Sequences of a step of all ranks."""
        return self.model.batch * (self.ranks if self.kind == "weak" else 1)

    @property
    def parallel(self) -> Parallel:
        return Parallel.of("none" if self.path == ONE else self.path)

    @property
    def seconds(self) -> float:
        """That it may take."""
        return COMPILING if self.mode == "compiled" else LIMIT

    def alone(self, total: int) -> Case:
        """One rank by itself in the same mode, on so many sequences."""
        return dataclasses.replace(
            self, path=ONE, kind="strong", model=dataclasses.replace(self.model, batch=total), ranks=1
        )


def cases(name: str) -> list[Case]:
    """Of a model: one rank first, which others are compared with, then plain PyTorch (weak alone), then ours."""
    first = [(precision, ONE, "graph", kind) for precision in PRECISIONS for kind in KINDS]
    rest = [("bf16", path, "compiled", "weak") for path in (DDP, FSDP)]
    for kind in KINDS:
        rest += [(precision, path, mode, kind) for path in PATHS for precision in PRECISIONS for mode in MODES]
    model = MODELS[name]
    return [
        Case(name, model, precision, path, mode, kind, GPUS, EFFORT) for precision, path, mode, kind in first + rest
    ]


def run(copy: float, name: str) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (compared with one rank, not with bytes)
    """Every case of one model."""
    one: dict[tuple[str, int], dict[str, Any]] = {}
    native: dict[tuple[str, str], float] = {}
    with Crew(GPUS, timing.DEVICE.type, "benchmarks.ranks:measured") as crew:
        for case in cases(name):
            row = {
                "configuration": name.upper(),
                "precision": case.precision,
                "mode": case.mode,
                "path": case.path,
                "kind": case.kind,
                "ranks": case.ranks,
                "sequences": case.total,
            }
            reply = crew.do(case, case.seconds)
            if "failed" not in reply:
                is_native, key = case.mode == "compiled", (case.path, case.kind)
                if case.path == ONE:
                    one[case.precision, case.total] = reply
                beside = None if is_native else native.get(key)
                reply |= planned(case) | compared(case, reply, one.get((case.precision, case.total)))
                reply["over_native"] = None if beside is None else beside / reply["step_ms"]
                if is_native and "failed" not in reply:
                    native[key] = reply["step_ms"]
            yield row | reply


def planned(case: Case) -> dict[str, Any]:
    """What `fusestep plan` says of a step; it knows no torch.compile."""
    if case.mode == "compiled":
        return {"plan_ms": None, "plan_reserved_bytes": None}
    is_one = case.path == ONE
    found = estimate(
        Work(
            Shape.of(case.model.config),
            batch=case.total,
            precision=case.precision,  # type: ignore[arg-type]
            parallel="none" if is_one else case.path,
            gpus=1 if is_one else case.ranks,
            graph=case.mode == "graph",
        )
    )
    return {"plan_ms": found.seconds * 1e3, "plan_reserved_bytes": found.reserved.amount}


def compared(case: Case, reply: dict[str, Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """How far losses and the norm are from those of one rank, and `failed` where that is too far or unknown."""
    if one is None:
        return {"failed": "one rank did not run on these sequences, so nothing says whether its losses are right"}
    losses = [abs(a / b - 1) for a, b in zip(reply["losses"], one["losses"], strict=True)]
    norm = abs(reply["norm"] / one["norm"] - 1)
    found: dict[str, Any] = {"loss_deviation": max(losses), "norm_deviation": norm}
    # Not written as `>`, which what is no number would pass.
    is_right = all(loss <= LOSS_WITHIN[case.precision] for loss in losses) and norm <= NORM_WITHIN[case.precision]
    if not is_right:
        found["failed"] = f"wrong: it has {_in_words(reply)}, where one rank has {_in_words(one)}"
    return found


def _in_words(reply: dict[str, Any]) -> str:
    return f"losses {', '.join(f'{loss:.4f}' for loss in reply['losses'])} and a first norm of {reply['norm']:.4f}"


# On each rank


def measured(world: World, case: Case, kept: dict[int, Any]) -> dict[str, Any]:
    """A case, by all ranks together; every one gets the same answer.

    Args: kept: of this process: its meshes.
    """
    is_cuda = world.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    mine = Prepared(world, case, kept)
    peak = torch.cuda.max_memory_reserved() if is_cuda else None
    turns = {"step": mine}
    shares_data = case.path != ONE and case.parallel.tensor == 1
    own = case.total // case.ranks if shares_data else 0
    if case.path != ONE and case.mode != "compiled":
        for total in dict.fromkeys((case.model.batch, own or case.model.batch)):
            turns[f"alone {total}"] = Prepared(world, case.alone(total), kept)
    rounds = [{name: one.window_ms() for name, one in turns.items()} for _ in range(case.effort.rounds)]
    sent = mine.sent(case.effort)
    everyone = world.gathered({"rounds": rounds, "peak": peak, "losses": mine.losses, "norm": mine.norm, "sent": sent})
    # A round is over when the slowest rank is through.
    times = {
        name: [max(one["rounds"][number][name] for one in everyone) for number in range(case.effort.rounds)]
        for name in turns
    }
    medians = {name: statistics.median(found) for name, found in times.items()}
    step, alone, base = medians["step"], medians.get(f"alone {own}"), medians.get(f"alone {case.model.batch}")
    fallback = getattr(mine.step, "fallback", None)
    mine.step = None
    turns.clear()
    del mine
    timing.free()
    return {
        "step_ms": step,
        "step_ms_quartiles": statistics.quantiles(times["step"], n=4)[::2],
        "one_ms": base,
        "efficiency": None if base is None else base / step / (1 if case.kind == "weak" else case.ranks),
        "alone_ms": alone,
        "exposed_ms": None if alone is None else max(0.0, step - alone),
        **_sent_of(everyone, step),
        "peak_reserved_bytes": peak if peak is None else max(one["peak"] for one in everyone),
        "losses": [statistics.fmean(found) for found in zip(*(one["losses"] for one in everyone), strict=True)],
        "loss": statistics.fmean(one["losses"][-1] for one in everyone),
        "norm": everyone[0]["norm"],
        "fallback": fallback if case.mode == "graph" else None,
    }


def _sent_of(everyone: list[dict[str, Any]], step: float) -> dict[str, Any]:
    """What the profiles say: NCCL's time in a step, of the rank that waits least for others."""
    reasons = [one["sent"] for one in everyone if isinstance(one["sent"], str)]
    if reasons:
        return {"sent_ms": None, "sent_share": None, "unprofiled": reasons[0]}
    least = min(one["sent"] for one in everyone)
    return {"sent_ms": least, "sent_share": least / step}


class Prepared:
    """A case's step that has run until it is captured or compiled.

    Attributes:
        losses: of the first steps, of this rank's sequences; norm: of the first gradient, of all ranks.
    """

    def __init__(self, world: World, case: Case, kept: dict[int, Any]) -> None:
        torch.manual_seed(0)
        device, parallel = world.device, case.parallel
        mesh = mesh_of(world, parallel, kept)
        norm: Callable[[], Tensor]
        self.step: Any
        if case.mode == "compiled":
            self.step, norm = native_step(
                case.model.config, mesh[DATA], device, shards=case.path == FSDP, compiles=case.effort.compiles
            )
        else:
            recipe = PRECISIONS[case.precision]
            if case.path == ONE and isinstance(recipe, DelayedScaling):
                # A rank by itself has no scales in common with others.
                recipe = dataclasses.replace(recipe, reduce_amax=False)
            self.step = train_step(case.model.config, mesh, parallel, recipe, device, graph=case.mode == "graph")
            optimizer = self.step.optimizer
            norm = lambda: optimizer.last_grad_norm  # noqa: E731
        sharing = mesh[DATA].size() if not parallel.is_alone else 1
        rank = mesh[DATA].get_local_rank() if sharing > 1 else 0
        self._batch = sequences(case.model.config, case.total, rank, sharing, device)
        self._device, self._timed = device, max(1, case.model.steps // case.effort.rounds)
        self.losses, self.norm = [], 0.0
        for number in range(case.effort.prepared):
            loss = self.step(*self._batch)
            if number < case.effort.losses:
                self.losses.append(float(loss))
            if number == 0:
                self.norm = float(norm())

    def window_ms(self) -> float:
        """Milliseconds of a step, over several in a row, begun by all ranks together."""
        distributed.barrier()
        self._wait()
        began = time.perf_counter()
        for _ in range(self._timed):
            self.step(*self._batch)
        self._wait()
        return (time.perf_counter() - began) * 1e3 / self._timed

    def sent(self, effort: Effort) -> float | str:
        """Milliseconds of a step that what sends takes on this rank, or why nobody could look."""
        distributed.barrier()
        prefix = "nccl" if self._device.type == "cuda" else "c10d::"
        steps = min(profiling.STEPS, effort.rounds)
        try:
            found = profiling.measure(lambda: self.step(*self._batch), self._device, steps=steps, kept=None)
        except RuntimeError as error:
            return timing.in_words(error)
        return sum(one.ms for one in found if one.name.startswith(prefix))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
