"""te.LayerNormMLP over fusestep.nn.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from fusestep import nn
from transformer_engine.pytorch._arguments import (
    accumulate_into_main_grad,
    mark_shared,
    own_randomness,
    placed,
    ranks_of,
    refuse,
)
from transformer_engine.pytorch.module.base import (
    Initialiser,
    TransformerEngineBaseModule,
    bias_or_empty,
    gathered_output,
)

__all__ = ["LayerNormMLP"]


class LayerNormMLP(TransformerEngineBaseModule, nn.LayerNormMLP):
    """A norm and an MLP of two linear layers; see fusestep.nn.LayerNormMLP.

    checkpoint=True keeps the input alone, and computes the forward again for backward.
    """

    SERVED_BY = "fusestep.nn.LayerNormMLP"

    checkpoint = False
    return_layernorm_output_gathered = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Initialiser | None = None,
        bias: bool = True,
        normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Initialiser | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,  # noqa: ARG002
        micro_batch_size: int | None = None,  # noqa: ARG002
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        refuse(
            "LayerNormMLP",
            activation_params=activation_params,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        with own_randomness(get_rng_state_tracker):
            super().__init__(
                hidden_size,
                ffn_hidden_size,
                bias,
                placed("LayerNormMLP", device),
                params_dtype,
                eps=eps,
                normalization=normalization,
                activation=activation,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output or return_layernorm_output_gathered,
                init_method=init_method,
                output_layer_init_method=output_layer_init_method,
                return_bias=return_bias,
                name=name,
                tp_group=ranks_of("LayerNormMLP", tp_group, tp_size, sequence_parallel) if set_parallel_mode else None,
            )
        self._has_modes = set_parallel_mode
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        mark_shared(self)
        self.checkpoint = checkpoint
        if fuse_wgrad_accumulation:
            accumulate_into_main_grad(self)
        self._announce()

    def forward(  # type: ignore[override]
        self, inp: Tensor, is_first_microbatch: bool | None = None, *, residual: Tensor | None = None
    ) -> Any:
        """(…, hidden_size) to the same shape, or a tuple with the bias and the norm's output, where asked for.

        With a residual, which only ours has, inp + residual is normalised, and returned last.
        """
        if self.checkpoint and torch.is_grad_enabled():
            result = recompute(super().forward, inp, is_first_microbatch, residual, use_reentrant=False)
        elif self.return_bias or self.return_layernorm_output_gathered:
            result = super().forward(inp, is_first_microbatch, residual)
        else:
            return super().forward(inp, is_first_microbatch, residual)  # so that torch.compile has nothing to resume
        if self.return_layernorm_output_gathered:
            result = gathered_output(self, result)
        return bias_or_empty(result, 1, inp) if self.return_bias else result
