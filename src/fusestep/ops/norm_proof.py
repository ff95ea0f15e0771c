"""What the doctor proves of the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.ops.dtypes import dtype_name
from fusestep.ops.norm_ops import norm_backward as backward_op
from fusestep.ops.norm_ops import norm_forward as forward_op
from fusestep.ops.norm_ops import norm_forward_residual as residual_op
from fusestep.ops.norm_reference import backward_reference, forward_reference
from fusestep.ops.registry import Proof, relative_error

EPS = 1e-5
# Rounding to bf16 once leaves about 2e-3 of relative error; sums of gradients are rounded at the end, once as well.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
# A usual width, an odd one, and one that is walked in blocks; few rows, since the interpreter is slow.
_SHAPES = (("", 9, 768), (" (odd width)", 5, 1001), (" (wide row)", 2, 33000))


def prove(centred: bool, device: torch.device) -> list[Proof]:
    """Forward, residual and backward on fresh random inputs, against the reference in float64."""
    proofs = []
    for what, rows, width in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, width, device=device).add_(3.0).to(dtype)
            residual, dy, dsum = (torch.randn(rows, width, device=device).to(dtype) for _ in range(3))
            weight = torch.rand(width, device=device).add_(0.5)
            bias = torch.randn(width, device=device) if centred else None
            y, _ = forward_op(x, weight, bias, width, EPS, centred, dtype)
            y_sum, total, statistics = residual_op(x, residual, weight, bias, width, EPS, centred, dtype)
            # dx of fp32 rows in bf16 as well, as for a branch that was added to them.
            copy_dtype = torch.bfloat16 if dtype is torch.float32 else None
            options = (width, centred, False, dtype, True, centred, copy_dtype)
            *gradients, dx_copy = backward_op(dy, dsum, total, statistics, weight, bias, *options)
            y_true, _, _ = _exact(x, weight, bias, width, centred)
            # Compared from the sum as it was rounded, which is what is normalised.
            y_sum_true, _, exact = _exact(total, weight, bias, width, centred)
            true = backward_reference(
                *(dy.double(), dsum.double(), total.double(), exact, weight.double(), None),
                *(width, centred, False, torch.float64),
            )
            name = f"{dtype_name(dtype)}{what}"
            errors = {
                f"forward, {name}": relative_error(y, y_true),
                f"residual, {name}": max(
                    relative_error(y_sum, y_sum_true), relative_error(total, x.double() + residual.double())
                ),
                f"backward, {name}": max(
                    relative_error(a, b) for a, b in zip(gradients, true, strict=True) if a.numel()
                ),
            }
            proofs += [Proof(label, error, _TOLERANCE[dtype]) for label, error in errors.items()]
            if copy_dtype is not None:
                error = relative_error(dx_copy, true[0])
                proofs.append(Proof(f"backward, {name}, dx in bf16", error, _TOLERANCE[copy_dtype]))
    return proofs


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None, width: int, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The reference in float64."""
    wide_bias = None if bias is None else bias.double()
    return forward_reference(x.double(), None, weight.double(), wide_bias, width, EPS, centred, torch.float64)
