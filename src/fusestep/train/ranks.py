"""Who takes part in a run: this process alone, or the ranks of a world.

The trainer asks here for everything that differs between the two: the model, this rank's share of the data, sums over
all ranks, and what to tell the others.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusestep.data.source import random_below
from fusestep.distributed.mesh import DATA, TENSOR, Parallel
from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig
from fusestep.train.config import TrainConfig, dtype_of
from fusestep.train.interruption import SIGNALS

#: Of the random numbers of rank 0; the data sources have those before it.
_STREAM = 2

if TYPE_CHECKING:
    from fusestep.distributed.launch import World
    from fusestep.distributed.parallelize import Spread


class Ranks:
    """Those who take part in a run: here one process, which shares nothing.

    Attributes:
        index, count: of this rank among those that train on different sequences.
        is_first: whether this process writes and speaks.
        is_sharded: whether it holds a part of each parameter only.
        size: of all ranks.
        signal: one that reached this process and that the others should know of.
    """

    index, count, size = 0, 1, 1
    is_first, is_sharded = True, False
    signal: signal.Signals | None = None

    def build(
        self, config: TrainConfig, model_config: GPTConfig, *, device: torch.device, accumulates_in_fp32: bool
    ) -> GPT:
        """The model, with initial values from the default generator of the CPU.

        Args: accumulates_in_fp32: gradients are summed in `main_grad`.
        """
        del accumulates_in_fp32
        self._model = GPT(model_config, device=device, dtype=dtype_of(config.weights))
        self._model.checkpoint_blocks = config.activation_checkpointing
        return self._model

    def loss(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """`GPT.loss` of this rank's sequences."""
        return self._model.loss(tokens, targets, **options)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:  # noqa: ARG002
        """Around a micro-batch: the ranks' gradients are averaged after the last one."""
        yield

    def rest(self) -> None:
        """After passes without a backward one."""

    def all_tokens(self, own: int) -> int | Tensor:
        """The tokens of all ranks, where this one has `own`."""
        return own

    def total(self, part: Tensor) -> Tensor:
        """The sum over all ranks of a number, such as its part of a mean loss."""
        return part

    def total_with_signals(self, part: Tensor) -> tuple[Tensor, ...]:
        """`total`, and how many ranks each of SIGNALS has reached; a process alone needs not ask about those."""
        return (part,)

    def seed(self, seed: int, step: int) -> None:
        """Choose the random numbers of a step; a process alone goes on where it was."""

    def at(self, words: str) -> None:
        """Tell whoever may wait for this rank what it does now."""

    def check(self) -> None:
        """Raises: PeerError if another rank has failed."""

    def from_first(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on rank 0, where alone it is called; plain values."""
        return call()

    def meet(self) -> None:
        """Go on when all ranks are here."""


class RanksOfWorld(Ranks):
    """One rank of a world.

    Args:
        world: see `fusestep.distributed.launch.join`.
        parallel: how the ranks share the work.

    Raises: UserError where the world has not the ranks that `parallel` asks for.
    """

    def __init__(self, world: World, parallel: Parallel) -> None:
        self.world = world
        self.parallel = parallel
        self.size = world.size
        self.count = parallel.data_ranks(world.size)
        self.index = world.rank // parallel.tensor
        self.is_first = world.is_first
        self.is_sharded = parallel.data == "fsdp" and self.count > 1

    def check_batch(self, batch: int) -> None:
        """Raises: UserError for a batch that the ranks cannot share evenly."""
        if batch % self.count:
            below = batch - batch % self.count
            raise UserError(
                f"--batch is {batch} sequences over all ranks, which {self.count} ranks cannot share evenly; pass "
                f"{f'{below} or ' if below else ''}{below + self.count}."
            )

    def build(
        self, config: TrainConfig, model_config: GPTConfig, *, device: torch.device, accumulates_in_fp32: bool
    ) -> GPT:
        from fusestep.distributed.parallelize import spread_gpt

        self.mesh = self.parallel.mesh(device.type, self.size)
        self._device = device
        self._spread: Spread = spread_gpt(
            model_config,
            self.mesh,
            self.parallel,
            device=device,
            dtype=dtype_of(config.weights),
            compute=dtype_of(config.precision),
            checkpoint_blocks=config.activation_checkpointing,
            fp8_recipe=config.fp8_recipe,
            has_main_grads=accumulates_in_fp32,
        )
        return self._spread.model

    def loss(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return self._spread.loss(tokens, targets, **options)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        with self._spread.micro_batch(is_last=is_last):
            yield

    def rest(self) -> None:
        self._spread.rest()

    def all_tokens(self, own: int) -> int | Tensor:
        if self.count == 1:
            return own
        tokens = torch.tensor(own).to(self._device, non_blocking=True)
        torch.distributed.all_reduce(tokens, group=self.mesh[DATA].get_group())
        return tokens

    def total(self, part: Tensor) -> Tensor:
        return self._totals(part)[0]

    def total_with_signals(self, part: Tensor) -> tuple[Tensor, ...]:
        if self.size == 1:
            return (part,)
        return self._totals(part, *(float(self.signal == number) for number in SIGNALS))

    def _totals(self, part: Tensor, *counts: float) -> tuple[Tensor, ...]:
        values = torch.zeros(1 + len(counts), device=part.device)
        # The ranks of a tensor group have the same loss, of which one counts.
        if self.mesh[TENSOR].get_local_rank() == 0:
            values[0] = part
        if any(counts):
            values[1:] = torch.tensor(counts)
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values.unbind()

    def seed(self, seed: int, step: int) -> None:
        # By what it is used for alone, so that a resumed run draws the same, and no two ranks do.
        torch.manual_seed(int(random_below(1 << 62, seed, _STREAM + self.index, step, 1)))

    def at(self, words: str) -> None:
        self.world.watch.at(words)

    def check(self) -> None:
        self.world.watch.check()

    def from_first(self, call: Callable[[], Any]) -> Any:
        return self.world.from_first(call)

    def meet(self) -> None:
        self.world.meet()
