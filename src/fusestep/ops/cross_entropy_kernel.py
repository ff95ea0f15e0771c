"""Cross entropy in Triton, one program a row, which it walks once or twice; cross_entropy_rows.py has the formulas.

The first walk finds the log-sum-exp: each lane keeps the largest of its logits and the sum of the exponentials below it
(Milakov and Gimelshein 2018, arXiv:1805.02867), and the lanes are put together at the end, in a fixed order. The second
walk finds the row in the caches, where the first has just brought it, and writes the gradient, in place where the
logits are not needed any more. So memory sees each logit read once and each gradient written once. For that the rows
that are worked on at a time have to fit in the L2 cache: rows that are walked twice have large programs, of which few
run beside each other. And the second walk goes back from the end of the row, which the first has read last: a cache
that is smaller than the row still has that, and of the beginning nothing. Logits that are read again are asked to stay
in the cache, and their gradients to leave it first, which took 4% less time on an H200. The last tile of a row is the
only one whose columns are compared with the row's end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from fusestep.language import tl, triton
from fusestep.ops.approximate import exp
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation

#: Rows of logits that we allocate are so many elements long, or a multiple, so that they consist of whole vectors.
ROW_MULTIPLE = 64

#: Vectors of 16 bytes that a program reads at a time, and warps that it has, at most.
MOST_LANES, MOST_WARPS = 512, 8

#: The same for rows that are walked twice, by the vectors of a row: the longer, the fewer a multiprocessor may hold.
#: Measured on an H200, whose cache has 60 MB, for rows of 64, 100 and 256 KB.
WALKED_TWICE = ((8192, (2048, 16)),)
WALKED_TWICE_LONGEST = (4096, 32)

#: Registers of a thread there, at most: of 16 warps two programs fit on a multiprocessor, of 32 one.
REGISTERS_TWICE = 64

_TANH_SERIES = tl.constexpr(0.1)


@triton.jit
def _tanh(x):
    """The hyperbolic tangent, to a few units in the last place; NaN stays."""
    away = exp(-2.0 * tl.abs(x))
    far = (1.0 - away) / (1.0 + away)
    squared = x * x
    near = x * (1.0 + squared * (-1.0 / 3.0 + squared * (2.0 / 15.0 - squared * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < _TANH_SERIES, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _load_logits(
    row_ptr, column, mask, columns, softcap, CAPS: tl.constexpr, IS_LAST: tl.constexpr, EVICTION: tl.constexpr
):
    """A tile of logits in fp32, capped; of the last tile −∞ outside of the row."""
    if IS_LAST:
        y = tl.load(row_ptr + column, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        if CAPS:
            # What stands behind a row may be anything.
            y = tl.where(column < columns, y, 0.0)
    else:
        y = tl.load(row_ptr + column, eviction_policy=EVICTION).to(tl.float32)
    if CAPS:
        y = _tanh(y * (1.0 / softcap)) * softcap
    if IS_LAST:
        y = tl.where(column < columns, y, float("-inf"))
    return y


@triton.jit
def _gather(y, column, columns, top, mass, total, SMOOTHS: tl.constexpr, IS_LAST: tl.constexpr):
    """(top, mass, total) of each lane with a tile's logits taken in."""
    if SMOOTHS:
        within = tl.where(column < columns, y, 0.0) if IS_LAST else y
        total += tl.sum(within, axis=1, keep_dims=True)
    higher = tl.maximum(top, tl.max(y, axis=1, keep_dims=True))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    mass = mass * exp(top - shift) + tl.sum(exp(y - shift), axis=1, keep_dims=True)
    return higher, mass, total


@triton.jit
def _walk(
    row_ptr,
    lane,
    place,
    stop,
    columns,
    softcap,
    SMOOTHS: tl.constexpr,
    CAPS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """(peak, mass, total) of the logits before `stop`: the largest, Σ exp(y − peak) and Σ y, 0 unless it SMOOTHS.

    Without any but −∞, the peak is −∞ and the mass 0.
    """
    top = tl.full([LANES, 1], float("-inf"), tl.float32)
    mass = tl.zeros([LANES, 1], tl.float32)
    total = tl.zeros([LANES, 1], tl.float32)
    whole = stop // (LANES * VECTOR) * (LANES * VECTOR)
    for start in range(0, whole, LANES * VECTOR):
        y = _load_logits(row_ptr, start + place, None, columns, softcap, CAPS, False, EVICTION)
        top, mass, total = _gather(y, start + place, columns, top, mass, total, SMOOTHS, False)
    if whole < stop:
        column = whole + place
        mask = (whole + lane < columns) if PADDED else (column < columns)
        y = _load_logits(row_ptr, column, mask, columns, softcap, CAPS, True, EVICTION)
        top, mass, total = _gather(y, column, columns, top, mass, total, SMOOTHS, True)
    peak = tl.max(tl.max(top, axis=1), axis=0)
    mass = tl.sum(tl.sum(mass * tl.exp(top - tl.where(peak == float("-inf"), 0.0, peak)), axis=1), axis=0)
    return peak, mass, tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _slope(y, base, rise, spread, softcap, CAPS: tl.constexpr):
    """The gradients of logits, of which `y` are capped, where they are not the target's."""
    slope = exp(y - base) * rise - spread
    if CAPS:
        capped = y * (1.0 / softcap)
        slope *= 1.0 - capped * capped
    return slope


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # rows of `columns` logits, row_stride apart
    target_ptr,  # (rows,) int64 or int32
    weights_ptr,  # (rows,) fp32, or None
    upstream_ptr,  # fp32, upstream_stride apart; None without gradients
    lse_ptr,  # (rows,) fp32: read if losses_ptr is None, else written
    losses_ptr,  # (rows,) fp32, or None
    gradient_ptr,  # rows of `columns`, gradient_stride apart, perhaps the logits themselves; or None
    columns,
    row_stride,
    gradient_stride,
    upstream_stride,
    first,
    vocabulary,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    SMOOTHS: tl.constexpr,
    CAPS: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Losses and log-sum-exps, or gradients, or both."""
    TWICE: tl.constexpr = losses_ptr is not None and gradient_ptr is not None
    KEPT: tl.constexpr = "evict_last" if TWICE else ""
    WRITTEN: tl.constexpr = "evict_first" if TWICE else ""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    is_counted = target != ignore_index
    is_known = (target >= 0) & (target < vocabulary)
    local = target - first
    weight = 1.0 if weights_ptr is None else tl.load(weights_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    # Of rows that consist of whole vectors one condition a vector is asked, so that its load stays one.
    lane = tl.arange(0, LANES)[:, None] * VECTOR
    place = lane + tl.arange(0, VECTOR)[None, :]
    # Read before anything is written in its place: threads of the program meet before the second walk.
    is_here = is_counted & is_known & (local >= 0) & (local < columns)
    picked = tl.load(row_ptr + tl.where(is_here, local, 0), mask=is_here, other=0.0).to(tl.float32)
    if CAPS:
        picked = _tanh(picked / softcap) * softcap
    # Before the walks, which hide how long it takes to come.
    upstream = 0.0 if gradient_ptr is None else tl.load(upstream_ptr + row * upstream_stride)
    if losses_ptr is None:
        lse = tl.load(lse_ptr + row)
        base, share = lse, 1.0
    else:
        stop = tl.where(is_counted, columns, 0)
        peak, mass, total = _walk(
            row_ptr, lane, place, stop, columns, softcap, SMOOTHS, CAPS, PADDED, LANES, VECTOR, KEPT
        )
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.where(is_counted, mass, 1.0)
        rest = tl.log(mass)
        base, share = peak, 1.0 / mass
        lse = tl.where(is_counted, peak + rest, 0.0)
        # From the largest logit down, since lse less a logit would lose digits where both are large.
        loss = rest + (1.0 - label_smoothing) * (peak - picked) + z_loss * lse * lse
        if SMOOTHS:
            loss += label_smoothing * (peak - total / vocabulary)
        loss = tl.where(is_known, loss * weight, float("nan"))
        tl.store(losses_ptr + row, tl.where(is_counted, loss, 0.0))
        tl.store(lse_ptr + row, lse)
    if gradient_ptr is not None:
        coefficient = tl.where(is_known, upstream * weight, float("nan"))
        rise = coefficient * (1.0 + 2.0 * z_loss * lse) * share
        spread = coefficient * (label_smoothing / vocabulary)
        gradient_row_ptr = gradient_ptr + row * gradient_stride
        tl.debug_barrier()  # all threads have read what others are about to write over
        whole = columns // (LANES * VECTOR) * (LANES * VECTOR)
        if is_counted:
            if whole < columns:
                column = whole + place
                mask = (whole + lane < columns) if PADDED else (column < columns)
                y = _load_logits(row_ptr, column, mask, columns, softcap, CAPS, True, "")
                slope = _slope(y, base, rise, spread, softcap, CAPS)
                tl.store(gradient_row_ptr + column, slope, mask=mask, eviction_policy=WRITTEN)
            for done in range(0, whole, LANES * VECTOR):
                column = whole - LANES * VECTOR - done + place
                y = _load_logits(row_ptr, column, None, columns, softcap, CAPS, False, "")
                slope = _slope(y, base, rise, spread, softcap, CAPS)
                tl.store(gradient_row_ptr + column, slope, eviction_policy=WRITTEN)
        else:
            for start in range(0, columns, LANES * VECTOR):
                column = start + place
                mask = (start + lane < columns) if PADDED else (column < columns)
                tl.store(gradient_row_ptr + column, tl.zeros([LANES, VECTOR], tl.float32), mask=mask)
        # The target's own, over what was written for it as for all others.
        tl.debug_barrier()
        slope = tl.exp(picked - base) * rise - spread - coefficient * (1.0 - label_smoothing)
        if CAPS:
            capped = picked * (1.0 / softcap)
            slope *= 1.0 - capped * capped
        tl.store(gradient_row_ptr + tl.where(is_here, local, 0), slope, mask=is_here)


def _program(columns: int, vector: int, twice: bool) -> tuple[int, int]:
    """(lanes, warps) of a program whose row is so long."""
    vectors = -(-columns // vector)
    most, warps = MOST_LANES, MOST_WARPS
    if twice:
        most, warps = next((size for longest, size in WALKED_TWICE if vectors <= longest), WALKED_TWICE_LONGEST)
    lanes = min(most, max(32, triton.next_power_of_2(vectors)))
    return lanes, max(1, min(warps, lanes // 32))


@functools.lru_cache(maxsize=4096)
def prepare_rows(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    rows: int,
    columns: int,
    row_stride: int,
    gradient_stride: int,
    upstream_stride: int,
    first: int,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    padded: bool,
) -> PreparedLaunch:
    """The launch on (logits, target, weights, upstream, lse, losses, gradient) of these dtypes; None for one not there.

    `padded`: the rows of logits and gradient go on to a multiple of ROW_MULTIPLE, with elements that do not matter.
    """
    logits_dtype = dtypes[0]
    assert logits_dtype is not None
    vector = 16 // logits_dtype.itemsize
    twice = dtypes[5] is not None and dtypes[6] is not None
    lanes, warps = _program(columns, vector, twice)
    limit = {"maxnreg": REGISTERS_TWICE} if twice else {}
    return PreparedLaunch(
        _cross_entropy_kernel,
        (rows,),
        device,
        (
            *(columns, row_stride, gradient_stride, upstream_stride, first, vocabulary, ignore_index),
            *(float(label_smoothing), float(z_loss), float(softcap)),
        ),
        SMOOTHS=label_smoothing != 0.0,
        CAPS=softcap != 0.0,
        PADDED=padded or columns % vector == 0,
        LANES=lanes,
        VECTOR=vector,
        num_warps=warps,
        **limit,
    )


def compilations(in_place: bool) -> Iterator[Compilation]:
    """Launches on logits that are given, or `in_place` on those of a product: each dtype, width and set of options."""
    walks = ((True, False), (True, True), (False, True)) if in_place else ((True, False), (False, True))
    for element, vector in (("bf16", 8), ("fp16", 8), ("fp32", 4)):
        for finds_lse, has_gradient in walks:
            sizes = [_program(vector << power, vector, finds_lse and has_gradient) for power in range(5, 15)]
            for size in dict.fromkeys(sizes):
                for padded in (True,) if in_place else (True, False):
                    is_usual = element == "bf16" and size == sizes[-1]
                    for extras in (False, True) if is_usual else (size[0] in (64, 256),):
                        yield _compilation(element, vector, size, padded, finds_lse, has_gradient, extras)


def _compilation(
    element: str,
    vector: int,
    size: tuple[int, int],
    padded: bool,
    finds_lse: bool,
    has_gradient: bool,
    extras: bool,
) -> Compilation:
    """One launch of (lanes, warps); with `extras` there are smoothing, softcap and weights."""
    lanes, warps = size
    pointers = {
        "logits_ptr": element,
        "target_ptr": "i64",
        "weights_ptr": "fp32" if extras else None,
        "upstream_ptr": "fp32" if has_gradient else None,
        "lse_ptr": "fp32",
        "losses_ptr": "fp32" if finds_lse else None,
        "gradient_ptr": element if has_gradient else None,
    }
    there = {name: f"*{kind}" for name, kind in pointers.items() if kind is not None}
    strides = ["row_stride", "gradient_stride"]
    numbers = dict.fromkeys(["columns", *strides, "upstream_stride", "first", "vocabulary", "ignore_index"], "i32")
    numbers |= dict.fromkeys(["label_smoothing", "z_loss", "softcap"], "fp32")
    constants: dict[str, Any] = {name: None for name, kind in pointers.items() if kind is None}
    constants |= {"SMOOTHS": extras, "CAPS": extras, "PADDED": padded, "LANES": lanes, "VECTOR": vector}
    walks = " and ".join(what for what, there in (("losses", finds_lse), ("gradients", has_gradient)) if there)
    return Compilation(
        _cross_entropy_kernel,
        f"{walks}, {lanes} vectors of {element}{'' if padded else ', any rows'}{', all options' if extras else ''}",
        there | numbers | dict.fromkeys(constants, "constexpr"),
        constants,
        num_warps=warps,
        divisible_by_16=frozenset(there) | (frozenset(strides) if padded else frozenset()),
        maximum_registers=REGISTERS_TWICE if finds_lse and has_gradient else None,
    )
