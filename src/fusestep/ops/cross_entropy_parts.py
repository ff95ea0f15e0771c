"""Cross entropy over a vocabulary that the ranks of a group share: each has the logits of its columns, and none those
of all.

For a row, a rank finds of its columns four numbers,

    peak = max y        mass = Σ exp(y − peak)        picked = y_t if the target is here, else 0        total = Σ y

and of the ranks' together the loss and the log-sum-exp follow, with the formulas and options of cross_entropy_rows.py:

    P = max peak        lse = P + log Σ mass · exp(peak − P)        y_t = Σ picked        mean(y) = Σ total / V

by two collectives, a maximum and a sum of three numbers a row. From the log-sum-exp each rank writes the gradients of
its own columns.

Source: Shoeybi et al. 2019, arXiv:1909.08053 (section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.cross_entropy_kernel import MOST_LANES, _tanh, _walk
from fusestep.ops.cross_entropy_rows import Options, statistics_dtype, uses_triton, write_rows
from fusestep.ops.dtypes import dtype_name
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, relative_error

#: Columns of what a rank finds of its logits.
PEAK, MASS, PICKED, TOTAL = range(4)


class Share(NamedTuple):
    """A rank's part of a vocabulary.

    Attributes: group: the ranks that share it. first: the number of this rank's first column. vocabulary: all columns.
    """

    group: Any
    first: int
    vocabulary: int


@triton.jit
def _parts_kernel(
    logits_ptr,  # rows of `columns` logits, row_stride apart
    target_ptr,  # (rows,) int64 or int32
    parts_ptr,  # (rows, 4) fp32, written
    columns,
    row_stride,
    first,
    ignore_index,
    softcap,
    SMOOTHS: tl.constexpr,
    CAPS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The four numbers of each row; those of a row that is ignored are not looked for."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    is_counted = target != ignore_index
    local = target - first
    row_ptr = logits_ptr + row * row_stride
    lane = tl.arange(0, LANES)[:, None] * VECTOR
    place = lane + tl.arange(0, VECTOR)[None, :]
    stop = tl.where(is_counted, columns, 0)
    peak, mass, total = _walk(row_ptr, lane, place, stop, columns, softcap, SMOOTHS, CAPS, PADDED, LANES, VECTOR, "")
    is_here = is_counted & (local >= 0) & (local < columns)
    picked = tl.load(row_ptr + tl.where(is_here, local, 0), mask=is_here, other=0.0).to(tl.float32)
    if CAPS:
        picked = _tanh(picked / softcap) * softcap
    tl.store(parts_ptr + row * 4, peak)
    tl.store(parts_ptr + row * 4 + 1, mass)
    tl.store(parts_ptr + row * 4 + 2, picked)
    tl.store(parts_ptr + row * 4 + 3, total)


def find_parts(
    op: str, logits: Tensor, target: Tensor, options: Options, first: int, *, padded: bool = False
) -> Tensor:
    """(rows, 4) in the dtype of statistics, by the kernel or the reference.

    Args: as of `cross_entropy_rows.write_rows`.
    """
    parts = logits.new_empty(logits.shape[0], 4, dtype=statistics_dtype(logits.dtype))
    if logits.shape[0] == 0:
        return parts
    if not uses_triton(op, logits.device, logits.dtype):
        _reference(logits, target, options, first, parts)
        return parts
    _prepare(
        logits.device,
        (logits.dtype, target.dtype, parts.dtype),
        *logits.shape,
        logits.stride(0),
        first,
        options.ignore_index,
        options.softcap,
        options.label_smoothing != 0.0,
        padded,
    )(logits, target, parts)
    return parts


def _reference(logits: Tensor, target: Tensor, options: Options, first: int, parts: Tensor) -> None:
    """`find_parts` in plain PyTorch."""
    y = logits.to(parts.dtype)
    if options.softcap:
        y = torch.tanh(y / options.softcap) * options.softcap
    local = target.long() - first
    is_counted = target != options.ignore_index
    is_here = is_counted & (local >= 0) & (local < logits.shape[1])
    peak = torch.where(is_counted, y.amax(1), -torch.inf)
    parts[:, PEAK] = peak
    parts[:, MASS] = torch.where(is_counted, torch.exp(y - torch.nan_to_num(peak, neginf=0.0)[:, None]).sum(1), 0.0)
    parts[:, PICKED] = torch.where(is_here, y.gather(1, torch.where(is_here, local, 0)[:, None])[:, 0], 0.0)
    parts[:, TOTAL] = torch.where(is_counted, y.sum(1), 0.0)


def merge_parts(
    parts: Tensor, target: Tensor, token_weights: Tensor | None, options: Options, share: Share
) -> tuple[Tensor, Tensor]:
    """(losses, lse), (rows,) each, the same on all ranks: of the four numbers of each rank."""
    peak = parts[:, PEAK].contiguous()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=share.group)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    sums = torch.stack((parts[:, MASS] * torch.exp(parts[:, PEAK] - peak), parts[:, PICKED], parts[:, TOTAL]))
    dist.all_reduce(sums, group=share.group)
    mass, picked, total = sums
    is_counted = target != options.ignore_index
    is_known = (target >= 0) & (target < share.vocabulary)
    rest = torch.log(mass)
    lse = torch.where(is_counted, peak + rest, 0.0)
    # From the largest logit down, since lse less a logit would lose digits where both are large.
    losses = rest + (1.0 - options.label_smoothing) * (peak - picked) + options.z_loss * lse * lse
    if options.label_smoothing:
        losses += options.label_smoothing * (peak - total / share.vocabulary)
    if token_weights is not None:
        losses *= token_weights
    return torch.where(is_counted, torch.where(is_known, losses, torch.nan), 0.0), lse


def write_shared_rows(
    op: str,
    logits: Tensor,
    target: Tensor,
    token_weights: Tensor | None,
    options: Options,
    lse: Tensor,
    share: Share,
    *,
    losses: Tensor,
    upstream: Tensor | None = None,
    gradient: Tensor | None = None,
    padded: bool = False,
) -> None:
    """`cross_entropy_rows.write_rows` where ranks share the vocabulary; logits and gradient are of this rank's columns.

    A collective: all ranks call it with the same rows.
    """
    parts = find_parts(op, logits, target, options, share.first, padded=padded)
    found, of_all = merge_parts(parts, target, token_weights, options, share)
    losses.copy_(found)
    lse.copy_(of_all)
    if gradient is not None:
        write_rows(
            *(op, logits, target, token_weights, options, lse),
            upstream=upstream,
            gradient=gradient,
            first=share.first,
            vocabulary=share.vocabulary,
            padded=padded,
        )


@functools.lru_cache(maxsize=4096)
def _prepare(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    rows: int,
    columns: int,
    row_stride: int,
    first: int,
    ignore_index: int,
    softcap: float,
    smooths: bool,
    padded: bool,
) -> PreparedLaunch:
    """The launch on (logits, target, parts) of these dtypes."""
    vector = 16 // dtypes[0].itemsize
    lanes = min(MOST_LANES, max(32, triton.next_power_of_2(-(-columns // vector))))
    return PreparedLaunch(
        _parts_kernel,
        (rows,),
        device,
        (columns, row_stride, first, ignore_index, float(softcap)),
        SMOOTHS=smooths,
        CAPS=softcap != 0.0,
        PADDED=padded or columns % vector == 0,
        LANES=lanes,
        VECTOR=vector,
        num_warps=max(1, min(8, lanes // 32)),
    )


def compilations() -> Iterator[Compilation]:
    """Launches: each dtype and width, with and without the options."""
    for element, vector in (("bf16", 8), ("fp16", 8), ("fp32", 4)):
        for lanes in (32, 64, 128, 256, 512):
            for padded in (True, False):
                extras = lanes in (64, 512)
                pointers = {"logits_ptr": f"*{element}", "target_ptr": "*i64", "parts_ptr": "*fp32"}
                numbers = dict.fromkeys(["columns", "row_stride", "first", "ignore_index"], "i32")
                numbers |= {"softcap": "fp32"}
                constants: dict[str, Any] = {"SMOOTHS": extras, "CAPS": extras, "PADDED": padded}
                constants |= {"LANES": lanes, "VECTOR": vector}
                yield Compilation(
                    _parts_kernel,
                    f"parts of a shared vocabulary, {lanes} vectors of {element}{'' if padded else ', any rows'}"
                    f"{', all options' if extras else ''}",
                    pointers | numbers | dict.fromkeys(constants, "constexpr"),
                    constants,
                    num_warps=max(1, min(8, lanes // 32)),
                    divisible_by_16=frozenset(pointers) | (frozenset(["row_stride"]) if padded else frozenset()),
                )


def prove(device: torch.device) -> list[Proof]:
    """The numbers of a slice of the columns of fresh random logits, against the reference in float64."""
    proofs = []
    for dtype in (torch.float32, torch.bfloat16):
        for what, options in (("", Options(-100, 0.0, 0.0, 0.0)), (", all options", Options(7, 0.1, 1e-3, 20.0))):
            logits = torch.randn(9, 1027, device=device).mul_(5.0).to(dtype)
            target = torch.randint(500, 2100, (9,), device=device)
            target[3] = options.ignore_index
            found = find_parts("cross_entropy", logits, target, options, 700)
            exact = logits.new_empty(found.shape, dtype=torch.float64)
            _reference(logits.double(), target, options, 700, exact)
            # Infinite peaks of ignored rows have no difference; the kernel sums what the options ask for.
            found, exact = (torch.nan_to_num(parts, neginf=-1.0) for parts in (found, exact))
            seen = slice(None) if options.label_smoothing else slice(TOTAL)
            proofs.append(Proof(f"{dtype_name(dtype)}{what}", relative_error(found[:, seen], exact[:, seen]), 1e-5))
    return proofs


catalogue(Op("cross_entropy_parts", "what a rank finds of its part of a vocabulary's logits", prove, compilations))
