"""The angles of rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusestep.errors import UserError


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary position embedding: position · base^(−2j / dim) for pair j.

    They are computed in fp32 from fp64 frequencies, whatever dtype the module is cast to, and have no state.

    Args:
        dim: of a head's elements.
        rotary_percent: the share of dim that is rotated, in (0, 1].
        seq_len_interpolation_factor: positions are divided by it, if pretrained_max_position_embeddings is given too.
        pretrained_max_position_embeddings: the longest sequence of pretraining. A sequence longer than this times the
            factor is squeezed to this length instead.
        rotary_base: base of the frequencies.
        interleaved: as of apply_rotary_pos_emb.
        device: of the angles; moves with the module.
    Raises: UserError for a share without an even, positive number of elements.
    """

    inverse_frequencies: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent)
        if not 0 < rotary_percent <= 1 or self.dim < 2 or self.dim % 2:
            raise UserError(
                f"RotaryPositionEmbedding: {rotary_percent} of {dim} elements are rotated; pass a rotary_percent in "
                "(0, 1] that leaves a positive, even number."
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.register_buffer("inverse_frequencies", self._inverse_frequencies(device), persistent=False)

    def _inverse_frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim
        return (self.rotary_base**-exponents).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositionEmbedding:
        """Follow to another device, but not to another dtype; memory without values, of to_empty, gets its values."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse_frequencies = self._inverse_frequencies(self.inverse_frequencies.device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """(max_seq_len, 1, 1, dim) fp32 angles in radians of positions offset, offset + 1, …"""
        position = torch.arange(max_seq_len, dtype=torch.float32, device=self.inverse_frequencies.device) + offset
        factor, longest = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and longest is not None:
            position = position / (max_seq_len / longest if max_seq_len > longest * factor else factor)
        angles = position[:, None] * self.inverse_frequencies
        both = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((angles, angles), 1)
        return both[:, None, None, :]
