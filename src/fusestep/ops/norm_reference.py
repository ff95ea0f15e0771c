"""LayerNorm and RMSNorm in plain PyTorch: what the kernels are compared with, and what runs where they cannot.

The formulas stand in norm_forward.py and norm_backward.py. `centred` tells LayerNorm from RMSNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor


def computing_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 where any tensor is fp64, else fp32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def statistics_columns(dtype: torch.dtype, centred: bool) -> int:
    """How many numbers are kept of a row: rstd, the mean, and what its rounding lost; see norm_forward.py."""
    if not centred:
        return 1
    return 2 if dtype == torch.bfloat16 else 3


def _as_rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return x.reshape(-1, width).to(dtype)


def forward_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, statistics) in plain PyTorch, differentiable to any order; the formulas of norm_forward.py."""
    total = x if residual is None else x + residual
    rows = _as_rows(total, width, computing_dtype(total, weight, bias))
    statistics = []
    if centred:
        first = rows[:, :1]
        shift = (rows - first).mean(1, keepdim=True)
        mean = first + shift
        mean_low = shift - (mean - first)
        rows = (rows - mean) - mean_low
        statistics = [mean, mean_low][: statistics_columns(total.dtype, centred) - 1]
    rstd = (rows.square().mean(1, keepdim=True) + eps).rsqrt()
    y = rows * rstd
    if weight is not None:
        y = y * weight.reshape(width)
    if bias is not None:
        y = y + bias.reshape(width)
    return y.to(dtype).reshape(total.shape), total, torch.cat([rstd, *statistics], 1)


def backward_reference(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    centred: bool,
    from_output: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) in plain PyTorch; the formulas of norm_backward.py. The last two have `width` elements."""
    compute = statistics.dtype
    x_hat, dy = _as_rows(x, width, compute), _as_rows(dy, width, compute)
    rstd = statistics[:, :1]
    if from_output:
        if bias is not None:
            x_hat = x_hat - bias.reshape(width)
        if weight is not None:
            x_hat = x_hat / weight.reshape(width)
    else:
        if centred:
            x_hat = x_hat - statistics[:, 1:2]
            if statistics.shape[1] == 3:
                x_hat = x_hat - statistics[:, 2:]
        x_hat = x_hat * rstd
    g = dy if weight is None else dy * weight.reshape(width)
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    if centred:
        dx = dx - g.mean(1, keepdim=True)
    dx = dx * rstd
    if dsum is not None:
        dx = dx + dsum.reshape(-1, width)
    return dx.to(dtype).reshape(x.shape), (dy * x_hat).sum(0), dy.sum(0)
