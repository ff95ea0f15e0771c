"""MultiheadAttention: queries, keys and values from one product, attention, and a product of all heads together.

    q, k, v = linear_qkv(norm(x))        out = linear_proj(attend(rotate(q), rotate(k), v))

The rows of the fused weight are q, then k, then v, or interleaved: for each group its query heads, its key and its
value. Parameter names and layouts are Transformer Engine's, so that checkpoints exchange.

Legend: H heads, G groups (key heads), R = H / G queries of a group, D head size, W hidden size; "…" stands for (batch,
sequence), (sequence, batch) or (tokens), as the format says.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusestep.distributed.tensor_parallel import TensorParallel, tensor_parallel
from fusestep.errors import UserError
from fusestep.nn.attention import BiasType, DotProductAttention, Format, Masks, check_heads
from fusestep.nn.attention_masks import default_alibi_slopes
from fusestep.nn.fp8_module import Initialiser
from fusestep.nn.fused_norm import Normalization
from fusestep.nn.head_split import HeadSplit, is_watched
from fusestep.nn.layer_norm_linear import LayerNormLinear
from fusestep.nn.linear import Linear
from fusestep.nn.normalization import LayerNorm, RMSNorm
from fusestep.ops.rotary import apply_rotary_pos_emb

NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class MultiheadAttention(nn.Module):
    """Attention with its products, and its norm in front on request.

    Args:
        hidden_size: W.
        num_attention_heads: H.
        kv_channels: D; None: W / H.
        attention_dropout: probability with which an attention weight is dropped while training.
        layernorm_epsilon: what norms add to the variance.
        device, dtype: of the parameters.
        init_method, output_layer_init_method: fill the weights of q, k, v and of the last product; None: N(0, 0.023).
        attn_mask_type, window_size, softmax_scale: as of DotProductAttention.
        num_gqa_groups: G; None: H.
        return_bias: do not add the last product's bias but return it too.
        input_layernorm: normalise the input first, in the same module as the product.
        attention_type: "self", or "cross" for keys and values of an encoder.
        fuse_qkv_params: one parameter for q, k and v; otherwise query_weight, key_weight and value_weight, which are
            put together for each call.
        zero_centered_gamma: norms multiply by 1 + weight.
        qkv_weight_interleaved: rows of the fused weight go group by group. Then queries of grouped heads (G < H) are
            copied on their way to the attention, which blocks of q, k and v spare.
        rotary_pos_interleaved: rotary embedding turns neighbouring elements, not halves.
        bias: of the products.
        normalization: "LayerNorm" or "RMSNorm".
        qkv_format: "bshd", "sbhd" or "thd", of the input.
        qk_norm_type: normalise each head of q and k: "LayerNorm", "RMSNorm" or None; qk_norm_eps is added to the
            variance; qk_norm_before_rope: before they are rotated instead of after.
        return_layernorm_output: return the norm's output too; needs input_layernorm.
        tp_group: the ranks that share the heads, with the first product by its rows and the last by its columns; see
            docs/parallelism. `num_attention_heads` and `num_gqa_groups`, the attributes, are then this rank's.
        sequence_parallel: input, norm and output are of this rank's slice of the sequence; attention sees the whole.
    Raises: UserError.
    """

    # The ranks that share the heads, if they do.
    _parallel: TensorParallel | None = None

    key_value: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Initialiser | None = None,
        output_layer_init_method: Initialiser | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        num_gqa_groups: int | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        qkv_format: Format = "bshd",
        softmax_scale: float | None = None,
        qk_norm_type: Normalization | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        name: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_heads(who, num_attention_heads, groups)
        if kv_channels is None:
            if hidden_size % num_attention_heads:
                raise UserError(
                    f"{who}: hidden_size {hidden_size} is not a multiple of {num_attention_heads} heads; choose a "
                    "size that the heads divide, or pass kv_channels."
                )
            kv_channels = hidden_size // num_attention_heads
        if attention_type not in ("self", "cross"):
            raise UserError(f'{who}: attention_type is {attention_type!r}; choose "self" or "cross".')
        for what, kind in (("normalization", normalization), ("qk_norm_type", qk_norm_type)):
            if kind not in NORMS and not (what == "qk_norm_type" and kind is None):
                raise UserError(f"{who}: {what} is {kind!r}; choose one of {', '.join(NORMS)}.")
        if return_layernorm_output and not input_layernorm:
            raise UserError(f"{who}: return_layernorm_output needs a norm; pass input_layernorm=True too.")
        rows_q, rows_k = num_attention_heads * kv_channels, groups * kv_channels
        self._parallel = tensor_parallel(who, tp_group, sequence_parallel, sequence_dim_of(qkv_format))
        if self._parallel is not None:
            num_attention_heads = self._parallel.share("num_attention_heads", num_attention_heads)
            groups = self._parallel.share("num_gqa_groups", groups)
        self.hidden_size, self.num_attention_heads, self.num_gqa_groups = hidden_size, num_attention_heads, groups
        self.kv_channels = kv_channels
        self.input_layernorm, self.attention_type, self.qkv_format = input_layernorm, attention_type, qkv_format
        self.is_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.qk_norm_before_rope = qk_norm_before_rope
        self.layer_number = layer_number

        where: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype, "tp_group": self._parallel}
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
        }

        def product(rows: dict[str, int], *, is_normed: bool) -> Linear | LayerNormLinear:
            split = None if fuse_qkv_params else rows
            options = {**where, "init_method": init_method, "parameters_split": split, "parallel_mode": "column"}
            # Interleaved rows go group by group; else each rank takes its part of q, of k and of v.
            options["column_blocks"] = list(rows.values()) if fuse_qkv_params and not self.is_interleaved else None
            if is_normed:
                normed = {**norm, "return_layernorm_output": return_layernorm_output}
                return LayerNormLinear(hidden_size, sum(rows.values()), **normed, **options)
            return Linear(hidden_size, sum(rows.values()), **options)

        if attention_type == "self":
            rows = {"query": rows_q, "key": rows_k, "value": rows_k}
            self.add_module("layernorm_qkv" if input_layernorm else "qkv", product(rows, is_normed=input_layernorm))
        else:
            query = product({"query": rows_q}, is_normed=input_layernorm)
            self.add_module("layernorm_query" if input_layernorm else "query_layer", query)
            self.key_value = product({"key": rows_k, "value": rows_k}, is_normed=False)
        if qk_norm_type is not None:
            for which in ("q_norm", "k_norm"):
                norm_class = NORMS[qk_norm_type]
                norm_of_heads = norm_class(
                    kv_channels, qk_norm_eps, device=device, dtype=dtype, tp_group=self._parallel
                )
                self.add_module(which, norm_of_heads)
        self.has_qk_norm = qk_norm_type is not None
        self.core_attention = DotProductAttention(
            num_attention_heads,
            kv_channels,
            groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            softmax_scale=softmax_scale,
            attention_type=attention_type,
            layer_number=layer_number,
        )
        self.proj = Linear(
            rows_q,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            name=name,
            parallel_mode="row",
            **where,
        )

    def reset_parameters(self) -> None:
        """Initialise the parameters of all parts, after meta-device construction for instance."""
        reset_parts(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Masks | None = None,
        encoder_output: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        returns_input: bool = False,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Any:
        """Attend.

        Args:
            hidden_states: (…, W).
            encoder_output: (…, W), what cross attention takes keys and values from.
            residual: (…, W), added to hidden_states before the norm, in one kernel with it.
            returns_input: where `may_return_input` says so and there is no residual, return hidden_states where
                hidden_states + residual would be: its gradient is then added in the norm's own backward.
            is_first_microbatch: as of Linear.
            rotary_pos_emb: angles, or those of queries and those of keys; see RotaryPositionEmbedding.
            others: as of DotProductAttention.
        Returns: (…, W), or a tuple of it and, in this order, what was asked for: the bias (return_bias), the norm's
            output (return_layernorm_output), hidden_states + residual (where a residual is given).
        Raises: UserError for arguments that do not fit.
        """
        if encoder_output is not None and self.attention_type == "self":
            raise UserError(
                f"{type(self).__name__}: encoder_output was passed and attention_type is 'self', which attends to "
                "hidden_states alone; build it with attention_type='cross', or leave encoder_output out."
            )
        mixed, *others = self._product(hidden_states, residual, is_first_microbatch, returns_input)
        if self.attention_type == "self":
            q, k, v = mixed
            cu_seqlens_kv, max_seqlen_kv = cu_seqlens_q, max_seqlen_q  # the same sequences
        else:
            if encoder_output is None:
                raise UserError(
                    f"{type(self).__name__}: cross attention takes keys and values of an encoder; pass encoder_output."
                )
            q = mixed
            k, v = self._keys_and_values(self.key_value(encoder_output, is_first_microbatch))
        q, k = self._placed(q, k, rotary_pos_emb, cu_seqlens_q, cu_seqlens_kv)
        attend: Any = self.core_attention if self._parallel is None else self._attend_own_heads
        attended = attend(
            q,
            k,
            v,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        out = self.proj(attended, is_first_microbatch)
        if self.return_bias:
            others = [out[1], *others]
            out = out[0]
        return (out, *others) if others else out

    def may_return_input(self) -> bool:
        """Whether a call may ask for `returns_input`: a norm of ours stands in front, and nothing is traced."""
        return type(self._modules.get("layernorm_qkv")) is LayerNormLinear and not torch.compiler.is_compiling()

    def _attend_own_heads(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Masks | None, **options: Any
    ) -> Tensor:
        """Attention of this rank's heads, which drop weights of their own."""
        parallel = self._parallel
        assert parallel is not None
        mine, heads = parallel.rank or 0, parallel.size * self.num_attention_heads
        if options["core_attention_bias_type"] == "alibi" and options["alibi_slopes"] is None:
            options["alibi_slopes"] = default_alibi_slopes(heads, q.device)
        for name, dim in (("alibi_slopes", -1), ("core_attention_bias", -3)):
            given = options[name]
            if given is not None and given.dim() >= -dim and given.shape[dim] == heads:
                options[name] = given.chunk(parallel.size, dim)[mine]
        core = self.core_attention
        draws = core.attention_dropout and self.training
        with parallel.own_randomness(q.device) if draws else nullcontext():
            attended: Tensor = core(q, k, v, attention_mask, **options)
        return attended

    def _product(self, x: Tensor, residual: Tensor | None, first: bool | None, returns_input: bool) -> tuple[Any, ...]:
        """(q, k, v) by heads, or in cross attention q alone; the norm's output if it is to be returned, and
        x + residual if a residual was given, or x if that is to be returned."""
        is_self = self.attention_type == "self"
        options: dict[str, Any] = {}
        names = ("layernorm_qkv", "qkv") if is_self else ("layernorm_query", "query_layer")
        module: Any = self._modules[names[0] if self.input_layernorm else names[1]]
        others: tuple[Tensor, ...] = ()
        split = HeadSplit(self.num_attention_heads, self.num_gqa_groups, self.kv_channels, self.is_interleaved)
        hands_out = is_self and may_split(module)
        if hands_out:
            options["split"] = split
        if self.input_layernorm:
            if residual is not None:
                options["residual"] = residual
            if returns_input:
                options["returns_input"] = True
            mixed = module(x, first, **options)
            if residual is not None or returns_input or self.return_layernorm_output:
                mixed, *others = mixed
        elif residual is None:
            mixed = module(x, first, **options)
        else:
            stream = x + residual
            mixed, others = module(stream, first, **options), (stream,)
        if not is_self:
            mixed = mixed.unflatten(-1, (self.num_attention_heads, self.kv_channels))
        elif not hands_out:
            mixed = split.views(mixed)
        return mixed, *others

    def _keys_and_values(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        G, D = self.num_gqa_groups, self.kv_channels
        if self.is_interleaved:
            k, v = mixed.unflatten(-1, (G, 2, D)).unbind(-2)
        else:
            k, v = (part.unflatten(-1, (G, D)) for part in mixed.chunk(2, -1))
        return k, v

    def _placed(
        self,
        q: Tensor,
        k: Tensor,
        rotary: Tensor | tuple[Tensor, Tensor] | None,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """q and k, each head normalised and rotated by its position, as asked."""
        if self.has_qk_norm and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            angles_q, angles_k = rotary if isinstance(rotary, tuple) else (rotary, rotary)
            is_packed = self.qkv_format == "thd"
            layout, turn = self.qkv_format, self.rotary_pos_interleaved
            q = apply_rotary_pos_emb(q, angles_q, layout, None, turn, starts_q if is_packed else None)
            k = apply_rotary_pos_emb(k, angles_k, layout, None, turn, starts_k if is_packed else None)
        if self.has_qk_norm and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k


def may_split(module: nn.Module) -> bool:
    """Whether the first product can hand out q, k and v itself, as FP8 would have it (head_split.py): nobody stands in
    its place, and nobody waits for its output or the gradient of that."""
    return type(module) in (LayerNormLinear, Linear) and not (torch.compiler.is_compiling() or is_watched(module))


def sequence_dim_of(layout: str) -> int:
    """The dimension of the sequence; packed tokens are one sequence."""
    return 1 if layout == "bshd" else 0


def reset_parts(module: nn.Module) -> None:
    """Initialise what a module is made of."""
    for part in module.children():
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
