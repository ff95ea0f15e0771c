"""te.Linear over fusestep.nn.Linear."""

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
from transformer_engine.pytorch.module.base import Initialiser, TransformerEngineBaseModule, bias_or_empty

__all__ = ["Linear"]


class Linear(TransformerEngineBaseModule, nn.Linear):
    """A linear layer; see fusestep.nn.Linear. The third argument is sequence_parallel, not bias."""

    SERVED_BY = "fusestep.nn.Linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Initialiser | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["column", "row"] | None = None,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,  # noqa: ARG002
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,  # noqa: ARG002
        name: str | None = None,
    ) -> None:
        refuse(
            "Linear",
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        with own_randomness(get_rng_state_tracker, rng_tracker_name):
            super().__init__(
                in_features,
                out_features,
                bias,
                placed("Linear", device),
                params_dtype,
                init_method=init_method,
                return_bias=return_bias,
                parameters_split=parameters_split,
                name=name,
                parallel_mode=parallel_mode,
                tp_group=ranks_of("Linear", tp_group, tp_size, sequence_parallel),
            )
        self._has_modes = parallel_mode is not None
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
    ) -> Any:
        """(…, in_features) to (…, out_features), or (y, bias) with return_bias."""
        if fp8_output or fp8_grad:
            refuse("Linear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        if self.return_bias:
            return bias_or_empty(super().forward(inp, is_first_microbatch), 1, inp)
        return super().forward(inp, is_first_microbatch)  # last, so that torch.compile has nothing to resume
