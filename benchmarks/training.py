"""Whole training steps in processes of their own: ours, the best of native PyTorch, and other libraries'.

The steps are the ladder's (`fusestep.ladder`): native PyTorch has one product for q, k and v, causal
scaled_dot_product_attention, model and loss compiled together by torch.compile, torch's fused AdamW, and forward,
backward and step in one CUDA graph; ours is `fusestep.models.GPT` under `fusestep.TrainStep`. All start from the same
weights, drawn on the device, and see the same random tokens.

A process builds its step, runs it until it is captured, says so, and times it when it is told to: several may get
ready beside each other, and are timed one after another. Its peak of memory is `max_memory_reserved` since its start.

This module must not touch a device when it is imported: processes are forked after that.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch._dynamo  # torch.optim imports it in its first step
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.distributed.groups import is_dtensor, local_of, own_part
from fusestep.fp8.recipes import recipe_named
from fusestep.ladder import profiling
from fusestep.ladder.peer_steps import peer_step
from fusestep.ladder.rungs import Recipe
from fusestep.ladder.step import Step
from fusestep.ladder.subject import BuiltIn
from fusestep.ladder.timing import clock_of, measure
from fusestep.ladder.torch_step import native_step
from fusestep.models import GPT, GPTConfig
from fusestep.models.gpt import INITIAL_STD
from fusestep.optim import FusedAdam

#: Batches that the timed steps take turns with, and steps that surely end with a captured one.
BATCHES, PREPARED = 4, 6
#: Seconds that a process may take to get ready, and to be timed.
PATIENCE = 300.0
#: Seconds until a process that said its last is ended.
ENDING = 20.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a step is made.

    Attributes:
        name: of the row.
        recipe: the ladder's.
        masters: ours with bf16 weights, fp32 moments and fp32 masters, which no rung of the ladder has: kept "whole",
            or as "remainders", the 16 bits of each that its weight does not hold, which is the same fp32 number.
            Beside FP8 copies of the weights remainders make the optimizer 4% slower, else 7% faster. "" for none.
    """

    name: str
    recipe: Recipe
    masters: Literal["", "whole", "remainders"] = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is fusestep's."""
        return not self.recipe.peer and self.recipe.optimizer == "fused"

    @property
    def dtypes(self) -> dict[str, str]:
        """Of weights, moments and masters, for a row."""
        # Transformer Engine's optimizer keeps masters of its bf16 weights.
        has_masters = bool(self.masters) or self.recipe.peer == "te"
        weights = "bf16" if self.masters else self.recipe.weights
        return {
            "weights": weights,
            "moments": "fp32" if has_masters else weights,
            "masters": "fp32" if has_masters else "none",
        }


@dataclasses.dataclass(frozen=True)
class Work:
    """What one process is to do."""

    setup: Setup
    config: GPTConfig
    batch: int
    steps: int
    device: str


class OnDevice(BuiltIn):
    """The GPT with weights and tokens drawn on the device: on the host a large model's would take many seconds."""

    def __init__(self, config: GPTConfig, batch: int) -> None:
        super().__init__(config, "random", batch, 0)
        self.sequences = batch

    def model(self, recipe: Recipe, device: torch.device) -> nn.Module:
        # In its dtype from the start: weights in fp32 that are cast later leave memory that nobody uses.
        dtype = torch.bfloat16 if recipe.weights == "bf16" and not recipe.peer else None
        made = GPT(dataclasses.replace(self.config, form=recipe.form, norm=recipe.norm), device="meta", dtype=dtype)
        return drawn(made.to_empty(device=device), device)

    def batches(self, device: torch.device, *, reverse: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Random tokens and targets."""
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.sequences, self.config.context)
        while True:
            pair = [torch.randint(self.config.symbols, shape, generator=generator, device=device) for _ in range(2)]
            yield (pair[0].flip(0), pair[1].flip(0)) if reverse else (pair[0], pair[1])


@torch.no_grad()
def drawn(model: nn.Module, device: torch.device) -> nn.Module:
    """A model with values from the device's generator, each matrix in the order that all forms of the GPT share.

    Of a parameter that lies over ranks each keeps its part of the same values.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        own = local_of(parameter)
        if parameter.dim() > 1:
            values = torch.empty(parameter.shape, device=device).normal_(0.0, INITIAL_STD, generator=generator)
            own.copy_(values[own_part(parameter)] if is_dtensor(parameter) else values)
        else:
            own.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def build(work: Work) -> Callable[..., Tensor]:
    """The step of a work: takes tokens and targets, returns the loss on the device."""
    setup, device = work.setup, torch.device(work.device)
    subject, recipe = OnDevice(work.config, work.batch), setup.recipe
    if setup.masters:
        return with_masters(setup, subject, device)
    if setup.is_ours:
        return Step(recipe, subject, device, seed=0)
    if device.type != "cuda":
        recipe = dataclasses.replace(recipe, graph=False)
    return (peer_step if recipe.peer else native_step)(recipe, subject, device, 0)


def with_masters(setup: Setup, subject: OnDevice, device: torch.device) -> TrainStep:
    """Ours with bf16 weights and fp32 masters: products in bf16 need no autocast then."""
    recipe = setup.recipe
    model = subject.model(dataclasses.replace(recipe, weights="bf16"), device)
    optimizer = FusedAdam(
        model.parameters(),
        lr=recipe.lr,
        weight_decay=0.01,
        master_weights=True,
        store_param_remainders=setup.masters == "remainders",
    )
    fp8 = recipe_named(recipe.scaling) if recipe.precision == "fp8" else None
    return TrainStep(model, subject.loss(recipe), optimizer, fp8_recipe=fp8)


class Prepared:
    """A step that was run until it is captured."""

    def __init__(self, work: Work) -> None:
        self.work, self.device = work, torch.device(work.device)
        self.clock = clock_of(self.device)
        stream = OnDevice(work.config, work.batch).batches(self.device)
        self.batches = list(itertools.islice(stream, BATCHES))
        self.step = build(work)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        for number in range(PREPARED):
            begun = time.perf_counter()
            self.losses.append(float(self.step(*self.batches[number % BATCHES])))
            self.seconds.append(time.perf_counter() - begun)
        graphed = getattr(self.step, "graphed", self.step)
        if isinstance(graphed, TrainStep) and graphed.fallback is not None and self.device.type == "cuda":
            raise RuntimeError(f"the step was not captured: {graphed.fallback}")
        # The losses were read above, which made the host wait; nothing below does.
        self.count = 0

    def once(self) -> None:
        """The next step."""
        self.step(*self.batches[self.count % BATCHES])
        self.count += 1

    def timed(self) -> dict[str, Any]:
        """Times of a step in ms, the peak of the process in bytes."""
        is_cuda = self.device.type == "cuda"
        timing = measure(self.once, self.clock, steps=self.work.steps, warmup_ms=300.0 if is_cuda else 0.0)
        steps = sorted(timing.steps)
        return {
            "device_ms": timing.step if timing.device is None else timing.device,
            "wall_ms": timing.step,
            "wall_ms_quartiles": [steps[len(steps) // 4], steps[-1 - len(steps) // 4]],
            "host_ms": timing.host,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
            "loss": self.losses[-1],
        }

    def kernels(self) -> dict[str, Any]:
        """The kernels that take the time of a step, or why nobody could look."""
        try:
            found = profiling.measure(self.once, self.device)
        except RuntimeError as error:
            return {"unprofiled": str(error).partition("\n")[0]}
        return {"kernels": [{**dataclasses.asdict(one), "name": one.short} for one in found]}


def child(connection: Connection, work: Work) -> None:
    """A process's life: get ready, wait for the word, time, and end."""
    try:
        prepared = Prepared(work)
        connection.send({"ready": prepared.losses})
        connection.recv()
        connection.send(prepared.timed())
        if work.setup.is_ours:
            connection.send(prepared.kernels())
    except Exception:
        connection.send({"failed": traceback.format_exc()[-2000:]})


def measured(works: Sequence[Work], together: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Each work in a process of its own: `together` of them get ready beside each other, and are timed in turn."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.training"])
    for first in range(0, len(works), together):
        running = []
        for work in works[first : first + together]:
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, work))
            process.start()
            theirs.close()
            running.append((work, process, ours))
        try:
            replies = [_reply(connection) for _, _, connection in running]
            for (work, process, connection), reply in zip(running, replies, strict=True):
                if "failed" not in reply:
                    connection.send("go")
                    reply = _reply(connection)
                if "failed" not in reply and work.setup.is_ours:
                    # A profiler may end a process; what was timed before stands.
                    kernels = _reply(connection)
                    reply |= {"unprofiled": kernels["failed"]} if "failed" in kernels else kernels
                if "failed" in reply:
                    # It has nothing more to say, and may take long to end.
                    process.kill()
                process.join(ENDING)
                yield work, reply
        finally:
            for _, process, connection in running:
                connection.close()
                if process.is_alive():
                    process.kill()
                process.join()


def _reply(connection: Connection) -> dict[str, Any]:
    """What a process says next."""
    if not connection.poll(PATIENCE):
        return {"failed": f"no word within {PATIENCE:.0f} s"}
    try:
        reply: dict[str, Any] = connection.recv()
    except EOFError:
        return {"failed": "its process ended without a word"}
    return reply
