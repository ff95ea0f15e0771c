"""Windows of context + 1 tokens out of one long sequence, whose end is held out.

The last tenth of the tokens is held out, and at least one window; a sequence shorter than two windows has no held-out
part, and all of it is training. Training windows end before the held-out part begins, so no token is in both. Every
start is equally likely, the last one included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.data.source import check_request, random_below
from fusestep.errors import UserError


def part(length: int, context: int, *, held_out: bool) -> tuple[int, int]:
    """Where a part begins and ends; empty for a held-out part that there is no room for."""
    window = context + 1
    tail = max(length // 10, window) if length >= 2 * window else 0
    return (length - tail, length) if held_out else (0, length - tail)


def draw_windows(
    tokens: Tensor, seed: int, first: int, count: int, context: int, *, held_out: bool, who: str
) -> tuple[Tensor, Tensor]:
    """Starts (count,) and windows (count, context + 1), in the dtype of tokens.

    Args:
        tokens: (length,), in memory or mapped: only the windows are read.
        who: names source and file in errors.
    Raises: UserError where the part holds no window.
    """
    check_request(who, first, count, context)
    length = tokens.numel()
    begin, end = part(length, context, held_out=held_out)
    if end - begin <= context:
        needed = 2 * (context + 1) if held_out else context + 1
        wanted = "for a held-out part beside the training part" if held_out else "for one sequence and its targets"
        raise UserError(
            f"{who} has {length:,} tokens and a context of {context} needs at least {needed:,} {wanted}; "
            f"give more data, or a shorter context{', or train without evaluation' * held_out}."
        )
    starts = begin + random_below(end - begin - context, seed, int(held_out), first, count)
    if count == 0:
        return starts, tokens.new_empty(0, context + 1)
    return starts, torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])
