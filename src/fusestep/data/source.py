"""What every data source offers, and how sample k is chosen.

Sample k of a source depends on the source's seed and on k alone. So any number of ranks, a resumed run and an
uninterrupted one draw the same stream: whoever needs samples a to b asks for them by number.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fusestep.errors import UserError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Source(Protocol):
    """A stream of token sequences with a held-out part that shares no sample with the training part."""

    vocab_size: int

    def batch(self, first: int, count: int, context: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Samples first to first + count - 1 as inputs and targets.

        Returns: two (count, context) int64 tensors on the CPU; targets are the inputs one token later.
        Raises: UserError where the part asked for holds no sequence of context + 1 tokens.
        """
        ...

    def describe(self) -> dict[str, str | int | float]:
        """What decides the stream, in plain values: two sources of equal description give equal samples."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that a person wrote."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, for a person to read."""
        ...


def random_below(bound: int, seed: int, stream: int, first: int, count: int) -> Tensor:
    """Numbers `first` to `first + count - 1` of a random stream, each uniform from 0 to bound - 1.

    The k-th is splitmix64(start + k · golden) mod bound, with a start from seed and stream; the bias of the remainder
    is below bound / 2^63.

    Returns: (count,) int64 on the CPU.
    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    start = _splitmix64((seed & _MASK) ^ _splitmix64(stream + 1))
    # int64 arithmetic wraps, as the generator wants it.
    z = torch.arange(first + 1, first + count + 1) * _signed(_GOLDEN) + _signed(start)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 1) % bound


def check_request(who: str, first: int, count: int, context: int) -> None:
    """Refuse a batch that cannot be. Raises: UserError."""
    if first < 0 or count < 0 or context < 1:
        raise UserError(
            f"{who}: batch was asked for {count} samples from {first} on with a context of {context}; "
            "give counts of at least 0 and a context of at least 1."
        )


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """The shift of unsigned 64-bit numbers; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
