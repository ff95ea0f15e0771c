"""Coming back from a capture that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recovered_capture(device: torch.device) -> Iterator[None]:
    """Around a capture on a CUDA device: what is raised passes, and torch draws random numbers and computes as before.

    Where the end of a capture fails, torch's generator believes itself within it for ever, and the stream of the
    capture stays the current one.
    """
    index = device.index or 0
    if index >= len(torch.cuda.default_generators):  # CUDA was never used
        yield
        return
    generator = torch.cuda.default_generators[index]
    state, stream = generator.clone_state(), torch.cuda.current_stream(device)
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        raise
