"""Attention."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "rope",
]

_PREFIX = "compute the whole prefix at each step, which takes any length, or generate with fusestep.models"
_BACKEND = "torch's kernels are chosen by shape; use torch.nn.attention.sdpa_kernel to rule some out"
NOT_SERVED = {
    "InferenceParams": (_PREFIX, False),
    "inference": (_PREFIX, False),
    "get_attention_backend": (_BACKEND, False),
    "AttentionParams": (_BACKEND, False),
    "apply_fused_qkv_rotary_pos_emb": ("apply apply_rotary_pos_emb to queries and to keys", False),
}
__getattr__ = module_getattr(__name__, NOT_SERVED)
