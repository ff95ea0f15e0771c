"""The fused functions, with torch.nn.functional's names and order of arguments where torch has them."""

from fusestep.ops.cross_entropy import cross_entropy
from fusestep.ops.embedding import embedding
from fusestep.ops.layer_norm import layer_norm
from fusestep.ops.linear_cross_entropy import linear_cross_entropy
from fusestep.ops.rms_norm import rms_norm
from fusestep.ops.rotary import apply_rotary_pos_emb
from fusestep.ops.rotary_tables import apply_rotary_tables

__all__ = [
    "apply_rotary_pos_emb",
    "apply_rotary_tables",
    "cross_entropy",
    "embedding",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
]
