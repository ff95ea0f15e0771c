"""What a ladder is to measure: the options, checked, and every choice that they leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusestep import hardware
from fusestep.data import open_source
from fusestep.errors import UserError
from fusestep.fp8.recipes import FormatName, RecipeName
from fusestep.ladder import described, gate, work
from fusestep.ladder.choices import remarks
from fusestep.ladder.config import LadderConfig
from fusestep.ladder.contenders import (
    PEERS_OF_OWN_MODELS,
    Contender,
    can_compile,
    contenders_of_peer,
    native,
    native_names,
    peer_names,
)
from fusestep.ladder.described import Description
from fusestep.ladder.processes import Workers
from fusestep.ladder.request import Request
from fusestep.ladder.rungs import RUNGS, Recipe, Rung, default_names, recipe_of, select
from fusestep.ladder.subject import RANDOM
from fusestep.ladder.timing import steps_in_windows
from fusestep.models import GPT, PRESETS, GPTConfig

#: Sequences in a batch where none are asked for; those of the speed targets.
BATCH = {"tiny": 8, "mini": 32, "scaleup": 32, "gpt2": 16, "gpt2-untied": 16, "long": 4}

#: Where no steps are asked for, a window of them need not be longer than this to be timed well.
ENOUGH_MS = 100.0

#: Rounds, steps or sequences; more is a slip of the keyboard.
MAXIMUM_COUNT = 10**6

#: What is timed on by default where the vocabulary is this small; a larger one would hardly be touched by it.
_SYNTHETIC, _SYNTHETIC_UP_TO = "synthetic", 1024


@dataclass(frozen=True)
class Plan:
    """A `LadderConfig` with every choice made, and remarks about those that were made for the reader.

    `enough_ms` is of `fusestep.ladder.timing.measure`, None where the steps were asked for.
    `preset`, `model` and `gate_model` are those of the built-in GPT; a model of the user's has its `factory` and what
    is known of it, `described`.
    """

    preset: str | None
    rungs: tuple[str, ...]
    data: str
    rounds: int
    steps: int
    gate_steps: int
    batch: int | None
    device: str
    seed: int
    scaling: RecipeName
    fp8_format: FormatName
    amax_history: int | None
    fp8_stats: bool
    model: GPTConfig | None
    gate_model: GPTConfig | None
    parameters: int
    factory: str | None
    described: Description | None
    natives: tuple[str, ...]
    compiled: bool
    peers: tuple[str, ...]
    notes: tuple[str, ...]
    enough_ms: float | None = None

    @property
    def tokens(self) -> int:
        """Of a step."""
        if self.described is not None:
            return self.described.tokens
        assert self.model is not None
        assert self.batch is not None
        return self.batch * self.model.context

    def as_dict(self) -> dict[str, Any]:
        """Every choice as plain values; the notes are for the reader of a report, and `enough_ms` follows from no
        `steps` being asked for.
        """
        fields = asdict(self)
        del fields["notes"], fields["enough_ms"]
        return fields

    def recipe_of(self, name: str, rungs: Sequence[Rung]) -> Recipe:
        """The recipe of a rung, FP8 in the way that was asked for."""
        recipe = recipe_of(name, rungs, self.rungs)
        if recipe.precision != "fp8":
            return recipe
        return replace(recipe, scaling=self.scaling, fp8_format=self.fp8_format, amax_history=self.amax_history)

    def contenders(self) -> list[Contender]:
        """What stands beside the rungs."""
        device = torch.device(self.device)
        found = [native(name, device, compiled=self.compiled) for name in self.natives]
        is_own = self.factory is not None
        return found + [one for peer in self.peers for one in contenders_of_peer(peer, device, is_own=is_own)]

    def work_of(self, recipe: Recipe) -> tuple[int, int]:
        """FLOPs and bytes of a step by formula."""
        if self.described is not None:
            return self.described.flops, self.described.moved(recipe.precision)
        assert self.model is not None
        assert self.batch is not None
        flops = work.flops_per_step(self.model, self.batch)
        return flops, work.bytes_per_step(self.model, self.parameters, self.batch, recipe.precision)

    @property
    def formulas(self) -> dict[str, str]:
        """Of `work_of`, for a reader."""
        counted = work if self.described is None else described
        return {"flops_formula": counted.FLOPS_FORMULA, "bytes_formula": counted.BYTES_FORMULA}

    def request(self, recipe: Recipe) -> Request:
        """The request that times a recipe."""
        model = None if self.model is None else self.model.to_dict()
        return Request(
            "time",
            recipe,
            model,
            self.data,
            self.batch,
            self.steps,
            self.device,
            self.seed,
            factory=self.factory,
            enough_ms=self.enough_ms,
        )

    def gate_request(self, recipe: Recipe, *, reverse: bool = False) -> Request:
        """The request for a recipe's loss curve on the gate's text, or on a user's own batches."""
        return replace(
            self.request(recipe),
            task="gate",
            model=None if self.gate_model is None else self.gate_model.to_dict(),
            data=gate.DATA,
            steps=self.gate_steps,
            reverse=reverse,
            fp8_stats=self.fp8_stats and recipe.precision == "fp8",
        )


def plan(config: LadderConfig, rungs: Sequence[Rung] = RUNGS) -> Plan:
    """Check a config and make every choice that it leaves open, before anything is measured.

    A user's model is made and takes one step, in a process of its own.

    Raises: UserError for whatever of it cannot be.
    """
    for name in ("rounds", "steps", "gate_steps", "batch"):
        value = getattr(config, name)
        if value is not None and not 1 <= value <= MAXIMUM_COUNT:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give 1 to {MAXIMUM_COUNT}.")
    if not 0 <= config.seed < 2**63:
        raise UserError(f"--seed is {config.seed}; give an integer from 0 to 2^63 - 1.")
    device = hardware.device_named(config.device)
    names = (
        default_names(device, rungs, config.base)
        if config.rungs == "auto"
        else select(config.rungs, rungs, config.base)
    )
    on_gpu = device.type == "cuda"
    preset = None if config.model is not None else _preset(config, on_gpu=on_gpu)
    base = None if preset is None else PRESETS[preset]
    precisions = [recipe_of(name, rungs, names).precision for name in names]
    natives, peers = native_names(config.natives, precisions), peer_names(config.peers)
    compiled = on_gpu if config.compiled is None else config.compiled
    if natives and compiled and not on_gpu and not can_compile():
        raise UserError("--compile needs a C++ compiler on a CPU, and there is none; install g++, or leave it out.")
    notes = remarks(config, names, rungs, device)
    data = _data(config, base)
    model = None
    if base is not None:
        symbols = base.symbols if data == RANDOM else open_source(data, seed=config.seed).vocab_size
        model = _for_symbols(base, symbols)
    made = Plan(
        preset=preset,
        rungs=names,
        data=data,
        rounds=config.rounds or (5 if on_gpu else 3),
        steps=steps_in_windows(config.steps or (36 if on_gpu else 24)),
        gate_steps=config.gate_steps or (200 if on_gpu else 40),
        batch=config.batch if preset is None else config.batch or BATCH[preset],
        device=str(device),
        seed=config.seed,
        scaling=config.scaling,
        fp8_format=config.fp8_format,
        amax_history=config.amax_history,
        fp8_stats=config.fp8_stats,
        model=model,
        gate_model=None if base is None else _for_symbols(base, 256),
        parameters=0 if model is None else GPT(model, device="meta").parameter_count(),
        factory=config.model,
        described=None,
        natives=natives,
        compiled=compiled and bool(natives),
        peers=peers,
        notes=tuple(notes),
        enough_ms=None if config.steps is not None else ENOUGH_MS,
    )
    return made if config.model is None else _described(made)


def _preset(config: LadderConfig, *, on_gpu: bool) -> str:
    preset = ("mini" if on_gpu else "tiny") if config.preset == "auto" else config.preset
    if preset not in PRESETS:
        raise UserError(f"--preset is {preset!r}; choose one of auto, {', '.join(PRESETS)}.")
    return preset


def _data(config: LadderConfig, base: GPTConfig | None) -> str:
    """What is timed on; a user's model brings its own batches."""
    if base is None:
        for option, given in (("--preset", config.preset != "auto"), ("--data", config.data != "auto")):
            if given:
                raise UserError(f"{option} is of the built-in model, and --model names one of yours; leave one out.")
        return "its own"
    if config.data != "auto":
        return config.data
    return _SYNTHETIC if base.symbols <= _SYNTHETIC_UP_TO else RANDOM


def _described(made: Plan) -> Plan:
    """The plan with what a worker finds out about the user's model.

    Raises: UserError for whatever of that model cannot be.
    """
    request = replace(made.request(Recipe()), task="describe", rungs=made.rungs)
    with Workers() as workers:
        reply = workers.run(request)
    if reply.done is None:
        said = (reply.failed or "").rstrip(".")
        is_sentence = said.startswith("--")
        raise UserError(f"{said}." if is_sentence else f"--model: {made.factory} cannot be trained: {said}.")
    found = Description(**reply.done)
    notes = [*made.notes, *(f"The rung {rung} swaps {what}." for rung, what in found.swapped.items())]
    left_out = [peer for peer in made.peers if peer not in PEERS_OF_OWN_MODELS]
    if left_out:
        notes.append(
            f"Without {' and '.join(left_out)}, whose parts are made for whole GPTs: this model is one of your own."
        )
    peers = tuple(peer for peer in made.peers if peer in PEERS_OF_OWN_MODELS)
    return replace(made, described=found, parameters=found.parameters, peers=peers, notes=tuple(notes))


def _for_symbols(base: GPTConfig, symbols: int) -> GPTConfig:
    """The preset, with a wider vocabulary where the data needs one: it is the preset's shapes that are measured."""
    return base if symbols <= base.symbols else base.with_vocabulary(symbols)
