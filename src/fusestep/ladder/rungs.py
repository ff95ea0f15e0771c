"""The rungs: named changes to a plain training step, each on top of the ones before it.

A rung is a small function from a `Recipe` to a `Recipe` and a line that describes it. Another rung is another entry
of `RUNGS`, another contender (a peer, the best of native PyTorch) another `Recipe`: what times and judges them reads
the recipe alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fusestep.errors import UserError
from fusestep.fp8 import support
from fusestep.fp8.recipes import AMAX_HISTORY, FormatName, RecipeName
from fusestep.models.config import Form, Norm

Precision = Literal["fp32", "bf16", "fp8"]

#: What a part has to run as for a rung to mean something: our kernel, the device's own FP8 product, a CUDA graph.
SERVED = ("triton", "native", "graph")


@dataclass(frozen=True)
class Recipe:
    """Everything that makes one training step: plain data, so that it travels to a process of its own.

    Attributes:
        form, norm: as in `fusestep.models.GPTConfig`.
        optimizer: "torch" (torch.optim.AdamW as torch sets it up by default), "fused" (fusestep.optim.FusedAdam), or
            "torch-fused" (torch.optim.AdamW(fused=True), of contenders alone).
        precision: "fp32" (TF32 off), "bf16" through torch.amp.autocast, or "fp8" within it, by fp8_autocast.
        scaling, fp8_format, amax_history: with fp8, as `fusestep.fp8.recipes.recipe_named` takes them.
        loss: "torch" (cross entropy of all logits) or "fused" (GPT.loss, by fusestep.linear_cross_entropy).
        graph: the whole step in one CUDA graph, by fusestep.TrainStep; of contenders by torch.cuda.graph.
        lr: learning rate; weight decay is torch's default, 0.01.
        compiled: forward and loss through torch.compile; of contenders alone.
        weights: dtype of the weights, and so of their gradients and moments; "bf16" of contenders alone.
        peer: whose parts make the step, as `fusestep.ladder.contenders` names them; "" where nobody else's do.
    """

    form: Form = "seed"
    norm: Norm = "torch"
    optimizer: Literal["torch", "fused", "torch-fused"] = "torch"
    precision: Precision = "fp32"
    scaling: RecipeName = "delayed"
    fp8_format: FormatName = "auto"
    amax_history: int | None = None
    loss: Literal["torch", "fused"] = "torch"
    graph: bool = False
    lr: float = 3e-4
    compiled: bool = False
    weights: Literal["fp32", "bf16"] = "fp32"
    peer: str = ""


@dataclass(frozen=True)
class Rung:
    """One named change.

    Attributes:
        name: what --rungs calls it.
        summary: what it is, in a few words.
        change: from the recipe of the rung before to this one's.
        fused: the part that must run as our kernel, as the device's own FP8 product or in a graph, for the rung to
            mean anything; None where the change is torch's own.
        slower_when: the likely cause when it does not pay, though everything runs as it should.
        only_if_chosen: whether later rungs are without this change where the rung itself is not measured.
    """

    name: str
    summary: str
    change: Callable[[Recipe], Recipe]
    fused: str | None
    slower_when: str
    only_if_chosen: bool = False


def _adam(recipe: Recipe) -> Recipe:
    return recipe


def _fused_adam(recipe: Recipe) -> Recipe:
    return replace(recipe, optimizer="fused")


def _fused_norm(recipe: Recipe) -> Recipe:
    return replace(recipe, norm="fused")


def _amp(recipe: Recipe) -> Recipe:
    return replace(recipe, precision="bf16")


def _blocks(recipe: Recipe) -> Recipe:
    return replace(recipe, form="fused")


def _loss(recipe: Recipe) -> Recipe:
    return replace(recipe, loss="fused")


def _fp8(recipe: Recipe) -> Recipe:
    return replace(recipe, precision="fp8")


def _graph(recipe: Recipe) -> Recipe:
    return replace(recipe, graph=True)


RUNGS: tuple[Rung, ...] = (
    Rung("adam", "torch.optim.AdamW, FP32, nn.MultiheadAttention and nn.LayerNorm", _adam, None, ""),
    Rung(
        "fused-adam",
        "+ fusestep.optim.FusedAdam",
        _fused_adam,
        "adam",
        "the optimizer is a small part of this step: few parameters for this many tokens",
    ),
    Rung(
        "fused-norm",
        "+ fusestep.nn.FusedLayerNorm",
        _fused_norm,
        "layer_norm",
        "norms are a small part of this step, or their rows are too few and narrow to fill the device",
    ),
    Rung(
        "amp",
        "+ torch.amp.autocast, BF16",
        _amp,
        None,
        "casting every weight and activation costs more than BF16 products save at this width and on this device",
    ),
    Rung(
        "blocks",
        "+ fusestep.nn.TransformerLayer: one QKV product, SDPA without a mask, residual adds within the norms",
        _blocks,
        "layer_norm",
        "attention without a mask and the folded adds save little at this length and width",
    ),
    Rung(
        "loss",
        "+ fusestep.linear_cross_entropy: the head's product and the loss without holding all logits",
        _loss,
        "linear_cross_entropy",
        "a small vocabulary: its logits are little beside the rest of the step",
    ),
    Rung(
        "fp8",
        f"+ fp8_autocast, delayed scaling (amax history {AMAX_HISTORY})",
        _fp8,
        "scaled_mm",
        "casts to FP8 cost more than its products save at this width: gains grow with the model",
        only_if_chosen=True,
    ),
    Rung(
        "graph",
        "+ fusestep.TrainStep: forward, backward and optimizer as one CUDA graph",
        _graph,
        "train_step",
        "the host launches these kernels as fast as the device runs them, so there is nothing to save",
    ),
)


def select(text: str, rungs: Sequence[Rung] = RUNGS, base: str | None = None) -> tuple[str, ...]:
    """The names that a person means by `text`: names, numbers and ranges, as in 'adam,amp', '1,4' or '1-6'.

    The base, the first rung unless another is named, is always among them, since every gain is over it; rungs before it
    are not.

    Raises: UserError for a name or a number that is no rung.
    """
    names = [rung.name for rung in rungs]
    start = place_of_base(base, rungs)
    wanted: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if part in names:
            wanted.add(part)
        elif first.isdecimal() and (last.isdecimal() if dash else True):
            low, high = int(first), int(last) if dash else int(first)
            if not 1 <= low <= high <= len(names):
                raise UserError(f"--rungs {part} is not within 1-{len(names)}; the rungs are {_listed(names)}.")
            wanted.update(names[low - 1 : high])
        else:
            raise UserError(f"--rungs names {part!r}, which is no rung; the rungs are {_listed(names)}.")
    if not wanted:
        raise UserError(f"--rungs names no rung; the rungs are {_listed(names)}.")
    return tuple(name for name in names[start:] if name in wanted or name == names[start])


def place_of_base(base: str | None, rungs: Sequence[Rung] = RUNGS) -> int:
    """Where in the ladder the rung is that all are compared with.

    Raises: UserError for a name that is no rung.
    """
    names = [rung.name for rung in rungs]
    if base is None:
        return 0
    if base not in names:
        raise UserError(f"--base is {base!r}, which is no rung; the rungs are {_listed(names)}.")
    return names.index(base)


def default_names(device: torch.device, rungs: Sequence[Rung] = RUNGS, base: str | None = None) -> tuple[str, ...]:
    """Every rung that means something on a device: FP8 only where the device multiplies in it, graphs on GPUs.

    Raises: UserError for a base that is no rung.
    """
    emulates = not support(device)[0]
    chosen: list[str] = []
    for rung in rungs:
        recipe = recipe_of(rung.name, rungs, chosen)
        if not (emulates and recipe.precision == "fp8") and not (recipe.graph and device.type != "cuda"):
            chosen.append(rung.name)
    return tuple(name for name in chosen if name in [rung.name for rung in rungs[place_of_base(base, rungs) :]])


def recipe_of(name: str, rungs: Sequence[Rung] = RUNGS, chosen: Collection[str] | None = None) -> Recipe:
    """The recipe of a rung: its own change after those of every rung before it.

    Args:
        chosen: the rungs that are measured, without whose others those that are `only_if_chosen` are left out; None
            for all.
    """
    recipe = Recipe()
    for rung in rungs:
        is_left_out = rung.only_if_chosen and chosen is not None and rung.name not in chosen
        if rung.name == name or not is_left_out:
            recipe = rung.change(recipe)
        if rung.name == name:
            return recipe
    raise ValueError(f"recipe_of: {name!r} is none of {_listed([rung.name for rung in rungs])}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{number} {name}" for number, name in enumerate(names, start=1))
