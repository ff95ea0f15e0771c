"""The GPT of separate modules that libraries swap parts of, and the one of Transformer Engine's layers.

Both take the weights of `fusestep.models.GPT`, so that every contender starts where the rungs start.

Legend: B batch, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig
from fusestep.models.blocks import EPSILON

#: Makes a norm of a width: a module with `weight` and `bias`.
Norm = Callable[[int], nn.Module]


def layer_norm(width: int) -> nn.Module:
    """torch's own."""
    return nn.LayerNorm(width, eps=EPSILON)


class _Attention(nn.Module):
    """One product for q, k and v, causal scaled_dot_product_attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(attended.transpose(1, 2).reshape(B, T, W))
        return out


class _SeedAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention with an additive mask, as the tutorial writes it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        T = x.shape[1]
        full = torch.full((T, T), float("-inf"), device=x.device, dtype=x.dtype)
        out: Tensor = super().forward(x, x, x, attn_mask=torch.triu(full, diagonal=1), need_weights=False)[0]
        return out


class _Block(nn.Module):
    def __init__(self, config: GPTConfig, norm: Norm, *, as_seed: bool) -> None:
        super().__init__()
        self.ln1 = norm(config.width)
        self.attention = _SeedAttention(config) if as_seed else _Attention(config)
        self.ln2 = norm(config.width)
        self.up, self.down = nn.Linear(config.width, config.ffn_width), nn.Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return out


class PeerGPT(nn.Module):
    """The GPT from separate modules.

    Args:
        gpt: whose weights it takes, on the device that it is to lie on.
        norm: of what its norms are made.
        as_seed: attention by nn.MultiheadAttention.
    """

    def __init__(self, gpt: GPT, norm: Norm = layer_norm, *, as_seed: bool = False) -> None:
        super().__init__()
        config = gpt.config
        _check_head(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config, norm, as_seed=as_seed) for _ in range(config.layers))
        self.final_norm = norm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.to(gpt.embedding.weight.device)
        attention = _SEED_ATTENTION if as_seed else _ATTENTION
        state = gpt.state_dict()
        names = {**_BLOCK, **{f"attention.{own}": theirs for own, theirs in attention.items()}}
        for layer in range(config.layers):
            for own, theirs in names.items():
                state[f"blocks.{layer}.{own}"] = state.pop(f"blocks.{layer}.{theirs}")
        self.load_state_dict(state)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head multiplies: (B, T) to (B, T, W)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.final_norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits: (B, T) to (B, T, vocabulary)."""
        out: Tensor = self.head(self.hidden(tokens))
        return out


_BLOCK = {
    "ln1.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "ln1.bias": "self_attention.layernorm_qkv.layer_norm_bias",
    "ln2.weight": "layernorm_mlp.layer_norm_weight",
    "ln2.bias": "layernorm_mlp.layer_norm_bias",
    "up.weight": "layernorm_mlp.fc1_weight",
    "up.bias": "layernorm_mlp.fc1_bias",
    "down.weight": "layernorm_mlp.fc2_weight",
    "down.bias": "layernorm_mlp.fc2_bias",
}
_ATTENTION = {
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "qkv.bias": "self_attention.layernorm_qkv.bias",
    "proj.weight": "self_attention.proj.weight",
    "proj.bias": "self_attention.proj.bias",
}
_SEED_ATTENTION = {
    "in_proj_weight": "self_attention.layernorm_qkv.weight",
    "in_proj_bias": "self_attention.layernorm_qkv.bias",
    "out_proj.weight": "self_attention.proj.weight",
    "out_proj.bias": "self_attention.proj.bias",
}


class LayersGPT(nn.Module):
    """The GPT from somebody's whole layers, under Transformer Engine's parameter names.

    Args:
        gpt: whose weights it takes, on the device that it is to lie on.
        layer: makes the layer of a number, from 1; its input is (B, T, W) in `dtype`.
        dtype: of the residual stream.
    """

    def __init__(self, gpt: GPT, layer: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        config = gpt.config
        _check_head(config)
        self.dtype = dtype
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(layer(number + 1) for number in range(config.layers))
        self.final_norm = layer_norm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.to(gpt.embedding.weight.device)
        self._take(gpt.state_dict())
        #: Called in place of the blocks; a graphed form of them.
        self.called: list[Callable[..., Any]] = list(self.blocks)

    def _take(self, state: dict[str, Tensor]) -> None:
        lacking = [name for name, _ in self.named_parameters() if name not in state]
        if lacking:
            raise UserError(
                f"its layers have a parameter {lacking[0]}, which the GPT has no weight for; another version of the "
                "library names them otherwise."
            )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(state[name])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits: (B, T) to (B, T, vocabulary)."""
        x = (self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))).to(self.dtype)
        for block in self.called:
            x = block(x)
        out: Tensor = self.head(self.final_norm(x))
        return out


def _check_head(config: GPTConfig) -> None:
    if config.tied_head:
        raise UserError(
            "the libraries' form of the GPT has a head of its own, and this preset ties it to the embedding; choose "
            "--preset gpt2-untied."
        )
