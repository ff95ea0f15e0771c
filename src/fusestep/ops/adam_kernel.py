"""Adam's kernel: all parameters in one launch. Formulas: see adam.py; the table of tensors: see tensor_table.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

import torch
from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.adam_reference import HYPER_ROW
from fusestep.ops.adam_remainders import parted_weight, whole_weight
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES, dtype_name
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import (
    BLOCK,
    COMMON_ROWS,
    DIM_COUNT,
    FIRST_CHUNK,
    FIRST_DIM,
    GRADIENT,
    NUMEL,
    TABLE_SIGNATURE,
    TensorTable,
    strided_offsets,
)

#: This op's rows of the table, after the common ones.
PARAMETER: tl.constexpr = tl.constexpr(COMMON_ROWS)
EXP_AVG: tl.constexpr = tl.constexpr(COMMON_ROWS + 1)
EXP_AVG_SQ: tl.constexpr = tl.constexpr(COMMON_ROWS + 2)
MASTER: tl.constexpr = tl.constexpr(COMMON_ROWS + 3)
LEARNING_RATE: tl.constexpr = tl.constexpr(COMMON_ROWS + 4)  # address of an fp32
GROUP: tl.constexpr = tl.constexpr(COMMON_ROWS + 5)  # row of `hyper`
STEP: tl.constexpr = tl.constexpr(COMMON_ROWS + 6)  # place in `steps`
ADAM_ROWS = COMMON_ROWS + 7

#: Floats a group in `hyper`.
ROW_FLOATS: tl.constexpr = tl.constexpr(HYPER_ROW)

#: (parameter, gradient): a gradient has its parameter's dtype, or fp32 (accumulated), or is narrower than fp32 weights.
DTYPE_PAIRS = [(p, g) for p, g in product(KERNEL_DTYPES, KERNEL_DTYPES) if p == g or torch.float32 in (p, g)]
MOMENT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Master(IntEnum):
    """What is kept of the fp32 weight that a step updates."""

    NONE = 0  # nothing but the parameter
    WHOLE = 1  # all of it
    REMAINDER = 2  # what a bf16 parameter leaves of it, see adam_remainders.py

    @classmethod
    def of(cls, kept: Tensor | None) -> Master:
        """By the tensor that is kept."""
        if kept is None:
            return cls.NONE
        return cls.REMAINDER if kept.dtype == torch.int16 else cls.WHOLE


NO_MASTER: tl.constexpr = tl.constexpr(int(Master.NONE))
WHOLE_MASTER: tl.constexpr = tl.constexpr(int(Master.WHOLE))
REMAINDER: tl.constexpr = tl.constexpr(int(Master.REMAINDER))


@triton.jit
def _bias_correction(step, log_beta):
    """1 − β^step to fp32's last places, though β is near 1: the series where the difference would cancel."""
    x = step * log_beta
    y = tl.maximum(x, -0.5)
    series = 1 + y / 8 * (1 + y / 9 * (1 + y / 10))
    series = 1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * series)))
    series = -y * (1 + y / 2 * (1 + y / 3 * series))
    return tl.where(x > -0.5, series, 1 - tl.exp(x))


@triton.jit
def _update(
    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, mask,
    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
    MASTER_KIND: tl.constexpr,
):  # fmt: skip
    """Step the elements at these places; returns the new weights as the parameter holds them, in fp32."""
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * inverse
    m = tl.load(exp_avg + at, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=mask).to(tl.float32)
    if MASTER_KIND == REMAINDER:
        w = whole_weight(tl.load(parameter + at_parameter, mask=mask), tl.load(master + at, mask=mask))
    else:
        weight, at_weight = (master, at) if MASTER_KIND == WHOLE_MASTER else (parameter, at_parameter)
        w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    g += l2 * w
    m += one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * g * g
    w = w * keep - step_size * (m / (tl.sqrt(v) * inverse_root + eps))
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    if MASTER_KIND == REMAINDER:
        stored, kept = parted_weight(w)
    else:
        stored, kept = w.to(parameter.dtype.element_ty), w
    tl.store(parameter + at_parameter, stored, mask=mask)
    if MASTER_KIND != NO_MASTER:
        tl.store(master + at, kept, mask=mask)
    return stored.to(tl.float32)


@triton.jit
def _master_at(address, MASTER_KIND: tl.constexpr):
    """The pointer that the table's row MASTER holds."""
    return address.to(tl.pointer_type(tl.int16 if MASTER_KIND == REMAINDER else tl.float32))


@triton.jit
def _gate(divisor, skip, IS_GATED: tl.constexpr):
    """(1 or 0: whether this step is skipped, what gradients are multiplied by)."""
    is_skipped = tl.full([], 0.0, tl.float32)
    inverse = tl.full([], 1.0, tl.float32)
    if IS_GATED:
        is_skipped = tl.where(tl.load(skip) == 0.0, 0.0, 1.0)
        inverse = 1.0 / tl.load(divisor)
    return is_skipped, inverse


@triton.jit
def _keep_counts(
    rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, LANES: tl.constexpr
):  # fmt: skip
    """Count the steps of the parameters of program `pid`, LANES in each of the first programs."""
    if pid * LANES < tensors:
        tensor = pid * LANES + tl.arange(0, LANES)
        mask = tensor < tensors
        has_gradient = tl.load(rows + tensors * GRADIENT + tensor, mask=mask, other=0) != 0
        place = tl.load(rows + tensors * STEP + tensor, mask=mask, other=0)
        before = tl.load(steps_before + place, mask=mask, other=0.0)
        tl.store(steps + place, before + (1.0 - is_skipped), mask=mask & has_gradient)
        if (pid == 0) & (is_counting != 0):
            counter = counters + is_skipped.to(tl.int32)
            tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _coefficients(rows, tensors, tensor, hyper, steps_before):
    """What the options of a parameter's group and its step count make of the formula, in the order of `_update`."""
    group = hyper + tl.load(rows + tensors * GROUP + tensor) * ROW_FLOATS
    lr = tl.load(tl.load(rows + tensors * LEARNING_RATE + tensor).to(tl.pointer_type(tl.float32)))
    step = tl.load(steps_before + tl.load(rows + tensors * STEP + tensor)) + 1.0
    one_minus_beta1 = tl.load(group + 1)
    beta2 = tl.load(group + 2)
    one_minus_beta2 = tl.load(group + 3)
    step_size = lr / _bias_correction(step, tl.load(group + 4))
    inverse_root = 1.0 / tl.sqrt(_bias_correction(step, tl.load(group + 5)))
    eps = tl.load(group + 6)
    l2 = tl.load(group + 7)
    keep = 1.0 - lr * tl.load(group + 8)
    return l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps


@triton.jit(
    do_not_specialize=["tensors", "chunks", "is_counting"],
    do_not_specialize_on_alignment=["divisor", "skip"],
)
def _adam_kernel(
    rows,  # (rows, tensors) int64: the table
    tensors,  # columns of the table
    chunk_tensor,  # (chunks,) int32
    chunks,
    dims,  # (n, 3) int64
    hyper,  # (groups, ROW_FLOATS) fp32, see Hyperparameters.row
    steps_before,  # (n,) fp32: a copy of `steps`, since programs end while others begin
    steps,  # (n,) fp32, written
    divisor,  # fp32, of the gradients
    skip,  # fp32, not 0: change nothing
    counters,  # (2,) int64: steps applied and skipped
    is_counting,  # 1 in the one launch of a step that counts
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    MOMENT_DTYPE: tl.constexpr,
    MASTER_KIND: tl.constexpr,  # a `Master`
    IS_GATED: tl.constexpr,  # divisor and skip are there
    IS_STRIDED: tl.constexpr,  # some parameters are
    CHUNK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped, inverse = _gate(divisor, skip, IS_GATED)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, CHUNK)

    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        gradient_address = tl.load(rows + tensors * GRADIENT + tensor)
        if (gradient_address != 0) & (is_skipped == 0.0):
            numel = tl.load(rows + tensors * NUMEL + tensor)
            first_chunk = tl.load(rows + tensors * FIRST_CHUNK + tensor)
            gradient = gradient_address.to(tl.pointer_type(GRADIENT_DTYPE))
            parameter = tl.load(rows + tensors * PARAMETER + tensor).to(tl.pointer_type(PARAMETER_DTYPE))
            exp_avg = tl.load(rows + tensors * EXP_AVG + tensor).to(tl.pointer_type(MOMENT_DTYPE))
            exp_avg_sq = tl.load(rows + tensors * EXP_AVG_SQ + tensor).to(tl.pointer_type(MOMENT_DTYPE))
            master = _master_at(tl.load(rows + tensors * MASTER + tensor), MASTER_KIND)

            l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps = _coefficients(
                rows, tensors, tensor, hyper, steps_before
            )

            start = (pid - first_chunk) * CHUNK
            is_plain = start + CHUNK <= numel
            first_dim = tl.full([], 0, tl.int64)
            dim_count = tl.full([], 0, tl.int64)
            if IS_STRIDED:
                first_dim = tl.load(rows + tensors * FIRST_DIM + tensor)
                dim_count = tl.load(rows + tensors * DIM_COUNT + tensor)
                is_plain = is_plain & (dim_count == 0)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _update(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(exp_avg, 16),
                    tl.multiple_of(exp_avg_sq, 16), tl.multiple_of(master, 16), at, at, at, None,
                    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
                    MASTER_KIND,
                )  # fmt: skip
            else:
                at = start + lanes
                mask = at < numel
                at_parameter = at
                at_gradient = at
                if dim_count != 0:
                    at_parameter, at_gradient = strided_offsets(at, dims, first_dim, dim_count)
                _update(
                    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, mask,
                    inverse, l2, keep, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps,
                    MASTER_KIND,
                )  # fmt: skip


@dataclass(frozen=True)
class AdamSignature:
    """What the parameters of one launch have in common."""

    device: torch.device
    parameter: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype
    master: Master

    @property
    def has_master(self) -> bool:
        """Whether an fp32 weight is stepped in the parameter's stead, which then holds it rounded."""
        return self.master != Master.NONE

    def unsupported(self) -> str | None:
        """Why the kernel cannot take them, or None."""
        if (self.parameter, self.gradient) not in DTYPE_PAIRS:
            return f"{dtype_name(self.gradient)} gradients of {dtype_name(self.parameter)} parameters"
        if self.master == Master.REMAINDER and self.parameter != torch.bfloat16:
            return f"remainders of {dtype_name(self.parameter)} parameters"
        if self.moment not in MOMENT_DTYPES:
            return f"{dtype_name(self.moment)} moments"
        return None


#: Warps a program; see BLOCK.
WARPS = 4

#: In the labels of compilations.
MASTER_WORDS = {Master.NONE: "", Master.WHOLE: ", masters", Master.REMAINDER: ", remainders"}


def launch_adam(
    signature: AdamSignature,
    table: TensorTable,
    hyper: Tensor,
    steps_before: Tensor,
    steps: Tensor,
    counters: Tensor,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    is_counting: bool = False,
) -> None:
    """One update launch. The caller has copied `steps` to `steps_before`; divisor and skip come both or not at all."""
    launch(
        _adam_kernel,
        (max(table.chunks, -(-table.count // BLOCK)),),
        table.device,
        *table.arguments,
        hyper,
        steps_before,
        steps,
        steps if divisor is None else divisor,
        steps if skip is None else skip,
        counters,
        int(is_counting),
        PARAMETER_DTYPE=KERNEL_DTYPES[signature.parameter],
        GRADIENT_DTYPE=KERNEL_DTYPES[signature.gradient],
        MOMENT_DTYPE=MOMENT_DTYPES[signature.moment],
        MASTER_KIND=int(signature.master),
        IS_GATED=divisor is not None,
        IS_STRIDED=table.is_strided,
        CHUNK=BLOCK,
        num_warps=WARPS,
    )


def adam_rows(
    parameter: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    learning_rate: int,
    group: int,
    step: int,
) -> tuple[list[Tensor], tuple[int, ...]]:
    """What `tensor_table.entry` needs of a parameter: the tensors, and the rows after their addresses."""
    tensors = [parameter, exp_avg, exp_avg_sq]
    rows = (learning_rate, group, step)
    if master is None:
        return tensors, (0, *rows)
    return [*tensors, master], rows


def compilations() -> Iterator[Compilation]:
    """Every combination of dtypes that the kernel takes, with masters of each kind, gates and strides or without."""
    short = SHORT_NAMES
    constants = (
        "PARAMETER_DTYPE",
        "GRADIENT_DTYPE",
        "MOMENT_DTYPE",
        "MASTER_KIND",
        "IS_GATED",
        "IS_STRIDED",
        "CHUNK",
    )
    signature = {
        **TABLE_SIGNATURE,
        "hyper": "*fp32",
        "steps_before": "*fp32",
        "steps": "*fp32",
        "divisor": "*fp32",
        "skip": "*fp32",
        "counters": "*i64",
        "is_counting": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = frozenset(n for n, kind in signature.items() if kind.startswith("*")) - {"divisor", "skip"}
    flags = (False, True)
    for (parameter, gradient), moment, master, is_gated, is_strided in product(
        DTYPE_PAIRS, MOMENT_DTYPES, Master, flags, flags
    ):
        if parameter == torch.float32 and master != Master.NONE:
            continue
        if parameter != torch.bfloat16 and master == Master.REMAINDER:
            continue
        # fp16 differs from bf16, of which all are compiled, in its conversions: the least code of it, and the most.
        if torch.float16 in (parameter, gradient) and is_gated != is_strided:
            continue
        # So do remainders from masters: the most code of them, in which the rest is.
        if master == Master.REMAINDER and not (is_gated and is_strided):
            continue
        values = (
            KERNEL_DTYPES[parameter],
            KERNEL_DTYPES[gradient],
            MOMENT_DTYPES[moment],
            int(master),
            is_gated,
            is_strided,
            BLOCK,
        )
        label = f"{short[parameter]} parameters, {short[gradient]} gradients, {short[moment]} moments"
        label += MASTER_WORDS[master] + (", gated" if is_gated else "") + (", strided" if is_strided else "")
        yield Compilation(
            _adam_kernel, label, signature, dict(zip(constants, values, strict=True)), WARPS, divisible_by_16=aligned
        )
