"""`fusestep generate`: continue prompts with a trained model, as text or as numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fusestep import hardware
from fusestep.data import Bytes, Numbers, arithmetic_sequences, strides
from fusestep.errors import UserError
from fusestep.models import generate
from fusestep.train.checkpoint import Checkpoint, load_model

SCHEMA = 1

#: Held-out sequences that are continued when arithmetic data is given no prompt, and how many ids of each are shown.
_HELD_OUT_PROMPTS, _HELD_OUT_IDS = 8, 8

#: New tokens unless --tokens says otherwise: a stride shows in few numbers, a text needs a few lines.
_NEW_NUMBERS, _NEW_BYTES = 24, 200


@dataclass(frozen=True)
class _Sample:
    """A prompt and its continuation; `strides` of both together where the data is arithmetic."""

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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue prompts with a trained model.

    Without a prompt, text begins after a newline, and arithmetic data continues sequences that were held out from
    training. Arithmetic data shows the stride at every step and whether each sequence keeps its own.

    Beyond the model's context, each token is generated from the last `context` tokens alone.
    """
    model, checkpoint = load_model(run, hardware.device_named(device))
    vocabulary, is_arithmetic = _vocabulary(checkpoint)
    prompts = _prompts(prompt, vocabulary, checkpoint, is_arithmetic=is_arithmetic)
    if tokens is None:
        tokens = _NEW_BYTES if isinstance(vocabulary, Bytes) else _NEW_NUMBERS
    # On the CPU, so that a seed draws the same numbers whatever the device.
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = generate(model, prompts, tokens, temperature=temperature, top_k=top_k, generator=generator)
    samples = []
    for ids, row in zip(prompts, rows, strict=True):
        everything = row.tolist()
        steps = strides(everything, vocabulary.vocab_size) if is_arithmetic else None
        samples.append(_Sample(ids, everything[len(ids) :], steps))
    if as_json:
        typer.echo(json.dumps(_as_dict(samples, vocabulary, checkpoint), ensure_ascii=False))
    else:
        typer.echo(_as_text(samples, vocabulary))


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
