"""Memory of the steps before a capture, so that the graph takes as much as they took and not more.

Torch keeps memory that was freed for the stream that had it, in segments, and gives back to the device only those of
which nothing is in use. The pool of a graph can have no other. Two things would make a step before a capture leave
memory behind that nobody uses, of a model with billions of parameters gigabytes:

- What an optimizer makes to last (moments, masters, copies of weights) would lie where activations had lain, between
  gradients. Once those are gone each such segment has a rest that is free and stays.
- What was freed on the stream that built the model serves no other stream, such as weights in fp32 that were then cast
  to 16 bits.

So a step outside of graphs starts with nothing kept that is free, and its optimizer works on a stream of its own, whose
segments hold what it makes and no gradient or activation. What those leave free is given back before, since the
optimizer's first step would otherwise come on top of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def release() -> None:
    """Give memory back that torch keeps for later; the host waits for the device where there is such memory."""
    torch.cuda.empty_cache()


@contextmanager
def apart(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Run what is within on a stream after what is on the current one, which goes on after it.

    No tensor needs record_stream for that: memory that is freed on either stream is taken again on the same one, which
    has waited for the other by then.
    """
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
