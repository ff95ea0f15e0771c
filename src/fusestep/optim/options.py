"""What an optimizer of ours accepts as options and parameters."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fusestep.errors import UserError

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
HALVES = (torch.bfloat16, torch.float16)


def check_common(who: str, options: dict[str, Any]) -> None:
    """Learning rate, weight decay and clipping, which all optimizers have.

    Raises: UserError for one out of range.
    """
    lr, norm = options["lr"], options["max_grad_norm"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise UserError(f"{who}: lr is a tensor of shape {tuple(lr.shape)}; pass a tensor of one element.")
    else:
        check_numbers(who, options, "lr")
    check_numbers(who, options, "weight_decay")
    if norm is not None and not (_is_number(norm) and norm > 0.0):
        raise UserError(f"{who}: max_grad_norm is {norm!r}; pass a number above 0, or None to clip nothing.")


def check_numbers(who: str, options: dict[str, Any], *names: str) -> None:
    """Raises: UserError for an option that is negative or not finite."""
    for name in names:
        if not (_is_number(options[name]) and 0.0 <= options[name] < math.inf):
            raise UserError(f"{who}: {name} is {options[name]!r}; pass a finite number that is not negative.")


def check_betas(who: str, options: dict[str, Any]) -> None:
    """Raises: UserError for betas that are not two numbers in [0, 1)."""
    betas = options["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (is_pair and all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in betas)):
        raise UserError(f"{who}: betas is {betas}; pass two numbers, each at least 0 and less than 1.")


def _is_number(value: object) -> bool:
    """Whether it can be compared with numbers: not the text that YAML makes of 1e-3, which it lacks a point to read."""
    return isinstance(value, (Real, Tensor))


def check_parameter(who: str, parameter: object, number: int) -> None:
    """Raises: UserError for a parameter that cannot be stepped."""
    if not isinstance(parameter, Tensor):
        return  # torch's own message says more
    if parameter.dtype not in FLOATING:
        raise UserError(
            f"{who}: parameter {number} is {parameter.dtype}; pass parameters in float32, bfloat16, float16, "
            "float64 or complex dtypes."
        )
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
        raise UserError(
            f"{who}: several elements of parameter {number} share one place in memory (it was expanded); pass a "
            "contiguous copy."
        )
    if parameter.is_conj() or parameter.is_neg():
        raise UserError(
            f"{who}: parameter {number} is a view that changes signs as it is read, as .conj() gives; pass what its "
            ".resolve_conj().resolve_neg() gives."
        )
