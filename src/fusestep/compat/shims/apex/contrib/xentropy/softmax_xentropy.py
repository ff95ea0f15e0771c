"""apex.contrib.xentropy.softmax_xentropy.

    loss = (1 − s) · (lse − x[label]) + s · (lse − mean(x)),    lse = log Σ exp(x),    0 where label is padding_idx

Source of the formula: Szegedy et al. 2016, arXiv:1512.00567, section 7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusestep.compat.implementation import by_torch
from fusestep.errors import UserError

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """Cross entropy with label smoothing, one loss a row; call its `apply`.

    Right where Apex is not: every dtype has a gradient, rounded once from fp32; what flows in from above stays as it
    is; a label that is padding_idx may lie out of range.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,  # noqa: ARG004
    ) -> Tensor:
        """One loss a row, fp32 (fp64 for fp64).

        Args:
            logits: (rows, classes), any floating dtype; may share memory with nothing that changes before backward.
            labels: (rows,) int64. Rows whose label is padding_idx, **class 0 unless told otherwise**, have loss 0.
            smoothing: the share of the uniform distribution in the target.
            half_to_float: without effect: losses are always fp32, as Apex needs it for a gradient at all.
        """
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise UserError(
                f"SoftmaxCrossEntropyLoss: logits has shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
                "pass (rows, classes) and (rows,)."
            )
        by_torch("apex.contrib.xentropy.SoftmaxCrossEntropyLoss", "torch.nn.functional.cross_entropy")
        wide = logits if logits.dtype is torch.float64 else logits.float()
        ctx.save_for_backward(logits, labels)
        ctx.options = smoothing, padding_idx
        return functional.cross_entropy(
            wide, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
        )

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        smoothing, padding_idx = ctx.options
        wide = logits if logits.dtype is torch.float64 else logits.float()
        is_counted = labels != padding_idx
        # d loss / d x = softmax(x) − (1 − s) · onehot − s / classes
        gradient = torch.softmax(wide, 1).sub_(smoothing / logits.shape[1])
        rows = torch.arange(labels.shape[0], device=labels.device)
        gradient[rows, labels.where(is_counted, 0)] -= 1.0 - smoothing
        # Selected, not multiplied: 0 times a softmax that is NaN would be NaN.
        gradient = torch.where(is_counted[:, None], gradient * dloss[:, None], 0.0)
        return gradient.to(logits.dtype), None, None, None, None
