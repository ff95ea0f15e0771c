"""Masters of which FusedAdam keeps what a bf16 parameter leaves of them: to and from whole ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.distributed.groups import is_dtensor, laid_out, local_of, wrapped
from fusestep.ops.adam_remainders import parted, whole
from fusestep.optim.loading import MASTER, REMAINDER
from fusestep.optim.plan_parts import State


def lying_as(parameter: Tensor, remainder: Tensor) -> Tensor:
    """A remainder laid out over processes as a parameter is: the same object where it is so already."""
    if not is_dtensor(remainder):
        return laid_out(remainder, parameter)
    if is_dtensor(parameter) and (parameter.device_mesh, parameter.placements) == (
        remainder.device_mesh,
        remainder.placements,
    ):
        return remainder
    # Collectives take no int16.
    moved = laid_out(wrapped(local_of(remainder).int(), remainder), parameter)
    short = local_of(moved).short()
    return wrapped(short, moved) if is_dtensor(moved) else short


def put_together(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter, laid out over processes as that is."""
    here = local_of(parameter)
    master = whole(here, local_of(lying_as(parameter, remainder)).to(here.device))
    return wrapped(master, parameter) if is_dtensor(parameter) else master


def is_rounded(parameter: Tensor, master: Tensor) -> bool:
    """Whether a bf16 parameter is its master rounded, with ties either way. Waits for the device."""
    here, kept = local_of(parameter).detach(), local_of(laid_out(master, parameter))
    return bool(((here == kept.bfloat16()) | (here == parted(kept)[0])).all())


@torch.no_grad()
def part_master(parameter: Tensor, state: State) -> None:
    """Write the whole master that a state holds into the bf16 parameter and the remainder, in place of itself."""
    here = local_of(parameter)
    master = local_of(laid_out(state.pop(MASTER), parameter)).to(here.device, torch.float32)
    high, low = parted(master)
    here.copy_(high)
    kept: Tensor | None = state.get(REMAINDER)
    if kept is None or local_of(kept).shape != low.shape:
        state[REMAINDER] = wrapped(low, parameter) if is_dtensor(parameter) else low
    else:
        local_of(kept).copy_(low)
    if is_dtensor(parameter):
        torch.autograd.graph.increment_version([parameter])  # the part's own count is another
