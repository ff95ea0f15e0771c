"""te.MultiheadAttention over fusestep.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fusestep import nn
from fusestep.compat.report import served
from transformer_engine.pytorch._arguments import (
    PACKAGE,
    SBHD,
    Ranks,
    layout_of,
    mark_shared,
    own_randomness,
    placed,
    ranks_of,
    refuse,
)
from transformer_engine.pytorch.attention._parts import NAMED, adopt, advise, configure, for_this_call, refuse_call
from transformer_engine.pytorch.attention.dot_product_attention import BiasType, Masks
from transformer_engine.pytorch.module.base import Initialiser, bias_or_empty

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Ranks, nn.MultiheadAttention):
    """Attention with its products, and its norm in front on request; see fusestep.nn.MultiheadAttention."""

    SERVED_BY = "fusestep.nn.MultiheadAttention"

    _unchosen: str | None = None  # the argument of a layout that nobody chose, until the first call

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Initialiser | None = None,
        output_layer_init_method: Initialiser | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm",
        device: torch.device | str = "cuda",
        qkv_format: str = SBHD,
        name: str | None = None,
        qk_norm_type: Literal["LayerNorm", "RMSNorm"] | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,  # noqa: ARG002
        micro_batch_size: int | None = None,  # noqa: ARG002
        softmax_type: str = "vanilla",
    ) -> None:
        refuse(
            "MultiheadAttention",
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            softmax_type=softmax_type,
        )
        layout = layout_of(qkv_format)
        parallel = ranks_of(
            "MultiheadAttention",
            tp_group,
            tp_size,
            sequence_parallel,
            layout=layout,
            set_parallel_mode=set_parallel_mode,
        )
        with own_randomness(get_rng_state_tracker):
            super().__init__(
                hidden_size,
                num_attention_heads,
                kv_channels,
                attention_dropout,
                layernorm_epsilon,
                placed("MultiheadAttention", device),
                params_dtype,
                init_method=init_method,
                output_layer_init_method=output_layer_init_method,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                num_gqa_groups=num_gqa_groups,
                return_bias=return_bias,
                return_layernorm_output=return_layernorm_output,
                input_layernorm=input_layernorm,
                attention_type=attention_type,
                fuse_qkv_params=fuse_qkv_params,
                zero_centered_gamma=zero_centered_gamma,
                qkv_weight_interleaved=qkv_weight_interleaved,
                rotary_pos_interleaved=rotary_pos_interleaved,
                bias=bias,
                normalization=normalization,
                qkv_format=layout,
                qk_norm_type=qk_norm_type,
                qk_norm_eps=qk_norm_eps,
                qk_norm_before_rope=qk_norm_before_rope,
                name=name,
                tp_group=parallel,
            )
        self._has_modes = True
        adopt(self, NAMED)
        mark_shared(self)
        # Under sequence parallelism the script draws all of a layer's numbers from a stream of the rank's.
        tracker = None if parallel is not None and sequence_parallel else get_rng_state_tracker
        configure(self, bottom_right_diagonal, tracker, fuse_wgrad_accumulation)
        if qkv_format is SBHD and self.qkv_format == "sbhd":
            self._unchosen = "qkv_format"
        runs_as = self.core_attention.implementation().implementation
        served(f"{PACKAGE}.MultiheadAttention", f"{self.SERVED_BY}, {runs_as}")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Masks | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,  # noqa: ARG002
        pad_between_seqs: bool | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Any:
        """(s, b, width) to the same shape, or bshd, or thd; or a tuple with what was asked for.

        With a residual, which only ours has, hidden_states + residual is the input, and returned last.
        """
        refuse_call("MultiheadAttention", inference_params, pad_between_seqs, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if self._unchosen is not None:
            advise(self, hidden_states, attn_mask_type or self.core_attention.attn_mask_type)
        options: dict[str, Any] = {
            "residual": residual,
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "is_first_microbatch": is_first_microbatch,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
        }
        if bottom_right_diagonal is None and not checkpoint_core_attention:
            result = super().forward(hidden_states, attention_mask, encoder_output, **options)
        else:
            with for_this_call(self.core_attention, bottom_right_diagonal, checkpoint_core_attention):
                result = super().forward(hidden_states, attention_mask, encoder_output, **options)
        return bias_or_empty(result, 1, hidden_states) if self.return_bias else result
