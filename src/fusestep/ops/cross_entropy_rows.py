"""Cross entropy of rows of logits: losses, log-sum-exps and gradients, written where the caller says.

For a row of V logits z, a target t and a weight w, with softcap c, smoothing s and z-loss coefficient ζ:

    y    = z, or with a softcap c · tanh(z / c)
    lse  = log Σ exp(y)
    loss = w · ( lse − (1 − s) · y_t − s · mean(y) + ζ · lse² )
    dz_j = w · upstream · ( (1 + 2 ζ lse) · exp(y_j − lse) − (1 − s) · [j = t] − s / V ) · dy_j/dz_j

A row whose target is ignore_index has loss 0 and gradient 0; any other target outside 0 … V − 1 gives NaN in both.
Computed in fp32 (fp64 for fp64 logits, in the reference); a gradient is rounded once, to the dtype it is written in.

The logits may be a slice of the columns of a larger vocabulary, from `first` on: then `lse`, which is over all of the
columns, has to be given, and gradients alone are written.

Sources: Szegedy et al. 2016, arXiv:1512.00567 (smoothing); Chowdhery et al. 2022, arXiv:2204.02311 (z-loss);
Gemma team 2024, arXiv:2408.00118 (softcap).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.cross_entropy_kernel import prepare_rows


class Options(NamedTuple):
    """Attributes: ignore_index; label_smoothing: s; z_loss: ζ; softcap: c, 0 for none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


#: The same in the schema of an op.
OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float softcap"


def statistics_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """What losses, log-sum-exps and weights are in: fp32, or fp64 for fp64."""
    return torch.float64 if logits_dtype is torch.float64 else torch.float32


def uses_triton(op: str, device: torch.device, logits_dtype: torch.dtype) -> bool:
    return dispatch.uses_triton(op, device, _unsupported(logits_dtype))


def explain(op: str, device: torch.device, logits_dtype: torch.dtype) -> dispatch.Choice:
    """What a call gets, and why."""
    return dispatch.explain_choice(op, device.type, device.index, _unsupported(logits_dtype))


def _unsupported(logits_dtype: torch.dtype) -> str | None:
    return "the kernel computes in fp32, not fp64" if logits_dtype is torch.float64 else None


def write_rows(
    op: str,
    logits: Tensor,
    target: Tensor,
    token_weights: Tensor | None,
    options: Options,
    lse: Tensor,
    *,
    losses: Tensor | None = None,
    upstream: Tensor | None = None,
    gradient: Tensor | None = None,
    first: int = 0,
    vocabulary: int | None = None,
    padded: bool = False,
) -> None:
    """Write losses and log-sum-exps, or gradients, or all of them, by the kernel or the reference.

    Args:
        op: whom `dispatch` chooses for.
        logits: (rows, columns), rows contiguous.
        target: (rows,) int64 or int32, contiguous.
        token_weights: (rows,) in the dtype of statistics, contiguous, or None for 1.
        lse: (rows,); written together with `losses`, else read.
        losses: (rows,), written; None where lse is given.
        upstream: 0-d or (rows,), what each row's gradient is multiplied by.
        gradient: (rows, columns), written; may be `logits` itself. None where it is not wanted.
        first, vocabulary: the number of the first column among so many; all columns unless said.
        padded: the rows of logits and gradient go on to a multiple of ROW_MULTIPLE, with elements that do not matter.
    """
    rows, columns = logits.shape
    vocabulary = columns if vocabulary is None else vocabulary
    if rows == 0:
        return
    if not uses_triton(op, logits.device, logits.dtype):
        _reference(logits, target, token_weights, options, lse, losses, upstream, gradient, first, vocabulary)
        return
    tensors = (logits, target, token_weights, upstream, lse, losses, gradient)
    launch = prepare_rows(
        logits.device,
        tuple(None if tensor is None else tensor.dtype for tensor in tensors),
        rows,
        columns,
        logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        0 if upstream is None or upstream.dim() == 0 else upstream.stride(0),
        first,
        vocabulary,
        *options,
        padded,
    )
    launch(*tensors)


def _reference(
    logits: Tensor,
    target: Tensor,
    token_weights: Tensor | None,
    options: Options,
    lse: Tensor,
    losses: Tensor | None,
    upstream: Tensor | None,
    gradient: Tensor | None,
    first: int,
    vocabulary: int,
) -> None:
    """`write_rows` in plain PyTorch."""
    ignore_index, smoothing, z_loss, softcap = options
    y = logits.to(lse.dtype)
    if softcap:
        y = torch.tanh(y / softcap) * softcap
    target = target.long()
    is_counted = target != ignore_index
    is_known = (target >= 0) & (target < vocabulary)
    local = target - first
    is_here = is_counted & (local >= 0) & (local < logits.shape[1])
    column = torch.where(is_here, local, 0)[:, None]
    if losses is not None:
        # From the largest logit down, since lse less a logit would lose digits where both are large.
        peak = y.amax(1)
        rest = torch.logsumexp(y - peak[:, None], 1)
        lse.copy_(torch.where(is_counted, peak + rest, 0.0))
        loss = rest + (1.0 - smoothing) * (peak - y.gather(1, column)[:, 0]) + z_loss * lse * lse
        if smoothing:
            loss += smoothing * (peak - y.mean(1))
        if token_weights is not None:
            loss *= token_weights
        losses.copy_(torch.where(is_counted, torch.where(is_known, loss, torch.nan), 0.0))
    if gradient is not None:
        assert upstream is not None
        coefficient = upstream if token_weights is None else upstream * token_weights
        coefficient = torch.where(is_known, coefficient, torch.nan)[:, None]
        slope = torch.exp(y - lse[:, None]) * (1.0 + 2.0 * z_loss * lse)[:, None] - smoothing / vocabulary
        slope.scatter_add_(1, column, -(1.0 - smoothing) * is_here[:, None].to(y.dtype))
        if softcap:
            slope *= 1.0 - (y / softcap).square()
        # Selected, not multiplied: 0 times NaN would be NaN.
        gradient.copy_(torch.where(is_counted[:, None], slope * coefficient, 0.0))
