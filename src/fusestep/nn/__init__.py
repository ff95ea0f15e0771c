"""Modules built from the fused operations."""

from fusestep.nn import functional
from fusestep.nn.attention import DotProductAttention
from fusestep.nn.linear import Linear
from fusestep.nn.normalization import FusedLayerNorm, FusedRMSNorm

__all__ = ["DotProductAttention", "FusedLayerNorm", "FusedRMSNorm", "Linear", "functional"]
