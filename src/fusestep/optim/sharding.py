"""Parameters that lie over several processes: what is here of each, and norms of the whole of them.

Every process steps the part that it holds. What it needs of the others is one small collective: a sum of squares for
the global norm, and for rules with a norm of each tensor all of those at once. A part that several processes hold is
counted once. The collective is enqueued on the device; the host reads nothing of it.

All processes of the collective have the same parameters in the same order (one program on all of them). It goes over
the ranks of the mesh that holds all others, FSDP's and tensor parallelism's together for one; where no mesh does, over
the world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusestep.distributed.groups import group_of, holders, is_dtensor, local_of
from fusestep.errors import UserError
from fusestep.ops.gradient_norm import to_device
from fusestep.ops.tensor_table import upload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """How tensors lie over processes, some of them in parts.

    Attributes:
        group: the processes that hold something of them.
        replicas: for each tensor, on how many of these each of its parts lies.
    """

    group: ProcessGroup
    replicas: list[int]

    def norm(
        self,
        norms: Sequence[Tensor],
        replicas: Sequence[int],
        device: torch.device,
        found_inf: Tensor | None = None,
        *,
        order: float = 2.0,
    ) -> tuple[Tensor, Tensor | None]:
        """(the norm of all parts on all processes, whether a loss scaler saw a non-finite gradient on any).

        Args:
            norms: 0-d, of parts that lie here, at least one.
            replicas: of each of these norms, on how many processes its parts lie.
            device: of the result.
            found_inf: one element.
            order: p of the p-norm; math.inf for the largest magnitude.
        Returns: 0-d fp32, the same bits on every process.
        """
        here = torch.stack([to_device(norm, device).double() for norm in norms])
        if order == math.inf:
            return largest_of(here.max(), self.group).float(), None
        counts = torch.stack([torch.full((), float(count), dtype=torch.float64, device=device) for count in replicas])
        powers = (here.pow(order) / counts).sum()
        seen = torch.zeros_like(powers) if found_inf is None else to_device(found_inf, device).double()
        both = torch.stack([powers, seen])
        torch.distributed.all_reduce(both, group=self.group)
        return both[0].pow(1 / order).float(), None if found_inf is None else both[1].float()

    def any_found(self, found_inf: Tensor, device: torch.device) -> Tensor:
        """0-d fp32 on a device: whether a loss scaler saw a non-finite gradient on any process."""
        seen = to_device(found_inf, device).clone()
        torch.distributed.all_reduce(seen, group=self.group)
        return seen


class WholeNorms:
    """Norms of whole tensors from those of the parts that lie here, in one collective.

    Args:
        members: the places of n tensors in the list that the sharding was made of.
        is_max: of each, whether its norms are largest magnitudes, not L2 norms.
    """

    def __init__(
        self, sharding: Sharding, members: Sequence[int], is_max: Sequence[bool], device: torch.device
    ) -> None:
        self._group = sharding.group
        self._has_sums, self._has_maxima = not all(is_max), any(is_max)
        self._replicas = upload([float(sharding.replicas[i]) for i in members], torch.float64, device)
        self._is_max = upload(list(is_max), torch.bool, device)

    def __call__(self, norms: Tensor) -> Tensor:
        """(k, n) float64, the same bits on every process, of (k, n): k norms of each tensor."""
        wide = norms.double()
        total = largest = wide
        if self._has_sums:
            squares = wide.square() / self._replicas
            torch.distributed.all_reduce(squares, group=self._group)
            total = squares.sqrt()
        if self._has_maxima:
            largest = largest_of(wide, self._group)
        return torch.where(self._is_max, largest, total)


def largest_of(values: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of all processes' values, each float64 and not negative, or NaN where one is."""
    # As integers, whose order is that of such numbers; the bits of NaN are above infinity's.
    bits = values.abs().view(torch.int64)
    torch.distributed.all_reduce(bits, torch.distributed.ReduceOp.MAX, group)
    return bits.view(torch.float64)


def sharding_of(tensors: Sequence[Tensor]) -> Sharding | None:
    """How these lie over processes; None where each is whole on this process, as under DDP.

    The first call for a set of ranks makes a group of them, on all of them together.
    """
    held = [holders(tensor) for tensor in tensors]
    sets = {one[0] for one in held if one is not None}
    if not sets:
        return None
    everyone = frozenset().union(*sets)
    if everyone not in sets:
        everyone = frozenset(range(torch.distributed.get_world_size()))
    replicas = [len(everyone) // (1 if one is None else one[1]) for one in held]
    return Sharding(group_of(everyone), replicas)


def check_placements(who: str, parameter: Tensor, number: int) -> None:
    """Raises: UserError for a parameter of which each process holds a summand only."""
    if is_dtensor(parameter) and any(placement.is_partial() for placement in parameter.placements):
        raise UserError(
            f"{who}: parameter {number} is laid out as {parameter.placements}, in summands; redistribute it to Shard "
            "or Replicate first."
        )


def local_gradient(who: str, parameter: Tensor, gradient: Tensor, number: int) -> Tensor:
    """The part of a gradient that belongs to the part of the parameter that lies here.

    Where the gradient is laid out otherwise (in sums that are not formed yet, for one) all processes communicate.

    Raises: UserError where only one of the two is a DTensor.
    """
    if is_dtensor(parameter) != is_dtensor(gradient):
        has, lacks = ("gradient", "parameter") if is_dtensor(gradient) else ("parameter", "gradient")
        raise UserError(
            f"{who}: of parameter {number} the {has} is a DTensor and the {lacks} is not; build the optimizer from the "
            "parameters of the model as it is once it is sharded. Nothing was changed."
        )
    if is_dtensor(gradient) and is_dtensor(parameter):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return local_of(gradient)
    return gradient


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with the parts that lie here in the place of DTensors."""
    return {key: local_of(value) if isinstance(value, Tensor) else value for key, value in state.items()}
