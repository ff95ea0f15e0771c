"""How an op that updates parameters is proved to the doctor: one step of its kernels against its reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusestep.ops.dtypes import KERNEL_DTYPES, dtype_name
from fusestep.ops.registry import Proof, relative_error
from fusestep.ops.update import Members

#: Whole chunks, parts of one, one that is transposed, and one at an odd address.
SHAPES = ((33, 65), (1024,), (7, 9), (2049,))


def prove_update(
    name: str,
    device: torch.device,
    run: Callable[[Members, list[Tensor]], None],
    reference: Callable[[Members, list[float]], None],
    *,
    dense: int,
    has_scalars: bool = False,
) -> list[Proof]:
    """Proofs of weights and states for each dtype, 16-bit parameters with masters.

    Args:
        run: steps members by the op, after 3 steps.
        reference: the same by the reference, as the fourth step.
        dense, has_scalars: the states that members have; the last of the parameter's shape is not negative.
    """
    proofs = []
    for dtype in KERNEL_DTYPES:
        ours, theirs = (_members(dtype, device, dense, has_scalars) for _ in range(2))
        run(ours, [torch.full((), 3.0, device=device) for _ in SHAPES])
        reference(theirs, [4.0] * len(SHAPES))
        what = f"{name} of {dtype_name(dtype)}{' with masters' if ours.masters else ''}"
        proofs.append(Proof(f"{what}: weights", _difference(ours.weights, theirs.weights), 1e-6))
        states = [[t for one in (*members.dense, members.scalars) for t in one] for members in (ours, theirs)]
        proofs.append(Proof(f"{what}: states", _difference(*states), 1e-6))
    return proofs


def _members(dtype: torch.dtype, device: torch.device, dense: int, has_scalars: bool) -> Members:
    """The same in every call."""
    generator = torch.Generator().manual_seed(0)
    first, second, third, fourth = (torch.randn(*shape, generator=generator).to(device) for shape in SHAPES)
    weights = [first, second, third.t(), fourth[1:]]
    has_masters = dtype != torch.float32
    states = [[torch.empty_like(w).copy_(w / 9) for w in weights], [torch.empty_like(w).copy_(w * w) for w in weights]]
    return Members(
        [w.to(dtype) for w in weights] if has_masters else weights,
        [torch.randn(w.shape, generator=generator).to(device, dtype) for w in weights],
        states[2 - dense :],
        [torch.rand((), generator=generator).to(device) for _ in weights] if has_scalars else [],
        [torch.empty_like(w).copy_(w) for w in weights] if has_masters else [],
    )


def _difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    return relative_error(*(torch.cat([tensor.reshape(-1) for tensor in one]) for one in (got, wanted)))
