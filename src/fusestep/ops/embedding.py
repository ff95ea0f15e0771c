"""Embedding: rows of a table by their ids, to which a row for each position may be added in the same pass.

    y[…, t] = weight[ids[…, t]] + positions[t]

Added in fp32 and rounded once. The gradients are

    dweight[v] = Σ dy[…, t] over the tokens whose id is v,   dpositions[t] = Σ dy[…, t] over the sequences

also summed in fp32 and rounded once, each sum in an order that ids and shapes alone decide, without atomics: the same
ids and gradients give the same bits. (The reference is PyTorch's own, which on a CPU rounds 16-bit sums at each
addition.) Rows that no token asks for get zeros, and so does that of padding_idx.

An id that the table does not have gives a row of NaN on a GPU, where ids are known to the device alone and a wrong row
would not be seen; its gradient goes nowhere. On a CPU it is an error.
Source: torch.nn.functional.embedding; the order of the sums is embedding_gradient.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusestep import dispatch
from fusestep.dispatch import Choice
from fusestep.distributed.groups import is_dtensor
from fusestep.errors import UserError
from fusestep.ops import embedding_gradient, embedding_kernel
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.layouts import row_stride
from fusestep.ops.registry import (
    Compilation,
    Op,
    Proof,
    announce_transformed,
    catalogue,
    define,
    is_plain,
    relative_error,
    shows_gradient,
)
from fusestep.transforms import is_transformed

OP = "embedding"
#: Why some options are not the kernel's.
_LEFT = "max_norm, scale_grad_by_freq and sparse are left to PyTorch"
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def embedding_reference(ids: Tensor, weight: Tensor, positions: Tensor | None, padding_idx: int = -1) -> Tensor:
    """The rows in plain PyTorch, differentiable to any order. Raises: UserError for an id that there is not."""
    try:
        y = F.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)
    except IndexError as problem:
        low, high = (int(bound) for bound in torch.aminmax(ids))
        raise UserError(
            f"embedding: id {low if low < 0 else high} is outside the table of {weight.shape[0]} rows; ids run from 0 "
            "to one less than that."
        ) from problem
    if positions is None:
        return y
    return y + F.embedding(torch.arange(ids.shape[-1], device=ids.device), positions)


def embedding_backward_reference(
    dy: Tensor, ids: Tensor, rows: int, padding_idx: int, places: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and positions as PyTorch's autograd computes them, in dy's dtype; differentiable.

    Args: places: rows of the positions, or 0 for none.
    """
    dw = torch.ops.aten.embedding_dense_backward(dy, ids, rows, padding_idx, False)
    if not places:
        return dw, None
    length, width = dy.shape[-2:]
    dp = dy.sum(tuple(range(dy.dim() - 2))) if dy.dim() > 2 else dy
    return dw, torch.cat((dp, dp.new_zeros(places - length, width)))


def _unsupported(*tables: Tensor | None) -> str | None:
    is_double = any(table is not None and table.dtype is torch.float64 for table in tables)
    return "the kernel computes in fp32, not fp64" if is_double else None


def _out_dtype(weight: Tensor, positions: Tensor | None) -> torch.dtype:
    return weight.dtype if positions is None else torch.promote_types(weight.dtype, positions.dtype)


def _with_near_elements(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 else table.contiguous()


def _run(ids: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
    """The rows, contiguous, through the kernel or the reference."""
    y = torch.empty((*ids.shape, weight.shape[1]), dtype=_out_dtype(weight, positions), device=ids.device)
    if y.numel() == 0:
        return y
    if not dispatch.uses_triton(OP, ids.device, _unsupported(weight, positions)):
        return embedding_reference(ids, weight, positions).contiguous()
    weight = _with_near_elements(weight)
    positions = None if positions is None else _with_near_elements(positions)
    strides = (weight.stride(0), 0 if positions is None else positions.stride(0))
    dtypes = (ids.dtype, weight.dtype, None if positions is None else positions.dtype)
    length = ids.shape[-1] if ids.dim() else 1
    prepared = embedding_kernel.prepare(ids.device, dtypes, ids.numel(), length, weight.shape, strides)
    prepared(ids.contiguous(), weight, positions, y)
    return y


def _run_backward(
    dy: Tensor,
    ids: Tensor,
    rows: int,
    padding_idx: int,
    places: int,
    weight_dtype: torch.dtype | None,
    positions_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and positions; of those whose dtype is None, or that have no rows, an empty tensor."""
    width = dy.shape[-1]

    def made(dtype: torch.dtype | None, size: int) -> Tensor:
        shape = (size, width) if dtype is not None else (0,)
        return torch.empty(shape, dtype=dtype or dy.dtype, device=dy.device)

    dw, dp = made(weight_dtype, rows), made(positions_dtype, places)
    if ids.numel() == 0 or width == 0:
        return dw.zero_(), dp.zero_()
    if not dispatch.uses_triton(OP, dy.device, _unsupported(dy)):
        wide, place = embedding_backward_reference(dy, ids, rows, padding_idx, places)
        if weight_dtype is not None:
            dw.copy_(wide)
        if positions_dtype is not None and place is not None:
            dp.copy_(place)
        return dw, dp
    stride = row_stride(dy, width)
    if stride is None:
        dy, stride = dy.contiguous(), width
    embedding_gradient.gradients(
        ids.contiguous().view(-1),
        dy.as_strided((ids.numel(), width), (stride, 1)),
        ids.shape[-1] if ids.dim() else 1,
        padding_idx,
        None if weight_dtype is None else dw,
        None if positions_dtype is None else dp,
    )
    return dw, dp


def _fake(ids: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]), dtype=_out_dtype(weight, positions))


def _fake_backward(
    dy: Tensor,
    ids: Tensor,  # noqa: ARG001
    rows: int,
    padding_idx: int,  # noqa: ARG001
    places: int,
    weight_dtype: torch.dtype | None,
    positions_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    width = dy.shape[-1]
    return (
        dy.new_empty((0,) if weight_dtype is None else (rows, width), dtype=weight_dtype or dy.dtype),
        dy.new_empty((0,) if positions_dtype is None else (places, width), dtype=positions_dtype or dy.dtype),
    )


embedding_forward = define(
    "embedding_forward(Tensor ids, Tensor weight, Tensor? positions) -> Tensor",
    _run,
    _fake,
)
embedding_backward = define(
    "embedding_backward(Tensor dy, Tensor ids, SymInt rows, int padding_idx, SymInt places, ScalarType? weight_dtype, "
    "ScalarType? positions_dtype) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


class _Embedding(torch.autograd.Function):
    """The rows, with the gradients of both tables from one pass; keeps the ids alone."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, positions: Tensor | None, padding_idx: int, plain: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx, ctx.plain = weight.shape[0], padding_idx, plain
        ctx.weight_dtype = weight.dtype
        ctx.places, ctx.positions_dtype = (0, None) if positions is None else (positions.shape[0], positions.dtype)
        y: Tensor = (_run if plain else embedding_forward)(ids, weight, positions)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        needs_weight, needs_positions = ctx.needs_input_grad[1:3]
        dtypes = (ctx.weight_dtype if needs_weight else None, ctx.positions_dtype if needs_positions else None)
        arguments = (ids, ctx.rows, ctx.padding_idx, ctx.places)
        dw: Tensor | None
        dp: Tensor | None
        if shows_gradient(OP, dy):
            dw, dp = embedding_backward_reference(dy, *arguments)
            dw, dp = dw.to(ctx.weight_dtype), None if dp is None else dp.to(ctx.positions_dtype)
        else:
            run = _run_backward if ctx.plain and is_plain(dy) else embedding_backward
            dw, dp = run(dy, *arguments, *dtypes)
        return None, dw if needs_weight else None, dp if needs_positions else None, None, None


def embedding(
    input: Tensor,  # noqa: A002 — torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """Rows of a table by their ids, as torch.nn.functional.embedding, with a gradient that is the same bits each time.

    Args:
        input: ids of any shape, int64 or int32. On a CPU all have to be in the table; on a GPU, where nothing waits for
            their values, one that is not gives a row of NaN and no gradient.
        weight: (rows, width), fp32, bf16 or fp16; fp64 runs on PyTorch's own operations.
        padding_idx: a row that gets no gradient; counted from the end where it is negative.
        max_norm, norm_type, scale_grad_by_freq, sparse: as torch's. With any of them PyTorch's own operations run,
            which is announced.
        positions: (places, width): row t is added to the row of every token at place t of the last dimension, in fp32
            before the one rounding. At least as many rows as that dimension has places.
    Returns: (*input.shape, width), contiguous, in the dtype of weight, or of weight + positions.
    Raises: UserError for shapes, dtypes or devices that do not fit, and on a CPU for an id outside of the table.
    """
    padding = _check(input, weight, padding_idx, positions)
    unsupported = None
    if max_norm is not None or scale_grad_by_freq or sparse:
        unsupported = _LEFT
    if is_dtensor(weight) or is_dtensor(positions):
        unsupported = "a sharded table is looked up by PyTorch"
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and is_transformed()
    if unsupported is not None or transformed:
        if not compiling and dispatch.uses_triton(OP, weight.device, unsupported):
            announce_transformed(OP)
        y = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        if positions is None:
            return y
        return y + F.embedding(torch.arange(input.shape[-1], device=input.device), positions)
    plain = not compiling and is_plain(input) and is_plain(weight) and (positions is None or is_plain(positions))
    result: Tensor = _Embedding.apply(input, weight, positions, padding, plain)
    return result


def _check(ids: Tensor, weight: Tensor, padding_idx: int | None, positions: Tensor | None) -> int:
    """The row of padding_idx, or -1 for none. Raises: UserError for what does not fit."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"embedding: input has dtype {ids.dtype}; pass ids in int64 or int32.")
    for name, table in (("weight", weight), ("positions", positions)):
        if table is not None and (table.dim() != 2 or table.dtype not in FLOATING):
            raise UserError(
                f"embedding: {name} has shape {tuple(table.shape)} and dtype {table.dtype}; pass (rows, width) in "
                "float32, bfloat16, float16 or float64."
            )
    if positions is not None and (
        not ids.dim() or positions.shape[0] < ids.shape[-1] or positions.shape[1] != weight.shape[1]
    ):
        raise UserError(
            f"embedding: positions has shape {tuple(positions.shape)} for ids of shape {tuple(ids.shape)} and rows of "
            f"{weight.shape[1]}; pass (places, {weight.shape[1]}), a row for each place of the last dimension."
        )
    dispatch.one_device(OP, input=ids, weight=weight, positions=positions)
    if padding_idx is None:
        return -1
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise UserError(f"embedding: padding_idx is {padding_idx} for a table of {rows} rows; pass one of those rows.")
    return padding_idx % rows


def explain(weight: Tensor, *, is_left: bool = False) -> Choice:
    """What a look-up in this table runs as, and why; `is_left` with one of the options that are torch's alone."""
    reason = _LEFT if is_left else _unsupported(weight)
    return dispatch.explain_choice(OP, weight.device.type, weight.device.index, reason)


def prove(device: torch.device) -> list[Proof]:
    """Rows and both gradients on fresh random inputs, ids all equal, skewed and all different, against float64."""
    proofs = []
    for what, dtype, tolerance in (
        ("all equal", torch.float32, 1e-6),
        ("skewed", torch.float32, 1e-6),
        # PyTorch's own sums of bf16 are rounded to bf16 at each addition.
        ("all different", torch.bfloat16, 6e-3),
    ):
        ids = torch.randperm(155, device=device).view(5, 31)
        if what != "all different":
            ids = ids * 0 if what == "all equal" else ids**2 // 200
        weight, positions = (torch.randn(size, 72, device=device).to(dtype) for size in (157, 40))
        dy = torch.randn(5, 31, 72, device=device).to(dtype)
        y = embedding_forward(ids, weight, positions)
        found = embedding_backward(dy, ids, 157, 2, 40, dtype, dtype)
        wanted = embedding_backward_reference(dy.double(), ids, 157, 2, 40)
        errors = [relative_error(y, embedding_reference(ids, weight.double(), positions.double()))]
        errors += [relative_error(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
        for part, error in zip(("rows", "gradient", "gradient of positions"), errors, strict=True):
            proofs.append(Proof(f"{part}, ids {what}, {dtype_name(dtype)}", error, tolerance))
    return proofs


def compilations() -> Iterator[Compilation]:
    """Those of the rows and of the gradients."""
    return itertools.chain(embedding_kernel.compilations(), embedding_gradient.compilations())


catalogue(Op(OP, "embedding with positions, and its gradient in a fixed order", prove, compilations))
