"""Modules built from the fused operations."""

from fusestep.nn import functional
from fusestep.nn.normalization import FusedLayerNorm, FusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "functional"]
