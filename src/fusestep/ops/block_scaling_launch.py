"""Launches of block scaling's kernel, and plans: casts of which all but the tensor is settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.ops.block_scaling_kernel import quantize_blocks_kernel
from fusestep.ops.fp8_cast import has_fp8_cast
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import maker
from fusestep.ops.norm_backward import prepare_sums
from fusestep.ops.quantized import padded

#: Rows and columns that share a scale.
Block = tuple[int, int]

#: Of activations and gradients, of weights, and of both in MXFP8.
ROW: Block = (1, 128)
TILE: Block = (128, 128)
MX: Block = (1, 32)

#: What makes a tensor that is not yet written.
Maker = Callable[[], Tensor]

#: (data, scales, transposed, its scales, column sums); None where they are not wanted.
Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

#: Rows and columns of what a program casts, which has whole blocks in both directions.
SIDE = 128


def scales_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Size of the inverse scales of a matrix; see the head of block_scaling.py."""
    column_blocks = -(-columns // block[1])
    if block[0] == 1:
        return padded(rows), column_blocks
    return -(-rows // block[0]), -(-column_blocks // 4) * 4


def unwritten_scales(rows: int, columns: int, block: Block, device: torch.device) -> Tensor:
    """Inverse scales of a matrix in their layout, not yet written."""
    shape = scales_shape(rows, columns, block)
    if block[0] != 1:
        return torch.empty(shape, dtype=torch.float32, device=device)
    dtype = torch.uint8 if block == MX else torch.float32
    return torch.empty_strided(shape, (1, max(shape[0], 1)), dtype=dtype, device=device)


def unwritten(
    x: Tensor, dtype: torch.dtype, block: Block, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
) -> Outputs:
    """What a cast of x returns, not yet written."""
    rows, columns = x.shape
    device = x.device
    data = scales = transposed = transposed_scales = sums = None
    if rowwise:
        data = torch.empty(padded(rows), padded(columns), dtype=dtype, device=device)
        scales = unwritten_scales(rows, columns, block, device)
    if columnwise:
        transposed = torch.empty(padded(columns), padded(rows), dtype=dtype, device=device)
        transposed_scales = unwritten_scales(columns, rows, block, device)
    if sums_dtype is not None:
        sums = torch.empty(columns, dtype=sums_dtype, device=device)
    return data, scales, transposed, transposed_scales, sums


@dataclass(frozen=True)
class BlockLaunch:
    """Rows of a tile, warps of a program, and the most registers of a thread, None: as the compiler likes."""

    rows: int
    warps: int
    registers: int | None = None


def block_launch(block: tuple[int, int], columnwise: bool, column_sums: bool, element_size: int) -> BlockLaunch:
    """The launch of a cast.

    With 80 registers three programs of 8 warps share a multiprocessor, which pays for weights and where columns are
    summed; a tile of fp32 needs twice as many. Measured on an H200: the fastest of five or six settings each.
    """
    if block == ROW and not columnwise and not column_sums:
        return BlockLaunch(32, 4)
    if element_size == 4:
        return BlockLaunch(SIDE, 16)
    is_capped = block == TILE or (block == ROW and column_sums)
    return BlockLaunch(SIDE, 8, 80 if is_capped else None)


def constants(dtype: torch.dtype, block: tuple[int, int], power_of_two: bool, hardware_cast: bool) -> dict[str, Any]:
    """The constexprs of a cast but for the rows of a tile."""
    return {
        "E4M3": dtype == torch.float8_e4m3fn,
        "HARDWARE_CAST": hardware_cast,
        "POWER_OF_TWO": power_of_two,
        "SQUARE": block[0] != 1,
        "WIDTH": block[1],
    }


class BlockPlan:
    """Casts matrices of the layout of the one that it was made for.

    Args: as of quantize_blocks; the rows of x are contiguous, and x has elements.
        right: which of data and transpose are handed out as right operands of a product: with the summed dimension
            first, and scales of (128, 128) likewise, of the same memory.
    """

    __slots__ = ("_as_bytes", "_cast", "_index", "_makers", "_partials", "_total")

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        block: Block,
        rowwise: bool,
        columnwise: bool,
        power_of_two: bool,
        sums_dtype: torch.dtype | None,
        right: tuple[bool, bool] = (False, False),
    ) -> None:
        rows, columns = x.shape
        device = x.device
        self._index = device.index if device.type == "cuda" else None
        straight = _makers(rows, columns, dtype, block, device, right[0]) if rowwise else (None, None)
        turned = _makers(columns, rows, dtype, block, device, right[1]) if columnwise else (None, None)
        self._makers = *straight, *turned, None if sums_dtype is None else maker((columns,), sums_dtype, device)
        launch = block_launch(block, columnwise, sums_dtype is not None, x.element_size())
        down = -(-padded(rows) // launch.rows)
        numbers = (rows, columns, x.stride(0), padded(rows), padded(columns))
        has_cast = has_fp8_cast(device)
        options: dict[str, Any] = {"ROWS": launch.rows, "num_warps": launch.warps}
        if launch.registers is not None:
            options["maxnreg"] = launch.registers
        options |= constants(dtype, block, power_of_two, has_cast)
        grid = (down * -(-padded(columns) // SIDE),)
        self._cast = PreparedLaunch(quantize_blocks_kernel, grid, device, numbers, **options)
        # Where a device has no such cast, Triton knows no pointer to FP8 either.
        self._as_bytes = not has_cast
        self._partials: Maker | None = None
        self._total: PreparedLaunch | None = None
        if sums_dtype is None or down == 1:  # the sums of one tile are the whole
            return
        self._partials = maker((down, columns), torch.float32, device)
        self._total = prepare_sums(device, down, columns)

    def cast(self, x: Tensor, *_: None) -> Outputs:
        """Cast x; what else a cast may be given has no meaning here."""
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.cast(x)
        make_data, make_scales, make_transposed, make_transposed_scales, make_sums = self._makers
        data = scales = transposed = transposed_scales = None
        data_at = scales_at = transposed_at = transposed_scales_at = 0
        if make_data is not None and make_scales is not None:
            data, scales = make_data(), make_scales()
            data_at, scales_at = data.data_ptr(), scales.data_ptr()
        if make_transposed is not None and make_transposed_scales is not None:
            transposed, transposed_scales = make_transposed(), make_transposed_scales()
            transposed_at, transposed_scales_at = transposed.data_ptr(), transposed_scales.data_ptr()
        sums = None if make_sums is None else make_sums()
        summed = sums if self._partials is None else self._partials()
        summed_at = 0 if summed is None else summed.data_ptr()
        x_at = x.data_ptr()
        addresses = (x_at, data_at, scales_at, transposed_at, transposed_scales_at, summed_at)
        # What is allocated here is aligned.
        if x_at & 15 or not self._cast.at(addresses):
            straight, turned = data, transposed
            if self._as_bytes:
                straight = None if data is None else data.view(torch.uint8)
                turned = None if transposed is None else transposed.view(torch.uint8)
            self._cast(x, straight, scales, turned, transposed_scales, summed)
        total = self._total
        if total is not None and sums is not None and not total.at((summed_at, sums.data_ptr(), 0)):
            total(summed, sums, None)
        return data, scales, transposed, transposed_scales, sums


def _makers(
    rows: int, columns: int, dtype: torch.dtype, block: Block, device: torch.device, right: bool
) -> tuple[Maker, Maker]:
    """Of a cast in one direction, and of its inverse scales; see `unwritten_scales` for how those lie."""
    shape = scales_shape(rows, columns, block)
    if block[0] != 1:
        scales = maker(shape, torch.float32, device, transposed=right)
    else:
        kind = torch.uint8 if block == MX else torch.float32
        scales = maker(shape[::-1], kind, device, transposed=True)
    return maker((padded(rows), padded(columns)), dtype, device, transposed=right), scales
