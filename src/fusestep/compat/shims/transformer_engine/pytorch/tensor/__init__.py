"""Tensors in FP8: weights that live in FP8 alone are fusestep.fp8.tensor.Float8Tensor, whatever their recipe."""

from __future__ import annotations

import enum

import torch

from fusestep.compat.names import module_getattr
from fusestep.fp8.tensor import Float8Tensor

__all__ = ["DType", "Float8Tensor", "QuantizedTensor"]

#: What a weight may be asked for, whatever its recipe.
QuantizedTensor = Float8Tensor

DType = enum.Enum(
    "DType",
    {
        "kByte": torch.uint8,
        "kInt16": torch.int16,
        "kInt32": torch.int32,
        "kInt64": torch.int64,
        "kFloat32": torch.float32,
        "kFloat16": torch.float16,
        "kBFloat16": torch.bfloat16,
        "kFloat8E4M3": torch.float8_e4m3fn,
        "kFloat8E5M2": torch.float8_e5m2,
    },
)
DType.__doc__ = "Transformer Engine's names of dtypes."

_ONE = ("weights in FP8 are fusestep.fp8.tensor.Float8Tensor whatever their recipe, te.QuantizedTensor here", False)
_CAST = ("cast by fusestep.ops.quantize.quantize, or build modules within quantized_model_init", False)
_TENSORS = (
    *("MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor", "Float8TensorStorage", "MXFP8TensorStorage"),
    *("Float8BlockwiseQTensorStorage", "NVFP4TensorStorage", "QuantizedTensorStorage", "HybridQuantizedTensor"),
)
_QUANTIZERS = (
    *("Quantizer", "Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer"),
    *("NVFP4Quantizer", "prepare_for_saving", "restore_from_saved"),
)
NOT_SERVED = {**dict.fromkeys(_TENSORS, _ONE), **dict.fromkeys(_QUANTIZERS, _CAST)}
__getattr__ = module_getattr(__name__, NOT_SERVED)
