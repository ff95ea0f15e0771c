"""Modules built from the fused operations."""

from fusestep.nn import functional
from fusestep.nn.attention import DotProductAttention
from fusestep.nn.embedding import Embedding
from fusestep.nn.grouped_linear import GroupedLinear
from fusestep.nn.layer_norm_linear import LayerNormLinear
from fusestep.nn.layer_norm_mlp import LayerNormMLP
from fusestep.nn.linear import Linear
from fusestep.nn.linear_cross_entropy import LinearCrossEntropy
from fusestep.nn.multihead_attention import MultiheadAttention
from fusestep.nn.normalization import FusedLayerNorm, FusedRMSNorm, LayerNorm, RMSNorm
from fusestep.nn.rotary import RotaryPositionEmbedding
from fusestep.nn.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Embedding",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearCrossEntropy",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "functional",
]
