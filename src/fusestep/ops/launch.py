"""Launch a Triton kernel on the device of its tensors, at the least cost to the host."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on `device`, whatever the current device is.

    A grid axis of 0 launches nothing. Triton launches on the current device, not on its tensors' (triton#2441).
    """
    if 0 in grid:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
