"""Exponentials and reciprocals that take the device one instruction each, for arguments whose results are normal.

Triton's own guard against subnormal numbers, and its division against very large divisors: five instructions more of
each, which made kernels of two exponentials an element wait for them and not for memory. Errors are those of the PTX
ISA's table for ex2.approx and rcp.approx: two units in the last place, and one. A result below 2⁻¹²⁶ is 0.
"""

from __future__ import annotations

import math

import torch

from fusestep.language import interpreted, tl, triton

#: Whether Triton's own are taken: PTX is NVIDIA's.
_IN_TRITON = tl.constexpr(interpreted() or torch.version.hip is not None)

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def exp2(x):
    """2ˣ; NaN stays."""
    if _IN_TRITON:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return power


@triton.jit
def exp(x):
    """eˣ; NaN stays."""
    return exp2(x * _LOG2_E)


@triton.jit
def reciprocal(x):
    """1 / x, of an infinite x 0; NaN stays."""
    if _IN_TRITON:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse
