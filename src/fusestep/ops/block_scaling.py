"""Quantise a matrix to FP8 by blocks: one scale for each block, both directions from one read.

    data = cast(clamp(x · scale)),   read as data · scale_inv

A block is (1, 128) for activations and gradients, (128, 128) for weights, or (1, 32) of MXFP8. With the largest value
of the format, 448 (E4M3) or 57344 (E5M2), and the block's amax = max |x|:

    (1, 128), (128, 128)    scale = min(largest / amax, 2^126), rounded down to a power of two unless fp32 scales are
                            asked for; 1 where amax is zero or not finite; scale_inv = 1 / scale
    (1, 32)                 scale = 2^(127 − e), e the biased exponent of amax / largest rounded up: 0 for 0, 254 for an
                            infinity, 255 for NaN, whose block is NaN; e itself is stored, as E8M0

x · scale is formed in fp32. Finite values saturate, NaN stays NaN, and an infinity becomes NaN. The last block of a
row or column may be partial: its scale comes from the elements that are there.

A product sums over the last dimension of both its operands, and blocks run along it. So x (rows, columns) has two
forms: `data`, in blocks along its rows, and `transposed`, in blocks along its columns, both cast from x itself. Blocks
of (128, 128) are the same both ways; there the transposed form is the transpose.

Layout of the inverse scales, as cuBLAS wants it (data are padded to multiples of 16):

    (1, w)        (padded rows, ⌈columns/w⌉), the rows contiguous; the padding's scales are as those of zeros
    (128, 128)    (⌈rows/128⌉, ⌈columns/128⌉ padded to a multiple of 4), the columns contiguous

Sources: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3; OCP Microscaling Formats (MX) v1.0; cuBLAS
documentation, "1D and 2D block scaling".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops.block_scaling_kernel import quantize_blocks_kernel
from fusestep.ops.block_scaling_launch import (
    MX,
    ROW,
    TILE,
    Block,
    BlockPlan,
    Outputs,
    block_launch,
    constants,
    unwritten,
)
from fusestep.ops.block_scaling_reference import quantize_blocks_reference
from fusestep.ops.dtypes import CASTABLE, FP8, SHORT_NAMES, dtype_name
from fusestep.ops.layouts import keep
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, is_plain, relative_error

BLOCKS = (ROW, TILE, MX)


def _reference(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    sums_dtype: torch.dtype | None,
) -> Outputs:
    """What the kernel computes, in plain PyTorch."""
    x = x.detach()
    outputs = unwritten(x, dtype, block, rowwise, columnwise, sums_dtype)
    sums = outputs[4]
    for source, data, scales in ((x, *outputs[:2]), (x.t(), *outputs[2:4])):
        if data is not None and scales is not None:
            q, scale_inv = quantize_blocks_reference(source, dtype, block, data.shape, scales.shape, power_of_two)
            data.copy_(q)
            scales.copy_(scale_inv)
    if sums is not None:
        sums.copy_(x.sum(0, dtype=torch.float32))
    return outputs


#: By layouts and options; see `keep`.
_plans: dict[tuple[Any, ...], BlockPlan] = {}


def plan_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    sums_dtype: torch.dtype | None,
    right: tuple[bool, bool] = (False, False),
) -> BlockPlan | None:
    """The plan of a cast, or None where no kernel takes x as it is.

    Args: as of quantize_blocks; right: as of BlockPlan.
    Raises: UserError, as quantize_blocks.
    """
    options = (dtype, block, rowwise, columnwise, power_of_two, sums_dtype, right)
    key = (x.shape, x.stride(), x.dtype, x.device, options)
    plan = _plans.get(key)
    if plan is None:
        _check(x, dtype, block, rowwise or columnwise)
    if not x.numel() or not dispatch.uses_triton("block_scaling", x.device):
        return None
    if plan is None and (x.stride(1) == 1 or x.shape[1] == 1):
        plan = keep(_plans, key, BlockPlan(x, *options))
    return plan


def run_quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    sums_dtype: torch.dtype | None,
) -> Outputs:
    """The cast, through the kernel where it runs, else the reference."""
    options = (dtype, block, rowwise, columnwise, power_of_two, sums_dtype)
    plan = plan_blocks(x, *options)
    if plan is not None:
        return plan.cast(x)
    if not x.numel() or not dispatch.uses_triton("block_scaling", x.device):
        return _reference(x, *options)
    return run_quantize_blocks(x.contiguous(), *options)


def _as_op(x: Tensor, dtype: torch.dtype, outputs: Outputs) -> tuple[Tensor, ...]:
    """An op cannot return None: what is not wanted is an empty tensor."""
    dtypes = (dtype, torch.float32, dtype, torch.float32, torch.float32)
    return tuple(x.new_empty(0, dtype=kind) if one is None else one for one, kind in zip(outputs, dtypes, strict=True))


def _quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: Sequence[int],
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    sums_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    height, width = block
    outputs = run_quantize_blocks(x, dtype, (height, width), rowwise, columnwise, power_of_two, sums_dtype)
    return _as_op(x, dtype, outputs)


def _fake(
    x: Tensor,
    dtype: torch.dtype,
    block: Sequence[int],
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,  # noqa: ARG001
    sums_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    height, width = block
    return _as_op(x, dtype, unwritten(x, dtype, (height, width), rowwise, columnwise, sums_dtype))


quantize_blocks_op = define(
    "quantize_blocks(Tensor x, ScalarType dtype, int[] block, bool rowwise, bool columnwise, bool power_of_two, "
    "ScalarType? sums_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_blocks,
    _fake,
)


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_two: bool = True,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Quantized, Tensor | None]:
    """Quantise a matrix by blocks; see the head of this file. No gradient flows through it.

    Args:
        x: (rows, columns) fp32, bf16 or fp16; copied if its last stride is not 1.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: (1, 128), (128, 128) or (1, 32).
        rowwise, columnwise: which of data and transposed are wanted.
        power_of_two: round scales down to powers of two, so that scaling loses no bit; (1, 32) always does.
        sums_dtype: also return the sums over the rows of x, (columns,), formed in fp32 in the same order every time,
            and rounded once to this dtype.

    Returns: the quantised matrix and the sums, None where they were not asked for.
    Raises: UserError, before anything is written, for shapes and dtypes that do not fit.
    """
    options = (dtype, block, rowwise, columnwise, power_of_two, sums_dtype)
    if not torch.compiler.is_compiling() and is_plain(x):
        data, scales, transposed, transposed_scales, sums = run_quantize_blocks(x, *options)
    else:
        _check(x, dtype, block, rowwise or columnwise)
        data, scales, transposed, transposed_scales, sums = quantize_blocks_op(x, *options)
    rows, columns = x.shape
    scale_inv = scales if rowwise else transposed_scales
    assert scale_inv is not None
    quantized = Quantized(
        (rows, columns),
        data if rowwise else None,
        transposed if columnwise else None,
        scale_inv,
        transposed_scales if columnwise and transposed_scales is not None else scale_inv,
        block,
    )
    return quantized, sums if sums_dtype is not None else None


def _check(x: Tensor, dtype: torch.dtype, block: Block, anything: bool) -> None:
    """One sentence for what cannot be quantised."""
    if x.dim() == 2 and x.dtype in CASTABLE and dtype in FP8 and block in BLOCKS and anything:
        return
    if x.dim() != 2:
        raise UserError(f"quantize_blocks: x has shape {tuple(x.shape)}; pass a matrix, (rows, columns).")
    if x.dtype not in CASTABLE:
        raise UserError(f"quantize_blocks: x is {dtype_name(x.dtype)}; pass float32, bfloat16 or float16.")
    if dtype not in FP8:
        raise UserError(f"quantize_blocks: dtype is {dtype}; pass torch.float8_e4m3fn or torch.float8_e5m2.")
    if block not in BLOCKS:
        raise UserError(f"quantize_blocks: block is {block!r}; pass (1, 128), (128, 128) or (1, 32).")
    raise UserError("quantize_blocks: neither data nor its transpose is wanted; pass rowwise=True or columnwise=True.")


# For the doctor and the checks


def prove(device: torch.device) -> list[Proof]:
    """Bytes and scales of every kind of block against the reference, of fresh random inputs: none may differ."""
    proofs = []
    for block, dtype, power_of_two in itertools.product(BLOCKS, FP8, (True, False)):
        if block == MX and not power_of_two:
            continue
        x = torch.randn(141, 203, device=device).mul_(torch.randn(141, 1, device=device).exp_()).to(torch.bfloat16)
        options = (x, dtype, block, True, True, power_of_two, torch.float32)
        found, true = _quantize_blocks(*options), _as_op(x, dtype, _reference(*options))
        differing = sum(
            float((one.view(torch.uint8) != other.view(torch.uint8)).sum())
            if one.element_size() == 1
            else float((one != other).sum())
            for one, other in zip(found[:4], true[:4], strict=True)
        )
        name = f"{block[0]} × {block[1]}, {dtype_name(dtype)}{'' if power_of_two else ', fp32 scales'}"
        proofs.append(Proof(f"bytes and scales, {name}", differing, 0.0))
        proofs.append(Proof(f"column sums, {name}", relative_error(found[4], true[4]), 1e-5))
    return proofs


def compilations() -> Iterator[Compilation]:
    """The launches of the recipes: activations, gradients with a bias, weights; before Hopper with integers.

    Of each launch what holds the most: both forms, unless it is for one.
    """
    e4m3, e5m2 = FP8
    row, tile, microblock = BLOCKS
    for label, element, dtype, block, power_of_two, columnwise, has_sums, hardware_cast in (
        ("activations", torch.bfloat16, e4m3, row, True, True, False, True),
        ("activations, before Hopper", torch.bfloat16, e4m3, row, True, True, False, False),
        ("activations, rows alone", torch.bfloat16, e4m3, row, True, False, False, True),
        ("gradients, bias", torch.bfloat16, e5m2, row, True, True, True, True),
        ("activations, fp32 scales", torch.float32, e4m3, row, False, True, False, True),
        ("weights, bf16", torch.bfloat16, e4m3, tile, True, True, False, True),
        ("weights", torch.float32, e4m3, tile, True, True, False, True),
        ("weights, before Hopper", torch.float32, e4m3, tile, True, True, False, False),
        ("MXFP8 gradients, bias", torch.bfloat16, e4m3, microblock, True, True, True, True),
        ("MXFP8, rows alone", torch.float32, e4m3, microblock, True, False, False, True),
    ):
        launch = block_launch(block, columnwise, has_sums, element.itemsize)
        data = "*u8"
        if hardware_cast:
            data = "*fp8e4nv" if dtype == e4m3 else "*fp8e5"
        scales = "*u8" if block == microblock else "*fp32"
        pointers = {"x_ptr": f"*{SHORT_NAMES[element]}", "data_ptr": data, "scales_ptr": scales}
        if columnwise:
            pointers |= {"transposed_ptr": data, "transposed_scales_ptr": scales}
        if has_sums:
            pointers["sums_ptr"] = "*fp32"
        numbers = dict.fromkeys(("rows", "columns", "row_stride", "padded_rows", "padded_columns"), "i32")
        constexprs = constants(dtype, block, power_of_two, hardware_cast) | {"ROWS": launch.rows}
        absent = {"transposed_ptr", "transposed_scales_ptr", "sums_ptr"} - set(pointers)
        constexprs |= dict.fromkeys(absent)
        yield Compilation(
            quantize_blocks_kernel,
            label,
            pointers | numbers | dict.fromkeys(constexprs, "constexpr"),
            constexprs,
            launch.warps,
            divisible_by_16=frozenset(pointers) | {"columns", "row_stride", "padded_rows", "padded_columns"},
            minimum_capability=90 if hardware_cast else 80,
            maximum_registers=launch.registers,
        )


catalogue(Op("block_scaling", "cast to FP8 with a scale for each block", prove, compilations))
