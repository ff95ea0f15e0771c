"""The 8-bit floating-point formats, and which of them serves which tensor.

- E4M3 (torch.float8_e4m3fn): four exponent bits, largest value 448, no infinity: values and weights.
- E5M2 (torch.float8_e5m2): five exponent bits, largest finite value 57344: gradients, whose range is wider.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433.
"""

from __future__ import annotations

import enum

import torch


class Format(enum.Enum):
    """The formats of a recipe: of what a forward product reads, and of the gradients that a backward product reads.

    HYBRID is E4M3 forward and E5M2 for gradients.
    """

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = (torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    @property
    def forward(self) -> torch.dtype:
        """The dtype of inputs and weights."""
        return self.value[0]

    @property
    def backward(self) -> torch.dtype:
        """The dtype of output gradients."""
        return self.value[1]

    @property
    def max_fwd(self) -> float:
        """The largest finite value of `forward`."""
        return largest(self.forward)

    @property
    def max_bwd(self) -> float:
        """The largest finite value of `backward`."""
        return largest(self.backward)

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def largest(dtype: torch.dtype) -> float:
    """The largest finite value of an FP8 dtype: 448 or 57344."""
    return torch.finfo(dtype).max
