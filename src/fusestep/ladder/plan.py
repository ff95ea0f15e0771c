"""What a ladder is to measure: the options, checked, and every choice that they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusestep import hardware
from fusestep.data import open_source
from fusestep.errors import UserError
from fusestep.fp8 import support
from fusestep.fp8.recipes import FormatName, RecipeName, recipe_named
from fusestep.ladder import gate
from fusestep.ladder.rungs import RUNGS, Recipe, Rung, default_names, recipe_of, select
from fusestep.ladder.timing import steps_in_windows
from fusestep.ladder.worker import Request
from fusestep.language import interpreted
from fusestep.models import GPT, PRESETS, GPTConfig

#: Sequences in a batch where none are asked for; those of the speed targets.
BATCH = {"tiny": 8, "mini": 32, "scaleup": 32, "gpt2": 16}

#: Rounds, steps or sequences; more is a slip of the keyboard.
MAXIMUM_COUNT = 10**6


@dataclass(frozen=True)
class LadderConfig:
    """What to measure; None lets the device decide.

    Attributes:
        preset: a name of `fusestep.models.PRESETS`; auto is mini on a GPU and tiny on a CPU.
        rungs: which, as `fusestep.ladder.rungs.select` reads it; auto is all that mean something on the device.
        data: what the timed steps train on, as `fusestep.data.open_source` reads it; the gate has its own text.
        rounds: how often each rung is timed, each time in a process of its own; 5 on a GPU, 3 on a CPU.
        steps: timed steps a process, rounded up to whole windows; 36 on a GPU, 24 on a CPU.
        gate_steps: steps of each loss curve that the gate compares; 200 on a GPU, 40 on a CPU.
        batch: sequences a step.
        device: as `fusestep.hardware.device_named` reads it.
        seed: of weights, data and the order of the rungs.
        scaling, fp8_format, amax_history: of the rung fp8, as `fusestep.fp8.recipes.recipe_named` takes them.
        fp8_stats: count what FP8 saturates while the gate runs.
    """

    preset: str = "auto"
    rungs: str = "auto"
    data: str = "synthetic"
    rounds: int | None = None
    steps: int | None = None
    gate_steps: int | None = None
    batch: int | None = None
    device: str = "auto"
    seed: int = 0
    scaling: RecipeName = "delayed"
    fp8_format: FormatName = "auto"
    amax_history: int | None = None
    fp8_stats: bool = False


@dataclass(frozen=True)
class Plan:
    """A `LadderConfig` with every choice made, and remarks about those that were made for the reader."""

    preset: str
    rungs: tuple[str, ...]
    data: str
    rounds: int
    steps: int
    gate_steps: int
    batch: int
    device: str
    seed: int
    scaling: RecipeName
    fp8_format: FormatName
    amax_history: int | None
    fp8_stats: bool
    model: GPTConfig
    gate_model: GPTConfig
    parameters: int
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.model.context

    def as_dict(self) -> dict[str, Any]:
        """Every choice as plain values; the notes are for the reader of a report."""
        fields = asdict(self)
        del fields["notes"]
        return fields

    def recipe_of(self, name: str, rungs: Sequence[Rung]) -> Recipe:
        """The recipe of a rung, FP8 in the way that was asked for."""
        recipe = recipe_of(name, rungs, self.rungs)
        if recipe.precision != "fp8":
            return recipe
        return replace(recipe, scaling=self.scaling, fp8_format=self.fp8_format, amax_history=self.amax_history)

    def request(self, recipe: Recipe) -> Request:
        """The request that times a recipe."""
        return Request("time", recipe, self.model.to_dict(), self.data, self.batch, self.steps, self.device, self.seed)

    def gate_request(self, recipe: Recipe, *, reverse: bool = False) -> Request:
        """The request for a recipe's loss curve on the gate's text."""
        return replace(
            self.request(recipe),
            task="gate",
            model=self.gate_model.to_dict(),
            data=gate.DATA,
            steps=self.gate_steps,
            reverse=reverse,
            fp8_stats=self.fp8_stats and recipe.precision == "fp8",
        )


def plan(config: LadderConfig, rungs: Sequence[Rung] = RUNGS) -> Plan:
    """Check a config and make every choice that it leaves open, before anything runs.

    Raises: UserError for whatever of it cannot be.
    """
    for name in ("rounds", "steps", "gate_steps", "batch"):
        value = getattr(config, name)
        if value is not None and not 1 <= value <= MAXIMUM_COUNT:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give 1 to {MAXIMUM_COUNT}.")
    if not 0 <= config.seed < 2**63:
        raise UserError(f"--seed is {config.seed}; give an integer from 0 to 2^63 - 1.")
    device = hardware.device_named(config.device)
    names = default_names(device, rungs) if config.rungs == "auto" else select(config.rungs, rungs)
    on_gpu = device.type == "cuda"
    preset = ("mini" if on_gpu else "tiny") if config.preset == "auto" else config.preset
    if preset not in PRESETS:
        raise UserError(f"--preset is {preset!r}; choose one of auto, {', '.join(PRESETS)}.")
    base = PRESETS[preset]
    model = _for_symbols(base, open_source(config.data, seed=config.seed).vocab_size)
    notes = []
    if not on_gpu:
        why = f" ({hardware.cuda_support().reason})" if config.device == "auto" else ""
        smaller = f" with the smallest preset, {preset}" if config.preset == "auto" else ""
        notes.append(
            f"Measured on the CPU{why}{smaller}; peak is the largest resident set of a process, libraries included."
        )
    notes += _fp8_notes(config, names, rungs, device)
    graphed = [rung.name for rung in rungs if recipe_of(rung.name, rungs).graph and rung.name not in names]
    if config.rungs == "auto" and graphed:
        notes.append(f"The rung {', '.join(graphed)} is left out, since CUDA graphs run on CUDA devices alone.")
    if interpreted():
        notes.append("TRITON_INTERPRET=1: kernels run through an interpreter, and their times say nothing of a GPU.")
    return Plan(
        preset=preset,
        rungs=names,
        data=config.data,
        rounds=config.rounds or (5 if on_gpu else 3),
        steps=steps_in_windows(config.steps or (36 if on_gpu else 24)),
        gate_steps=config.gate_steps or (200 if on_gpu else 40),
        batch=config.batch or BATCH[preset],
        device=str(device),
        seed=config.seed,
        scaling=config.scaling,
        fp8_format=config.fp8_format,
        amax_history=config.amax_history,
        fp8_stats=config.fp8_stats,
        model=model,
        gate_model=_for_symbols(base, 256),
        parameters=GPT(model, device="meta").parameter_count(),
        notes=tuple(notes),
    )


def _fp8_notes(config: LadderConfig, names: Sequence[str], rungs: Sequence[Rung], device: torch.device) -> list[str]:
    """Check what is asked of the rung fp8, and say where it is emulated, left out or not the default.

    Raises: UserError for options that nothing comes of.
    """
    in_fp8 = [rung.name for rung in rungs if recipe_of(rung.name, rungs, names).precision == "fp8"]
    if config.amax_history is not None and config.scaling != "delayed":
        raise UserError(
            f"--amax-history is {config.amax_history} and --recipe is {config.scaling}, which has none; leave one out."
        )
    recipe = recipe_named(config.scaling, config.fp8_format, config.amax_history)
    is_native, why = support(device, recipe)
    if not set(in_fp8) & set(names):
        chosen = {"--recipe": config.scaling != "delayed", "--fp8-format": config.fp8_format != "auto"}
        chosen |= {"--amax-history": config.amax_history is not None, "--fp8-stats": config.fp8_stats}
        for option, is_given in chosen.items():
            if is_given:
                raise UserError(
                    f"{option} is of the rung fp8, which is not run; name it with --rungs, or leave it out."
                )
        if in_fp8 and config.rungs == "auto":
            left_out = f"The rung {', '.join(in_fp8)} is left out, since FP8 would be emulated: {why}"
            return [f"{left_out}; --rungs 1-{len(rungs)} runs it."]
        return []
    if config.fp8_stats and not recipe.has_history:
        raise UserError(
            f"--fp8-stats looks at the state of delayed scaling and --recipe is {config.scaling}; leave one out."
        )
    notes = [] if is_native else [f"FP8 is emulated: the numbers of FP8, and slower than without; {why}."]
    return notes if recipe == recipe_named() else [*notes, f"FP8 is {recipe}."]


def _for_symbols(base: GPTConfig, symbols: int) -> GPTConfig:
    """The preset, with a wider vocabulary where the data needs one: it is the preset's shapes that are measured."""
    return base if symbols <= base.symbols else base.with_vocabulary(symbols)
