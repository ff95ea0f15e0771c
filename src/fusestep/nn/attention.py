"""DotProductAttention: softmax(scale · q · kᵀ + mask) · v, through the fastest of torch's kernels for the shape.

Layouts of q, k, v: "bshd" (batch, sequence, heads, head size), "sbhd", and "thd", packed tokens whose sequences are
told by cumulative lengths. None of them is copied on the way in or out where a kernel of torch's takes it as it lies;
attention_backends says which kernel serves a call.

Source of the names and meanings: Transformer Engine's DotProductAttention.

Legend: B batch, T packed tokens, Sq and Sk lengths of queries and keys, H heads, G groups (key heads), D head size.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.nn.attention_backends import (
    NAMES,
    attend,
    attend_masked,
    attend_packed,
    attend_window,
    check_total,
    choose,
    serves_flash,
)
from fusestep.nn.attention_masks import (
    Mask,
    alibi_bias,
    checked_window,
    default_alibi_slopes,
    is_named,
    keep_mask,
    mask_named,
    packed_keep_mask,
    padding_from_lengths,
)

Format = Literal["bshd", "sbhd", "thd"]
BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]

#: Layouts whose checks and choice are kept; sequences of all lengths, as generation has them, must not fill memory.
MOST_PLANS = 1024

#: A padding mask for queries and keys alike, or one for each.
Masks = Tensor | tuple[Tensor, Tensor]


class DotProductAttention(nn.Module):
    """Attention of queries to keys and values, without weights of its own.

    Args:
        num_attention_heads: H, of queries.
        kv_channels: D, or (D of queries and keys, D of values).
        num_gqa_groups: G, of keys and values, each of which serves H / G query heads; None: H.
        attention_dropout: probability with which an attention weight is dropped while training, by torch's generator.
        qkv_format: "bshd", "sbhd" or "thd"; see forward.
        attn_mask_type: "no_mask", "causal", "padding", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary". Causal masks count from the first query and key, those of
            bottom_right from the last.
        window_size: (left, right), how many keys on each side of its own place a query sees; -1: all.
        softmax_scale: multiplies the scores; None: 1 / √D.
        attention_type: "self" or "cross"; told to the reader alone.
        layer_number: told to the reader alone.
    Raises: UserError.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: Format = "bshd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        softmax_scale: float | None = None,
        attention_type: Literal["self", "cross"] = "self",
        layer_number: int | None = None,
    ) -> None:
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(type(self).__name__, num_attention_heads, groups)
        if not 0.0 <= attention_dropout < 1.0:
            raise UserError(
                f"{type(self).__name__}: attention_dropout is {attention_dropout!r}; give a probability from 0 up to, "
                "not including, 1."
            )
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.kv_channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.attention_dropout = attention_dropout
        self.qkv_format = _checked_format(type(self).__name__, qkv_format)
        self.attn_mask_type = attn_mask_type
        mask = mask_named(type(self).__name__, attn_mask_type)
        checked_window(type(self).__name__, window_size, mask)
        self.window_size = window_size
        self.softmax_scale = 1.0 / math.sqrt(self.kv_channels[0]) if softmax_scale is None else softmax_scale
        self.attention_type = attention_type
        self.layer_number = layer_number
        self._backend: str | None = None
        self._plans: dict[tuple[Any, ...], tuple[str, bool]] = {}
        self.register_load_state_dict_pre_hook(_drop_empty_extra_state)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Masks | None = None,
        *,
        qkv_format: Format | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query_layer: (B, Sq, H, D), (Sq, B, H, D) or (T, H, D); strided views are taken as they lie.
            key_layer, value_layer: the same with Sk and G.
            attention_mask: boolean, True is masked out. For padding masks (B, 1, 1, S), or a pair of them for queries
                and keys, with the padding at the end; for "arbitrary" broadcastable to (B, H, Sq, Sk).
            cu_seqlens_q, cu_seqlens_kv: (B + 1,) int32 on the device, cumulative lengths from 0; they tell the
                sequences of thd, where they end with T, and may stand for a padding mask. cu_seqlens_kv is that of the
                queries if None.
            max_seqlen_q, max_seqlen_kv: the longest sequences of thd. Without them T is taken, so that the host need
                not wait for the device; the kernel then launches programs that find nothing to do.
            qkv_format, attn_mask_type, window_size: of this call; None: the module's.
            core_attention_bias_type, core_attention_bias: added to the scores before ("pre_scale_bias") or after
                ("post_scale_bias") they are scaled, broadcastable to (B, H, Sq, Sk); "alibi" adds
                −slope · |distance|, with alibi_slopes (H,) or (B, H) or the usual ones.

        Returns: (B, Sq, H·D), (Sq, B, H·D) or (T, H·D), in the dtype of the inputs, or of autocast. A query that sees
            no key gets zeros and gives no gradient.
        Raises: UserError for arguments that do not fit; nothing waits for the device to find out.
        """
        q, k, v = query_layer, key_layer, value_layer
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = _in_autocast_dtype(q), _in_autocast_dtype(k), _in_autocast_dtype(v)
        is_usual = (
            (attention_mask is None and cu_seqlens_q is None and core_attention_bias is None)
            and (qkv_format is None and attn_mask_type is None and window_size is None)
            and (core_attention_bias_type == "no_bias" and not torch.compiler.is_compiling())
        )
        key = self._key(q, k, v) if is_usual else None
        plan = None if key is None else self._plans.get(key)
        if plan is not None:
            return self._attend_named(q, k, v, *plan, self.qkv_format)

        who = type(self).__name__
        layout = self.qkv_format if qkv_format is None else _checked_format(who, qkv_format)
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        mask = mask_named(who, mask_type)
        window = checked_window(who, self.window_size if window_size is None else window_size, mask)
        self._check(who, layout, q, k, v)
        if attention_mask is not None and not (mask.padding or mask.arbitrary):
            raise UserError(
                f"{who}: an attention_mask was passed but attn_mask_type is {mask_type!r}, which has none; pass "
                "attn_mask_type='padding', 'padding_causal' or 'arbitrary', or leave the mask out."
            )
        scale, dropout = self.softmax_scale, self.attention_dropout if self.training else 0.0
        if layout == "thd":
            if core_attention_bias_type != "no_bias":
                raise UserError(
                    f"{who}: core_attention_bias_type is {core_attention_bias_type!r}, which packed sequences (thd) do "
                    "not take; use qkv_format='bshd'."
                )
            starts = _packed_starts(who, q, k, cu_seqlens_q, cu_seqlens_kv)
            longest = (max_seqlen_q or q.shape[0], max_seqlen_kv or max_seqlen_q or k.shape[0])
            return self._attend_packed(q, k, v, starts, longest, mask, window, scale, dropout).flatten(1)

        as_given = (q, k, v)
        q, k, v = _heads_first(q, layout), _heads_first(k, layout), _heads_first(v, layout)
        lengths = (q.shape[2], k.shape[2])
        bias = self._bias(who, core_attention_bias_type, core_attention_bias, alibi_slopes, lengths, mask, q)
        is_aligned = lengths[0] == lengths[1] or mask.bottom_right
        is_plain = bias is None and not mask.padding and not mask.arbitrary
        if is_plain and is_named(mask, window, lengths):
            backend = choose(q, k, v, mask.causal, dropout, self.training)
            if key is not None:
                if len(self._plans) >= MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = (backend, mask.causal)
            return self._attend_named(*as_given, backend, mask.causal, layout)
        if is_plain and is_aligned and q.shape[-1] % 8 == 0 and serves_flash(q, k, v):
            self._note("flash")
            out = attend_window(q, k, v, window=window, scale=scale, dropout=dropout)
        else:
            self._note("masked")
            padded: tuple[Tensor | None, Tensor | None] = (None, None)
            masked_out = None
            if mask.padding:
                padded = _padding(who, attention_mask, cu_seqlens_q, cu_seqlens_kv, q.shape[0], lengths)
            elif mask.arbitrary:
                masked_out = _arbitrary(who, attention_mask, (q.shape[0], q.shape[1], *lengths))
            keep = keep_mask(mask, window, lengths, *padded, masked_out, q.device)
            out = attend_masked(q, k, v, keep, bias, scale=scale, dropout=dropout)
        return _heads_last(out, layout)

    def _key(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """All that checks and the choice of a kernel depend on, in a call without options."""
        return (
            *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.stride(), v.dtype, v.device, self.training, self.qkv_format, self.attn_mask_type),
            *(self.window_size, self.attention_dropout > 0, torch.are_deterministic_algorithms_enabled()),
            # What the user switched off, with torch.nn.attention.sdpa_kernel for instance, stays off.
            *(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        )

    def _attend_named(self, q: Tensor, k: Tensor, v: Tensor, backend: str, causal: bool, layout: Format) -> Tensor:
        """Under a mask that kernels know by name."""
        self._note(backend)
        dropout = self.attention_dropout if self.training else 0.0
        q, k, v = _heads_first(q, layout), _heads_first(k, layout), _heads_first(v, layout)
        out = attend(q, k, v, backend, causal=causal, scale=self.softmax_scale, dropout=dropout)
        return _heads_last(out, layout)

    def _attend_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        mask: Mask,
        window: tuple[int, int],
        scale: float,
        dropout: float,
    ) -> Tensor:
        """(T, H, D), where each sequence attends within itself."""
        # The kernel counts from the last query and key, which differs from the first where lengths do.
        is_aligned = starts[0] is starts[1] or mask.bottom_right or window == (-1, -1)
        if is_aligned and serves_flash(q, k, v):
            self._note("flash")
            for start, tensor in zip(starts, (q, k), strict=True):
                check_total(start, tensor.shape[0])
            return attend_packed(q, k, v, starts, longest, window=window, scale=scale, dropout=dropout)
        self._note("masked")
        totals = (q.shape[0], k.shape[0])
        if q.device.type != "cpu" or torch.compiler.is_compiling():
            keep: Tensor | None = packed_keep_mask(mask.bottom_right, window, *starts, totals)
            return _attend_tokens(q, k, v, keep, scale, dropout)
        # On a CPU the lengths can be looked at, and the sequences taken one by one.
        parts = []
        sizes = [torch.diff(start).tolist() for start in starts]
        pieces = (q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]))
        for one_q, one_k, one_v in zip(*pieces, strict=True):
            lengths = (one_q.shape[0], one_k.shape[0])
            keep = keep_mask(mask, window, lengths, None, None, None, q.device)
            parts.append(_attend_tokens(one_q, one_k, one_v, keep, scale, dropout))
        return torch.cat(parts) if parts else q[..., : v.shape[-1]]

    def _bias(
        self,
        who: str,
        kind: BiasType,
        bias: Tensor | None,
        slopes: Tensor | None,
        lengths: tuple[int, int],
        mask: Mask,
        q: Tensor,
    ) -> Tensor | None:
        """What is added to the scaled scores."""
        if kind not in get_args(BiasType):
            raise UserError(
                f"{who}: core_attention_bias_type is {kind!r}; choose one of {', '.join(get_args(BiasType))}."
            )
        if kind == "alibi":
            if slopes is None:
                slopes = default_alibi_slopes(self.num_attention_heads, q.device)
            if slopes.shape[-1] != self.num_attention_heads or slopes.dim() > 2:
                raise UserError(
                    f"{who}: alibi_slopes have shape {tuple(slopes.shape)}; pass one slope for each of the "
                    f"{self.num_attention_heads} heads, or (batch, heads)."
                )
            return alibi_bias(slopes, lengths, mask.bottom_right)
        wants_bias = kind != "no_bias"
        if wants_bias != (bias is not None):
            raise UserError(
                f"{who}: core_attention_bias_type is {kind!r} but core_attention_bias is "
                f"{'missing' if bias is None else 'given'}; pass both, or neither."
            )
        if bias is None:
            return None
        _check_broadcast(who, "core_attention_bias", bias, (q.shape[0], q.shape[1], *lengths))
        return bias * self.softmax_scale if kind == "pre_scale_bias" else bias

    def _check(self, who: str, layout: Format, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One sentence for tensors that do not fit each other or the module."""
        dimensions = 3 if layout == "thd" else 4
        size_k, size_v = self.kv_channels
        wanted = (("query_layer", q, self.num_attention_heads, size_k), ("key_layer", k, self.num_gqa_groups, size_k))
        for name, tensor, heads, size in (*wanted, ("value_layer", v, self.num_gqa_groups, size_v)):
            if tensor.dim() != dimensions or tensor.shape[-2:] != (heads, size):
                places = "tokens" if layout == "thd" else "batch, sequence" if layout == "bshd" else "sequence, batch"
                raise UserError(
                    f"{who}: {name} has shape {tuple(tensor.shape)}; pass ({places}, {heads} heads, {size}) for "
                    f"qkv_format={layout!r}."
                )
            if tensor.dtype != q.dtype or tensor.device != q.device:
                raise UserError(
                    f"{who}: {name} is {tensor.dtype} on {tensor.device} and query_layer {q.dtype} on {q.device}; "
                    "give all three one dtype and device."
                )
        batch = {"bshd": 0, "sbhd": 1, "thd": None}[layout]
        if k.shape[:-2] != v.shape[:-2] or (batch is not None and q.shape[batch] != k.shape[batch]):
            raise UserError(
                f"{who}: query_layer, key_layer and value_layer have shapes {tuple(q.shape)}, {tuple(k.shape)} and "
                f"{tuple(v.shape)}; keys and values must agree, and all three in the batch, for qkv_format={layout!r}."
            )

    def _note(self, backend: str) -> None:
        if self._backend != backend:
            self._backend = backend

    def implementation(self) -> Choice:
        """Which of torch's kernels the last call ran as."""
        if self._backend is None:
            return Choice("torch", "the attention kernel is chosen at the first call")
        return Choice("torch", f"attention by {NAMES[self._backend]}, at the last call")

    def extra_repr(self) -> str:
        groups = "" if self.num_gqa_groups == self.num_attention_heads else f", num_gqa_groups={self.num_gqa_groups}"
        window = "" if self.window_size is None else f", window_size={self.window_size}"
        return (
            f"num_attention_heads={self.num_attention_heads}, kv_channels={self.kv_channels[0]}{groups}, "
            f"attn_mask_type={self.attn_mask_type!r}, qkv_format={self.qkv_format!r}{window}"
        )


def _attend_tokens(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attention of (tokens, H, D) by a mask (tokens of q, tokens of k)."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    return attend_masked(q, k, v, keep, None, scale=scale, dropout=dropout).squeeze(0).transpose(0, 1)


def _heads_first(tensor: Tensor, layout: Format) -> Tensor:
    """(B, heads, S, D), a view."""
    return tensor.transpose(1, 2) if layout == "bshd" else tensor.permute(1, 2, 0, 3)


def _heads_last(out: Tensor, layout: Format) -> Tensor:
    """(B, S, H·D) or (S, B, H·D) of (B, H, S, D); copied only where the kernel has an order of its own."""
    out = out.transpose(1, 2) if layout == "bshd" else out.permute(2, 0, 1, 3)
    return out.flatten(2).contiguous()


def check_heads(who: str, heads: int, groups: int) -> None:
    """Raises: UserError unless both are positive and the groups divide the heads."""
    if heads < 1 or groups < 1 or heads % groups:
        raise UserError(
            f"{who}: {heads} attention heads cannot be shared out over {groups} groups; choose positive numbers of "
            "which num_gqa_groups divides num_attention_heads."
        )


def _checked_format(who: str, layout: str) -> Format:
    if layout not in get_args(Format):
        raise UserError(f"{who}: qkv_format is {layout!r}; choose one of {', '.join(get_args(Format))}.")
    return layout  # type: ignore[return-value]


def _in_autocast_dtype(tensor: Tensor) -> Tensor:
    """As autocast casts the arguments of scaled_dot_product_attention; the kernels called directly are not told."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _packed_starts(who: str, q: Tensor, k: Tensor, starts_q: Tensor | None, starts_k: Tensor | None) -> Any:
    """The cumulative lengths of queries and keys, one object if they are the same."""
    if starts_q is None:
        raise UserError(f"{who}: qkv_format 'thd' needs to know where sequences begin; pass cu_seqlens_q.")
    if starts_k is None:
        starts_k = starts_q
    for name, starts, total in (("cu_seqlens_q", starts_q, q.shape[0]), ("cu_seqlens_kv", starts_k, k.shape[0])):
        _check_cumulative(who, name, starts, q.device)
        # On a GPU the device checks it: looking at the number would make the host wait.
        if starts.device.type == "cpu" and not torch.compiler.is_compiling() and int(starts[-1]) != total:
            raise UserError(
                f"{who}: {name} ends with {int(starts[-1])} and there are {total} packed tokens; let it begin with 0 "
                "and end with their number."
            )
    if starts_q.shape != starts_k.shape:
        raise UserError(
            f"{who}: cu_seqlens_q and cu_seqlens_kv have shapes {tuple(starts_q.shape)} and {tuple(starts_k.shape)}; "
            "give both one entry more than there are sequences."
        )
    return starts_q, starts_k


def _check_cumulative(who: str, name: str, starts: Tensor, device: torch.device) -> None:
    if starts.dtype is not torch.int32 or starts.dim() != 1 or starts.numel() == 0 or starts.device != device:
        raise UserError(
            f"{who}: {name} is {starts.dtype} of shape {tuple(starts.shape)} on {starts.device}; pass int32 cumulative "
            f"lengths of shape (sequences + 1,) on {device}."
        )


def _padding(
    who: str,
    given: Masks | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    batch: int,
    lengths: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """(B, Sq) and (B, Sk), True where padding, from a mask, a pair of them, or cumulative lengths."""
    if given is None:
        if starts_q is None:
            raise UserError(f"{who}: a padding mask was asked for; pass attention_mask, or cu_seqlens_q.")
        starts_k = starts_q if starts_k is None else starts_k
        for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_kv", starts_k)):
            _check_cumulative(who, name, starts, starts_q.device)
            if starts.numel() != batch + 1:
                raise UserError(
                    f"{who}: {name} has {starts.numel()} entries for a batch of {batch}; pass one more than sequences."
                )
        return padding_from_lengths(starts_q, lengths[0]), padding_from_lengths(starts_k, lengths[1])
    pair = given if isinstance(given, tuple) else (given, given)
    for mask, length in zip(pair, lengths, strict=True):
        if mask.dtype is not torch.bool or mask.shape != (batch, 1, 1, length):
            raise UserError(
                f"{who}: attention_mask is {mask.dtype} of shape {tuple(mask.shape)}; a padding mask is boolean, True "
                f"where masked out, of shape {(batch, 1, 1, length)}, or a pair of such for queries and keys."
            )
    return pair[0][:, 0, 0], pair[1][:, 0, 0]


def _arbitrary(who: str, given: Masks | None, scores: tuple[int, int, int, int]) -> Tensor:
    if not isinstance(given, Tensor) or given.dtype is not torch.bool:
        got = "missing" if given is None else getattr(given, "dtype", type(given).__name__)
        raise UserError(
            f"{who}: attention_mask is {got}; attn_mask_type 'arbitrary' needs a boolean tensor, True where masked "
            f"out, broadcastable to {scores}."
        )
    _check_broadcast(who, "attention_mask", given, scores)
    return given


def _check_broadcast(who: str, name: str, tensor: Tensor, scores: tuple[int, int, int, int]) -> None:
    fits = tensor.dim() <= 4 and all(
        size in (1, wanted) for size, wanted in zip(tensor.shape[::-1], scores[::-1], strict=False)
    )
    if not fits:
        raise UserError(
            f"{who}: {name} has shape {tuple(tensor.shape)}; pass one that broadcasts to (batch, heads, queries, keys) "
            f"= {scores}."
        )


def _drop_empty_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_unused: Any) -> None:
    """Transformer Engine writes an entry for the attention's FP8 state; this module has none."""
    extra = state.get(prefix + "_extra_state")
    if extra is None or (isinstance(extra, Tensor) and extra.numel() == 0):
        state.pop(prefix + "_extra_state", None)
