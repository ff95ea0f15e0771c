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

Memory is not given back while a graph is captured, by whichever thread: CUDA refuses that to all threads during a
capture of torch's default mode, and what it has refused spoils the capture. A later step gives it back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger("fusestep")

#: The threads that are capturing a step.
_capturing: set[int] = set()


def release() -> str | None:
    """Give memory back that torch keeps for later; the host waits for the device where there is such memory.

    Returns: why that has to wait for another time, or None.
    """
    reason = _capture_underway()
    if reason is None:
        torch.cuda.empty_cache()
    else:
        logger.info("TrainStep: memory that torch keeps for later is given back at another step, since %s", reason)
    return reason


@contextmanager
def capturing() -> Iterator[None]:
    """Around the capture of a step, during which nothing is released."""
    here = threading.get_ident()
    _capturing.add(here)
    try:
        yield
    finally:
        _capturing.discard(here)


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


def _capture_underway() -> str | None:
    """Whose capture a release could spoil, in words.

    Torch tells of single streams alone whether they capture. Of those that others capture on, the one is known that
    torch.cuda.graph takes where it is given none; who names a stream of his own to a capture in the default mode, in
    another thread, is not found here. Torch itself releases nothing on the device of a capture, but for graphs that
    are gone.
    """
    if _capturing:
        return "a step is being captured"
    if torch.cuda.is_current_stream_capturing():
        return "the current stream is captured in a graph"
    stream = torch.cuda.graph.default_capture_stream
    if stream is not None:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return "torch.cuda.graph captures in another thread"
    return None
