"""Models whose parts are named and computed as Hugging Face's Llama and GPT-2 are, for where that library is missing.

Written for the benchmark of conversion: norms in several operations, a gated MLP, rotary embedding by halves, GPT-2's
weights that lie the other way and its GELU of many kernels; a loss that the model computes from its labels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its batch."""

    width: int
    heads: int
    layers: int
    ffn_width: int
    vocabulary: int
    context: int
    batch: int
    key_heads: int = 0


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * wide.to(hidden_states.dtype)


class LlamaMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.down_proj = nn.Linear(shape.ffn_width, shape.width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


def rotate_half(x: Tensor) -> Tensor:
    """The second half, negated, before the first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, (B, H, S, D), turned by angles whose cosines and sines are (B, S, D)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class LlamaAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        inner = (shape.key_heads or shape.heads) * self.head_dim
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, inner, bias=False)
        self.v_proj = nn.Linear(shape.width, inner, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (
            projected(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        is_causal, grouped = attention_mask is None, k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=is_causal, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class LlamaDecoderLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(shape)
        self.mlp = LlamaMLP(shape)
        self.input_layernorm = LlamaRMSNorm(shape.width)
        self.post_attention_layernorm = LlamaRMSNorm(shape.width)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        x = hidden_states + self.self_attn(hidden_states=normed, position_embeddings=position_embeddings)[0]
        turned: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return turned


class LlamaModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape) for _ in range(shape.layers))
        self.norm = LlamaRMSNorm(shape.width)
        half = shape.width // shape.heads // 2
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(half) / half), persistent=False)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> tuple[Tensor]:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        angles = torch.arange(x.shape[1], device=x.device)[None, :, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        embeddings = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, position_embeddings=embeddings)
        return (self.norm(x),)


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class NewGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        inner = math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))
        return 0.5 * input * (1.0 + torch.tanh(inner))


class GPT2Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn, self.c_proj = Conv1D(3 * shape.width, shape.width), Conv1D(shape.width, shape.width)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(hidden_states).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=attention_mask is None)
        return self.c_proj(out.transpose(1, 2).flatten(2)), None


class GPT2MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(shape.ffn_width, shape.width), Conv1D(shape.width, shape.ffn_width)
        self.act = NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.act(self.c_fc(hidden_states)))
        return out


class GPT2Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attn, self.mlp = GPT2Attention(shape), GPT2MLP(shape)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,  # noqa: ARG002 (theirs has it)
    ) -> Tensor:
        x = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask=attention_mask)[0]
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT2Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(GPT2Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> tuple[Tensor]:
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            x = block(x)
        return (self.ln_f(x),)


class ForCausalLM(nn.Module):
    """A model with its head, which may share its weight with an embedding, and the loss where there are labels."""

    def __init__(self, model: nn.Module, shape: Shape, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        if embedding is not None:
            self.lm_head.weight = embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds)[0]
        logits = self.lm_head(hidden)
        if labels is None:
            return {"logits": logits}
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.float().view(-1, logits.size(-1)), shifted.view(-1))
        return {"loss": loss, "logits": logits}


def llama(shape: Shape) -> nn.Module:
    """As LlamaForCausalLM, its head its own."""
    return ForCausalLM(LlamaModel(shape), shape)


def gpt2(shape: Shape) -> nn.Module:
    """As GPT2LMHeadModel, its head tied."""
    model = GPT2Model(shape)
    return ForCausalLM(model, shape, model.wte)


class Plain(nn.Module):
    """The tutorials' own model: torch's encoder layers under a causal mask."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, shape.ffn_width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers, nn.LayerNorm(shape.width), enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.head(self.encoder(x, mask=self.mask, is_causal=True))
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())}
