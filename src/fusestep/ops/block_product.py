"""The product of two FP8 matrices that carry a scale for each block; scaled_mm.py says what a product is.

    out[m, n] = Σ_k (a[m, k] · scale of its block) · (b[n, k] · scale of its block) + bias[n]

What is multiplied: blocks of 1 × 128 with those of 128 × 128 or of 1 × 128, and MXFP8's blocks of 1 × 32 with each
other. Scales lie as block_scaling.py lays them.

On Hopper cuBLASLt multiplies the first two, through torch's scaled_mm; which formats, outputs and biases it takes is
asked of it once, by multiplying something small. Elsewhere, and for MXFP8, the product is emulated from the same bytes.

Source of the layouts: cuBLAS documentation, "1D and 2D block scaling"; torch.nn.functional.scaled_mm.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from fusestep import dispatch, hardware
from fusestep.errors import UserError
from fusestep.hardware import Support
from fusestep.ops.block_scaling_launch import MX, ROW, TILE, Block, scales_shape, unwritten_scales
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.exact_product import exact_product
from fusestep.ops.quantized import values
from fusestep.precision import Scaling

#: What torch calls them.
KINDS = {ROW: ScalingType.BlockWise1x128, TILE: ScalingType.BlockWise128x128}

#: Which blocks of a meet which of b.
PAIRS = ((ROW, TILE), (ROW, ROW), (TILE, ROW), (MX, MX))


def multiply_blocks(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    a_block: Block,
    b_block: Block,
) -> Tensor:
    """The whole padded product, (M, N) of a (M, K) and b (N, K); the bias has N elements."""
    if _runs_natively(a, b, a_block, b_block):
        if not _asked(a, b, a_block, b_block, out_dtype, bias is not None):
            # Rounded once all the same: fp32 holds the product until the bias is in, in one pass.
            out = _native(a, a_scale_inv, b, b_scale_inv, torch.float32, None, a_block, b_block)
            return rounded(out, bias, out_dtype)
        return _native(a, a_scale_inv, b, b_scale_inv, out_dtype, bias, a_block, b_block)
    out = emulated_product(a, a_scale_inv, b, b_scale_inv, a_block, b_block)
    return (out if bias is None else out.add_(bias)).to(out_dtype)


def rounded(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """An fp32 product with its bias, rounded once."""
    if bias is None:
        return out.to(dtype)
    return torch.add(out, bias, out=torch.empty_like(out, dtype=dtype))


def emulated_product(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, a_block: Block, b_block: Block
) -> Tensor:
    """The padded product in fp32, on any device."""
    if not a.is_cuda or a_block == MX:
        # What MXFP8 holds bf16 holds as well, since scales are powers of two.
        return exact_product(_values(a, a_scale_inv, a_block), _values(b, b_scale_inv, b_block))
    # Any other scale needs more digits than bf16 has, and a GPU's fp32 product may round to TF32. So each block along
    # the sum is multiplied exactly, and scaled as it is added, which is also what hardware does.
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for place, k in enumerate(range(0, a.shape[1], 128)):
        product = exact_product(a[:, k : k + 128], b[:, k : k + 128])
        row_scales = _outer_scales(a_scale_inv, a_block, place, a.shape[0])
        column_scales = _outer_scales(b_scale_inv, b_block, place, b.shape[0])
        out.addcmul_(product, row_scales[:, None] * column_scales)
    return out


def _values(matrix: Tensor, scale_inv: Tensor, block: Block) -> Tensor:
    rows, columns = matrix.shape
    return values(matrix, scale_inv, block, rows, columns)


def _outer_scales(scale_inv: Tensor, block: Block, place: int, rows: int) -> Tensor:
    """(rows,) inverse scales of the block at `place` along the sum."""
    return scale_inv[:, place].repeat_interleave(block[0])[:rows]


def _runs_natively(a: Tensor, b: Tensor, a_block: Block, b_block: Block) -> bool:
    """Whether cuBLASLt multiplies these; emulation is announced with its reason."""
    device = a.device
    scaling: Scaling = "mx" if a_block == MX else "block"
    if not dispatch.multiplies_fp8("scaled_mm", device, scaling) or not a.numel() or not b.numel():
        return False
    answer = _ask(device.index or 0, a.dtype, b.dtype, a_block, b_block, torch.float32, False)
    if not answer.ok:
        dispatch.announce("scaled_mm", answer.reason, "emulated")
    return answer.ok


def _asked(a: Tensor, b: Tensor, a_block: Block, b_block: Block, out_dtype: torch.dtype, has_bias: bool) -> bool:
    """Whether cuBLASLt rounds to this dtype and adds a bias itself."""
    if has_bias and out_dtype is torch.float32:
        return False
    return _ask(a.device.index or 0, a.dtype, b.dtype, a_block, b_block, out_dtype, has_bias).ok


@functools.cache
def _ask(
    index: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    a_block: Block,
    b_block: Block,
    out_dtype: torch.dtype,
    has_bias: bool,
) -> Support:
    """Whether cuBLASLt multiplies such matrices on a CUDA device, by doing it, and does it right."""
    what = f"{_named(a_dtype, a_block)} with {_named(b_dtype, b_block)} to {dtype_name(out_dtype)}{', bias' * has_bias}"
    device = torch.device("cuda", index)
    # Ones but for the scales, which tell the two blocks along the sum, the second partial, from each other.
    rows, columns, inner = 32, 16, 144
    with hardware.probing(index):
        try:
            a, b = (torch.ones(n, inner, device=device).to(t) for n, t in ((rows, a_dtype), (columns, b_dtype)))
            scales = []
            for n, block in ((rows, a_block), (columns, b_block)):
                scale = unwritten_scales(n, inner, block, device).fill_(1.0)
                scale[:, 1] = 0.5
                scales.append(scale)
            bias = torch.ones(columns, dtype=out_dtype, device=device) if has_bias else None
            out = _native(a, scales[0], b, scales[1], out_dtype, bias, a_block, b_block)
            is_right = bool((out == 128 + 16 * 0.25 + has_bias).all())
        except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
            return Support(False, f"cuBLASLt refuses {what} ({hardware.first_line(error)})")
    return Support(is_right, f"cuBLASLt multiplies {what}{'' if is_right else ', but wrongly'}")


def _named(dtype: torch.dtype, block: Block) -> str:
    return f"{dtype_name(dtype)} in blocks of {block[0]} × {block[1]}"


def _native(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    a_block: Block,
    b_block: Block,
) -> Tensor:
    """cuBLASLt's product; torch wants scales of 128 × 128 with the summed dimension first."""
    return scaled_mm(
        a,
        b.t(),
        a_scale_inv if a_block == ROW else a_scale_inv.t(),
        KINDS[a_block],
        b_scale_inv if b_block == ROW else b_scale_inv.t(),
        KINDS[b_block],
        bias=bias,
        output_dtype=out_dtype,
    )


class NativeProduct:
    """cuBLASLt's product of blocks of 1 × 128 with others, of which all but the tensors is settled.

    Args:
        b_block: of the right operand.
        out_dtype: of the product.
        is_fused: whether cuBLASLt rounds to it and adds a bias itself; else the product goes through fp32.
    """

    __slots__ = ("_b_kinds", "_dtype", "_is_fused")

    def __init__(self, b_block: Block, out_dtype: torch.dtype, is_fused: bool) -> None:
        self._b_kinds, self._dtype, self._is_fused = [KINDS[b_block].value], out_dtype, is_fused

    def __call__(self, a: Any, a_scale_inv: Any, b: Any, b_scale_inv: Any, bias: Tensor | None) -> Tensor:
        """a (M, K) times b (K, N), contiguous as (N, K), whose scales of (128, 128) lie likewise."""
        dtype, added = (self._dtype, bias) if self._is_fused else (torch.float32, None)
        # What torch.nn.functional.scaled_mm comes to, without the way there.
        out = torch._scaled_mm_v2(
            a, b, [a_scale_inv], _ROW_KINDS, [], [b_scale_inv], self._b_kinds, [], added, dtype, (), False
        )
        return out if self._is_fused else rounded(out, bias, self._dtype)


_ROW_KINDS = [KINDS[ROW].value]


def plan_native(
    device: torch.device,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    b_block: Block,
    out_dtype: torch.dtype,
    has_bias: bool,
) -> NativeProduct | None:
    """The product of operands whose left one is in blocks of 1 × 128; None where the device does not multiply them."""
    if not dispatch.multiplies_fp8("scaled_mm", device, "block"):
        return None
    index = device.index or 0
    if not _ask(index, a_dtype, b_dtype, ROW, b_block, torch.float32, False).ok:
        return None
    is_fused = not (has_bias and out_dtype is torch.float32)
    is_fused = is_fused and _ask(index, a_dtype, b_dtype, ROW, b_block, out_dtype, has_bias).ok
    return NativeProduct(b_block, out_dtype, is_fused)


def scales_fit(matrix: Tensor, scale_inv: Tensor, block: Block) -> bool:
    """Whether inverse scales are those of a padded matrix in these blocks, and lie as block_scaling.py lays them."""
    rows, columns = matrix.shape  # padded already, which changes no count of blocks
    if scale_inv.shape != scales_shape(rows, columns, block):
        return False
    if scale_inv.dtype is not (torch.uint8 if block == MX else torch.float32):
        return False
    if block[0] != 1:
        return scale_inv.is_contiguous()
    return scale_inv.stride() == (1, rows) or scale_inv.t().is_contiguous()


def check_blocks(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, a_block: Block, b_block: Block
) -> None:
    """Refuse blocks that do not meet, and scales that do not belong to their matrix.

    Raises: UserError.
    """
    if (a_block, b_block) not in PAIRS:
        raise UserError(
            f"scaled_mm: a is in blocks of {a_block} and b in blocks of {b_block}; pass (1, 128) with (128, 128) or "
            "(1, 128), or (1, 32) with (1, 32)."
        )
    for name, matrix, scale, block in (("a", a, a_scale_inv, a_block), ("b", b, b_scale_inv, b_block)):
        if not scales_fit(matrix, scale, block):
            raise UserError(
                f"scaled_mm: {name}_scale_inv is {dtype_name(scale.dtype)} of shape {tuple(scale.shape)} and strides "
                f"{scale.stride()}, which are not the scales of {name} {tuple(matrix.shape)} in blocks of {block}; "
                "pass what quantize_blocks gave with it."
            )
