"""What the optimizer's step does about FP8: copies that modules asked for, and weights that live in FP8 only.

See fp8/copies.py for who does what when. A weight that lives in FP8 is stepped as its fp32 master, and its own bytes
and scales are the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep.fp8.copies import WeightCopies, copies_of
from fusestep.fp8.tensor import Float8Tensor
from fusestep.ops.adam_copies import CopySignature, is_aligned, unsupported


def stepped_weight(parameter: Tensor, state: dict[str, Any] | None) -> Tensor:
    """What the update reads and writes as the weight: the parameter, or the master of one that lives in FP8."""
    if isinstance(parameter, Float8Tensor) and state:
        master: Tensor = state["master_param"]
        return master
    return parameter


def first_master(parameter: Tensor) -> Tensor:
    """What a master starts from: the parameter, or the values that one that lives in FP8 had before its cast."""
    if not isinstance(parameter, Float8Tensor):
        return parameter.detach()
    initial = parameter.get_high_precision_init_val()
    return parameter.dequantize() if initial is None else initial.clone()


def copies_to_write(parameter: Tensor) -> WeightCopies | None:
    """The copies that a step of this parameter writes, if any."""
    if isinstance(parameter, Float8Tensor):
        return parameter.copies()
    copies = copies_of(parameter)
    if copies is None or parameter.dim() != 2:
        return None
    # Of a module that went elsewhere since it asked; it will ask again.
    is_here = copies.slots is None or copies.slots.device == parameter.device
    return copies if is_here else None


def copy_signature(copies: WeightCopies, tensors: Sequence[Tensor]) -> CopySignature | None:
    """How the update's kernel writes these copies, None where it does not and they are cast after it.

    Args:
        tensors: weight, gradient, both moments, and the master where there is one.
    """
    form = copies.form
    if form.kind == "microblocks" or unsupported(tensors) is not None:
        return None
    by_tile = form.kind == "tiles"
    return CopySignature(by_tile, form.dtype, form.transposed, form.margin, form.power_of_two, is_aligned(tensors))


def finish_copies(parameter: Tensor, weight: Tensor, copies: WeightCopies, *, by_kernel: bool) -> None:
    """After a step of this parameter, have its copies written, where no kernel has done it, and mark them.

    Args:
        weight: see `stepped_weight`.
    """
    if not by_kernel:
        # A weight that lives in FP8 may hold more than it did when the step was planned.
        copies = copies_to_write(parameter) or copies
        copies.write(weight.detach())
    copies.mark(parameter)


def count_versions(parameters: Sequence[Tensor]) -> None:
    """Tell torch that a kernel of ours has written these, so that autograd and copies of them notice."""
    torch.autograd.graph.increment_version(parameters)
