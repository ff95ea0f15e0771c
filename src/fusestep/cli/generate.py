"""`fusestep generate`: continue prompts with a trained model, as text or as numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from fusestep import hardware
from fusestep.data import Bytes, Numbers, arithmetic_sequences, strides
from fusestep.errors import UserError
from fusestep.fp8 import fp8_autocast
from fusestep.fp8.recipes import FormatName, Recipe, RecipeName, recipe_named
from fusestep.models import GPT, generate
from fusestep.models.fp8_weights import keep_weights_in_fp8, weight_bytes
from fusestep.train.checkpoint import Checkpoint, find, model_of
from fusestep.train.config import Precision, dtype_of

SCHEMA = 1

#: Held-out sequences that are continued when arithmetic data is given no prompt, and how many ids of each are shown.
_HELD_OUT_PROMPTS, _HELD_OUT_IDS = 8, 8

#: New tokens unless --tokens says otherwise: a stride shows in few numbers, a text needs a few lines.
_NEW_NUMBERS, _NEW_BYTES = 24, 200


@dataclass(frozen=True)
class _Computing:
    """How the model computes.

    Attributes:
        precision: as of `fusestep train`.
        recipe: of products in FP8, and of weights that live in FP8; None where there is neither.
        keeps_fp8_weights: whether the weights live in FP8.
    """

    precision: Precision
    recipe: Recipe | None
    keeps_fp8_weights: bool

    @contextmanager
    def region(self, device: torch.device) -> Iterator[None]:
        """The region in which the model is called."""
        is_mixed = self.precision != "fp32"
        with (
            torch.autocast(device.type, dtype_of(self.precision), enabled=is_mixed),
            fp8_autocast(enabled=self.precision == "fp8", recipe=self.recipe),
        ):
            yield


@dataclass(frozen=True)
class _Weights:
    """Bytes of weights that live in FP8, and of the same model without."""

    now: int
    before: int
    dtype: str


@dataclass(frozen=True)
class _Sample:
    """A prompt and its continuation; `strides` of both together where the data is arithmetic and there is one."""

    prompt: list[int]
    continuation: list[int]
    strides: list[int] | None

    @property
    def keeps_stride(self) -> bool:
        return self.strides is not None and len(set(self.strides)) <= 1


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|IDS",
            help="What to continue: text, or numbers such as '3 5 7' for data made of numbers. Repeat it for several.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help=f"New tokens. [default: {_NEW_BYTES} for text, {_NEW_NUMBERS} for numbers]", metavar="N"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among this many likeliest tokens. [default: all]", metavar="K")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    precision: Annotated[str, typer.Option(help="auto (that of the training), fp32, bf16, fp16 or fp8.")] = "auto",
    recipe: Annotated[
        str | None,
        typer.Option(help="Of FP8: delayed, current, block or mxfp8. [default: that of the training, else delayed]"),
    ] = None,
    fp8_format: Annotated[
        str | None, typer.Option(help="Of FP8: auto, hybrid or e4m3. [default: that of the training, else auto]")
    ] = None,
    fp8_weights: Annotated[
        bool, typer.Option("--fp8-weights", help="Keep the blocks' weights in FP8 alone, in half of bf16's memory.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue prompts with a trained model.

    Without a prompt, text begins after a newline, and arithmetic data continues sequences that were held out from
    training. Arithmetic data shows the stride at every step and whether each sequence keeps its own.

    Beyond the model's context, each token is generated from the last `context` tokens alone.

    A model generates in the precision that it was trained in: one trained in FP8 under its own recipe, with the scales
    that it has learnt.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed is {seed}; give an integer from 0 to 2^63 - 1.")
    target = hardware.device_named(device)
    checkpoint = find(run)
    computing = _computing(checkpoint, precision, recipe, fp8_format, fp8_weights=fp8_weights)
    model, weights = _load(checkpoint, target, computing)
    vocabulary, is_arithmetic = _vocabulary(checkpoint)
    prompts = _prompts(prompt, vocabulary, checkpoint, is_arithmetic=is_arithmetic)
    if tokens is None:
        tokens = _NEW_BYTES if isinstance(vocabulary, Bytes) else _NEW_NUMBERS
    # On the CPU, so that a seed draws the same numbers whatever the device.
    generator = torch.Generator().manual_seed(seed)
    with computing.region(target):
        rows = generate(model, prompts, tokens, temperature=temperature, top_k=top_k, generator=generator)
    samples = []
    for ids, row in zip(prompts, rows, strict=True):
        everything = row.tolist()
        # Where nothing was generated, a stride would be the prompt's alone.
        steps = strides(everything, vocabulary.vocab_size) if is_arithmetic and tokens else None
        samples.append(_Sample(ids, everything[len(ids) :], steps))
    if as_json:
        answer = _as_dict(samples, vocabulary, checkpoint) | {"precision": computing.precision}
        if weights is not None:
            answer["weights"] = {"bytes": weights.now, f"bytes_in_{weights.dtype}": weights.before}
        typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        if weights is not None:
            typer.echo(
                f"weights: {weights.now / 2**20:.1f} MiB with the blocks' in FP8, {weights.before / 2**20:.1f} MiB "
                f"all in {weights.dtype}",
                err=True,
            )
        typer.echo(_as_text(samples, vocabulary))


def _computing(
    found: Checkpoint, precision: str, recipe: str | None, fp8_format: str | None, *, fp8_weights: bool
) -> _Computing:
    """How to compute, from what was asked for and what the checkpoint's run did.

    Raises: UserError for names that are none, and for settings of FP8 where there is none.
    """
    for option, name, known in (
        ("--precision", None if precision == "auto" else precision, ("auto", *get_args(Precision))),
        ("--recipe", recipe, get_args(RecipeName)),
        ("--fp8-format", fp8_format, get_args(FormatName)),
    ):
        if name is not None and name not in known:
            raise UserError(f"{option} is {name!r}; choose one of {', '.join(known)}.")
    trained: Any = found.config.get("precision", "fp32")
    chosen: Any = trained if precision == "auto" else precision
    if chosen not in get_args(Precision):
        raise UserError(f"{found.path} was trained in {chosen!r}, which this version does not know; pass --precision.")
    if chosen != "fp8" and not fp8_weights:
        if recipe is not None or fp8_format is not None:
            option = "--recipe" if recipe is not None else "--fp8-format"
            raise UserError(
                f"{option} is {recipe or fp8_format} and the precision is {chosen}; pass --precision fp8 or "
                "--fp8-weights with it, or leave it out."
            )
        return _Computing(chosen, None, keeps_fp8_weights=False)
    own_recipe, own_format = found.config.get("recipe") or "delayed", found.config.get("fp8_format") or "auto"
    # A format belongs to the recipe that it was trained with.
    formats = fp8_format or (own_format if recipe in (None, own_recipe) else "auto")
    named: Any = recipe or own_recipe, formats
    return _Computing(chosen, recipe_named(*named), keeps_fp8_weights=fp8_weights)


def _load(found: Checkpoint, device: torch.device, computing: _Computing) -> tuple[GPT, _Weights | None]:
    # Of the three forms, which are one function, the fused one multiplies in FP8.
    if computing.recipe is None:
        return model_of(found, device), None
    if not computing.keeps_fp8_weights:
        return model_of(found, device, form="fused"), None
    dtype = dtype_of(computing.precision)
    # On the CPU first: the device never holds more than the weights in FP8.
    model = model_of(found, dtype=dtype, form="fused")
    before = weight_bytes(model)
    keep_weights_in_fp8(model, computing.recipe)
    model.to(device)
    return model, _Weights(weight_bytes(model), before, str(dtype).removeprefix("torch."))


def _vocabulary(checkpoint: Checkpoint) -> tuple[Bytes | Numbers, bool]:
    """How the run's data is written, and whether it is arithmetic sequences; the data itself need not be there."""
    match checkpoint.data.get("source"):
        case "text":
            return Bytes(), False
        case "tokens":
            return Numbers(_number(checkpoint, "vocab_size")), False
        case "arithmetic sequences":
            return Numbers(_number(checkpoint, "vocab_size")), True
        case other:
            raise UserError(
                f"{checkpoint.path} was trained on {other!r}, which this version cannot write as text; "
                "upgrade fusestep, or generate in Python with fusestep.models.generate."
            )


def _number(checkpoint: Checkpoint, name: str) -> int:
    value = checkpoint.data.get(name)
    if not isinstance(value, int):
        raise UserError(f"{checkpoint.path} is damaged (its data's {name} is {value!r}); use an earlier checkpoint.")
    return value


def _prompts(
    given: list[str] | None, vocabulary: Bytes | Numbers, checkpoint: Checkpoint, *, is_arithmetic: bool
) -> list[list[int]]:
    if given is None and is_arithmetic:
        source = arithmetic_sequences(vocabulary.vocab_size, seed=_number(checkpoint, "seed"))
        drawn, _ = source.batch(0, 100 * _HELD_OUT_PROMPTS, _HELD_OUT_IDS, held_out=True)
        # The first different ones, since samples come back.
        return [list(ids) for ids in dict.fromkeys(map(tuple, drawn.tolist()))][:_HELD_OUT_PROMPTS]
    if isinstance(vocabulary, Bytes):
        # Text begins where a line does.
        return [vocabulary.encode(text or "\n") for text in given or [""]]
    prompts = [vocabulary.encode(text) for text in given or []]
    if not prompts or not all(prompts):
        raise UserError(
            f"--prompt is missing or empty; give ids below {vocabulary.vocab_size}, such as --prompt '3 5 7'."
        )
    return prompts


def _as_dict(samples: list[_Sample], vocabulary: Bytes | Numbers, checkpoint: Checkpoint) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for sample in samples:
        row: dict[str, Any] = {"prompt": sample.prompt, "continuation": sample.continuation}
        if isinstance(vocabulary, Bytes):
            row["text"] = vocabulary.decode(sample.prompt + sample.continuation)
        if sample.strides is not None:
            row |= {"strides": sample.strides, "constant_stride": sample.keeps_stride}
        rows.append(row)
    return {"schema": SCHEMA, "checkpoint": str(checkpoint.path), "step": checkpoint.step, "samples": rows}


def _as_text(samples: list[_Sample], vocabulary: Bytes | Numbers) -> str:
    parts = []
    for number, sample in enumerate(samples, 1):
        if isinstance(vocabulary, Bytes):
            # Texts have blank lines of their own, so that several need a mark between them.
            title = f"--- prompt {number} of {len(samples)}\n" if len(samples) > 1 else ""
            parts.append(title + _printable(vocabulary.decode(sample.prompt + sample.continuation)))
            continue
        line = f"prompt + generation: {vocabulary.decode(sample.prompt)} | {vocabulary.decode(sample.continuation)}"
        if sample.strides is not None:
            verdict = "constant stride" if sample.keeps_stride else "the stride changes"
            line += f"\nstep differences:    {vocabulary.decode(sample.strides)} <- {verdict}"
        parts.append(line)
    text = "\n\n".join(parts)
    if samples and samples[0].strides is not None:
        text += f"\n\nconstant stride: {sum(sample.keeps_stride for sample in samples)} of {len(samples)}"
    return text


def _printable(text: str) -> str:
    """Without control characters, which a model of bytes may generate and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
