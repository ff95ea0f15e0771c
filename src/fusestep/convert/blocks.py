"""Blocks whose residual add goes into the norm that follows it: the sum is not read again to be normalised.

    y, x ← norm(x + branch), x + branch        in one kernel

Known are nn.TransformerEncoderLayer, pre-norm blocks as Llama and its kin name their parts, GPT-2's, and the ends of
BERT's sublayers. The norms must be ours already; where a norm has hooks, or a call asks for what the forward here does
not know, the old forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.norms import FusedNorm
from fusestep.convert.patterns import Pattern, Stage, has_hooks, is_a, positional_names, takes
from fusestep.dispatch import Choice
from fusestep.fp8 import context
from fusestep.nn import FusedLayerNorm, FusedRMSNorm
from fusestep.ops.norm import normalise


def adds(norm: nn.Module) -> bool:
    """Whether `add_and_normalise` may stand for a call of this norm."""
    return isinstance(norm, (FusedNorm, FusedLayerNorm, FusedRMSNorm)) and not has_hooks(norm)


def add_and_normalise(norm: Any, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(branch + residual), branch + residual)"""
    if isinstance(norm, FusedNorm):
        return norm.with_residual(branch, residual)
    centred = isinstance(norm, FusedLayerNorm)
    bias = norm.bias if centred else None
    y, total = normalise(
        centred, type(norm).__name__, branch, norm.normalized_shape, norm.weight, bias, norm.eps, residual, False
    )
    return y, total


class FusedBlock(Kind):
    """What blocks share: they are looked up by their class's name, and answer through their norms."""

    _prefix = ""
    _second_norm: str

    def implementation(self) -> Choice:
        """What the norm with its residual add runs as, and why."""
        choice: Choice = getattr(self, self._second_norm).implementation()
        return Choice(
            choice.implementation, f"residual add in {self._second_norm}: {choice.reason}", choice.is_fallback
        )


class FusedEncoderLayer(FusedBlock):
    """nn.TransformerEncoderLayer, while training or in FP8; else torch's own forward with its fast path."""

    _second_norm = "norm2"
    norm1: nn.Module
    norm2: nn.Module
    norm_first: bool
    self_attn: nn.MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        is_ours = self.training or context.is_enabled()
        if not is_ours or src.is_nested or not (adds(self.norm1) and adds(self.norm2)):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)  # type: ignore[no-any-return]
        padding = nn.functional._canonical_mask(
            mask=src_key_padding_mask,
            mask_name="src_key_padding_mask",
            other_type=nn.functional._none_or_dtype(src_mask),
            other_name="src_mask",
            target_type=src.dtype,
        )
        mask = nn.functional._canonical_mask(
            mask=src_mask,
            mask_name="src_mask",
            other_type=None,
            other_name="",
            target_type=src.dtype,
            check_other=False,
        )
        owner: Any = self
        if self.norm_first:
            branch = owner._sa_block(self.norm1(src), mask, padding, is_causal=is_causal)
            normed, x = add_and_normalise(self.norm2, branch, src)
            return x + owner._ff_block(normed)  # type: ignore[no-any-return]
        x, _ = add_and_normalise(self.norm1, owner._sa_block(src, mask, padding, is_causal=is_causal), src)
        x, _ = add_and_normalise(self.norm2, owner._ff_block(x), x)
        return x


#: What blocks hand on to their attention although it does not name them.
_HANDED_ON = {"position_ids", "use_cache", "cache_position", "output_attentions"}

#: Arguments for a second attention, which the blocks here have not.
_CROSSING = {"encoder_hidden_states", "encoder_attention_mask"}


def _arguments(module: nn.Module, attention: str) -> dict[str, Any]:
    """The names of a block's arguments in their order, and those that its attention has no place for."""
    known = inspect.signature(module.forward).parameters
    taken = inspect.signature(getattr(module, attention).forward).parameters
    named = {name: one for name, one in known.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    kept = named.keys() - taken.keys() - _HANDED_ON - _CROSSING - {next(iter(named))}
    return {
        "fused_arguments": positional_names(module),
        "fused_kept": {name: named[name].default for name in kept},
    }


class FusedHuggingFaceBlock(FusedBlock):
    """Blocks that hand to their attention what they are called with.

    Attributes:
        fused_arguments: names of the arguments, in their order.
        fused_kept: those that attention has no place for, so that the block does something with them, and their
            defaults.
    """

    fused_arguments: tuple[str, ...]
    fused_kept: dict[str, Any]

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The hidden states and what attention is given by name; None for hidden states of calls that are not known."""
        if len(args) > len(self.fused_arguments):
            return None, {}
        given = dict(zip(self.fused_arguments, args, strict=False)) | kwargs
        for name, default in self.fused_kept.items():
            if given.pop(name, default) is not default:
                return None, {}
        return given.pop(self.fused_arguments[0], None), given


class FusedLlamaBlock(FusedHuggingFaceBlock):
    """x ← x + attention(norm(x)), x ← x + mlp(norm(x)), its parts named as in Llama."""

    _second_norm = "post_attention_layernorm"
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, given = self._given(args, kwargs)
        if hidden is None or not adds(self.post_attention_layernorm):
            return super().forward(*args, **kwargs)
        branch = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)[0]
        normed, total = add_and_normalise(self.post_attention_layernorm, branch, hidden)
        return total + self.mlp(normed)


class FusedGPT2Block(FusedHuggingFaceBlock):
    """The same with GPT-2's names."""

    _second_norm = "ln_2"
    ln_1: nn.Module
    ln_2: nn.Module
    attn: nn.Module
    mlp: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, given = self._given(args, kwargs)
        crosses = given.get("encoder_hidden_states") is not None or hasattr(self, "crossattention")
        if hidden is None or crosses or not adds(self.ln_2):
            return super().forward(*args, **kwargs)
        branch = self.attn(self.ln_1(hidden), **{name: one for name, one in given.items() if name not in _CROSSING})[0]
        normed, total = add_and_normalise(self.ln_2, branch, hidden)
        return total + self.mlp(normed)


class FusedPostNorm(FusedBlock):
    """norm(x + dropout(dense(h))), as BERT and its kin end their sublayers."""

    _second_norm = "LayerNorm"
    LayerNorm: nn.Module
    dense: nn.Module
    dropout: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not adds(self.LayerNorm):  # which is which only the old forward knows
            return super().forward(*args, **kwargs)
        hidden, residual = args
        return add_and_normalise(self.LayerNorm, self.dropout(self.dense(hidden)), residual)[0]


# What is recognised


def _encoder_layer(module: nn.Module) -> bool | str:
    if not isinstance(module, nn.TransformerEncoderLayer) or is_a(module, FusedEncoderLayer):
        return False
    own = type(module)
    for name in ("forward", "_sa_block", "_ff_block"):
        if getattr(own, name) is not getattr(nn.TransformerEncoderLayer, name):
            return f"{own.__name__} overrides {name} of nn.TransformerEncoderLayer"
    return True if adds(module.norm1) and adds(module.norm2) else "its norms are not swapped"


def _encoder_inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    attention: Any = module.self_attn
    width, first = int(attention.embed_dim), attention.batch_first
    length, batch = 21, 3
    hidden = torch.ones(length, length, dtype=torch.bool, device=probe.device).triu(1)
    padding = torch.zeros(batch, length, dtype=torch.bool, device=probe.device)
    padding[0, -2:] = True
    shape = (batch, length, width) if first else (length, batch, width)
    options: list[dict[str, Any]] = [{}, {"src_mask": hidden, "is_causal": True}, {"src_key_padding_mask": padding}]
    return [((probe.randn(*shape),), option) for option in options]


def _has_parts(module: nn.Module, kind: type[FusedBlock], parts: set[str]) -> bool | str:
    """Whether a module's children are just these, and its second norm is one of ours."""
    if isinstance(module, FusedBlock) or module._parameters or module._modules.keys() != parts:
        return False
    return True if adds(module._modules[kind._second_norm]) else f"{kind._second_norm} is not swapped, or has hooks"  # type: ignore[arg-type]


def _llama_block(module: nn.Module) -> bool | str:
    return _has_parts(module, FusedLlamaBlock, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})


def _llama_inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    attention: Any = module.self_attn
    width = int(module.input_layernorm.weight.shape[0])  # type: ignore[union-attr, index]
    turned: Any = getattr(attention, "head_dim", None) or getattr(attention, "qk_rope_head_dim", width)
    angles = probe.randn(3, 21, turned)
    positions = torch.arange(21, device=probe.device).expand(3, 21)
    options = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    if takes(module) is not None:
        known = inspect.signature(module.forward).parameters
        options = {name: value for name, value in options.items() if name in known}
    return [((probe.randn(3, 21, width),), options)]


def _gpt2_block(module: nn.Module) -> bool | str:
    return _has_parts(module, FusedGPT2Block, {"ln_1", "attn", "ln_2", "mlp"})


def _gpt2_inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    width = int(module.ln_1.weight.shape[0])  # type: ignore[union-attr, index]
    return [((probe.randn(3, 21, width),), {"attention_mask": None, "use_cache": False})]


def _post_norm(module: nn.Module) -> bool | str:
    return takes(module) == 2 and _has_parts(module, FusedPostNorm, {"dense", "LayerNorm", "dropout"})


def _post_norm_inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    dense: Any = module.dense
    return [((probe.randn(3, 21, dense.in_features), probe.randn(3, 21, dense.out_features)), {})]


_WHAT = "residual add within the next norm"

PATTERNS = (
    Pattern(_WHAT, FusedEncoderLayer, _encoder_layer, _encoder_inputs, stage=Stage.BLOCK),
    Pattern(
        _WHAT,
        FusedLlamaBlock,
        _llama_block,
        _llama_inputs,
        lambda module: _arguments(module, "self_attn"),
        stage=Stage.BLOCK,
    ),
    Pattern(
        _WHAT,
        FusedGPT2Block,
        _gpt2_block,
        _gpt2_inputs,
        lambda module: _arguments(module, "attn"),
        stage=Stage.BLOCK,
    ),
    Pattern(_WHAT, FusedPostNorm, _post_norm, _post_norm_inputs, stage=Stage.BLOCK),
)
