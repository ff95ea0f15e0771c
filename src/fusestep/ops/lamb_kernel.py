"""LAMB's kernels: moments with the norms of each tensor, and weights. Formulas: see lamb.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import _bias_correction, _gate, _keep_counts
from fusestep.ops.gradient_norm import _accumulate, _combine
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import BLOCK, FIRST_CHUNK, GRADIENT, TensorTable
from fusestep.ops.update import (
    SHARED_SIGNATURE,
    WARPS,
    Shared,
    UpdateSignature,
    compilation,
    constants_of,
    programs,
    signatures,
)
from fusestep.ops.update_kernel import chunk_of, options, places, pointers

#: Chunks that the last program of a tensor combines at once. With 1,024 the kernel takes 119 registers on compute
#: capability 9.0, which halves the programs of a multiprocessor; with 256 it takes 56.
REDUCE: tl.constexpr = tl.constexpr(256)


#: The least number that fp32 holds at full precision; what it divides stays finite.
TINY: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def _direction(m, v, w, first, second, eps, decoupled):
    """u of the formula, from the moments as stored; first = 1 / (1 − β₁ᵗ), second = 1 / √(1 − β₂ᵗ)."""
    return m * first / (tl.sqrt(v) * second + eps) + decoupled * w


@triton.jit
def _corrections(group, step):
    """1 / (1 − β₁ᵗ) and 1 / √(1 − β₂ᵗ)."""
    return 1.0 / _bias_correction(step + 1.0, tl.load(group + 5)), 1.0 / tl.sqrt(
        _bias_correction(step + 1.0, tl.load(group + 6))
    )


@triton.jit
def _norm(x):
    """The L2 norm of a block, whose squares are formed at the scale of its largest magnitude."""
    largest = tl.max(tl.abs(x), 0)
    unit = tl.where((largest > TINY) & (largest < float("inf")), largest, 1.0)
    scaled = x * (1.0 / unit)
    return unit * tl.sqrt(tl.sum(scaled * scaled, 0))


@triton.jit
def _moments(
    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, mask,
    inverse, l2, beta1, beta3, beta2, one_minus_beta2, first, second, eps, decoupled,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    """Write the moments; returns the norms of the weights and of their update."""
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * inverse
    m = tl.load(exp_avg + at, mask=mask)
    v = tl.load(exp_avg_sq + at, mask=mask)
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    g += l2 * w
    m = beta1 * m + beta3 * g
    v = beta2 * v + one_minus_beta2 * g * g
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    u = _direction(m, v, w, first, second, eps, decoupled)
    if mask is not None:
        w = tl.where(mask, w, 0.0)
        u = tl.where(mask, u, 0.0)
    return _norm(w), _norm(u)


@triton.jit
def _norms(partials, chunks, first_chunk, count, LANES: tl.constexpr):
    """‖w‖ and ‖u‖ from the norms of a tensor's chunks, always added in the same order."""
    index = tl.arange(0, LANES)
    w_large = tl.zeros([LANES], tl.float32)
    w_middle = tl.zeros([LANES], tl.float32)
    w_small = tl.zeros([LANES], tl.float32)
    u_large = tl.zeros([LANES], tl.float32)
    u_middle = tl.zeros([LANES], tl.float32)
    u_small = tl.zeros([LANES], tl.float32)
    for at in tl.range(0, count, LANES, num_stages=1):
        mask = at + index < count
        here = partials + first_chunk + at + index
        # Past the first-level cache, which other programs' stores do not reach.
        w = tl.load(here, mask=mask, other=0.0, cache_modifier=".cg")
        u = tl.load(here + chunks, mask=mask, other=0.0, cache_modifier=".cg")
        w_large, w_middle, w_small = _accumulate(w, w_large, w_middle, w_small)
        u_large, u_middle, u_small = _accumulate(u, u_large, u_middle, u_small)
    w_norm = _combine(tl.sum(w_large, 0), tl.sum(w_middle, 0), tl.sum(w_small, 0))
    u_norm = _combine(tl.sum(u_large, 0), tl.sum(u_middle, 0), tl.sum(u_small, 0))
    return w_norm, u_norm


@triton.jit(do_not_specialize=["tensors", "chunks"], do_not_specialize_on_alignment=["divisor", "skip"])
def _lamb_moments_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, divisor, skip,  # see Shared
    partials,  # (2, chunks) fp32: norms of the weights and of their updates
    tickets,  # (tensors,) int32, 0 before and after
    norms,  # (2, tensors) fp32, written: those of tensors
    ratios,  # (tensors,) fp32, written
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped, inverse = _gate(divisor, skip, True)
    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        address = tl.load(rows + tensors * GRADIENT + tensor)
        if (address != 0) & (is_skipped == 0.0):
            parameter, gradient, exp_avg, exp_avg_sq, master = pointers(
                rows, tensors, tensor, address, PARAMETER_DTYPE, GRADIENT_DTYPE
            )
            _lr, group, step = options(rows, tensors, tensor, hyper, steps_before)
            beta1 = tl.load(group + 1)
            beta3 = tl.load(group + 2)
            beta2 = tl.load(group + 3)
            one_minus_beta2 = tl.load(group + 4)
            first, second = _corrections(group, step)
            eps = tl.load(group + 7)
            l2 = tl.load(group + 8)
            decoupled = tl.load(group + 9)
            start, numel, first_dim, dim_count, is_plain = chunk_of(rows, tensors, tensor, pid, IS_STRIDED, CHUNK)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                w_norm, u_norm = _moments(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(exp_avg, 16),
                    tl.multiple_of(exp_avg_sq, 16), tl.multiple_of(master, 16), at, at, at, None,
                    inverse, l2, beta1, beta3, beta2, one_minus_beta2, first, second, eps, decoupled, HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                at_parameter, at_gradient = places(at, dims, first_dim, dim_count)
                w_norm, u_norm = _moments(
                    parameter, gradient, exp_avg, exp_avg_sq, master, at, at_parameter, at_gradient, at < numel,
                    inverse, l2, beta1, beta3, beta2, one_minus_beta2, first, second, eps, decoupled, HAS_MASTER,
                )  # fmt: skip
            tl.store(partials + pid, w_norm)
            tl.store(partials + chunks + pid, u_norm)
            tl.debug_barrier()
            arrived = tl.atomic_add(tickets + tensor, 1, sem="acq_rel")  # integer ticket
            count = (numel + CHUNK - 1) // CHUNK
            if arrived == count - 1:
                first_chunk = tl.load(rows + tensors * FIRST_CHUNK + tensor)
                is_adaptive = tl.load(group + 10) != 0.0
                w_norm, u_norm = _norms(partials, chunks, first_chunk, count, REDUCE)
                is_trusted = is_adaptive & (w_norm != 0.0) & (u_norm != 0.0)
                tl.store(norms + tensor, w_norm)
                tl.store(norms + tensors + tensor, u_norm)
                tl.store(ratios + tensor, tl.where(is_trusted, w_norm / tl.where(is_trusted, u_norm, 1.0), 1.0))
                tl.store(tickets + tensor, 0)


@triton.jit
def _weights(
    parameter, exp_avg, exp_avg_sq, master, at, at_parameter, mask, rate, first, second, eps, decoupled,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    m = tl.load(exp_avg + at, mask=mask)
    v = tl.load(exp_avg_sq + at, mask=mask)
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    w -= rate * _direction(m, v, w, first, second, eps, decoupled)
    tl.store(parameter + at_parameter, w.to(parameter.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master + at, w, mask=mask)


@triton.jit(do_not_specialize=["tensors", "chunks", "is_counting"], do_not_specialize_on_alignment=["divisor", "skip"])
def _lamb_weights_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, steps, divisor, skip, counters, is_counting,  # see Shared
    ratios,  # (tensors,) fp32
    PARAMETER_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped, _inverse = _gate(divisor, skip, True)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, CHUNK)
    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        address = tl.load(rows + tensors * GRADIENT + tensor)
        if (address != 0) & (is_skipped == 0.0):
            parameter, _gradient, exp_avg, exp_avg_sq, master = pointers(
                rows, tensors, tensor, address, PARAMETER_DTYPE, PARAMETER_DTYPE
            )
            lr, group, step = options(rows, tensors, tensor, hyper, steps_before)
            rate = lr * tl.load(ratios + tensor)
            first, second = _corrections(group, step)
            eps = tl.load(group + 7)
            decoupled = tl.load(group + 9)
            start, numel, first_dim, dim_count, is_plain = chunk_of(rows, tensors, tensor, pid, IS_STRIDED, CHUNK)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _weights(
                    tl.multiple_of(parameter, 16), tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16),
                    tl.multiple_of(master, 16), at, at, None, rate, first, second, eps, decoupled, HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                at_parameter, _at_gradient = places(at, dims, first_dim, dim_count)
                _weights(
                    parameter, exp_avg, exp_avg_sq, master, at, at_parameter, at < numel,
                    rate, first, second, eps, decoupled, HAS_MASTER,
                )  # fmt: skip


def launch_moments(signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared) -> None:
    """Moments, norms and trust ratios; `scratch` as LambRule makes it."""
    before = (shared.hyper, shared.steps_before, shared.divisor, shared.skip)
    constants = {**constants_of(signature, table), "CHUNK": BLOCK, "num_warps": WARPS}
    launch(_lamb_moments_kernel, programs(table), table.device, *table.arguments, *before, *scratch, **constants)


def launch_weights(signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared) -> None:
    """The weights, by the trust ratios in `scratch`."""
    constants = {**constants_of(signature, table), "CHUNK": BLOCK, "num_warps": WARPS}
    del constants["GRADIENT_DTYPE"]
    launch(_lamb_weights_kernel, programs(table), table.device, *table.arguments, *shared, scratch[3], **constants)


def compilations() -> Iterator[Compilation]:
    """Every combination of dtypes, with and without masters and strides, of both kernels."""
    own = {"partials": "*fp32", "tickets": "*i32", "norms": "*fp32", "ratios": "*fp32"}
    before = {name: SHARED_SIGNATURE[name] for name in ("hyper", "steps_before", "divisor", "skip")}
    of_weights: dict[str, dict[str, Any]] = {}
    for label, constants in signatures():
        constants["CHUNK"] = BLOCK
        yield compilation(_lamb_moments_kernel, f"moments: {label}", constants, {**before, **own})
        # The weights' kernel reads no gradients.
        without = {name: value for name, value in constants.items() if name != "GRADIENT_DTYPE"}
        of_weights[re.sub(r", \w* gradients", "", label)] = without
    for label, constants in of_weights.items():
        yield compilation(_lamb_weights_kernel, f"weights: {label}", constants, {**SHARED_SIGNATURE, "ratios": "*fp32"})
