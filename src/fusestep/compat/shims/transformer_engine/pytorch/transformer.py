"""te.TransformerLayer over fusestep.nn.TransformerLayer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from fusestep import nn
from fusestep.compat.report import served
from fusestep.errors import UserError
from transformer_engine.pytorch._arguments import (
    PACKAGE,
    SBHD,
    Ranks,
    layout_of,
    mark,
    mark_shared,
    own_randomness,
    placed,
    ranks_of,
    refuse,
)
from transformer_engine.pytorch.attention._parts import NAMED, adopt, advise, configure, for_this_call, refuse_call
from transformer_engine.pytorch.attention.dot_product_attention import BiasType, Masks
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.module.base import Initialiser

__all__ = ["TransformerLayer"]


class TransformerLayer(Ranks, nn.TransformerLayer):
    """A transformer block, pre-norm; see fusestep.nn.TransformerLayer.

    The layout is sbhd, sequence first, unless attn_input_format or `fusestep run --te-layout` says otherwise.
    """

    SERVED_BY = "fusestep.nn.TransformerLayer"

    _unchosen: str | None = None  # the argument of a layout that nobody chose, until the first call

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Initialiser | None = None,
        output_layer_init_method: Initialiser | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,  # noqa: ARG002
        micro_batch_size: int | None = None,  # noqa: ARG002
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,  # noqa: ARG002 (they refine ub_tp_comm_overlap)
        ub_overlap_rs: bool = True,  # noqa: ARG002
        ub_overlap_rs_dgrad: bool = False,  # noqa: ARG002
        ub_bulk_dgrad: bool = True,  # noqa: ARG002
        ub_bulk_wgrad: bool = True,  # noqa: ARG002
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm",
        device: torch.device | str = "cuda",
        attn_input_format: str = SBHD,
        name: str | None = None,
        qk_norm_type: Literal["LayerNorm", "RMSNorm"] | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        refuse(
            "TransformerLayer",
            ub_tp_comm_overlap=ub_tp_comm_overlap,
            activation_params=activation_params,
            softmax_type=softmax_type,
        )
        layout = layout_of(attn_input_format)
        parallel = ranks_of(
            "TransformerLayer",
            tp_group,
            tp_size,
            sequence_parallel,
            layout=layout,
            set_parallel_mode=set_parallel_mode,
        )
        with own_randomness(get_rng_state_tracker):
            super().__init__(
                hidden_size,
                ffn_hidden_size,
                num_attention_heads,
                num_gqa_groups,
                layernorm_epsilon,
                hidden_dropout,
                attention_dropout,
                placed("TransformerLayer", device),
                params_dtype,
                init_method=init_method,
                output_layer_init_method=output_layer_init_method,
                layer_number=layer_number,
                kv_channels=kv_channels,
                self_attn_mask_type=self_attn_mask_type,
                window_size=window_size,
                enc_dec_attn_mask_type=enc_dec_attn_mask_type,
                enc_dec_window_size=enc_dec_window_size,
                apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
                output_layernorm=output_layernorm,
                parallel_attention_mlp=parallel_attention_mlp,
                layer_type=layer_type,
                drop_path_rate=drop_path_rate,
                fuse_qkv_params=fuse_qkv_params,
                rotary_pos_interleaved=rotary_pos_interleaved,
                zero_centered_gamma=zero_centered_gamma,
                qkv_weight_interleaved=qkv_weight_interleaved,
                bias=bias,
                activation=activation,
                normalization=normalization,
                attn_input_format=layout,
                qk_norm_type=qk_norm_type,
                qk_norm_eps=qk_norm_eps,
                qk_norm_before_rope=qk_norm_before_rope,
                name=name,
                tp_group=parallel,
            )
        self._has_modes = True
        adopt(self, {**NAMED, nn.MultiheadAttention: MultiheadAttention})
        mark_shared(self)
        if output_layernorm and sequence_parallel:
            mark(self.layernorm, "weight", "bias")
        # Under sequence parallelism the script draws all of a layer's numbers from a stream of the rank's.
        tracker = None if parallel is not None and sequence_parallel else get_rng_state_tracker
        configure(self, bottom_right_diagonal, tracker, fuse_wgrad_accumulation)
        if layer_type == "decoder":
            configure(self.inter_attention, enc_dec_bottom_right_diagonal, tracker, accumulates=False)
        if attn_input_format is SBHD and self.attn_input_format == "sbhd":
            self._unchosen = "attn_input_format"
        runs_as = self.layernorm_mlp.implementation().implementation
        served(f"{PACKAGE}.TransformerLayer", f"{self.SERVED_BY}, {runs_as}")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Masks | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Masks | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Any:
        """(s, b, width) to the same shape, or bshd, or thd; see fusestep.nn.TransformerLayer.forward."""
        if isinstance(bottom_right_diagonal, Tensor):
            raise UserError(
                "TransformerLayer: bottom_right_diagonal is a tensor; encoder_output, fifth in 1.x, is now sixth, so "
                "pass it by its name."
            )
        refuse_call("TransformerLayer", inference_params, pad_between_seqs, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if self._unchosen is not None:
            advise(self, hidden_states, self_attn_mask_type or self.self_attention.core_attention.attn_mask_type)
        options: dict[str, Any] = {
            "self_attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "encoder_output": encoder_output,
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_dec_attn_mask_type": enc_dec_attn_mask_type,
            "enc_dec_window_size": enc_dec_window_size,
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
        if bottom_right_diagonal is None and enc_dec_bottom_right_diagonal is None and not checkpoint_core_attention:
            return super().forward(hidden_states, attention_mask, **options)
        with ExitStack() as stack:
            core = self.self_attention.core_attention
            stack.enter_context(for_this_call(core, bottom_right_diagonal, checkpoint_core_attention))
            if self.layer_type == "decoder":
                core = self.inter_attention.core_attention
                stack.enter_context(for_this_call(core, enc_dec_bottom_right_diagonal, checkpoint_core_attention))
            return super().forward(hidden_states, attention_mask, **options)
