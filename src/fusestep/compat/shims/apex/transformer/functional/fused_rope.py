"""apex.transformer.functional.fused_rope over fusestep.nn.functional's apply_rotary_pos_emb and apply_rotary_tables.

Pairs j, j + r/2 of the first r elements of a head are rotated, the tail is copied. Cosines and sines stay fp32, where
Apex rounds them to t's dtype; the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.compat.implementation import ran
from fusestep.errors import UserError
from fusestep.nn import functional

__all__ = [
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_2d",
    "fused_apply_rotary_pos_emb_cached",
    "fused_apply_rotary_pos_emb_thd",
]


def fused_apply_rotary_pos_emb(t: Tensor, freqs: Tensor, transpose_output_memory: bool = False) -> Tensor:
    """Rotate t by angles.

    Args:
        t: (sequence, batch, heads, d). freqs: (sequence, 1, 1, r) fp32 angles, r even and at most d; its
            second half repeats the first, which is read.
        transpose_output_memory: lay the result out as (batch, sequence, heads, d).
    """
    _told("fused_apply_rotary_pos_emb", t)
    return _laid_out(functional.apply_rotary_pos_emb(t, freqs, "sbhd"), transpose_output_memory)


def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Rotate t, (sequence, batch, heads, d), by cosines and sines, (sequence, 1, 1, r) each."""
    cos, sin = (one.reshape(1, -1, one.shape[-1]) for one in (cos_, sin_))
    _told("fused_apply_rotary_pos_emb_cached", t, by_tables=True)
    y = functional.apply_rotary_tables(t.permute(1, 2, 0, 3), cos, sin, t.dtype)
    return _laid_out(y.permute(2, 0, 1, 3), transpose_output_memory)


def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """Rotate packed sequences, whose positions each begin at 0.

    Args:
        t: (tokens, heads, d). cu_seqlens: (sequences + 1,) int32 offsets. freqs: (positions, 1, 1, r) fp32 angles.
    """
    _told("fused_apply_rotary_pos_emb_thd", t)
    return functional.apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=cu_seqlens)


def fused_apply_rotary_pos_emb_2d(
    t: Tensor, img_h: int, img_w: int, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor
) -> Tensor:
    """Rotate the first half of each head by its patch's row and the second half by its column.

    Args:
        t: (batch, img_h · img_w, heads, d), d divisible by 4.
        cos_h, sin_h: (1, at least img_h, 1, d/2). cos_w, sin_w: (1, at least img_w, 1, d/2).
    """
    _, patches, _, width = t.shape
    if patches != img_h * img_w or width % 4 or cos_h.shape[1] < img_h or cos_w.shape[1] < img_w:
        raise UserError(
            f"fused_apply_rotary_pos_emb_2d: t has shape {tuple(t.shape)} for {img_h} × {img_w} patches, cos_h "
            f"{tuple(cos_h.shape)} and cos_w {tuple(cos_w.shape)}; pass (batch, img_h · img_w, heads, d) with d "
            "divisible by 4, and tables of at least img_h and img_w positions."
        )
    _told("fused_apply_rotary_pos_emb_2d", t, by_tables=True)
    # A row of the tables for each patch: (1, img_h · img_w, d/2).
    rows = [table[:, :img_h, 0].repeat_interleave(img_w, 1) for table in (cos_h, sin_h)]
    columns = [table[:, :img_w, 0].repeat(1, img_h, 1) for table in (cos_w, sin_w)]
    by_row, by_column = t.transpose(1, 2).chunk(2, -1)
    turned = (
        functional.apply_rotary_tables(part, cos, sin, t.dtype)
        for part, (cos, sin) in ((by_row, rows), (by_column, columns))
    )
    return torch.cat([part.transpose(1, 2) for part in turned], -1)


def _laid_out(y: Tensor, transposed: bool) -> Tensor:
    return y.transpose(0, 1).contiguous().transpose(0, 1) if transposed else y


def _told(name: str, t: Tensor, by_tables: bool = False) -> None:
    ours, op = ("apply_rotary_tables", "rotary_tables") if by_tables else ("apply_rotary_pos_emb", "rotary")
    ran(f"apex.transformer.functional.{name}", f"fusestep.nn.functional.{ours}", op, t)
