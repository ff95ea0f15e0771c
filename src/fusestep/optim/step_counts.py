"""The step counts of a device's parameters, packed into one tensor that kernels read and write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusestep.ops.gradient_norm import to_device
from fusestep.ops.tensor_table import upload
from fusestep.optim.plan_parts import State


def pack_steps(states: Sequence[State | None], device: torch.device) -> Tensor:
    """The step counts of one device in one fp32 tensor, and each state's `step` a 0-d view of it.

    Counts that already lie so keep their memory, which a CUDA graph may hold. No wait for the device.
    """
    present = [(place, state) for place, state in enumerate(states) if state is not None]
    packed = _packed_already(present, len(states), device)
    if packed is not None:
        return packed
    # Counts that the host can read are uploaded together; those on a device are gathered there.
    on_host = [0.0 if s is None or s["step"].device.type == "cuda" else float(s["step"]) for s in states]
    packed = upload(on_host, torch.float32, device)
    on_device = [(place, state["step"]) for place, state in present if state["step"].device.type == "cuda"]
    if on_device:
        places = upload([place for place, _ in on_device], torch.int64, device)
        packed[places] = torch.stack([to_device(step, device) for _, step in on_device])
    for place, state in present:
        state["step"] = packed[place]
    return packed


def _packed_already(present: list[tuple[int, State]], count: int, device: torch.device) -> Tensor | None:
    """The tensor of which every present step is the view at its place, if there is one."""
    first_place, first_state = present[0]
    first: Tensor = first_state["step"]
    start = first.storage_offset() - first_place
    if first.device != device or first.dtype != torch.float32:
        return None
    if start < 0 or (start + count) * first.element_size() > first.untyped_storage().nbytes():
        return None
    memory = first.untyped_storage().data_ptr()
    for place, state in present:
        step: Tensor = state["step"]
        if step.shape != () or step.device != device or step.dtype != torch.float32:
            return None
        if step.untyped_storage().data_ptr() != memory or step.storage_offset() != start + place:
            return None
    return first.as_strided((count,), (1,), start)
