"""The fused functions, with torch.nn.functional's names and order of arguments where torch has them."""

from fusestep.ops.layer_norm import layer_norm
from fusestep.ops.rms_norm import rms_norm
from fusestep.ops.rotary import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb", "layer_norm", "rms_norm"]
