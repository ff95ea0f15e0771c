"""The state of a run, and one step of it: gradients of a window of sequences, clip, update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.data import Source
from fusestep.errors import UserError
from fusestep.fp8 import fp8_autocast
from fusestep.fp8.statistics import TensorStatistics, collect, reset_counts
from fusestep.models import GPTConfig
from fusestep.ops.cross_entropy import Reduction
from fusestep.optim import FusedAdam, accumulate_in_fp32
from fusestep.train import checkpoint
from fusestep.train.checkpoint import Checkpoint
from fusestep.train.config import TrainConfig, dtype_of
from fusestep.train.ranks import Ranks
from fusestep.train.schedule import Schedule

#: A target that counts for nothing, as in torch.nn.functional.cross_entropy.
IGNORED = -100

#: Micro-batches of held-out sequences in one evaluation; always the same ones.
EVALUATION_BATCHES = 4


class Trainer:
    """Model, optimizer, scaler, schedule and the position in the data: all that a checkpoint holds.

    Args:
        config: what to do.
        model_config: of the model.
        source: the data.
        device: where everything lives.
        ranks: who else takes part, and how the model is spread over them; None: nobody.

    Attributes:
        step: steps taken, skipped ones included.
        position: index of the next training sequence.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_config: GPTConfig,
        source: Source,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.source = source
        self.device = device
        self.step = 0
        self.position = 0
        self.ranks = ranks or Ranks()
        self.model = self.ranks.build(config, model_config, device=device, accumulates_in_fp32=self.accumulates_in_fp32)
        self.fp8_recipe = config.fp8_recipe
        self.lr = torch.tensor(config.lr, dtype=torch.float32, device=device)
        self.schedule = Schedule(config.lr, config.warmup, config.schedule_length)
        self.optimizer = FusedAdam(
            self.model.parameters(),
            lr=self.lr,
            weight_decay=config.weight_decay,
            max_grad_norm=self._max_grad_norm,
            master_weights=self.has_masters,
        )
        self.scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
        if self.accumulates_in_fp32:
            accumulate_in_fp32(self.model.parameters())
            self._norm_probe = nn.Parameter(torch.zeros((), device=device))
            self._probe_optimizer = torch.optim.SGD([self._norm_probe], lr=0.0)

    @property
    def has_masters(self) -> bool:
        return self.config.weights != "fp32"

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether gradients of 16-bit weights are summed over a window in fp32; one micro-batch has nothing to sum."""
        # Sharded gradients are summed in fp32 by what shards them.
        return self.has_masters and self.config.accumulate > 1 and not self.ranks.is_sharded

    @property
    def tokens_per_step(self) -> int:
        return self.config.window * self.model.config.context

    def train_step(self) -> Tensor:
        """Take one step.

        Returns: (4,) fp32, still on the device: loss, norm of the gradient, learning rate, steps skipped so far; where
            there are several ranks (7,), with the number of those that each of interruption.SIGNALS has reached.
        Raises: UserError if no parameter received a gradient.
        """
        ranks = self.ranks
        ranks.at(f"reading the data of step {self.step + 1}")
        if self.config.dropout:
            ranks.seed(self.config.seed, self.step)
        inputs, targets = self._window()
        ranks.at(f"computing the gradients of step {self.step + 1}")
        self.schedule.write(self.lr, self.optimizer.applied_steps)
        is_trainable = any(parameter.requires_grad for parameter in self.model.parameters())
        with self._fp8():  # one region a step, so that its micro-batches share their scales
            loss = self.add_gradients(inputs, targets) if is_trainable else None
        if loss is None or not has_gradients(self.model):
            raise UserError("no trainable parameter received a gradient; unfreeze some, or check the model's forward.")
        ranks.at(f"updating the weights in step {self.step + 1}")
        self._renew_scales()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self._update_scale(self.scaler)
        loss, *stops = ranks.total_with_signals(loss)
        values = [loss, self.optimizer.last_grad_norm, self.lr, self.optimizer.skipped_steps, *stops]
        packed = torch.stack([value.float() for value in values])
        self.optimizer.zero_grad()
        self.step += 1
        self.position += self.config.window
        return packed

    def add_gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a window's mean loss to the parameters, micro-batch by micro-batch.

        Each micro-batch's loss is a sum over its tokens, divided by the tokens of the whole window, so that how the
        window is split, over micro-batches and ranks, does not weigh some tokens more than others.

        Args:
            inputs, targets: (window, context) int64 on the CPU, this rank's part of the window where there are
                several; IGNORED targets count for nothing.

        Returns: the mean loss per token, 0-d fp32 on the device; of several ranks, this one's part of it.
        """
        count = self.ranks.count
        tokens = self.ranks.all_tokens(int((targets != IGNORED).sum()))
        total = torch.zeros((), device=self.device)
        size = self.config.batch // count
        pairs = list(zip(inputs.split(size), targets.split(size), strict=True))
        for number, (x, y) in enumerate(pairs, 1):
            with self.ranks.micro_batch(is_last=number == len(pairs)):
                loss = self._loss(x, y, "sum") / tokens
                total += loss.detach()
                # The gradients of ranks are averaged, where those of parts of a sum add up.
                scaled = loss * count if count > 1 else loss
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss per token on held-out sequences; nothing of the run's state changes."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        with self._fp8():
            for index in range(EVALUATION_BATCHES):
                self.ranks.at(f"evaluating after step {self.step}")
                x, y = self._batch(index * self.config.batch, held_out=True)
                total += self._loss(x, y, "mean")
        self.model.train()
        self.ranks.rest()
        mean = total / (EVALUATION_BATCHES * self.ranks.count)
        return float(self.ranks.total(mean))

    def fp8_statistics(self) -> list[TensorStatistics]:
        """What delayed scaling has seen, its counts since this was last asked. Waits for the device."""
        rows = collect(self.model)
        reset_counts(self.model)
        return rows

    def state(self) -> dict[str, Any]:
        """All but the weights, as tensors and plain values."""
        on_gpu = self.device.type == "cuda"
        return {
            "position": self.position,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None,
        }

    def restore(self, saved: Checkpoint) -> None:
        """Continue where a checkpoint was made.

        Learning rate, weight decay, clipping, precision and recipe are the configuration's, not the checkpoint's.
        """
        has_history = self.fp8_recipe is not None and self.fp8_recipe.has_history
        state = checkpoint.restore(saved, self.model, self.optimizer, with_fp8_state=has_history)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.config.weight_decay
            group["max_grad_norm"] = self._max_grad_norm
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["rng_cuda"] is not None:
            torch.cuda.set_rng_state(state["rng_cuda"], self.device)
        self.step = saved.step
        self.position = state["position"]

    @property
    def _max_grad_norm(self) -> float:
        """Infinity clips nothing, yet measures the norm and skips a step whose gradients are not finite."""
        return self.config.clip or math.inf

    def _update_scale(self, scaler: torch.amp.GradScaler) -> None:
        if self.accumulates_in_fp32:
            # The scaler looks for non-finite gradients in `grad` alone, which is empty now: it gets their norm to see.
            self._norm_probe.grad = self.optimizer.last_grad_norm.clone()
            scaler.unscale_(self._probe_optimizer)
        scaler.update()

    def _window(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the next window, by micro-batches."""
        if self.ranks.count == 1:
            return self.source.batch(self.position, self.config.window, self.model.config.context)
        batch = self.config.batch
        parts = [self._batch(self.position + number * batch) for number in range(self.config.accumulate)]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def _batch(self, first: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """This rank's part of the `batch` sequences from number `first` on."""
        size = self.config.batch // self.ranks.count
        mine = first + self.ranks.index * size
        return self.source.batch(mine, size, self.model.config.context, held_out=held_out)

    def _loss(self, inputs: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        inputs, targets = self._to_device(inputs), self._to_device(targets)
        precision = self.config.precision
        with torch.autocast(self.device.type, dtype_of(precision), enabled=precision != "fp32"):
            return self.ranks.loss(inputs, targets, ignore_index=IGNORED, reduction=reduction)

    @contextmanager
    def _fp8(self) -> Iterator[None]:
        """The region in which the model multiplies in FP8, if the run does."""
        if self.fp8_recipe is None:
            yield
        else:
            with fp8_autocast(recipe=self.fp8_recipe):
                yield

    def _renew_scales(self) -> None:
        """Have what this step recorded enter the histories, which the beginning of a region does.

        Before the optimizer's step: it casts the new weights with the new scales then, and a resumed run, whose first
        forward casts them itself, gets the same bytes.
        """
        with self._fp8():
            pass

    def _to_device(self, tokens: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return tokens
        return tokens.pin_memory().to(self.device, non_blocking=True)


def has_gradients(model: nn.Module) -> bool:
    """Whether backward reached any parameter, in `grad` or in fp32 beside it."""
    return any(p.grad is not None or getattr(p, "main_grad", None) is not None for p in model.parameters())
