"""TransformerLayer: a pre-norm block of attention and MLP, in which each norm takes the residual add before it in.

    x ← x + dropout(attention(norm(x)))        x ← x + dropout(mlp(norm(x)))

Between its parts the stream x is kept in two parts, (branch, residual), x = branch + residual, so that the next norm
adds them while it reads them. A stack of layers can hand them on in that form too: see `return_residual`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep.distributed.tensor_parallel import TensorParallel, tensor_parallel
from fusestep.errors import UserError
from fusestep.nn.attention import BiasType, Format, Masks
from fusestep.nn.fp8_module import Initialiser
from fusestep.nn.fused_norm import Normalization
from fusestep.nn.layer_norm_mlp import LayerNormMLP
from fusestep.nn.multihead_attention import NORMS, MultiheadAttention, reset_parts, sequence_dim_of


class TransformerLayer(nn.Module):
    """A transformer block; GPT's shape as it is, Llama's with normalization="RMSNorm", activation="swiglu", bias=False,
    groups, and rotary embedding in forward.

    Args:
        hidden_size: of the residual stream.
        ffn_hidden_size: of the MLP's hidden layer; of a gated activation, of each half.
        num_attention_heads, num_gqa_groups: heads of queries, and of keys and values (None: as many).
        layernorm_epsilon: what norms add to the variance.
        hidden_dropout: probability, of each branch's output, while training.
        attention_dropout: probability, of attention weights, while training.
        device, dtype: of the parameters; on "meta" until `to_empty` and `reset_parameters`.
        self_attn_mask_type, window_size: as of DotProductAttention; enc_dec_… those of the attention to an encoder.
        apply_residual_connection_post_layernorm: add each branch to the norm's output instead of its input.
        parallel_attention_mlp: x + dropout(attention(norm(x)) + mlp(norm(x))).
        output_layernorm: the norm in front of the attention stands at the end of the layer instead.
        layer_type: "encoder", or "decoder", which attends to an encoder's output between attention and MLP.
        drop_path_rate: probability with which a sequence skips a branch while training.
        attn_input_format: "bshd", "sbhd" or "thd".
        tp_group: the ranks that share attention and MLP; see docs/parallelism. Every rank gives the same input, with
            dropout from the same state of the default generator, and has the same output.
        sequence_parallel: input and output are this rank's slice of the sequence, which norms, dropout and residual
            adds work on.
        others: as of MultiheadAttention and LayerNormMLP.
    Raises: UserError.
    """

    # The ranks that share the layer, if they do.
    _parallel: TensorParallel | None = None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Initialiser | None = None,
        output_layer_init_method: Initialiser | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: Normalization = "LayerNorm",
        attn_input_format: Format = "bshd",
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
        if apply_residual_connection_post_layernorm and (output_layernorm or parallel_attention_mlp):
            raise UserError(
                f"{who}: apply_residual_connection_post_layernorm needs a norm in front of each branch in turn; leave "
                "output_layernorm and parallel_attention_mlp out."
            )
        if layer_type not in ("encoder", "decoder"):
            raise UserError(f'{who}: layer_type is {layer_type!r}; choose "encoder" or "decoder".')
        if parallel_attention_mlp and layer_type == "decoder":
            raise UserError(
                f"{who}: parallel_attention_mlp leaves no place for a decoder's attention to the encoder; choose one."
            )
        for what, probability in (("hidden_dropout", hidden_dropout), ("drop_path_rate", drop_path_rate)):
            if not 0.0 <= probability < 1.0:
                raise UserError(f"{who}: {what} is {probability!r}; give a probability from 0 up to, not including, 1.")

        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.attn_input_format, self.layer_type, self.layer_number = attn_input_format, layer_type, layer_number
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        sequence_dim = sequence_dim_of(attn_input_format)
        self._parallel = tensor_parallel(who, tp_group, sequence_parallel, sequence_dim)
        shared: dict[str, Any] = {
            "tp_group": self._parallel,
            "device": device,
            "dtype": dtype,
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
        }
        attention: dict[str, Any] = {
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "softmax_scale": softmax_scale,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            input_layernorm=not output_layernorm,
            name=None if name is None else f"{name}.self_attention",
            **attention,
            **shared,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                input_layernorm=True,
                attention_type="cross",
                name=None if name is None else f"{name}.inter_attention",
                **attention,
                **shared,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            name=None if name is None else f"{name}.layernorm_mlp",
            **shared,
        )
        if output_layernorm:
            self.layernorm = NORMS[normalization](
                hidden_size,
                layernorm_epsilon,
                device=device,
                dtype=dtype,
                zero_centered_gamma=zero_centered_gamma,
                tp_group=self._slices_sequences(),
            )

    def _slices_sequences(self) -> TensorParallel | None:
        """The ranks over which gradients of what works on slices of sequences are to be added."""
        parallel = self._parallel
        return None if parallel is None or parallel.sequence_dim is None or not parallel.adds_gradients else parallel

    def reset_parameters(self) -> None:
        """Initialise the parameters of all parts, after meta-device construction for instance."""
        reset_parts(self)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Masks | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Masks | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
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
        """Run the layer.

        Args:
            hidden_states: (batch, sequence, W), (sequence, batch, W) or (tokens, W), as attn_input_format says.
            residual: of the same shape; the stream is hidden_states + residual, added by the first norm.
            return_residual: return the stream as (branch, residual) without adding them, for the next layer's
                `hidden_states` and `residual`, or for a final norm.
            encoder_output: what a decoder attends to, with enc_dec_attn_mask.
            cu_seqlens_kv, max_seqlen_kv: of encoder_output; self-attention has one set of sequences.
            others: as of MultiheadAttention.
        Returns: the stream after the layer, of the shape of hidden_states; or its two parts.
        Raises: UserError for arguments that do not fit.
        """
        if return_residual and self.output_layernorm:
            raise UserError(
                f"{type(self).__name__}: a layer with output_layernorm=True ends in a norm, so that no add is left to "
                "the next; call it without return_residual."
            )
        if self.layer_type == "encoder" and not (encoder_output is None and enc_dec_attn_mask is None):
            what = "enc_dec_attn_mask" if encoder_output is None else "encoder_output"
            raise UserError(
                f"{type(self).__name__}: {what} was passed and layer_type is 'encoder', which attends to no encoder; "
                "build the layer with layer_type='decoder', or leave it out."
            )
        packing: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        attention = self.self_attention
        # The norm and the stream read the same input: the norm's backward then adds up both gradients of it.
        is_returned = residual is None and type(attention) is MultiheadAttention and attention.may_return_input()
        own = {"returns_input": True} if is_returned and not attention.return_layernorm_output else {}
        attended = attention(
            hidden_states,
            attention_mask,
            residual=residual,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            is_first_microbatch=is_first_microbatch,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **packing,
            **own,
        )
        branch, stream = self._parts(attended, hidden_states)
        if self.parallel_attention_mlp:
            branch = self._dropped(branch + self.layernorm_mlp(stream, is_first_microbatch))
        else:
            branch = self._dropped(branch)
            if self.layer_type == "decoder":
                attended = self.inter_attention(
                    branch,
                    enc_dec_attn_mask,
                    encoder_output,
                    residual=stream,
                    attn_mask_type=enc_dec_attn_mask_type,
                    window_size=enc_dec_window_size,
                    is_first_microbatch=is_first_microbatch,
                    cu_seqlens_kv=cu_seqlens_kv,
                    max_seqlen_kv=max_seqlen_kv,
                    **packing,
                )
                branch, stream = self._parts(attended, hidden_states)
                branch = self._dropped(branch)
            mixed = self.layernorm_mlp(branch, is_first_microbatch, residual=stream)
            branch, stream = self._parts(mixed, hidden_states)
            branch = self._dropped(branch)
        if return_residual:
            return branch, stream
        if self.output_layernorm:
            return self.layernorm(branch, stream)[0]
        return branch + stream

    def _parts(self, results: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a branch gave, and what it is to be added to: its norm's input, which is x without a residual."""
        if not isinstance(results, tuple):
            return results, x
        # (branch, norm's output if it is returned, sum if there was a residual)
        return results[0], results[1]

    def _dropped(self, branch: Tensor) -> Tensor:
        """Dropout of elements, and of whole sequences."""
        parallel = self._parallel
        if parallel is None:
            branch = F.dropout(branch, self.hidden_dropout, self.training)
        else:
            branch = parallel.dropped(branch, self.hidden_dropout, self.training)
        if self.drop_path_rate == 0.0 or not self.training:
            return branch
        if branch.dim() == 2:
            raise UserError(
                f"{type(self).__name__}: drop_path_rate drops whole sequences, which packed tokens (thd) do not show; "
                "set it to 0."
            )
        shape = (branch.shape[0], 1, 1) if self.attn_input_format == "bshd" else (1, branch.shape[1], 1)
        kept = 1.0 - self.drop_path_rate
        return branch * (torch.empty(shape, device=branch.device, dtype=branch.dtype).bernoulli_(kept) / kept)
