"""Arithmetic sequences, (phase + stride · t) mod V with stride 1 to 6: a rule that a tiny model learns in seconds.

A sequence is fixed by its pair (phase, stride). The pairs with (phase + stride) mod 8 = 0 are held out: one in eight
for every stride, and for every phase at most one stride. They are the same for every seed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fusestep.data.source import check_request, random_below
from fusestep.data.vocabulary import Numbers
from fusestep.errors import UserError

STRIDES = 6
_HELD_OUT_EVERY = 8


class ArithmeticSequences(Numbers):
    """The source that `arithmetic_sequences` returns."""

    def __init__(self, vocab_size: int = 96, *, seed: int = 0) -> None:
        # Fewer than 7 ids make two strides one; from 8 on every stride has a phase that is held out.
        if vocab_size < _HELD_OUT_EVERY:
            raise UserError(
                f"arithmetic_sequences: vocab_size is {vocab_size}; give at least {_HELD_OUT_EVERY}, "
                "so that strides differ and some sequences can be held out."
            )
        super().__init__(vocab_size)
        self.seed = seed
        phase = torch.arange(vocab_size).repeat_interleave(STRIDES)
        stride = torch.arange(1, STRIDES + 1).repeat(vocab_size)
        is_held_out = (phase + stride) % _HELD_OUT_EVERY == 0
        pairs = torch.stack((phase, stride), dim=1)
        self._pairs = {True: pairs[is_held_out], False: pairs[~is_held_out]}

    def batch(self, first: int, count: int, context: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Samples first to first + count - 1: two (count, context) int64 tensors, targets one token later."""
        check_request("arithmetic_sequences", first, count, context)
        pairs = self._pairs[held_out]
        phase, stride = pairs[random_below(len(pairs), self.seed, int(held_out), first, count)].unbind(1)
        sequence = (phase[:, None] + stride[:, None] * torch.arange(context + 1)) % self.vocab_size
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

    def describe(self) -> dict[str, str | int | float]:
        """What decides the stream."""
        return {"source": "arithmetic sequences", "vocab_size": self.vocab_size, "seed": self.seed}


def arithmetic_sequences(vocab_size: int = 96, *, seed: int = 0) -> ArithmeticSequences:
    """The tutorial's deterministic data: (phase + stride · t) mod vocab_size, stride 1 to 6.

    Raises: UserError for a vocabulary of fewer than 8 ids.
    """
    return ArithmeticSequences(vocab_size, seed=seed)


def strides(ids: list[int], vocab_size: int) -> list[int]:
    """Differences of neighbours, mod vocab_size; all equal where a sequence keeps its stride."""
    return [(after - before) % vocab_size for before, after in itertools.pairwise(ids)]
