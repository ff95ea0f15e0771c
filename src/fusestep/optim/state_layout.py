"""How a state lies: in the order of memory of its parameter, and over processes as its parameter does."""

from __future__ import annotations

import torch
from torch import Tensor

from fusestep.distributed.groups import is_dtensor, laid_out, local_of, wrapped


def as_part(local: Tensor, parameter: Tensor) -> Tensor:
    """What lies here of a tensor, as a tensor that is laid out over processes as its parameter is."""
    return wrapped(local, parameter) if is_dtensor(parameter) else local


def like(parameter: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` itself where it has this dtype and lies as torch.empty_like(parameter) would, else a copy that does."""
    if is_dtensor(parameter) or is_dtensor(value):
        value = laid_out(value, parameter)
        found = local_of(value)
        made = _like_here(local_of(parameter), found, dtype)
        return value if made is found else as_part(made, parameter)
    return _like_here(parameter, value, dtype)


def _like_here(parameter: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    model = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    strides = [stride for stride, size in zip(model.stride(), model.shape, strict=True) if size != 1]
    found = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    if (
        value.dtype == dtype
        and value.device == parameter.device
        and not (value.is_conj() or value.is_neg())
        and (found == strides or not value.numel())
        and value is not parameter
    ):
        return value
    made = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    return made.copy_(value, non_blocking=made.device.type == "cuda")
