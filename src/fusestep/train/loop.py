"""A whole run, from its configuration to its last checkpoint; read it from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusestep import dispatch
from fusestep.data import Source, open_source
from fusestep.distributed.launch import join, launched_size
from fusestep.distributed.mesh import Parallel
from fusestep.errors import UserError
from fusestep.fp8 import count_saturation, support
from fusestep.fp8.casting import is_counting
from fusestep.memory import asked, ran_out
from fusestep.tables import counted
from fusestep.train import checkpoint, memory
from fusestep.train.checkpoint import Checkpoint
from fusestep.train.config import TrainConfig, option
from fusestep.train.interruption import SIGNALS, Interruption
from fusestep.train.progress import Progress
from fusestep.train.ranks import Ranks, RanksOfWorld
from fusestep.train.readings import MAXIMUM_LAG, Reading, Readings
from fusestep.train.run_folder import ElsewhereFolder, RunFolder
from fusestep.train.trainer import EVALUATION_BATCHES, Trainer

#: Seconds for which one rank's second signal may be the launcher passing the first one on.
PATIENCE = 30.0


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: steps taken since the run's very start.
        loss: of the last step taken in this process, mean per token in nats; None if there was none.
        eval_loss: of the last evaluation in this process; None if there was none.
        skipped_steps: those that the optimizer left out because gradients were not finite.
        checkpoint: the newest one of the run, or None.
        stopped_by: SIGINT, SIGTERM or SIGHUP, if one ended the run before its last step.
    """

    step: int
    loss: float | None
    eval_loss: float | None
    skipped_steps: int
    checkpoint: Path | None
    stopped_by: signal.Signals | None = None


def train(config: TrainConfig, progress: Progress | None = None) -> TrainResult:
    """Train as `config` says, writing the run's folder as it goes.

    With `config.resume` the run in `config.out` goes on from its newest good checkpoint to `config.steps`, bit for bit
    as if it had never stopped. Its data, seed, model and the dtype of its weights must be what they were; everything
    else is taken from `config`, not from the checkpoint.

    Ctrl-C, SIGTERM or SIGHUP (unless it is ignored) ends the run after the step in progress, with a checkpoint.

    Args:
        progress: shows what happens; nothing is shown without one.

    Raises: UserError, without touching an earlier checkpoint, for bad data, a folder that is in use, a loss that is not
        finite, memory or disk that is full, a damaged checkpoint.
    """
    parallel = Parallel.of(config.parallel)
    if parallel.is_alone and launched_size() > 1:
        raise UserError(
            f"{launched_size()} processes were started and --parallel says nothing of how they share the work; pass "
            "--parallel ddp or --parallel fsdp."
        )
    progress = progress or Progress()
    with _repeatable(config.deterministic), _counting(config.fp8_stats):
        if parallel.is_alone:
            return _Run(config, progress, config.torch_device(), Ranks()).end_to_end()
        runs: list[_Run] = []
        with join(config.torch_device().type, config.timeout, lambda: runs[0].and_then() if runs else ".") as world:
            ranks = RanksOfWorld(world, parallel)
            ranks.check_batch(config.batch)
            run = _Run(config, progress if world.is_first else Progress(), world.device, ranks)
            runs.append(run)
            return run.end_to_end()


class _Run:
    """One process's share of a run."""

    def __init__(self, asked: TrainConfig, progress: Progress, device: torch.device, ranks: Ranks) -> None:
        config = self.config = asked.resolved()
        self.preset_is_automatic = asked.preset == "auto"
        self.progress = progress
        self.device = device
        self.ranks = ranks
        # Until the settings are known to fit the data, nobody has a folder.
        self.folder: RunFolder = ElsewhereFolder(config.out)
        self.trainer: Trainer | None = None
        self.has_begun = False
        self.last: dict[str, Any] = {}
        self.eval_loss: float | None = None
        self.saved: Path | None = None
        self.saved_step = self.counted_step = 0
        self.last_step = config.steps
        self.stopped_by: signal.Signals | None = None

    def end_to_end(self) -> TrainResult:
        """The run, and what ends it in words."""
        # A launcher may pass a signal on to processes that have it already.
        patience = 0.0 if self.ranks.size == 1 else PATIENCE
        with contextlib.closing(self):
            try:
                with Interruption(self.interrupted, patience=patience) as interruption:
                    return self.go(interruption)
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                raise UserError(self.memory_sentence(asked(error))) from error

    def go(self, interruption: Interruption) -> TrainResult:
        config, progress = self.config, self.progress
        source = open_source(config.data, seed=config.seed)
        model_config = config.gpt_config(source.vocab_size)
        # Data too short for one sequence is better known now than at the first step or evaluation.
        source.batch(0, 1, model_config.context)
        if config.eval_every:
            source.batch(0, 1, model_config.context, held_out=True)
        if self.ranks.is_first:
            self.folder = RunFolder(config.out, resume=config.resume)
        # Where the folder cannot be, nothing else begins.
        self.ranks.meet()
        trainer = self.trainer = Trainer(config, model_config, source, self.device, self.ranks)
        if config.resume:
            self._restore(trainer, source)
        self._introduce(trainer)

        contents = self._contents(trainer, source)
        readings = Readings(self.device)
        progress.start(trainer.step, config.steps)
        is_alone = self.ranks.size == 1
        while trainer.step < self.last_step and not (is_alone and interruption.signal is not None):
            self.ranks.check()
            readings.start()
            self.ranks.signal = interruption.signal
            values = trainer.train_step()
            readings.finish(trainer.step, values)
            if not self.has_begun:
                # Now it is known that a step fits into memory, so the folder is worth making.
                self.folder.begin(contents, last_step=trainer.step - 1)
                self.has_begun = True
            is_due = _is_due(trainer.step, config.eval_every) or _is_due(trainer.step, config.save_every)
            self._record(trainer, readings.ready(wait=is_due))
            if _is_due(trainer.step, config.eval_every):
                self._evaluate(trainer)
            if _is_due(trainer.step, config.save_every):
                self._save(trainer, contents)
        self._record(trainer, readings.ready(wait=True))
        if self.has_begun and self.saved_step != trainer.step:
            self._save(trainer, contents)
        progress.stop()

        signalled = interruption.signal if is_alone else self.stopped_by
        stopped_by = signalled if trainer.step < config.steps else None
        self._conclude(trainer, source, stopped_by)
        skipped = int(trainer.optimizer.skipped_steps)
        return TrainResult(trainer.step, self.last.get("loss"), self.eval_loss, skipped, self.saved, stopped_by)

    def close(self) -> None:
        self.progress.stop()
        self.folder.close()

    def interrupted(self, number: signal.Signals) -> None:
        self.progress.say(f"{number.name}: finishing this step, then saving; once more stops at once")

    def memory_sentence(self, asked: int) -> str:
        """`asked`: bytes of the allocation that failed."""
        trainer, peak = self.trainer, memory.peak(self.device)
        parts = memory.parts(
            None if trainer is None else trainer.model,
            has_masters=self.config.weights != "fp32",
            accumulates_in_fp32=trainer is not None and trainer.accumulates_in_fp32,
            peak=peak + asked,
        )
        said = memory.sentence(self.device, parts, peak, asked, self.config.batch, self.config.accumulate)
        return said + self.and_then()

    def _restore(self, trainer: Trainer, source: Source) -> None:
        self.ranks.at("reading the newest checkpoint")
        found = checkpoint.newest(Path(self.config.out), together=self.ranks.size > 1)
        if found is None:
            self.progress.say(f"{self.config.out} has no checkpoint yet: starting at step 0")
            return
        _check_unchanged(self.config, trainer, source, found)
        if found.step > self.config.steps:
            raise UserError(
                f"the run in {self.config.out} is at step {found.step}, past --steps {self.config.steps}; "
                f"raise --steps to go on."
            )
        trainer.restore(found)
        self.saved, self.saved_step = found.path, found.step
        self.progress.say(f"resuming {found.path}")

    def _note_stops(self, step: int, stops: list[float]) -> None:
        """Where a signal reached a rank, have all of them stop after the same step.

        Each reads a step's numbers when they come, but none is more than MAXIMUM_LAG steps further by then.
        """
        if any(stops) and self.stopped_by is None:
            self.stopped_by = next(number for number, count in zip(SIGNALS, stops, strict=True) if count)
            self.last_step = min(self.last_step, step + (MAXIMUM_LAG if self.device.type == "cuda" else 0))
            self.progress.say(f"{self.stopped_by.name} reached a rank: all stop after step {self.last_step} and save")

    def _introduce(self, trainer: Trainer) -> None:
        config, device = self.config, self.device
        name = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        )
        self.progress.say(trainer.model.describe())
        choice = dispatch.explain_choice("the optimizer and the fused norms", device.type, device.index)
        kernels = "our Triton kernels" if choice.implementation == "triton" else "the PyTorch reference"
        preset = config.preset
        if self.preset_is_automatic:
            preset += ", since there is a GPU" if device.type == "cuda" else ", the one for a CPU"
        weights = "" if config.weights == "fp32" else f", weights {config.weights} with fp32 masters"
        self.progress.say(f"device: {name} | fused parts run as {kernels}: {choice.reason}")
        self.progress.say(
            f"preset: {preset} | data: {config.data} | {counted(config.steps, 'step')} of "
            f"{counted(trainer.tokens_per_step, 'token')} "
            f"({config.batch} × {counted(config.accumulate, 'sequence')} of {trainer.model.config.context}) | "
            f"precision {config.precision}{weights}"
        )
        if config.parallel != "none":
            size = self.ranks.size
            self.progress.say(
                f"parallel: {config.parallel} | {counted(size, 'rank')}"
                + (f", {counted(config.batch // self.ranks.count, 'sequence')} each at a time" if size > 1 else "")
            )
        if trainer.fp8_recipe is not None:
            is_native, why = support(device, trainer.fp8_recipe)
            how = "this device's own products" if is_native else "emulated, the same numbers without the speed"
            self.progress.say(f"FP8: {trainer.fp8_recipe} | {how}: {why}")

    def _contents(self, trainer: Trainer, source: Source) -> dict[str, Any]:
        """What config.json and each checkpoint say of the run."""
        settings = dataclasses.asdict(self.config)
        # These belong to this command, not to the run.
        del settings["out"], settings["resume"]
        return {"train": settings, "model": trainer.model.config.to_dict(), "data": source.describe()}

    def _record(self, trainer: Trainer, readings: Iterator[Reading]) -> None:
        """Write the rows of the steps that were read.

        Raises: UserError if a loss is not finite.
        """
        for reading in readings:
            loss, grad_norm, lr, skipped, *stops = reading.values
            self._note_stops(reading.step, stops)
            row = {
                "step": reading.step,
                "loss": loss,
                "tokens": trainer.tokens_per_step,
                "ms": round(reading.ms, 4),
                "lr": lr,
                "grad_norm": grad_norm,
                "skipped": int(skipped),
            }
            self.folder.write(row)
            self.last = row
            if not math.isfinite(loss):
                others = ", or pass --precision bf16" if self.config.precision in ("fp16", "fp8") else ""
                raise UserError(
                    f"the loss became {loss} at step {reading.step}, with learning rate {lr:.3g}; lower --lr, raise "
                    f"--warmup, or set --clip 1{others}{self.and_then()}"
                )
            self.progress.update(row, memory.in_use(self.device))

    def _evaluate(self, trainer: Trainer) -> None:
        self._write_fp8(trainer)
        self.eval_loss = trainer.evaluate()
        tokens = EVALUATION_BATCHES * self.config.batch * trainer.model.config.context
        self.folder.write({"step": trainer.step, "eval_loss": self.eval_loss, "eval_tokens": tokens})
        self.progress.say(f"step {trainer.step}: held-out loss {self.eval_loss:.4f}")

    def _write_fp8(self, trainer: Trainer) -> None:
        """What FP8 has seen, once at a step, where that was asked for."""
        if not self.config.fp8_stats or self.counted_step == trainer.step:
            return
        self.counted_step = trainer.step
        rows = [dataclasses.asdict(row) for row in trainer.fp8_statistics()]
        for row in rows:
            del row["history"]
        self.folder.write_fp8([{"step": trainer.step, **row} for row in rows])

    def _save(self, trainer: Trainer, contents: dict[str, Any]) -> None:
        self._write_fp8(trainer)
        self.folder.sync()
        self.ranks.at(f"saving the checkpoint of step {trainer.step}")
        self.saved = checkpoint.save(
            self.folder.path,
            trainer.step,
            trainer.model.state_dict(),
            trainer.state(),
            config=contents["train"],
            model=contents["model"],
            data=contents["data"],
            together=self.ranks.size > 1,
        )
        self.saved_step = trainer.step

    def _conclude(self, trainer: Trainer, source: Source, stopped_by: signal.Signals | None) -> None:
        say, steps = self.progress.say, self.config.steps
        if stopped_by is not None:
            if self.saved is None:
                say("stopped before the first step; nothing was written")
            else:
                say(f"stopped at step {trainer.step} of {steps} and saved; go on with: {self._resume_command()}")
            return
        if not self.last:
            say(f"the run is at step {trainer.step} already; raise --steps to go on")
            return
        skipped = int(trainer.optimizer.skipped_steps)
        if skipped:
            say(f"{counted(skipped, 'step')} skipped, where gradients were not finite")
        say(f"saved {self.saved}")
        say(
            f"final loss {self.last['loss']:.4f} | a random guess has ln {source.vocab_size} = "
            f"{math.log(source.vocab_size):.4f}"
        )

    def and_then(self) -> str:
        """The end of a sentence about what ended the run: where it can be taken up again."""
        if self.saved is not None:
            return f"; the last good checkpoint is {self.saved}, go on from it with: {self._resume_command()}"
        if self.has_begun:
            return f"; there is no checkpoint yet, start over with: {self._resume_command()}"
        return "."

    def _resume_command(self) -> str:
        return f"fusestep train --resume --out {shlex.quote(self.config.out)}"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _check_unchanged(config: TrainConfig, trainer: Trainer, source: Source, saved: Checkpoint) -> None:
    """Refuse to go on with another model, other data, another seed or another dtype of the weights."""
    for name in ("data", "seed", "weights"):
        was, now = saved.config.get(name), getattr(config, name)
        if was != now:
            raise UserError(_changed_sentence(option(name), was, now))
    model = trainer.model.config.to_dict()
    for name, was in saved.model.items():
        # Neither changes what the weights mean.
        if name not in ("dropout", "form", "norm") and model.get(name) != was:
            raise UserError(_changed_sentence(f"the model's {name}", was, model.get(name)))
    data = source.describe()
    for name in sorted(data.keys() | saved.data.keys()):
        if data.get(name) != saved.data.get(name):
            raise UserError(_changed_sentence(f"the data's {name}", saved.data.get(name), data.get(name)))


def _changed_sentence(what: str, was: object, now: object) -> str:
    return (
        f"{what} was {was} in the run that is to go on, and is {now} now; put it back, or start a run in another --out."
    )


@contextlib.contextmanager
def _counting(wanted: bool) -> Iterator[None]:
    """Casts count what they saturate and flush to zero, for as long as the run lasts."""
    before = is_counting()
    count_saturation(wanted)
    try:
        yield
    finally:
        count_saturation(before)


@contextlib.contextmanager
def _repeatable(wanted: bool) -> Iterator[None]:
    """torch's deterministic algorithms, for as long as the run lasts."""
    if not wanted:
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS repeats itself only with a workspace of its own; read when its first product runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
