"""What a training run is asked to do: one field for each option of `fusestep train`, checked on construction."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fusestep import hardware
from fusestep.distributed.mesh import Parallel
from fusestep.errors import UserError
from fusestep.fp8.recipes import AMAX_HISTORY, LONGEST_HISTORY, FormatName, Recipe, RecipeName, recipe_named
from fusestep.models import PRESETS, GPTConfig
from fusestep.models.config import Form
from fusestep.precision import BF16_CAPABILITY
from fusestep.tables import counted
from fusestep.train import run_folder

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
WeightDtype = Literal["fp32", "bf16", "fp16"]
DeviceName = Literal["auto", "cpu", "cuda"]

#: Dimensions of the model that a config file's `model` table may set in place of the preset's.
MODEL_FIELDS = ("vocab_size", "width", "heads", "layers", "ffn_width", "context", "tied_head")

#: Sequences in one step, and any dimension of the model; more is a slip of the keyboard.
MAXIMUM_WINDOW = MAXIMUM_DIMENSION = 2**24

#: What only training in FP8 asks about, and of that what only delayed scaling does.
FP8_FIELDS = ("recipe", "fp8_format", "amax_history", "fp8_stats")
DELAYED_FIELDS = ("amax_history", "fp8_stats")

#: In seconds, of `--timeout`: a rank that reads, computes or saves for as long is not slow yet.
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 2.0, 1e6

#: The least compute capability that computes in a 16-bit format at speed. FP8 is emulated where a chip lacks it.
_CAPABILITY = {"bf16": BF16_CAPABILITY, "fp16": (7, 0)}

#: What is not an FP8 product computes in bf16 under fp8.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def dtype_of(name: Precision) -> torch.dtype:
    """The torch dtype that an option such as `--precision bf16` names; for fp8, that of autocast around it."""
    return _DTYPES[name]


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Plain numbers, strings and booleans, so that it goes through JSON unchanged.

    A step is one update of the weights, from a window of `accumulate` micro-batches of `batch` sequences each. Both
    count the sequences of all ranks, so that a run is the same on any number of them.

    Args:
        preset: tiny, mini, scaleup or gpt2; auto is mini on a GPU and tiny on a CPU.
        model: dimensions in place of the preset's (see MODEL_FIELDS); a config file's table `model`.
        form: seed (nn.MultiheadAttention, additive mask), plain (fused QKV, SDPA) or fused (with fused norms).
        data: synthetic, text:PATH or tokens:PATH.
        steps: the step at which the run ends, counted from its very start, also on resume.
        lr: peak learning rate, reached after `warmup` steps, then a cosine down to a tenth at `schedule_steps`.
        schedule_steps: where the cosine ends; 0 follows `steps`.
        clip: largest global norm of the gradient; 0 does not clip.
        precision: fp32; bf16 and fp16 by torch.amp; fp8 is bf16 with the products of the blocks in FP8.
        recipe, fp8_format, amax_history: with precision fp8, as `fusestep.fp8.recipes.recipe_named` takes them; None
            is delayed, auto, 16.
        fp8_stats: under delayed scaling, count what is saturated and flushed to zero, and keep it in fp8.jsonl.
        weights: the dtype that weights are stored in; a 16-bit one keeps fp32 masters in the optimizer.
        parallel: how the ranks that torchrun started share the work; see `fusestep.distributed.mesh`.
        timeout: seconds that no rank may stay behind or silent; then all end, and the sentence names it.
        eval_every, save_every: in steps; 0 evaluates never, saves at the end alone.
        out: the run's folder.
        resume: go on in `out` from its newest good checkpoint.

    Raises: UserError for a value that cannot be trained with.
    """

    preset: str = "auto"
    model: Mapping[str, int | bool] = field(default_factory=dict)
    form: Form = "fused"
    data: str = "synthetic"
    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    lr: float = 3e-4
    warmup: int = 0
    schedule_steps: int = 0
    weight_decay: float = 0.01
    clip: float = 1.0
    dropout: float = 0.0
    precision: Precision = "fp32"
    recipe: RecipeName | None = None
    fp8_format: FormatName | None = None
    amax_history: int | None = None
    fp8_stats: bool = False
    weights: WeightDtype = "fp32"
    eval_every: int = 100
    save_every: int = 100
    activation_checkpointing: bool = False
    deterministic: bool = False
    device: DeviceName = "auto"
    parallel: str = "none"
    timeout: float = 600.0
    out: str = "run"
    resume: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if self.preset != "auto" and self.preset not in PRESETS:
            raise UserError(f"--preset is {self.preset!r}; choose one of auto, {', '.join(PRESETS)}.")
        for name in self.model:
            if name not in MODEL_FIELDS:
                raise UserError(f"the model table has {name!r}; it may set {', '.join(MODEL_FIELDS)}.")
        for name in ("steps", "batch", "accumulate"):
            self._in_range(name, 1)
        if self.window > MAXIMUM_WINDOW:
            raise UserError(
                f"--batch {self.batch} and --accumulate {self.accumulate} make steps of {self.window} sequences; "
                f"pass at most {MAXIMUM_WINDOW}."
            )
        for name in ("warmup", "schedule_steps", "weight_decay", "clip", "eval_every", "save_every", "seed"):
            self._in_range(name, 0)
        if not 0 < self.lr <= torch.finfo(torch.float32).max:
            raise UserError(f"--lr is {self.lr}; pass a learning rate above 0 that fp32 can hold, such as 3e-4.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout is {self.dropout}; pass a probability from 0 up to, not including, 1.")
        if self.warmup > self.schedule_length:
            raise UserError(
                f"--warmup is {self.warmup}, longer than the schedule of {counted(self.schedule_length, 'step')}; "
                f"lower it, or raise --steps or --schedule-steps."
            )
        if self.weights != "fp32" and dtype_of(self.weights) != dtype_of(self.precision):
            raise UserError(
                f"--weights is {self.weights} and --precision is {self.precision}; "
                f"weights are fp32, or of the precision that is computed in (bf16 for fp8)."
            )
        self._check_fp8()
        Parallel.of(self.parallel)
        if not SHORTEST_TIMEOUT <= self.timeout <= LONGEST_TIMEOUT:
            raise UserError(
                f"--timeout is {self.timeout:g}; pass {SHORTEST_TIMEOUT:g} to {LONGEST_TIMEOUT:,.0f} seconds."
            )
        if not self.out or "\0" in self.out:
            raise UserError(f"--out is {self.out!r}; name a folder for the run.")
        self._check_device()

    @property
    def schedule_length(self) -> int:
        """The step at which the cosine ends."""
        return self.schedule_steps or self.steps

    @property
    def window(self) -> int:
        """Sequences in one step."""
        return self.batch * self.accumulate

    @property
    def fp8_recipe(self) -> Recipe | None:
        """How FP8 scales are chosen; None for a run that is not in FP8."""
        if self.precision != "fp8":
            return None
        return recipe_named(self.recipe or "delayed", self.fp8_format or "auto", self.amax_history)

    def torch_device(self) -> torch.device:
        """The device that the run uses; auto is the current CUDA device where there is one."""
        return hardware.device_named(self.device)

    def resolved(self) -> TrainConfig:
        """The same run with every choice that was left open by its name, so that a checkpoint says what was trained."""
        chosen: dict[str, Any] = {}
        if self.preset == "auto":
            chosen["preset"] = "mini" if self.torch_device().type == "cuda" else "tiny"
        if self.precision == "fp8":
            chosen |= {"recipe": self.recipe or "delayed", "fp8_format": self.fp8_format or "auto"}
            if chosen["recipe"] == "delayed":
                chosen["amax_history"] = AMAX_HISTORY if self.amax_history is None else self.amax_history
        return dataclasses.replace(self, **chosen)

    def gpt_config(self, symbols: int) -> GPTConfig:
        """The model for data of `symbols` token ids.

        Raises: UserError where the model table asks for fewer symbols than the data has, or for impossible dimensions.
        """
        changes: dict[str, Any] = {**self.model, "dropout": self.dropout, "form": self.form}
        wanted = changes.pop("vocab_size", None)
        config = dataclasses.replace(PRESETS[self.resolved().preset], **changes).with_vocabulary(symbols)
        if wanted is None:
            return config
        if wanted < symbols:
            raise UserError(
                f"the model table sets vocab_size {wanted}, the data has {symbols} symbols; raise it or leave it out."
            )
        return dataclasses.replace(config, vocab_size=wanted, padded_from=symbols if wanted > symbols else None)

    def _check_fp8(self) -> None:
        """Refuse settings of FP8 where nothing would come of them."""
        if self.precision != "fp8":
            for name in FP8_FIELDS:
                if getattr(self, name) not in (None, False):
                    raise UserError(
                        f"{_said(name, getattr(self, name))} and --precision is {self.precision}; pass --precision fp8 "
                        f"with it, or leave it out."
                    )
            return
        if self.form != "fused":
            raise UserError(
                f"--precision is fp8 and --form is {self.form}; pass --form fused, whose blocks multiply in FP8."
            )
        if self.recipe not in (None, "delayed"):
            for name in DELAYED_FIELDS:
                if getattr(self, name) not in (None, False):
                    raise UserError(
                        f"{_said(name, getattr(self, name))} and --recipe is {self.recipe}, which keeps no state to "
                        f"look at; leave it out, or pass --recipe delayed."
                    )
        if self.amax_history is not None and not 1 <= self.amax_history <= LONGEST_HISTORY:
            raise UserError(f"--amax-history is {self.amax_history}; pass 1 to {LONGEST_HISTORY} steps.")

    def _in_range(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise UserError(f"{option(name)} is {value}; pass {least} or more.")
        if isinstance(value, int) and value >= 2**63:
            raise UserError(f"{option(name)} is {value}; pass one below 2^63.")

    def _check_types(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, _checked(option(name), value, kind))
        for name, value in self.model.items():
            _checked(f"model.{name}", value, bool if name == "tied_head" else int)
            if value > MAXIMUM_DIMENSION:
                raise UserError(f"model.{name} is {value}; pass at most {MAXIMUM_DIMENSION}.")

    def _check_device(self) -> None:
        """Refuse a GPU that is not there, and a precision that the GPU has no units for."""
        if self.device == "auto" and self.precision not in _CAPABILITY:
            return  # any device will do, so none is looked for yet
        target = self.torch_device()
        if self.precision not in _CAPABILITY or target.type == "cpu":
            return
        device = hardware.devices()[target.index]
        if device.capability < _CAPABILITY[self.precision]:
            have, need = hardware.dotted(device.capability), hardware.dotted(_CAPABILITY[self.precision])
            others = "fp32" if self.precision == "fp16" else "fp16 or fp32"
            raise UserError(
                f"--precision is {self.precision}, which needs compute capability {need}; {device.name} has {have}: "
                f"use --precision {others}."
            )


_KINDS: dict[str, Any] = get_type_hints(TrainConfig)


def option(name: str) -> str:
    """The command line's name for a field: eval_every is --eval-every."""
    return "--" + name.replace("_", "-")


def _said(name: str, value: object) -> str:
    """A setting as someone made it: --fp8-stats is given, --recipe is current."""
    return f"{option(name)} is {'given' if value is True else value}"


def _checked(who: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`, or a sentence that says what was wanted. An int serves as a float, a bool as neither."""
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(f"{who} is {value!r}; choose one of {', '.join(get_args(kind))}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a table")
    wrong = not isinstance(value, kind if isinstance(kind, type) else Mapping)
    if wrong or (kind is int and isinstance(value, bool)):
        raise UserError(f"{who} is {value!r}; pass {wanted}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{who} is {value}; pass a finite number.")
    return value


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The settings in a JSON or TOML file, by TrainConfig's field names (dashes serve for underscores).

    Raises: UserError if the file cannot be read, is neither, or names a setting that does not exist.
    """
    path = Path(path)
    try:
        # Some editors begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--config {path} cannot be read ({why}); name a JSON or TOML file.") from error
    try:
        settings = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        mend = "correct it" if path.suffix in (".toml", ".json") else "correct it, or name it .toml if it is TOML"
        raise UserError(f"--config {path} is not {kind} ({error}); {mend}.") from error
    if not isinstance(settings, dict):
        raise UserError(f'--config {path} holds no table of settings; write {{"steps": 100, ...}}.')
    known = {f.name for f in fields(TrainConfig)}
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            mend = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(sorted(known))}."
            raise UserError(f"--config {path} sets {name!r}, which is no setting; {mend}")
    return settings


def settings_of(given: Mapping[str, Any], *, file: str | None, resume: bool) -> dict[str, Any]:
    """All settings that someone chose: those `given`, over a config file's, over those of the run that is resumed.

    Raises: UserError for a bad file, or if there is no run to resume.
    """
    chosen = {**({} if file is None else read_config_file(file)), **given}
    if not (resume or chosen.get("resume")):
        return chosen
    out = chosen.get("out", TrainConfig.out)
    saved = run_folder.read_config(Path(out))["train"]
    known = {f.name for f in fields(TrainConfig)}
    saved = {name: value for name, value in saved.items() if name in known}
    # What the run said of FP8 goes when what it was said of does.
    if chosen.get("precision", saved.get("precision")) != "fp8":
        saved = {name: value for name, value in saved.items() if name not in FP8_FIELDS}
    elif chosen.get("recipe", saved.get("recipe")) not in (None, "delayed"):
        saved = {name: value for name, value in saved.items() if name not in DELAYED_FIELDS}
    return {**saved, **chosen, "resume": True}


def has_begun(given: Mapping[str, Any], *, file: str | None) -> bool:
    """Whether the run that these settings name is there, so that it can be resumed.

    Raises: UserError for a bad file.
    """
    chosen = {**({} if file is None else read_config_file(file)), **given}
    return (Path(chosen.get("out", TrainConfig.out)) / run_folder.CONFIG).exists()
