"""Queries, keys and values within the output of the product that makes all three.

Outside of FP8 they are views, and in backward one kernel puts their gradients together, as the product's own gradient
asks for. In FP8 a cast stands between, which reads the three gradients where attention leaves them: there the
product's Function hands out q, k and v itself, since what lies between two nodes of autograd is one tensor.

Legend: H heads, G groups (key heads), R = H / G queries of a group, D head size; "…" as of the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusestep.fp8.casts import Casts
from fusestep.ops.quantize_joined import Joined
from fusestep.ops.quantized import Quantized


class HeadSplit(NamedTuple):
    """How the columns of a product are those of heads.

    Attributes:
        heads, groups, size: H, G, D.
        is_interleaved: for each group its R queries, its key and its value; else all queries, all keys, all values.
    """

    heads: int
    groups: int
    size: int
    is_interleaved: bool

    def views(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(…, columns) as (…, H, D), (…, G, D), (…, G, D), which autograd follows; interleaved queries of groups are
        copied."""
        H, G, D, is_interleaved = self
        if is_interleaved:
            q, k, v = y.unflatten(-1, (G, H // G + 2, D)).split((H // G, 1, 1), -2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        q, k, v = y.split((H * D, G * D, G * D), -1)
        return q.unflatten(-1, (H, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (G, D))

    def of(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same within a Function's forward, where nothing follows, at less cost to the host; y is contiguous."""
        H, G, D, is_interleaved = self
        if is_interleaved and G != H:
            return self.views(y)
        leading, strides = y.shape[:-1], y.stride()[:-1]
        step, of_k, of_v = (3 * D, D, 2 * D) if is_interleaved else (D, H * D, (H + G) * D)
        strides, of_keys = (*strides, step, 1), (*leading, G, D)
        return (
            y.as_strided((*leading, H, D), strides),
            y.as_strided(of_keys, strides, of_k),
            y.as_strided(of_keys, strides, of_v),
        )

    def gradient(self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> Joined | None:
        """That of y from those of q, k and v, None for one that nothing depends on."""
        H, G, D, is_interleaved = self
        there = dq if dq is not None else dk if dk is not None else dv
        if there is None:
            return None
        of_keys = (*there.shape[:-2], G, D)
        dq = there.new_zeros((*there.shape[:-2], H, D)) if dq is None else dq
        dk = there.new_zeros(of_keys) if dk is None else dk
        dv = there.new_zeros(of_keys) if dv is None else dv
        widths, stretches = ((H // G * D, D, D), G) if is_interleaved else ((H * D, G * D, G * D), 1)
        return Joined((dq, dk, dv), widths, stretches)


def cast_gradient(
    casts: Casts, dy: Tensor | Joined, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
) -> tuple[Quantized, Tensor | None]:
    """The gradient of y cast, and its column sums, as `Casts` has them."""
    if isinstance(dy, Joined):
        return casts.joined_gradient(dy, index, rowwise, columnwise, sums_dtype)
    return casts.gradient(rows_of(dy), index, rowwise, columnwise, sums_dtype)


def rows_of(dy: Tensor | Joined) -> Tensor:
    """A gradient as one matrix, (rows, columns)."""
    return dy.together() if isinstance(dy, Joined) else dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])


def split_gradients(
    split: HeadSplit | None, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | Joined | None, tuple[Tensor | None, ...]]:
    """The gradient of y, which a Function may have handed out as q, k and v, and those of its other outputs."""
    if split is None:
        return gradients[0], gradients[1:]
    return split.gradient(*gradients[:3]), gradients[3:]


def is_watched(module: torch.nn.Module) -> bool:
    """Whether hooks wait for the module's output or its gradient, which then must be the one that they know."""
    of_all = torch.nn.modules.module
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or of_all._global_forward_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
    )
