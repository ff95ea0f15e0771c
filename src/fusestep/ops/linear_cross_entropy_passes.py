"""The passes of linear_cross_entropy over its operands, which hold the logits of one chunk at a time.

- `losses_pass`: the losses alone. Chunks of tokens: a product, then losses and log-sum-exps of its rows.
- `gradients_pass`: losses and gradients at once, for a loss whose gradient is known but for one number. Chunks of
  tokens: a product, then losses and, in place of the logits, their gradient, and from that two more products. The
  weight's gradient is a sum over chunks.
- `recomputing_pass`: the gradients from the log-sum-exps that a losses_pass left. Slices of the vocabulary over all
  tokens: a product, gradients in its place, and two more. Here a row of the weight's gradient is complete in its slice,
  so that it is rounded once and needs no memory beside its own; the input's is a sum over slices.

Where ranks share the vocabulary (cross_entropy_parts.py), weight, bias and their gradients are of this rank's part. So
is the input's gradient, which the caller adds over the ranks.

Products are torch's, into buffers that every chunk uses again. All sums are in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.ops.cross_entropy_kernel import ROW_MULTIPLE
from fusestep.ops.cross_entropy_parts import Share, write_shared_rows
from fusestep.ops.cross_entropy_rows import Options, statistics_dtype, write_rows
from fusestep.ops.dtypes import dtype_name

OP = "linear_cross_entropy"

#: Bytes that a chunk's logits may have in any case, and at most as a quarter of all.
CHUNK_BYTES, QUARTER_BYTES = 2**28, 2**29

#: Tokens in a chunk, and columns in a slice, are a multiple of this, as products like them.
CHUNK_MULTIPLE = 128

#: A slice has so many columns at least.
FEWEST_COLUMNS = 512

#: What gradients in fp16, of one token's loss, are multiplied by: the smallest would vanish else. None is above 1
#: before, but for options: those of z-loss are up to 2 · z_loss · lse.
FP16_FACTOR = 256.0


def input_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """What `gradients_pass` returns the input's gradient in: fp16 is too narrow before it is scaled."""
    return torch.float32 if dtype is torch.float16 else dtype


def chunk_of(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> int:
    """Tokens a chunk, for chunks that are even.

    Its logits take CHUNK_BYTES, or a quarter of all up to QUARTER_BYTES, or as much as the weight, whichever is most.
    So the weight's gradient, which is read and written once for each chunk, is not passed over too often.
    """
    of_token = vocabulary * dtype.itemsize
    allowed = max(CHUNK_BYTES, min(QUARTER_BYTES, tokens * of_token // 4))
    return _even(tokens, max(width, allowed // of_token))


def slice_of(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Columns a slice."""
    return _even(vocabulary, max(FEWEST_COLUMNS, CHUNK_BYTES // (max(tokens, 1) * dtype.itemsize)))


def _even(count: int, limit: int) -> int:
    """A multiple of CHUNK_MULTIPLE, or all, that cuts `count` into parts as even as can be, of about `limit`."""
    parts = max(1, -(-count // max(limit, CHUNK_MULTIPLE)))
    size = -(-count // parts)
    return max(1, min(count, -(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE))


def losses_pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    options: Options,
    chunk: int,
    share: Share | None = None,
) -> tuple[Tensor, Tensor]:
    """(losses, lse), (tokens,) each.

    Args:
        x: (tokens, width).
        weight: (vocabulary, width), bias: (vocabulary,), of x's dtype.
        target: (tokens,) int64 or int32; token_weights: (tokens,), in the dtype of statistics.
        chunk: tokens a chunk.
        share: this rank's part of the vocabulary, None for all of it.
    """
    losses, lse = _statistics(x)
    buffer = _buffer(x, chunk, weight.shape[0])
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = _logits(x[part], weight, bias, buffer)
        weights = None if token_weights is None else token_weights[part]
        rows = (OP, logits, target[part], weights, options, lse[part])
        if share is None:
            write_rows(*rows, losses=losses[part], padded=True)
        else:
            write_shared_rows(*rows, share, losses=losses[part], padded=True)
    return losses, lse


def gradients_pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    upstream: Tensor,
    options: Options,
    chunk: int,
    sum_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    share: Share | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(losses, dx, dweight, dbias): the losses, and `upstream` times the gradients of their sum.

    Args: as of losses_pass, and
        upstream: 0-d, in the dtype of statistics.
        sum_dtype: of dweight: that of statistics, or x's.
        wanted: which of the gradients.
    Returns: dx in `input_gradient_dtype`, dbias in the dtype of statistics; None for a gradient that is not wanted.
    """
    losses, lse = _statistics(x)
    x_wanted, weight_wanted, bias_wanted = wanted
    dx = x.new_empty(x.shape, dtype=input_gradient_dtype(x.dtype)) if x_wanted else None
    dweight = x.new_empty(weight.shape, dtype=sum_dtype) if weight_wanted else None
    if dweight is not None and x.shape[0] == 0:
        dweight.zero_()
    dbias = losses.new_zeros(weight.shape[0]) if bias_wanted else None
    buffer = _buffer(x, chunk, weight.shape[0])
    for start in range(0, x.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = _logits(x[part], weight, bias, buffer)
        weights = None if token_weights is None else token_weights[part]
        rows = (OP, logits, target[part], weights, options, lse[part])
        if share is None:
            write_rows(*rows, losses=losses[part], upstream=upstream, gradient=logits, padded=True)
        else:
            write_shared_rows(*rows, share, losses=losses[part], upstream=upstream, gradient=logits, padded=True)
        if dx is not None:
            product(logits, weight, dx[part])
        if dweight is not None:
            (add_product if start else product)(logits.t(), x[part], dweight)
        if dbias is not None:
            dbias += logits.sum(0, dtype=dbias.dtype)
    return losses, dx, dweight, dbias


def recomputing_pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weights: Tensor | None,
    upstream: Tensor,
    lse: Tensor,
    options: Options,
    columns: int,
    weight_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
    share: Share | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias): `upstream`, 0-d or (tokens,), times the gradients of each token's loss.

    Args: as of gradients_pass, and
        lse: as losses_pass returned it.
        columns: of the vocabulary, in a slice.
    Returns: dx in x's dtype, dweight in `weight_dtype`, dbias in the dtype of statistics.
    """
    vocabulary = weight.shape[0]
    before, of_all = (0, vocabulary) if share is None else (share.first, share.vocabulary)
    x_wanted, weight_wanted, bias_wanted = wanted
    dx = None
    if x_wanted:
        dx = x.new_empty(x.shape, dtype=x.dtype if columns >= vocabulary else statistics_dtype(x.dtype))
    dweight = x.new_empty(weight.shape, dtype=weight_dtype) if weight_wanted else None
    dbias = lse.new_empty(vocabulary) if bias_wanted else None
    buffer = _buffer(x, x.shape[0], min(columns, vocabulary))
    for first in range(0, vocabulary, columns):
        part = slice(first, first + columns)
        logits = _logits(x, weight[part], None if bias is None else bias[part], buffer)
        write_rows(
            *(OP, logits, target, token_weights, options, lse),
            upstream=upstream,
            gradient=logits,
            first=before + first,
            vocabulary=of_all,
            padded=True,
        )
        if dx is not None:
            (add_product if first else product)(logits, weight[part], dx)
        if dweight is not None:
            product(logits.t(), x, dweight[part])
        if dbias is not None:
            torch.sum(logits, 0, dtype=dbias.dtype, out=dbias[part])
    return None if dx is None else dx.to(x.dtype), dweight, dbias


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    losses = x.new_empty(x.shape[0], dtype=statistics_dtype(x.dtype))
    return losses, torch.empty_like(losses)


def _buffer(x: Tensor, rows: int, columns: int) -> Tensor:
    """Room for logits: rows of whole vectors, however many columns, which aligns the products as well."""
    return x.new_empty(min(rows, x.shape[0]), -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """x · weightᵀ + bias, in the buffer."""
    logits = buffer[: x.shape[0], : weight.shape[0]]
    if bias is None:
        return torch.mm(x, weight.t(), out=logits)
    return torch.addmm(bias, x, weight.t(), out=logits)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a · b, summed in fp32 (fp64 for fp64), to `out`, in the dtype of the operands or in fp32."""
    if out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """Likewise, added to `total`."""
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif adds_in_fp32(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        # A few rows at a time, so that the products take little memory.
        rows = max(CHUNK_MULTIPLE, total.shape[0] // 32)
        for start in range(0, total.shape[0], rows):
            part = slice(start, start + rows)
            total[part] += torch.mm(a[part], b, out_dtype=total.dtype)


@functools.cache
def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of 16-bit matrices to one in fp32; announces that it does not.

    Older ones want all three in the same dtype, and say so before they launch anything.
    """
    a = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
    except RuntimeError as error:
        dispatch.announce_fallback(
            OP,
            f"adds products in {dtype_name(dtype)} to its fp32 sums in a pass of its own",
            f"torch {torch.__version__} has no such product ({str(error).splitlines()[0]})",
            "cannot add a product to an fp32 sum",
            "to add it in a pass of its own",
        )
        return False
    return True


def contiguous_rows(matrix: Any) -> Any:
    """A matrix as products read it without a copy for each; None stays."""
    if matrix is None or matrix.dim() < 2 or matrix.stride(-1) == 1 or matrix.stride(-2) == 1:
        return matrix
    return matrix.contiguous()
