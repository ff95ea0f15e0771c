"""The product of two FP8 matrices that carry scales:

    out[m, n] = (Σ_k a[m, k] · b[n, k]) · a_scale_inv · b_scale_inv + bias[n]

Both operands are row-major with the summed dimension last, and padded with zeros to multiples of PAD both ways, as FP8
hardware wants them; `rows` and `columns` say how much of the product is meant.

Where the device multiplies FP8 itself the product is cuBLASLt's, through torch. Elsewhere it is emulated: the same
bytes, multiplied in a wider format that holds them exactly, summed in fp32, scaled and rounded once.

How exact, before the rounding to `out_dtype`: an emulated product is within 2⁻²⁰·√K of the float64 product of the same
operands, relative to its norm. Hopper's tensor cores keep fewer bits of a sum than fp32 has. On one H200 the error was,
for normal random values and for values that all are positive:

    precise             1.3e-4 and 6e-4, at every K from 512 to 65536
    fast, K = 512       3.4e-4 and 5.7e-3
    fast, K = 4096      1.3e-3 and 6.5e-2
    fast, K = 14336     1.5e-3 and 8.2e-2
    fast, K = 65536     3.7e-3 and 0.28

So fast accumulation is for sums whose terms have both signs.

Source of the layout rules: cuBLAS documentation, "8-bit Floating Point Data Types (FP8) Usage".
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.block_product import check_blocks, multiply_blocks
from fusestep.ops.block_scaling_launch import Block
from fusestep.ops.dtypes import FP8, dtype_name
from fusestep.ops.exact_product import exact_product
from fusestep.ops.quantized import PAD, padded
from fusestep.ops.registry import Op, Proof, catalogue, define, is_plain, relative_error

#: Rows and columns that share a scale in a and in b.
Blocks = tuple[Block, Block]

#: What hardware multiplies: all but E5M2 by E5M2.
PAIRS = frozenset((a, b) for a in FP8 for b in FP8 if (a, b) != (torch.float8_e5m2, torch.float8_e5m2))
OUTPUTS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def scaled_mm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    *,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    a_block: tuple[int, int] | None = None,
    b_block: tuple[int, int] | None = None,
) -> Tensor:
    """The product a · bᵀ of FP8 matrices, scaled, with the bias added. It has no gradient of its own.

    Args:
        a: (M, K) FP8, b: (N, K) FP8, contiguous, sizes multiples of 16; not both in E5M2.
        a_scale_inv, b_scale_inv: what values are multiplied by when they are read: fp32 of one element each, or one
            for each block, as quantize_blocks gives them.
        rows, columns: how much of the product is meant: M and N before they were padded.
        out_dtype: fp32, bf16 or fp16.
        bias: (columns,), or None. It is rounded to `out_dtype` first, and added before the product is rounded.
        fast_accumulation: sum at the tensor cores' own precision, which is faster on Hopper; see above for its price.
        a_block, b_block: rows and columns of a block of scales; None: one scale for all of the matrix. See
            block_product.py for which blocks can be multiplied.

    Returns: (rows, columns), contiguous where `columns` is a multiple of 16; else rows lie the padded size apart, on
        every device.
    Raises: UserError, before anything is launched, for what the hardware cannot multiply, on every device.
    """
    if torch.compiler.is_compiling() or not is_plain(a):
        out: Tensor = scaled_mm_op(
            a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, fast_accumulation, a_block, b_block
        )
        return out
    return run_scaled_mm(
        a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, fast_accumulation, a_block, b_block
    )


def multiply(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    a_block: tuple[int, int] | None = None,
    b_block: tuple[int, int] | None = None,
) -> Tensor:
    """scaled_mm of operands that casts made, and so fit: the device's own product of them is not checked.

    Call it where gradients are disabled, as within an autograd.Function. Returns: as scaled_mm, but contiguous.
    """
    # `is_plain`, without the call: every product of a module passes here.
    if torch.compiler.is_compiling() or type(a) is not Tensor or torch._C._len_torch_dispatch_stack():
        run = scaled_mm_op
    elif a_block is None and dispatch.multiplies_fp8("scaled_mm", a.device):
        if bias is not None or columns % PAD or rows % PAD:
            out = _native(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, fast_accumulation)
            return out.contiguous() if columns % PAD else out
        return torch._scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, None, None, out_dtype, fast_accumulation)
    elif a_block is not None and b_block is not None:
        out = _of_blocks(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, a_block, b_block)
        return out if out.is_contiguous() else out.contiguous()
    else:
        run = run_scaled_mm
    made: Tensor = run(
        a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, fast_accumulation, a_block, b_block
    )
    return made if made.is_contiguous() else made.contiguous()


def run_scaled_mm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accumulation: bool,
    a_block: list[int] | tuple[int, int] | None = None,
    b_block: list[int] | tuple[int, int] | None = None,
) -> Tensor:
    """What the op does: check, then the device's own product or the emulated one."""
    blocks = None if a_block is b_block is None else (_block(a_block), _block(b_block))
    check(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, blocks)
    device = a.device
    bias = None if bias is None else bias.detach()
    if blocks is not None:
        return _of_blocks(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, *blocks)
    if dispatch.multiplies_fp8("scaled_mm", device) and a.numel() and b.numel():
        return _native(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias, fast_accumulation)
    return scaled_mm_reference(a, a_scale_inv, b, b_scale_inv, rows, columns, out_dtype, bias)


def _of_blocks(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    a_block: Block,
    b_block: Block,
) -> Tensor:
    """The product of matrices with a scale for each block."""
    if bias is not None:
        bias = _padded_bias(bias, columns, b.shape[0], out_dtype)
    return sliced(multiply_blocks(a, a_scale_inv, b, b_scale_inv, out_dtype, bias, a_block, b_block), rows, columns)


def scaled_mm_reference(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """The emulated product, on any device."""
    out = exact_product(a, b).mul_(a_scale_inv * b_scale_inv)
    if bias is not None:
        out[:, :columns] += bias.to(out_dtype)
    return sliced(out.to(out_dtype), rows, columns)


def _native(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accumulation: bool,
) -> Tensor:
    """cuBLASLt's product, which adds a bias before it rounds to bf16 or fp16; to fp32 it is added after."""
    epilogue = None
    if bias is not None and out_dtype is not torch.float32:
        epilogue = bias
        if columns % PAD or bias.dtype is not out_dtype or not bias.is_contiguous():
            epilogue = _padded_bias(bias, columns, b.shape[0], out_dtype)
    # By position: keywords cost the host another microsecond.
    out = torch._scaled_mm(a, b.t(), a_scale_inv, b_scale_inv, epilogue, None, out_dtype, fast_accumulation)
    if columns % PAD or rows % PAD:
        out = sliced(out, rows, columns)
    return out if bias is None or epilogue is not None else out.add_(bias)


def _block(block: list[int] | tuple[int, int] | None) -> Block:
    """A block as the op was given it; what is none fails the check of blocks."""
    return (block[0], block[1]) if block else (0, 0)


def _padded_bias(bias: Tensor, columns: int, padded_columns: int, dtype: torch.dtype) -> Tensor:
    """A bias as a product's epilogue reads it: contiguous, in the product's dtype, as long as its padded rows."""
    if columns != padded_columns:
        bias = torch.nn.functional.pad(bias, (0, padded_columns - columns))
    if bias.dtype is not dtype or not bias.is_contiguous():
        bias = bias.to(dtype).contiguous()
    return bias


def sliced(out: Tensor, rows: int, columns: int) -> Tensor:
    """The part of a padded product that is meant, without a copy."""
    padded_rows, padded_columns = out.shape
    if columns != padded_columns:
        return out[:rows, :columns]
    return out if rows == padded_rows else out[:rows]


def check(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    blocks: Blocks | None = None,
) -> None:
    """Refuse what FP8 hardware cannot multiply, on every device alike.

    torch's product on a CPU takes any sizes, layouts and biases, so that a mistake would first show on a GPU.

    Raises: UserError.
    """
    device, a_shape, b_shape = a.device, a.shape, b.shape
    # One expression, since every product passes here; what is wrong is looked for only if something is.
    if (
        len(a_shape) == 2 == len(b_shape)
        and (a.dtype, b.dtype) in PAIRS
        and a_shape[0] == padded(rows)
        and b_shape[0] == padded(columns)
        and a_shape[1] == b_shape[1]
        and not b_shape[1] % PAD
        and a.is_contiguous()
        and b.is_contiguous()
        and (
            blocks is not None
            or (
                a_scale_inv.dtype is torch.float32 is b_scale_inv.dtype
                and a_scale_inv.numel() == 1 == b_scale_inv.numel()
            )
        )
        and out_dtype in OUTPUTS
        and b.device == device == a_scale_inv.device == b_scale_inv.device
        and (bias is None or (bias.shape == (columns,) and bias.is_floating_point() and bias.device == device))
    ):
        if blocks is not None:
            check_blocks(a, a_scale_inv, b, b_scale_inv, *blocks)
        return
    dispatch.one_device("scaled_mm", a=a, b=b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, bias=bias)
    for name, matrix, meant, size in (("a", a, "rows", rows), ("b", b, "columns", columns)):
        if matrix.dim() != 2 or matrix.dtype not in FP8:
            raise UserError(
                f"scaled_mm: {name} is {dtype_name(matrix.dtype)} of shape {tuple(matrix.shape)}; pass a matrix in "
                "float8_e4m3fn or float8_e5m2, as quantize makes it."
            )
        if matrix.shape[0] % PAD or matrix.shape[1] % PAD:
            raise UserError(
                f"scaled_mm: {name} is {tuple(matrix.shape)}; pad both sizes with zeros to multiples of {PAD}, as "
                "quantize does."
            )
        if matrix.shape[0] != padded(size):
            raise UserError(
                f"scaled_mm: {meant} is {size} and {name} is {tuple(matrix.shape)}; its first size is {meant} padded "
                f"to a multiple of {PAD}."
            )
        if not matrix.is_contiguous():
            raise UserError(
                f"scaled_mm: {name} has strides {matrix.stride()}; pass it row-major with the summed dimension last, "
                "such as the transposed bytes that quantize makes with columnwise=True."
            )
    if a.shape[1] != b.shape[1]:
        raise UserError(
            f"scaled_mm: a is {tuple(a.shape)} and b is {tuple(b.shape)}; their second sizes are summed over and must "
            "agree."
        )
    if a.dtype is b.dtype is torch.float8_e5m2:
        raise UserError(
            "scaled_mm: a and b are both float8_e5m2, which no hardware multiplies; quantise one of them to "
            "float8_e4m3fn."
        )
    for name, scale in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        if blocks is None and (scale.dtype is not torch.float32 or scale.numel() != 1):
            raise UserError(
                f"scaled_mm: {name} is {dtype_name(scale.dtype)} of shape {tuple(scale.shape)}; pass one float32 value."
            )
    if out_dtype not in OUTPUTS:
        raise UserError(f"scaled_mm: out_dtype is {dtype_name(out_dtype)}; choose float32, bfloat16 or float16.")
    if bias is not None:
        raise UserError(
            f"scaled_mm: bias is {dtype_name(bias.dtype)} of shape {tuple(bias.shape)}; pass a floating-point "
            f"({columns},), one value a column."
        )


def _fake(
    a: Tensor,
    a_scale_inv: Tensor,  # noqa: ARG001
    b: Tensor,
    b_scale_inv: Tensor,  # noqa: ARG001
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,  # noqa: ARG001
    fast_accumulation: bool,  # noqa: ARG001
    a_block: list[int] | None,  # noqa: ARG001
    b_block: list[int] | None,  # noqa: ARG001
) -> Tensor:
    return sliced(a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype), rows, columns)


scaled_mm_op = define(
    "scaled_mm(Tensor a, Tensor a_scale_inv, Tensor b, Tensor b_scale_inv, int rows, int columns, "
    "ScalarType out_dtype, Tensor? bias, bool fast_accumulation, int[]? a_block, int[]? b_block) -> Tensor",
    run_scaled_mm,
    _fake,
)


# Rows, columns, inner: a usual shape, and one that needs padding in every direction.
_SHAPES = ((64, 48, 256), (7, 29, 131))

#: Half of a unit in the last place, relative to the value.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tolerance(native: bool, fast: bool, out_dtype: torch.dtype) -> float:
    """Relative error that is allowed to sums of some hundred normal random products: several times what is measured."""
    if not native:
        return 1e-5 + ROUNDING[out_dtype]
    return (2e-3 if fast else 1e-3) + ROUNDING[out_dtype]


def prove(device: torch.device) -> list[Proof]:
    """Products of fresh random bytes, each pair of formats, against float64."""
    proofs = []
    native = dispatch.multiplies_fp8("scaled_mm", device)
    for (rows, columns, inner), out_dtype in itertools.product(_SHAPES, (torch.float32, torch.bfloat16)):
        for a_dtype, b_dtype in sorted(PAIRS, key=str):
            a, b = (random_operand(size, inner, dtype, device) for size, dtype in ((rows, a_dtype), (columns, b_dtype)))
            a_inv, b_inv = (torch.rand((), device=device).add_(0.5) for _ in range(2))
            bias = torch.randn(columns, device=device).mul_(4).to(out_dtype)
            true = (a.double() * a_inv @ (b.double() * b_inv).t())[:rows, :columns] + bias
            formats = f"{dtype_name(a_dtype)} × {dtype_name(b_dtype)} to {dtype_name(out_dtype)}"
            what = f"{formats}, {rows} × {columns} × {inner}"
            for fast in (False, True):
                out = scaled_mm(
                    *(a, a_inv, b, b_inv),
                    rows=rows,
                    columns=columns,
                    out_dtype=out_dtype,
                    bias=bias,
                    fast_accumulation=fast,
                )
                error = relative_error(out, true)
                proofs.append(Proof(f"{what}{', fast' * fast}", error, tolerance(native, fast, out_dtype)))
    return proofs


def random_operand(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal random values in FP8, padded with zeros."""
    values = torch.zeros(padded(rows), padded(columns), device=device)
    values[:rows, :columns] = torch.randn(rows, columns, device=device)
    return values.to(dtype)


catalogue(Op("scaled_mm", "product of FP8 matrices", prove, lambda: (), is_product=True))
