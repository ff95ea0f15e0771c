"""The modules that are not attention."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.fp8_padding import Fp8Padding
from transformer_engine.pytorch.module.fp8_unpadding import Fp8Unpadding
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
]

_OVERLAP = ("overlap of products with communication is not served; leave the ub_ arguments out", False)
NOT_SERVED = {"initialize_ub": _OVERLAP, "destroy_ub": _OVERLAP}
__getattr__ = module_getattr(__name__, NOT_SERVED)
