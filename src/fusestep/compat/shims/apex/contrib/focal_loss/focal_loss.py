"""apex.contrib.focal_loss.focal_loss.

    loss = Σ α (1 − σ)^γ · bce(x, t)  over positive entries  +  Σ (1 − α) σ^γ · bce(x, t)  over the others,

divided by the number of positives; σ = sigmoid(x), bce the binary cross entropy, t = 1 − s/2 and s/2.
Source: Lin, Goyal, Girshick, He and Dollár 2017, arXiv:1708.02002, equation 5.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fusestep.compat.implementation import Applied, by_torch
from fusestep.errors import UserError

__all__ = ["FocalLoss", "focal_loss"]


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positive_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sigmoid focal loss of all anchors, 0-d fp32.

    Args:
        cls_output: (…, classes) logits, any floating dtype; classes beyond num_real_classes are padding.
        cls_targets_at_level: (…,) int64: the class of each anchor, -1 for background, -2 to leave the anchor out.
        num_positive_sum: one fp32 element.
    """
    if cls_output.shape[:-1] != cls_targets_at_level.shape or cls_output.shape[-1] < num_real_classes:
        raise UserError(
            f"focal_loss: cls_output has shape {tuple(cls_output.shape)}, cls_targets_at_level "
            f"{tuple(cls_targets_at_level.shape)} and there are {num_real_classes} real classes; pass (…, classes) "
            "and (…,) with at least as many classes."
        )
    by_torch("apex.contrib.focal_loss.focal_loss", "torch.nn.functional.binary_cross_entropy_with_logits")
    wide = cls_output if cls_output.dtype is torch.float64 else cls_output.float()
    x = wide[..., :num_real_classes]
    classes = torch.arange(num_real_classes, device=x.device)
    is_positive = cls_targets_at_level[..., None] == classes
    target = torch.where(is_positive, 1.0 - label_smoothing / 2, label_smoothing / 2).to(x.dtype)
    # 1 − σ is σ(−x), which keeps its digits where σ is near 1.
    wrong = torch.sigmoid(torch.where(is_positive, -x, x))
    factor = torch.where(is_positive, alpha, 1.0 - alpha) * wrong**gamma
    losses = factor * functional.binary_cross_entropy_with_logits(x, target, reduction="none")
    counted = torch.where((cls_targets_at_level != -2)[..., None], losses, 0.0)
    return counted.sum() / num_positive_sum.reshape(())


class FocalLoss(Applied):
    """`apply` is focal_loss."""

    apply = staticmethod(focal_loss)
