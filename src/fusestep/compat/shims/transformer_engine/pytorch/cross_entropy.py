"""Cross entropy of logits, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusestep.compat.report import served
from fusestep.errors import UserError
from transformer_engine.pytorch._arguments import PACKAGE, check_ranks

__all__ = ["parallel_cross_entropy"]

#: fp32 logits that exist at a time, by number.
AT_A_TIME = 2**25


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

    Backward computes fp32 logits anew from what was given, chunk by chunk, and writes into nothing of the caller's.

    Args:
        inp: (…, …, vocabulary), logits in any floating dtype. `_input` is its old name.
        target: inp's leading dimensions, int64.
        label_smoothing: the share of the target that is spread evenly, in [0, 1].
        reduce_loss: give the mean.
        dist_process_group: one rank.
        ignore_idx: targets with this value have loss 0 and no gradient.
    Raises: UserError for shapes that do not fit.
    """
    check_ranks("parallel_cross_entropy", dist_process_group)
    logits = inp if _input is None else _input
    if logits is None or target is None or logits.dim() != 3 or target.numel() != logits.shape[:-1].numel():
        shapes = [None if one is None else tuple(one.shape) for one in (logits, target)]
        raise UserError(
            f"parallel_cross_entropy: inp and target have shapes {shapes[0]} and {shapes[1]}; pass logits (batch, "
            "sequence, vocabulary) and a target for each token."
        )
    served(f"{PACKAGE}.parallel_cross_entropy", "torch.nn.functional.cross_entropy")
    rows, targets = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)

    def losses(some: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(
            some.float(), wanted, ignore_index=ignore_idx, reduction="none", label_smoothing=label_smoothing
        )

    size = max(1, AT_A_TIME // logits.shape[-1])
    chunks = zip(rows.split(size), targets.split(size), strict=True)
    loss = torch.cat([checkpoint(losses, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])
    if reduce_loss:
        return loss.sum() / (targets != ignore_idx).sum()
    return loss.view(logits.shape[:-1])
