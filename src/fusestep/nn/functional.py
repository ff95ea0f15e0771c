"""The fused functions, with torch.nn.functional's names and order of arguments."""

from fusestep.ops.layer_norm import layer_norm
from fusestep.ops.rms_norm import rms_norm

__all__ = ["layer_norm", "rms_norm"]
