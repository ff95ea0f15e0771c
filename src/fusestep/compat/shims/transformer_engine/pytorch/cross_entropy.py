"""Cross entropy of logits, over fusestep.nn.functional.cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusestep.compat.implementation import ran
from fusestep.errors import UserError
from fusestep.nn import functional
from transformer_engine.pytorch._arguments import PACKAGE

__all__ = ["parallel_cross_entropy"]


def parallel_cross_entropy(
    inp: Tensor | None = None,
    target: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,  # noqa: ARG001
    *,
    _input: Tensor | None = None,
) -> Tensor:
    """Cross entropy: the loss of each token, or the mean over those that are not ignored, in fp32.

    Backward computes probabilities anew from what was given, and writes into nothing of the caller's.

    Args:
        inp: (…, …, vocabulary), logits in any floating dtype. `_input` is its old name.
        target: inp's leading dimensions, or as many elements in another shape, int64 or int32.
        label_smoothing: the share of the target that is spread evenly, in [0, 1].
        reduce_loss: give the mean.
        dist_process_group: ranks that share the vocabulary; inp has this rank's part of the logits.
        ignore_idx: targets with this value have loss 0 and no gradient.
    Raises: UserError for shapes that do not fit, and on a CPU for a target that is neither a class nor ignore_idx; on a
        GPU such a target's loss is NaN.
    """
    logits = inp if _input is None else _input
    if logits is None or target is None or logits.dim() != 3 or target.numel() != logits.shape[:-1].numel():
        shapes = [None if one is None else tuple(one.shape) for one in (logits, target)]
        raise UserError(
            f"parallel_cross_entropy: inp and target have shapes {shapes[0]} and {shapes[1]}; pass logits (batch, "
            "sequence, vocabulary) and a target for each token."
        )
    name = f"{PACKAGE}.parallel_cross_entropy"
    ran(name, "fusestep.nn.functional.cross_entropy", "cross_entropy", logits)
    return functional.cross_entropy(
        logits,
        target.reshape(logits.shape[:-1]),
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
        tp_group=dist_process_group,
    )
