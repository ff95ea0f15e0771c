"""Operations on lists of tensors: those that Apex has too, whose code serves both."""

from __future__ import annotations

from amp_C import (
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

__all__ = [
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]
