"""te.LayerNormLinear over fusestep.nn.LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

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

__all__ = ["LayerNormLinear"]


class LayerNormLinear(TransformerEngineBaseModule, nn.LayerNormLinear):
    """A norm and the linear layer after it; see fusestep.nn.LayerNormLinear."""

    SERVED_BY = "fusestep.nn.LayerNormLinear"

    return_layernorm_output_gathered = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Initialiser | None = None,
        bias: bool = True,
        normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["column"] | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,  # noqa: ARG002
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        refuse(
            "LayerNormLinear",
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
                in_features,
                out_features,
                bias,
                placed("LayerNormLinear", device),
                params_dtype,
                eps=eps,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output or return_layernorm_output_gathered,
                init_method=init_method,
                return_bias=return_bias,
                parameters_split=parameters_split,
                name=name,
                parallel_mode=parallel_mode,
                tp_group=ranks_of("LayerNormLinear", tp_group, tp_size, sequence_parallel),
            )
        self._has_modes = parallel_mode is not None
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        mark_shared(self)
        if fuse_wgrad_accumulation:
            accumulate_into_main_grad(self)
        self._announce()

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        residual: Tensor | None = None,
    ) -> Any:
        """(…, in_features) to (…, out_features), or a tuple with the bias and the norm's output, where asked for.

        With a residual, which only ours has, inp + residual is normalised, and returned last.
        """
        if fp8_output or fp8_grad:
            refuse("LayerNormLinear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        if self.return_bias or self.return_layernorm_output_gathered:
            results = super().forward(inp, is_first_microbatch, residual)
            if self.return_layernorm_output_gathered:
                results = gathered_output(self, results)
            return bias_or_empty(results, 1, inp) if self.return_bias else results
        return super().forward(inp, is_first_microbatch, residual)  # last, so that torch.compile has nothing to resume
