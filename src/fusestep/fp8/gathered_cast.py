"""The arithmetic of weights that are gathered in FP8: what shards know of the whole, and what is made of their bytes.

See gathered.py for who calls this when. A shard is rows of a weight; its tiles are the whole weight's, so that one that
lies over a border is scaled by what all its shards hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.functional import pad

from fusestep.fp8.copies import CopyFormat
from fusestep.ops.block_scaling_launch import TILE, unwritten_scales
from fusestep.ops.block_scaling_reference import NAN_BYTE, block_scale
from fusestep.ops.quantize import quantize, transpose_bytes
from fusestep.ops.quantize_reference import scale_from_amax_reference
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.roll_scales import SCALE, SLOT

if TYPE_CHECKING:
    from fusestep.fp8.gathered import Share


def amaxes_of(values: Tensor, form: CopyFormat, share: Share) -> Tensor:
    """fp32 amaxes of the whole weight as far as these rows of it tell: (1,), or (tile rows, tile columns)."""
    if form.kind != "tiles":
        if not values.numel():
            return torch.zeros(1, dtype=torch.float32, device=values.device)
        amax: Tensor = torch.linalg.vector_norm(values, float("inf"), dtype=torch.float32)
        return amax.view(1)
    height, width = TILE
    rows, columns = -(-share.shape[0] // height), -(-share.shape[1] // width)
    found = torch.zeros(rows, columns, dtype=torch.float32, device=values.device)
    if values.numel():
        above = share.first % height
        below = -(above + values.shape[0]) % height
        whole = pad(values.float(), (0, columns * width - values.shape[1], above, below))
        tiles = whole.view(-1, height, columns, width)
        start = share.first // height
        found[start : start + tiles.shape[0]] = tiles.abs().amax(dim=(1, 3))
    return found


def slots_of(amaxes: Tensor, form: CopyFormat) -> Tensor:
    """(n, 4) slots with the scales that n amaxes call for, so that a cast need not look for one."""
    slots = torch.zeros(amaxes.numel(), SLOT, dtype=torch.float32, device=amaxes.device)
    slots[:, SCALE] = scale_from_amax_reference(amaxes, form.dtype, form.margin, form.power_of_two)
    return slots


def cast_rows(values: Tensor, known: Tensor, form: CopyFormat, share: Share) -> tuple[Tensor, Tensor]:
    """(bytes of a shard, (most, columns) uint8, zero below its rows; inverse scales of the whole weight).

    Args: known: of the whole weight its slot, (1, 4), or the amaxes of its tiles.
    """
    rows, columns = values.shape
    if form.kind == "tiles":
        data, scale_inv = _cast_tiles(values, known, form, share)
    else:
        quantized, _ = quantize(values, known, 0, form.dtype)
        assert quantized.data is not None
        data, scale_inv = quantized.data.view(torch.uint8), quantized.scale_inv
    if data.shape == (share.most, columns):
        return data, scale_inv
    whole = torch.zeros(share.most, columns, dtype=torch.uint8, device=values.device)
    whole[:rows] = data[:rows, :columns]
    return whole, scale_inv


def _cast_tiles(values: Tensor, amaxes: Tensor, form: CopyFormat, share: Share) -> tuple[Tensor, Tensor]:
    """As ops.block_scaling casts them, with scales that are given."""
    height, width = TILE
    largest = torch.finfo(form.dtype).max
    scale = block_scale(amaxes, largest, form.power_of_two)
    rows = torch.arange(share.first, share.first + values.shape[0], device=values.device) // height
    values = values.float()
    scaled = values * scale[rows].repeat_interleave(width, 1)[:, : values.shape[1]] + values * 0
    data = scaled.clamp(-largest, largest).to(form.dtype).view(torch.uint8).masked_fill(scaled.isnan(), NAN_BYTE)
    scale_inv = unwritten_scales(*share.shape, TILE, values.device).fill_(1)
    scale_inv[: scale.shape[0], : scale.shape[1]] = 1.0 / scale
    return data, scale_inv


def whole_quantized(
    gathered: Tensor, scale_inv: Tensor, shape: tuple[int, int], form: CopyFormat, known: Quantized | None
) -> tuple[Quantized, tuple[Tensor, ...]]:
    """(the whole weight of all shards' bytes, what it has of memory beside them).

    Args:
        gathered: (ranks · most, columns) uint8.
        known: what an earlier call made, whose memory, with nothing in it by now, is written again.
    """
    rows, columns = shape
    is_fit = rows == padded(rows) and columns == padded(columns)
    if known is None:
        data = gathered[:rows] if is_fit else _unwritten(rows, columns, gathered.device)
        transposed = _unwritten(columns, rows, gathered.device)
    else:
        assert known.data is not None
        assert known.transposed is not None
        data, transposed = known.data.view(torch.uint8), known.transposed.view(torch.uint8)
    own = (transposed,) if is_fit else (data, transposed)
    # What autograd has kept of the transpose is the same weight, gathered again.
    with torch.no_grad(), _unsafe_preserve_version_counter(own):
        if not is_fit:
            data.zero_()
            data[:rows, :columns] = gathered[:rows]
        transposed.copy_(transpose_bytes(data.view(form.dtype)).view(torch.uint8))
    transposed_scale_inv = scale_inv
    if form.kind == "tiles":
        transposed_scale_inv = unwritten_scales(columns, rows, TILE, gathered.device).fill_(1)
        tiles = -(-rows // TILE[0]), -(-columns // TILE[1])
        transposed_scale_inv[: tiles[1], : tiles[0]] = scale_inv[: tiles[0], : tiles[1]].t()
    block = TILE if form.kind == "tiles" else None
    whole = Quantized(shape, data.view(form.dtype), transposed.view(form.dtype), scale_inv, transposed_scale_inv, block)
    return whole, own


def _unwritten(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(padded(rows), padded(columns), dtype=torch.uint8, device=device)
