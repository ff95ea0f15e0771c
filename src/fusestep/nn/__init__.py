"""Modules built from the fused operations."""

from fusestep.nn import functional
from fusestep.nn.attention import DotProductAttention
from fusestep.nn.layer_norm_linear import LayerNormLinear
from fusestep.nn.layer_norm_mlp import LayerNormMLP
from fusestep.nn.linear import Linear
from fusestep.nn.normalization import FusedLayerNorm, FusedRMSNorm

__all__ = [
    "DotProductAttention",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "functional",
]
