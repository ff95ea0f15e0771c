"""Whether a device multiplies FP8 itself, or emulates it, and why."""

from __future__ import annotations

import torch

from fusestep import dispatch, hardware
from fusestep.errors import UserError
from fusestep.fp8.recipes import Float8BlockScaling, MXFP8BlockScaling, Recipe
from fusestep.precision import Scaling


def support(device: torch.device | str | int | None = None, recipe: Recipe | None = None) -> tuple[bool, str]:
    """Whether FP8 products of a recipe run on the device's own FP8 hardware, and the reason in words.

    Where they do not, the same modules train with emulated FP8: the same quantised numbers, without the speed.

    | recipe | needs |
    |---|---|
    | DelayedScaling, Float8CurrentScaling | compute capability 8.9; from 10.0 on a torch built for CUDA 12.8 |
    | Float8BlockScaling | 9.0, a torch built for CUDA 12.9 |
    | MXFP8BlockScaling | 10.0 or 11.0 |

    Args:
        device: a CUDA device's number or name, or any torch.device; the current CUDA device, else the CPU, if None.
        recipe: any recipe of `fusestep.fp8`; one scale for a tensor if None.
    Raises: UserError for what is no recipe, and for a device that is not there.
    """
    if recipe is not None and (not isinstance(recipe, Recipe) or type(recipe) is Recipe):
        raise UserError(f"fp8.support: recipe is {recipe!r}; pass an object such as fusestep.fp8.DelayedScaling().")
    choice = dispatch.explain_product(*_place(device), scaling_of(recipe))
    return choice.implementation == "native", choice.reason


def scaling_of(recipe: Recipe | None) -> Scaling:
    """What shares a scale under a recipe, in the words of `precision` and `dispatch`."""
    if isinstance(recipe, Float8BlockScaling):
        return "block"
    return "mx" if isinstance(recipe, MXFP8BlockScaling) else "tensor"


def _place(device: torch.device | str | int | None) -> tuple[str, int | None]:
    has_cuda = hardware.cuda_support().ok
    if device is None:
        # Without a GPU the answer tells why there is none.
        return "cuda", torch.cuda.current_device() if has_cuda else None
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"fp8.support: device is {device!r}; pass a torch.device, a name such as cuda:0, or a number."
        ) from error
    if found.type == "cuda" and has_cuda and found.index is not None and found.index >= len(hardware.devices()):
        raise UserError(
            f"fp8.support: device is {found}, but there is {hardware.cuda_support().reason}; choose one of cuda:0 to "
            f"cuda:{len(hardware.devices()) - 1}."
        )
    return found.type, found.index
