"""Transformer blocks in the plain and the fused form, under Transformer Engine's parameter names.

    attention = proj(attend(linear_qkv(norm(x))))        x ← x + dropout(attention)
    mlp       = fc2(gelu(fc1(norm(x))))                  x ← x + dropout(mlp)

The fused form is `fusestep.nn.TransformerLayer`; the plain form below is ordinary PyTorch with each step apart.

GELU is the tanh form, 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), in every form of the model, as Transformer Engine's
"gelu" is. The exact (erf) form differs from it by up to 5e-4.

Legend: B batch, T tokens, W width, H heads.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import nn as fused
from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import TensorParallel
from fusestep.models.config import GPTConfig
from fusestep.ops.norm import explain

#: What layer norms add to the variance, everywhere in the model; torch's and Transformer Engine's default.
EPSILON = 1e-5


def fused_block(config: GPTConfig) -> fused.TransformerLayer:
    """A block of the fused form, whose every residual add is taken in by the norm after it."""
    return fused.TransformerLayer(
        config.width,
        config.ffn_width,
        config.heads,
        layernorm_epsilon=EPSILON,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        fuse_qkv_params=True,
        # Blocks of q, k and v, as nn.MultiheadAttention has them.
        qkv_weight_interleaved=False,
    )


class _WithLayerNorm(nn.Module):
    """A module that normalises its input first, and holds the norm's parameters beside its own."""

    # The ranks that share the block, if they do (fusestep.distributed.plans).
    _parallel: TensorParallel | None = None

    def __init__(self, width: int, *, has_fused_norm: bool) -> None:
        super().__init__()
        self.has_fused_norm = has_fused_norm
        self.layer_norm_weight = nn.Parameter(torch.empty(width))
        self.layer_norm_bias = nn.Parameter(torch.empty(width))

    def normalise(self, x: Tensor) -> Tensor:
        """The norm over the last dimension."""
        layer_norm = fused.functional.layer_norm if self.has_fused_norm else F.layer_norm
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self._parallel is None:
            return layer_norm(x, weight.shape, weight, bias, EPSILON)
        weight, bias = self._parallel.shared(weight, bias)
        return self._parallel.enter(layer_norm(x, weight.shape, weight, bias, EPSILON))

    def implementation(self) -> Choice:
        """What the norm runs as on the device of the parameters, and why; the products are torch's."""
        if self.has_fused_norm:
            return explain(True, self.layer_norm_weight, self.layer_norm_bias)
        return Choice("torch", "the model's form asks for torch's layer norm")


class LayerNormLinear(_WithLayerNorm):
    """norm(x) · weightᵀ + bias."""

    def __init__(self, in_features: int, out_features: int, *, has_fused_norm: bool) -> None:
        super().__init__(in_features, has_fused_norm=has_fused_norm)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, in) to (B, T, out)."""
        return F.linear(self.normalise(x), self.weight, self.bias)


class SelfAttention(nn.Module):
    """Causal attention with its norm in front; the rows of the fused weight are q, then k, then v."""

    # The ranks that share the heads, if they do.
    _parallel: TensorParallel | None = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.layernorm_qkv = LayerNormLinear(config.width, 3 * config.width, has_fused_norm=config.has_fused_norm)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to the branch (B, T, W), before it is added."""
        qkv = self.layernorm_qkv(x)
        B, T, _ = qkv.shape
        q, k, v = qkv.view(B, T, 3, self.heads, self.proj.in_features // self.heads).permute(
            2, 0, 3, 1, 4
        )  # each (B, H, T, W / H)
        parallel, dropout = self._parallel, self.dropout if self.training else 0.0
        with parallel.own_randomness(x.device) if parallel is not None and dropout else nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        heads = attended.transpose(1, 2).flatten(2)
        if parallel is None:
            return F.dropout(self.proj(heads), self.dropout, self.training)
        return parallel.dropped(shared_product(parallel, heads, self.proj.weight, self.proj.bias), dropout, True)


class LayerNormMLP(_WithLayerNorm):
    """fc2(gelu(fc1(norm(x))))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, has_fused_norm=config.has_fused_norm)
        self.dropout = config.dropout
        self.fc1_weight = nn.Parameter(torch.empty(config.ffn_width, config.width))
        self.fc1_bias = nn.Parameter(torch.empty(config.ffn_width))
        self.fc2_weight = nn.Parameter(torch.empty(config.width, config.ffn_width))
        self.fc2_bias = nn.Parameter(torch.empty(config.width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to the branch (B, T, W), before it is added."""
        hidden = F.gelu(F.linear(self.normalise(x), self.fc1_weight, self.fc1_bias), approximate="tanh")
        parallel = self._parallel
        if parallel is None:
            return F.dropout(F.linear(hidden, self.fc2_weight, self.fc2_bias), self.dropout, self.training)
        branch = shared_product(parallel, hidden, self.fc2_weight, self.fc2_bias)
        return parallel.dropped(branch, self.dropout, self.training)


def shared_product(parallel: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x · weightᵀ + bias, where each rank has some features of x and some columns of the weight."""
    return parallel.leave(F.linear(x, weight), *parallel.shared(bias))


class PlainBlock(nn.Module):
    """A block that adds each branch as soon as it is there."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.layernorm_mlp = LayerNormMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, W) to (B, T, W)."""
        x = x + self.self_attention(x)
        out: Tensor = x + self.layernorm_mlp(x)
        return out
