"""Small models whose parts are named and computed as those of well-known libraries, written for these tests.

They stand for the libraries where those are not installed, on a GPU machine for instance; test_families.py takes the
real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep.convert import blocks, rotary


class PlainRMSNorm(nn.Module):
    """Llama's: rounds the normalised row to x's dtype, then scales."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale).to(hidden_states.dtype)


class RoundingRMSNorm(nn.Module):
    """OLMo's: scales in fp32 and gives x's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * x).to(hidden_states.dtype)


class GatedRMSNorm(PlainRMSNorm):
    """A gate may be passed too."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


class T5StyleLayerNorm(nn.Module):
    """T5's: fp32 comes out unless the weight has 16 bits."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states * torch.rsqrt(hidden_states.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class OffsetRMSNorm(nn.Module):
    """Gemma's: 1 + w, all in fp32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class CodedLayerNorm(nn.Module):
    """nanoGPT's: eps is written in the code, and the bias may be missing."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.bias = nn.Parameter(torch.randn(width)) if bias else None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class NewGELUActivation(nn.Module):
    """GELU in its tanh form, from many operations."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 0.5 * input * (1.0 + torch.tanh(0.7978845608028654 * (input + 0.044715 * torch.pow(input, 3.0))))


class QuickGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input * torch.sigmoid(1.702 * input)


class GatedMLP(nn.Module):
    """Llama's."""

    def __init__(self, width: int, hidden: int, act: Any = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """Causal, with rotated queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (
            projected(hidden_states).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        q, k = (x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * sin for x in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, norm: Any = PlainRMSNorm) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads)
        self.mlp = GatedMLP(width, hidden)
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None) -> Tensor:
        x = self.input_layernorm(hidden_states)
        x, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, position_embeddings=position_embeddings)
        hidden_states = hidden_states + x
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Decoder(nn.Module):
    """Llama's shape: (batch, sequence) tokens to logits; the head shares the embedding's weight."""

    def __init__(self, norm: Any = PlainRMSNorm, vocabulary: int = 51, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, 4, 56, norm) for _ in range(layers))
        self.norm = norm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(8) / 8.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequencies
        cos, sin = (turned.to(x.dtype).expand(tokens.shape[0], -1, -1) for turned in (angles.cos(), angles.sin()))
        for layer in self.layers:
            x = layer(x, position_embeddings=(cos, sin))
        return self.lm_head(self.norm(x))


class EncoderClassifier(nn.Module):
    """torch's own encoder: (sequence, batch) tokens to logits, as a plain training script has it."""

    def __init__(self, norm_first: bool = True, dropout: float = 0.0, width: int = 32, vocabulary: int = 51) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 72, dropout, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[0], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask.to(self.head.weight.dtype)))


@pytest.fixture
def models() -> SimpleNamespace:
    """The classes of this file."""
    return SimpleNamespace(
        PlainRMSNorm=PlainRMSNorm,
        RoundingRMSNorm=RoundingRMSNorm,
        GatedRMSNorm=GatedRMSNorm,
        T5StyleLayerNorm=T5StyleLayerNorm,
        OffsetRMSNorm=OffsetRMSNorm,
        CodedLayerNorm=CodedLayerNorm,
        NewGELUActivation=NewGELUActivation,
        QuickGELUActivation=QuickGELUActivation,
        GatedMLP=GatedMLP,
        DecoderLayer=DecoderLayer,
        Decoder=Decoder,
        EncoderClassifier=EncoderClassifier,
    )


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each residual add that was done in a norm."""
    calls: list[int] = []
    real = blocks.add_and_normalise
    monkeypatch.setattr(blocks, "add_and_normalise", lambda *args: (calls.append(1), real(*args))[1])
    return calls


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What our function has rotated in attention of other libraries."""
    calls: list[Tensor] = []
    real = rotary.apply_rotary_tables
    monkeypatch.setattr(rotary, "apply_rotary_tables", lambda t, *tables: (calls.append(t), real(t, *tables))[1])
    return calls
