"""What a checkpoint knows of FP8: the scale and the amaxes of every tensor that its run casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusestep.errors import UserError
from fusestep.fp8.state import KEYS, Slots
from fusestep.fp8.statistics import TensorStatistics, rows_of
from fusestep.models import GPT, GPTConfig
from fusestep.train.checkpoint import FOLDER, Checkpoint, find
from fusestep.train.run_folder import read_fp8


@dataclass(frozen=True)
class Inspection:
    """The state of delayed scaling in a checkpoint.

    Attributes:
        checkpoint: where it was found.
        history_length: steps that the histories remember.
        tensors: in the order of the model; fractions are of the rows that fp8.jsonl has of this step, None without.
    """

    checkpoint: Checkpoint
    history_length: int
    tensors: tuple[TensorStatistics, ...]


def inspect(path: str | Path) -> Inspection:
    """Look into a run's folder, at its newest good checkpoint, or into one checkpoint.

    Raises: UserError if there is none, or it holds no FP8 state.
    """
    found = find(path)
    saved = found.fp8_state()
    if not saved:
        raise UserError(f"{found.path} holds no FP8 state, since {_why_none(found.config)}.")
    # Without storage: only the modules' names, and those of their tensors, are of interest.
    model = GPT(replace(GPTConfig.from_dict(found.model), form="fused", norm=None), device="meta")
    counted = {(row["module"], row["tensor"]): row for row in read_fp8(_run_of(found)) if row["step"] == found.step}
    tensors = []
    for name, module in model.named_modules():
        if name in saved:
            for row in rows_of(name, Slots.restored(module.SLOTS, saved[name], torch.device("cpu"))):
                seen = counted.get((row.module, row.tensor), {})
                tensors.append(replace(row, saturated=seen.get("saturated"), flushed=seen.get("flushed")))
    length = next(iter(saved.values()))[KEYS[1]].shape[1]
    return Inspection(found, length, tuple(tensors))


def statistics_of_run(found: Checkpoint) -> list[dict[str, Any]]:
    """The rows of the run's fp8.jsonl up to a checkpoint.

    Raises: UserError if there are none.
    """
    rows = [row for row in read_fp8(_run_of(found)) if row["step"] <= found.step]
    if not rows:
        raise UserError(
            f"{_run_of(found)} has no statistics over steps up to step {found.step}; train with --fp8-stats to keep "
            "them."
        )
    return rows


def _run_of(found: Checkpoint) -> Path:
    """The run's folder; that of a checkpoint which was moved out of one holds no statistics."""
    return found.path.parent.parent if found.path.parent.name == FOLDER else found.path


def _why_none(config: Mapping[str, Any]) -> str:
    precision, recipe = config.get("precision"), config.get("recipe")
    if precision != "fp8":
        return f"it was trained in {precision or 'another precision'}; name a run of fusestep train --precision fp8"
    return f"the recipe {recipe} keeps none from step to step; name a run of --recipe delayed"
