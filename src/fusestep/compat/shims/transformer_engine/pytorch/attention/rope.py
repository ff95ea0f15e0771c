"""Rotary position embedding, over fusestep's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusestep import nn
from fusestep.compat.implementation import ran
from fusestep.compat.report import served
from transformer_engine.pytorch._arguments import PACKAGE, SBHD, check_ranks, layout_of, placed

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]


class RotaryPositionEmbedding(nn.RotaryPositionEmbedding):
    """Angles of rotary position embedding, (s, 1, 1, dim) in fp32; see fusestep.nn.RotaryPositionEmbedding."""

    SERVED_BY = "fusestep.nn.RotaryPositionEmbedding"

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__(
            dim,
            rotary_percent,
            seq_len_interpolation_factor,
            pretrained_max_position_embeddings,
            rotary_base,
            interleaved,
            device=torch.device(placed("RotaryPositionEmbedding", "cuda") or "cpu"),
        )
        served(f"{PACKAGE}.RotaryPositionEmbedding", self.SERVED_BY)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        # Frequencies follow from the arguments; a state dict may hold them nevertheless.
        kept = {key: value for key, value in state_dict.items() if key != f"{prefix}inv_freq"}
        super()._load_from_state_dict(kept, prefix, *others)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = SBHD,
    start_positions: Any = None,
    interleaved: Any = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,  # noqa: ARG001
) -> Tensor:
    """Rotate queries or keys by the angles of their positions; see fusestep.nn.functional.apply_rotary_pos_emb.

    1.x has `fused` in fourth place and cu_seqlens in fifth, which is recognised by their types.
    """
    if isinstance(start_positions, bool):
        fused, start_positions = start_positions, None
        if isinstance(interleaved, torch.Tensor):
            cu_seqlens, interleaved = interleaved, False
    del fused  # the rotation is one kernel in any case
    check_ranks("apply_rotary_pos_emb", None, cp_size, "cp")
    ran(f"{PACKAGE}.apply_rotary_pos_emb", "fusestep.nn.functional.apply_rotary_pos_emb", "rotary", t)
    layout = layout_of(tensor_format)
    starts = cu_seqlens if layout == "thd" else None
    return nn.functional.apply_rotary_pos_emb(t, freqs, layout, start_positions, interleaved, starts)
