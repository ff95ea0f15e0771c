"""te.GroupedLinear over fusestep.nn.GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep import nn
from transformer_engine.pytorch._arguments import (
    accumulate_into_main_grad,
    check_ranks,
    own_randomness,
    placed,
    refuse,
)
from transformer_engine.pytorch.module.base import Initialiser, TransformerEngineBaseModule

__all__ = ["GroupedLinear"]


class GroupedLinear(TransformerEngineBaseModule, nn.GroupedLinear):
    """Several linear layers, each for its share of the rows; see fusestep.nn.GroupedLinear."""

    SERVED_BY = "fusestep.nn.GroupedLinear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,  # noqa: ARG002 (one rank)
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initialiser | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,  # noqa: ARG002
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,  # noqa: ARG002
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,  # noqa: ARG002
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        refuse(
            "GroupedLinear",
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            use_grouped_tensor=use_grouped_tensor,
        )
        check_ranks("GroupedLinear", tp_group, tp_size)
        with own_randomness(get_rng_state_tracker, rng_tracker_name):
            super().__init__(
                num_gemms,
                in_features,
                out_features,
                bias,
                placed("GroupedLinear", device),
                params_dtype,
                init_method=init_method,
                return_bias=return_bias,
                name=name,
            )
        if fuse_wgrad_accumulation:
            accumulate_into_main_grad(self)
        self._announce()

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """(rows, in_features) to (rows, out_features), m_splits rows for each layer; (y, biases) with return_bias."""
        refuse("GroupedLinear.forward", out=out, dgrad_out=dgrad_out)
        result = super().forward(inp, m_splits, is_first_microbatch)
        if self.return_bias and not self.has_bias:
            return result[0], [inp.new_empty(0) for _ in range(self.num_gemms)]
        return result
