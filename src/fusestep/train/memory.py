"""How much memory a run takes, and what to say when there is not enough."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from fusestep.distributed.groups import local_of
from fusestep.memory import GIB, peak_resident


def in_use(device: torch.device) -> int:
    """Bytes now: allocated on a GPU, resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident


def peak(device: torch.device) -> int:
    """The most bytes at one time so far: allocated on a GPU, resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(peak_resident() or 0, in_use(device))


def parts(model: nn.Module | None, *, has_masters: bool, accumulates_in_fp32: bool, peak: int) -> dict[str, int]:
    """What fills this process's memory, in bytes, largest first: known from its part of the model, activations being
    what is left of `peak`, to which an allocation that failed counts."""
    parameters = [] if model is None else [local_of(parameter) for parameter in model.parameters()]
    trainable = [] if model is None else [local_of(p) for p in model.parameters() if p.requires_grad]
    known = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.numel() * 4 if accumulates_in_fp32 else p.nbytes for p in trainable),
        # Two fp32 moments, and an fp32 master where there is one.
        "optimizer state": sum(p.numel() * (12 if has_masters else 8) for p in trainable),
    }
    known["activations and the rest"] = max(peak - sum(known.values()), 0)
    return dict(sorted(known.items(), key=lambda part: -part[1]))


def sentence(device: torch.device, parts: dict[str, int], peak: int, asked: int, batch: int, accumulate: int) -> str:
    """Out of memory: the peak, what was asked for then, their largest parts, what to lower; without a full stop."""
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
    if not next(iter(parts)).startswith("activations"):
        mend = "choose a smaller --preset"
    elif batch > 1:
        half = batch // 2
        smaller = f"--batch {half} --accumulate {-(-batch // half) * accumulate}"
        mend = f"lower --batch, such as {smaller}, or pass --activation-checkpointing"
    else:
        mend = "pass --activation-checkpointing, or choose a smaller --preset"
    more = f" and a request for {asked / GIB:.2f} more" if asked else ""
    return f"out of memory on {where} after a peak of {peak / GIB:.2f} GiB{more} (in GiB: {listed}); {mend}"
