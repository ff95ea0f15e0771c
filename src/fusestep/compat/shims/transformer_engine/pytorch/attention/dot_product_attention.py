"""te.DotProductAttention over fusestep.nn.DotProductAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from fusestep import nn
from fusestep.compat.report import not_served
from fusestep.nn.attention_masks import Mask, alibi_bias, default_alibi_slopes, keep_mask
from transformer_engine.pytorch import _arguments
from transformer_engine.pytorch._arguments import SBHD, Ranks, check_ranks, layout_of, own_randomness, ranks_of, refuse
from transformer_engine.pytorch.module._norm import EmptyExtraState

__all__ = ["DotProductAttention"]

Masks = Tensor | tuple[Tensor, Tensor]
BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]

#: Where a layout's batch and sequence stand.
_SEQUENCE = {"bshd": 1, "sbhd": 0}


class DotProductAttention(EmptyExtraState, Ranks, nn.DotProductAttention):
    """Attention of queries to keys and values; see fusestep.nn.DotProductAttention.

    With tp_size ranks num_attention_heads and num_gqa_groups are of all of them, and tensors have this rank's heads.

    bottom_right_diagonal tells where windows and ALiBi begin for masks that are not causal: at the last query and key,
    unless it is False. Causal masks say it by their names.
    """

    SERVED_BY = "fusestep.nn.DotProductAttention"

    # Of the parts of fusestep's own modules, which know nothing of them.
    bottom_right_diagonal: bool | None = None
    checkpoints = False
    _tracker: Callable[[], Any] | None = None
    _unchosen: str | None = None  # the argument of a layout that nobody chose, until the first call

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = SBHD,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: Literal["self", "cross"] = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,  # noqa: ARG002
        cp_stream: Any = None,  # noqa: ARG002
        cp_comm_type: str = "p2p",  # noqa: ARG002
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,  # noqa: ARG002
    ) -> None:
        refuse("DotProductAttention", softmax_type=softmax_type, return_max_logit=return_max_logit)
        check_ranks("DotProductAttention", cp_group, argument="cp")
        parallel = ranks_of("DotProductAttention", tp_group, tp_size, sequence_parallel)
        if parallel is not None:
            num_attention_heads = parallel.share("num_attention_heads", num_attention_heads)
            num_gqa_groups = None if num_gqa_groups is None else parallel.share("num_gqa_groups", num_gqa_groups)
        super().__init__(
            num_attention_heads,
            kv_channels,
            num_gqa_groups,
            attention_dropout,
            layout_of(qkv_format),
            attn_mask_type,
            window_size,
            softmax_scale=softmax_scale,
            attention_type=attention_type,
            layer_number=layer_number,
        )
        self.bottom_right_diagonal = bottom_right_diagonal
        self._parallel, self._has_modes = parallel, True
        # Under sequence parallelism the script draws all of a layer's numbers from a stream of the rank's.
        self._tracker = None if parallel is not None and sequence_parallel else get_rng_state_tracker
        if qkv_format is SBHD and self.qkv_format == "sbhd":
            self._unchosen = "qkv_format"
        self._announce()

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Masks | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,  # noqa: ARG002
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,  # noqa: ARG002
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        """(s, b, h, d) to (s, b, h·d), or bshd, or thd; see fusestep.nn.DotProductAttention.forward.

        qkv_layer holds queries, keys and values in one, kv_layer keys and values, along qkv_interleave_dim.
        """
        if (
            (fp8_output or bf16_backward or pad_between_seqs)
            or (inference_params is not None or score_mod is not None)
            or (cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None)
        ):
            refuse(
                "DotProductAttention.forward",
                inference_params=inference_params,
                pad_between_seqs=pad_between_seqs,
                cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                fp8_output=fp8_output,
                bf16_backward=bf16_backward,
                score_mod=score_mod,
                score_mod_bprop=score_mod_bprop,
                score_mod_tensors=score_mod_tensors,
                score_mod_bprop_tensors=score_mod_bprop_tensors,
            )
        if qkv_layer is not None:
            query_layer, key_layer, value_layer = qkv_layer.unbind(qkv_interleave_dim)
        elif kv_layer is not None:
            key_layer, value_layer = kv_layer.unbind(qkv_interleave_dim)
        if query_layer is None or key_layer is None or value_layer is None:
            raise TypeError(f"{type(self).__name__}: pass query_layer, key_layer and value_layer, or qkv_layer.")

        options: dict[str, Any] = {
            "attention_mask": attention_mask,
            "qkv_format": qkv_format,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_kv": max_seqlen_kv,
            "attn_mask_type": attn_mask_type,
            "window_size": window_size,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
        }
        if self._unchosen is not None:
            self._advise(self._unchosen, query_layer, qkv_format, attn_mask_type)
        if window_size is not None or self.window_size is not None or core_attention_bias_type == "alibi":
            self._align(options, bottom_right_diagonal, query_layer, key_layer)
        recomputes = (checkpoint_core_attention or self.checkpoints) and torch.is_grad_enabled()
        tracker = self._tracker if self.training and self.attention_dropout else None
        draws = self.training and self.attention_dropout
        own = self._parallel if tracker is None and draws else None
        if tracker is None and own is None and not recomputes:
            return super().forward(query_layer, key_layer, value_layer, **options)
        with own_randomness(tracker) if own is None else own.own_randomness(query_layer.device):
            if not recomputes:
                return super().forward(query_layer, key_layer, value_layer, **options)
            out: Tensor = recompute(
                super().forward, query_layer, key_layer, value_layer, use_reentrant=False, **options
            )
            return out

    def _advise(self, argument: str, q: Tensor, qkv_format: str | None, mask_type: str | None) -> None:
        if torch.compiler.is_compiling():
            return
        if qkv_format is None and "causal" in (mask_type or self.attn_mask_type) and q.dim() == 4:
            _arguments.advise_on_layout(argument, (q.shape[0], q.shape[1]))
        self._unchosen = None

    def _align(self, options: dict[str, Any], bottom_right: bool | None, q: Tensor, k: Tensor) -> None:
        """Spell out a window or ALiBi that begins at the last query and key where the mask's name does not say so."""
        mask_type = options["attn_mask_type"] or self.attn_mask_type
        window = self.window_size if options["window_size"] is None else options["window_size"]
        window = (-1, -1) if window is None else window
        has_window = tuple(window) != (-1, -1)
        has_alibi = options["core_attention_bias_type"] == "alibi"
        chosen = self.bottom_right_diagonal if bottom_right is None else bottom_right
        if "causal" in mask_type or chosen is False or not (has_window or has_alibi):
            return
        layout = options["qkv_format"] or self.qkv_format
        if layout == "thd":
            if options["cu_seqlens_kv"] is None or options["cu_seqlens_kv"] is options["cu_seqlens_q"]:
                return
            raise not_served(
                f"{_arguments.PACKAGE}.DotProductAttention with a window over packed sequences of other lengths for "
                "keys than for queries",
                "pass bottom_right_diagonal=False, or attn_mask_type='padding_causal_bottom_right'",
            )
        place = _SEQUENCE[layout]
        lengths = (q.shape[place], k.shape[place])
        if lengths[0] == lengths[1] and mask_type != "padding":
            return
        if has_alibi:
            slopes = options["alibi_slopes"]
            slopes = default_alibi_slopes(self.num_attention_heads, q.device) if slopes is None else slopes
            options["core_attention_bias"] = alibi_bias(slopes, lengths, bottom_right=True).to(q.dtype)
            options["core_attention_bias_type"], options["alibi_slopes"] = "post_scale_bias", None
        if has_window:
            mask, padded = options["attention_mask"], (None, None)
            if mask_type == "padding":
                if mask is None:
                    raise not_served(
                        f"{_arguments.PACKAGE}.DotProductAttention with a window over sequences whose padding is told "
                        "by cu_seqlens_q",
                        "pass the padding as attention_mask",
                    )
                pair = mask if isinstance(mask, tuple) else (mask, mask)
                padded, mask = (pair[0][:, 0, 0], pair[1][:, 0, 0]), None
            keep = keep_mask(Mask(bottom_right=True), window, lengths, *padded, mask, q.device)
            options["attention_mask"] = None if keep is None else ~keep
            options["attn_mask_type"], options["window_size"] = "arbitrary", (-1, -1)
