"""apex.transformer.functional.fused_softmax: scale, mask and softmax in fp32, rounded once.

A row with everything masked is 0, as in Apex's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apex.transformer.enums import AttnMaskType
from fusestep.compat.implementation import Applied, by_torch
from fusestep.errors import UserError

__all__ = [
    "FusedScaleMaskSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
]


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(inputs · scale) over the last dimension without what is masked.

    Args:
        inputs: (batch, heads, queries, keys), any floating dtype, which is that of the result.
        mask: broadcastable to inputs; True where masked.
    """
    by_torch("apex.transformer.functional.scaled_masked_softmax", "torch.softmax")
    return _softmax(inputs, mask, scale)


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Any, scale: float) -> Tensor:
    """softmax(inputs · scale) over keys up to each query's own; inputs (…, queries, keys), as many of both."""
    if inputs.shape[-1] != inputs.shape[-2]:
        raise UserError(
            f"scaled_upper_triang_masked_softmax: inputs has shape {tuple(inputs.shape)}; a causal mask is for as "
            "many queries as keys."
        )
    by_torch("apex.transformer.functional.scaled_upper_triang_masked_softmax", "torch.softmax")
    return _softmax(inputs, _causal(inputs), scale)


class ScaledMaskedSoftmax(Applied):
    """`apply` is scaled_masked_softmax."""

    apply = staticmethod(scaled_masked_softmax)


def _causal_softmax(inputs: Tensor, scale: float) -> Tensor:
    return scaled_upper_triang_masked_softmax(inputs, None, scale)


class ScaledUpperTriangMaskedSoftmax(Applied):
    """`apply` is scaled_upper_triang_masked_softmax, without its second argument."""

    apply = staticmethod(_causal_softmax)


class FusedScaleMaskSoftmax(nn.Module):
    """scale, mask and softmax of attention scores.

    Args:
        input_in_fp16, input_in_bf16: the dtype of the input, not both; else fp32.
        attn_mask_type: AttnMaskType.padding, which masks what `mask` says; or causal, which masks later keys, and what
            `mask` says where there is one. Without a mask it is causal all the same (Apex masks nothing then).
        scaled_masked_softmax_fusion: without effect on the result but for where mask_func is called.
        mask_func: (scores, mask) to masked scores; called where Apex would not run its kernel.
        softmax_in_fp32: compute in fp32; always so where mask_func is not called.
        scale: of the scores, or None; needs softmax_in_fp32.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("FusedScaleMaskSoftmax: input_in_fp16 and input_in_bf16 are both set; set one.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("FusedScaleMaskSoftmax: scale is set, which needs softmax_in_fp32=True.")
        if attn_mask_type not in (AttnMaskType.padding, AttnMaskType.causal):
            raise ValueError(
                f"FusedScaleMaskSoftmax: attn_mask_type is {attn_mask_type!r}; pass AttnMaskType.padding or causal."
            )
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, heads, queries, keys) to the same shape and, where it is 16-bit, dtype."""
        if input.dim() != 4:
            raise UserError(
                f"FusedScaleMaskSoftmax: input has shape {tuple(input.shape)}; pass (batch, heads, queries, keys)."
            )
        by_torch("apex.transformer.functional.FusedScaleMaskSoftmax", "torch.softmax")
        is_causal = self.attn_mask_type is AttnMaskType.causal
        if mask is not None and self.mask_func is not None and not self.is_kernel_available(mask, *input.shape):
            wide = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
            wide = wide if self.scale is None else wide * self.scale
            scores = self.mask_func(wide, mask)
            return _softmax(scores, _causal(input) if is_causal else None, 1.0).to(input.dtype)
        if is_causal:
            mask = _causal(input) if mask is None else _causal(input) | mask.bool()
        return _softmax(input, mask, 1.0 if self.scale is None else self.scale)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:  # noqa: ARG002
        """Whether Apex would run its kernel for such scores, and so not call mask_func."""
        return (
            self.scaled_masked_softmax_fusion
            and self.input_in_float16
            and 16 < sk <= 16384
            and sq % 4 == 0
            and sk % 4 == 0
            and (b * np) % 4 == 0
        )


def _causal(scores: Tensor) -> Tensor:
    """(queries, keys), True for keys after the query's own, where the last query's is the last key."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)


def _softmax(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    wide = scores if scores.dtype is torch.float64 else scores.float()
    if scale != 1.0:
        wide = wide * scale
    if mask is None:
        return torch.softmax(wide, -1).to(scores.dtype)
    # A row with all of it masked would be NaN, also in its gradient: it is computed unmasked and then set to 0.
    mask = mask.bool()
    is_empty = mask.all(-1, keepdim=True)
    probabilities = torch.softmax(wide.masked_fill(mask & ~is_empty, float("-inf")), -1)
    return probabilities.masked_fill(is_empty, 0.0).to(scores.dtype)
