"""Optimizers, and operations on lists of tensors."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD
from transformer_engine.pytorch.optimizers.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

_STEP = ("use FusedAdam, whose step is one launch", False)
NOT_SERVED = {
    "multi_tensor_adam_param_remainder": _STEP,
    "multi_tensor_adam_fp8": _STEP,
    "multi_tensor_adam_capturable": _STEP,
    "multi_tensor_adam_capturable_master": _STEP,
}
__getattr__ = module_getattr(__name__, NOT_SERVED)
