"""Swap modules of a user's model for fused ones in place, report what was done and why, and take it back.

`convert(model)` is all that most need; `Pattern` and `register` teach it a swap of your own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fusestep.convert.agreement import Probe, Trial
    from fusestep.convert.patterns import Pattern, Stage, register, unregister
    from fusestep.convert.report import Report, Row
    from fusestep.fp8.recipes import Recipe

__all__ = ["Pattern", "Probe", "Report", "Row", "Stage", "Trial", "convert", "register", "unregister"]

_MODULES = {
    "Pattern": "patterns",
    "Probe": "agreement",
    "Report": "report",
    "Row": "report",
    "Stage": "patterns",
    "Trial": "agreement",
    "register": "patterns",
    "unregister": "patterns",
}


def convert(
    model: nn.Module,
    *,
    skip: Sequence[str] = (),
    fp8: Recipe | None = None,
    fp8_skip: Sequence[str] = (),
    fp8_keep_blocks: tuple[int, int] = (0, 0),
    fused_loss: bool = True,
    dry_run: bool = False,
) -> Report:
    """Swap what fusestep has faster parts for, in place, and report on it.

    A swapped module stays the same object with the same parameters, buffers, hooks, flags and names: only its class
    becomes one of ours that is derived from the old one, so that optimizers, state dicts, `isinstance`, copies and
    pickles go on as before. Every swap is tried first: the old and the new forward, and their gradients, on the same
    random input. Where they disagree nothing is swapped. Neither the weights' gradients nor the state of torch's
    random generators change by that.

    Swapped are LayerNorm and RMSNorm, torch's and those of Hugging Face's families, activations that are many kernels,
    gated MLPs, torch's attention and encoder layers, the residual adds before the norms of known blocks, what was
    registered with `fusestep.convert.register`, head and loss of language models that are called with labels, and
    linear layers if FP8 is asked for.

    Args:
        model: any module; its parameters may be on the meta device, where random weights stand in for them in trials.
        skip: patterns of module paths, as of fnmatch ("*.layers.0"); those modules and all in them stay as they are.
        fp8: the recipe with which linear layers multiply, for instance fusestep.fp8.DelayedScaling(); None: none does.
            The model's forward then runs within `fp8_autocast` with that recipe, unless it is called in a region of
            your own.
        fp8_skip: patterns of paths of linear layers that stay in the model's dtype, besides heads, layers that share
            their weight with an embedding, routers and low-rank adapters, which always do.
        fp8_keep_blocks: how many of the first and of the last blocks stay in the model's dtype, a block being an
            element of a ModuleList or Sequential.
        fused_loss: whether head and loss of a model with labels are computed at once while it trains. Its output's
            `logits` are then no tensor but compute themselves when they are used, once more and at the cost of a
            product: pass False if a script reads them in every step of training.
        dry_run: report what would be swapped, and leave everything as it was.

    Returns: the report; it prints as a table, and its `undo()` makes the model what it was.
    Raises: UserError for arguments that do not fit, before anything is changed.
    """
    from fusestep.convert.engine import run

    return run(model, skip, fp8, fp8_skip, fp8_keep_blocks, fused_loss, dry_run)


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"fusestep.convert.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fusestep.convert' has no attribute {name!r}")
