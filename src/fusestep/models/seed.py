"""The tutorial's own block: nn.MultiheadAttention, an additive mask, and an nn.Sequential MLP.

It keeps the tutorial's module names (ln1, attn, ln2, mlp); two hooks translate its state dict to and from the names
that every form shares. Two departures from the tutorial's text: GELU has its tanh form, so that all forms agree
(see `blocks`), and the norm in front of the attention is computed once, not three times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusestep import nn as fused
from fusestep.models.blocks import EPSILON
from fusestep.models.config import GPTConfig

#: The tutorial's parameter names and the shared ones, in the order in which both kinds of block hold them.
SHARED_NAMES = {
    "ln1.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "ln1.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "attn.in_proj_weight": "self_attention.layernorm_qkv.weight",
    "attn.in_proj_bias": "self_attention.layernorm_qkv.bias",
    "attn.out_proj.weight": "self_attention.proj.weight",
    "attn.out_proj.bias": "self_attention.proj.bias",
    "ln2.weight": "layernorm_mlp.layer_norm_weight",
    "ln2.bias": "layernorm_mlp.layer_norm_bias",
    "mlp.0.weight": "layernorm_mlp.fc1_weight",
    "mlp.0.bias": "layernorm_mlp.fc1_bias",
    "mlp.2.weight": "layernorm_mlp.fc2_weight",
    "mlp.2.bias": "layernorm_mlp.fc2_bias",
}


def causal_mask(tokens: int, like: Tensor) -> Tensor:
    """(T, T), 0 on and below the diagonal and -inf above, added to the attention scores."""
    full = torch.full((tokens, tokens), float("-inf"), device=like.device, dtype=like.dtype)
    return torch.triu(full, diagonal=1)


class SeedBlock(nn.Module):
    """A block as the tutorial writes it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        norm = fused.FusedLayerNorm if config.has_fused_norm else nn.LayerNorm
        self.ln1 = norm(config.width, eps=EPSILON)
        self.attn = nn.MultiheadAttention(config.width, config.heads, dropout=config.dropout, batch_first=True)
        self.ln2 = norm(config.width, eps=EPSILON)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.ffn_width),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.ffn_width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.register_state_dict_post_hook(_to_shared_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_shared_names)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, W) and the mask (T, T) to (B, T, W)."""
        y = self.ln1(x)
        attention, _ = self.attn(y, y, y, attn_mask=mask, need_weights=False)
        x = x + self.dropout(attention)
        out: Tensor = x + self.dropout(self.mlp(self.ln2(x)))
        return out


def _to_shared_names(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]) -> None:
    for own, shared in SHARED_NAMES.items():
        state[prefix + shared] = state.pop(prefix + own)


def _from_shared_names(_module: nn.Module, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    for own, shared in SHARED_NAMES.items():
        if prefix + shared in state:
            state[prefix + own] = state.pop(prefix + shared)
