"""NovoGrad's kernels: running norms of each tensor's gradients, and weights. Formulas: see novograd.py.

A program of the first kernel reads a run of chunks, as in gradient_norm.py, and writes the norm of each stretch of one
tensor in it. The last of the programs that read a tensor combines its stretches in a fixed order and updates the
running norm. Of two stretches that follow each other either the program or the tensor is a later one, so program +
tensor is a place in `partials` of each stretch's own. The ticket that tells the last one is an integer: no float is
added atomically.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fusestep import hardware
from fusestep.language import tl, triton
from fusestep.ops.adam_kernel import EXP_AVG_SQ, _bias_correction, _gate, _keep_counts
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES
from fusestep.ops.gradient_norm import LAUNCH, _accumulate, _combine
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation
from fusestep.ops.tensor_table import (
    BLOCK,
    FIRST_CHUNK,
    FIRST_DIM,
    GRADIENT,
    GRADIENT_DIM_COUNT,
    NUMEL,
    TensorTable,
    strided_offsets,
)
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

#: Stretches that the last program of a tensor combines at once.
REDUCE = 256

#: Registers of a thread of the norms' kernel where all gradients are runs of memory, so that as many programs of a
#: multiprocessor run at once as LAUNCH gives it. Without a limit it takes 72 on compute capability 9.0; within this one
#: nothing spills.
REGISTERS = 64


@triton.jit
def _piece(large, middle, small, biggest, is_max):
    """The norm of what was accumulated. A NaN is in the middle sum, and so in the largest magnitude as well."""
    middle_sum = tl.sum(middle, 0)
    norm = _combine(tl.sum(large, 0), middle_sum, tl.sum(small, 0))
    return tl.where(is_max & (middle_sum == middle_sum), tl.max(biggest, 0), norm)


@triton.jit
def _norm(partials, first, count, scale, is_max, LANES: tl.constexpr):
    """‖g‖ from the norms of a tensor's stretches, always added in the same order."""
    index = tl.arange(0, LANES)
    large = tl.zeros([LANES], tl.float32)
    middle = tl.zeros([LANES], tl.float32)
    small = tl.zeros([LANES], tl.float32)
    biggest = tl.zeros([LANES], tl.float32)
    for at in tl.range(0, count, LANES, num_stages=1):
        # Past the first-level cache, which other programs' stores do not reach.
        n = tl.load(partials + first + at + index, mask=at + index < count, other=0.0, cache_modifier=".cg")
        large, middle, small = _accumulate(n, large, middle, small)
        biggest = tl.maximum(biggest, n)
    return _piece(large, middle, small, biggest, is_max) * scale


@triton.jit
def _running_norm(norm, is_max, running, is_first, beta2, one_minus_beta2):
    """N of the formula after this step."""
    # Squares at the scale of the larger, so that neither 1e20 nor 1e-30 is lost.
    unit = tl.maximum(running, norm)
    unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    root = unit * tl.sqrt(beta2 * (running / unit) * (running / unit) + one_minus_beta2 * (norm / unit) * (norm / unit))
    blended = tl.where(is_max, beta2 * running + one_minus_beta2 * norm, root)
    return tl.where(is_first, norm, blended)


@triton.jit(do_not_specialize=["tensors", "chunks", "is_whole"], do_not_specialize_on_alignment=["divisor", "skip"])
def _novograd_norm_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, divisor, skip,  # see Shared
    partials,  # (programs + tensors,) fp32
    tickets,  # (tensors,) int32, 0 before and after
    norms,  # (tensors,) fp32, written: those of tensors
    is_whole,  # not 0: and running norms are updated
    GRADIENT_DTYPE: tl.constexpr,
    IS_STRIDED: tl.constexpr,  # some gradients are
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,  # elements a load
    REDUCE: tl.constexpr,  # stretches a load
    STAGES: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    is_skipped, inverse = _gate(divisor, skip, True)
    chunk = pid * chunks // programs
    end = tl.where(is_skipped == 0.0, (pid + 1) * chunks // programs, chunk)
    while chunk < end:
        tensor = tl.load(chunk_tensor + chunk)
        gradient = tl.load(rows + tensors * GRADIENT + tensor)
        numel = tl.load(rows + tensors * NUMEL + tensor)
        first_chunk = tl.load(rows + tensors * FIRST_CHUNK + tensor)
        last_chunk = first_chunk + (numel + CHUNK - 1) // CHUNK
        after = tl.minimum(end, last_chunk)
        if gradient != 0:
            start = (chunk - first_chunk) * CHUNK
            stop = tl.minimum(numel, (after - first_chunk) * CHUNK)
            whole_end = start + (stop - start) // TILE * TILE
            first_dim = tl.full([], 0, tl.int64)
            dim_count = tl.full([], 0, tl.int64)
            if IS_STRIDED:
                first_dim = tl.load(rows + tensors * FIRST_DIM + tensor)
                dim_count = tl.load(rows + tensors * GRADIENT_DIM_COUNT + tensor)
                whole_end = tl.where(dim_count == 0, whole_end, start)
            pointer = gradient.to(tl.pointer_type(GRADIENT_DTYPE))
            aligned = tl.multiple_of(pointer, 16)
            large = tl.zeros([TILE], tl.float32)
            middle = tl.zeros([TILE], tl.float32)
            small = tl.zeros([TILE], tl.float32)
            biggest = tl.zeros([TILE], tl.float32)
            for at in tl.range(start, whole_end, TILE, num_stages=STAGES):
                g = tl.load(aligned + tl.multiple_of(at, 16) + lanes).to(tl.float32)
                large, middle, small = _accumulate(g, large, middle, small)
                biggest = tl.maximum(biggest, tl.abs(g))
            for at in tl.range(whole_end, stop, TILE, num_stages=1):
                offset = at + lanes
                mask = offset < stop
                if dim_count != 0:
                    _at, offset = strided_offsets(offset, dims, first_dim, dim_count)
                g = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
                large, middle, small = _accumulate(g, large, middle, small)
                biggest = tl.maximum(biggest, tl.abs(g))
            _lr, group, step = options(rows, tensors, tensor, hyper, steps_before)
            is_max = tl.load(group + 11) != 0.0
            tl.store(partials + tensor + pid, _piece(large, middle, small, biggest, is_max))
            tl.debug_barrier()
            arrived = tl.atomic_add(tickets + tensor, 1, sem="acq_rel")  # integer ticket
            # The programs that read the tensor: of chunk c it is ((c + 1) · programs − 1) // chunks.
            first_program = ((first_chunk + 1) * programs - 1) // chunks
            count = (last_chunk * programs - 1) // chunks - first_program + 1
            if arrived == count - 1:
                beta2 = tl.load(group + 3)
                one_minus_beta2 = tl.load(group + 4)
                is_first = (step == 0.0) & (tl.load(group + 10) == 0.0)
                running = tl.load(rows + tensors * EXP_AVG_SQ + tensor).to(tl.pointer_type(tl.float32))
                norm = _norm(partials, tensor + first_program, count, inverse, is_max, REDUCE)
                tl.store(norms + tensor, norm)
                if is_whole != 0:
                    now = _running_norm(norm, is_max, tl.load(running), is_first, beta2, one_minus_beta2)
                    tl.store(running, now)
                tl.store(tickets + tensor, 0)
        chunk = after


@triton.jit
def _update(
    parameter, gradient, exp_avg, master, at, at_parameter, at_gradient, mask,
    factor, inside, beta1, beta3, scale, rate, outside,
    HAS_MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(gradient + at_gradient, mask=mask).to(tl.float32) * factor
    m = tl.load(exp_avg + at, mask=mask)
    weight, at_weight = (master, at) if HAS_MASTER else (parameter, at_parameter)
    w = tl.load(weight + at_weight, mask=mask).to(tl.float32)
    m = beta1 * m + beta3 * (g + inside * w)
    w -= rate * (m * scale + outside * w)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(parameter + at_parameter, w.to(parameter.dtype.element_ty), mask=mask)
    if HAS_MASTER:
        tl.store(master + at, w, mask=mask)


@triton.jit(do_not_specialize=["tensors", "chunks", "is_counting"], do_not_specialize_on_alignment=["divisor", "skip"])
def _novograd_kernel(
    rows, tensors, chunk_tensor, chunks, dims,  # the table
    hyper, steps_before, steps, divisor, skip, counters, is_counting,  # see Shared
    PARAMETER_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    is_skipped, inverse = _gate(divisor, skip, True)
    _keep_counts(rows, tensors, pid, steps_before, steps, is_skipped, counters, is_counting, CHUNK)
    if pid < chunks:
        tensor = tl.load(chunk_tensor + pid)
        address = tl.load(rows + tensors * GRADIENT + tensor)
        if (address != 0) & (is_skipped == 0.0):
            parameter, gradient, exp_avg, running, master = pointers(
                rows, tensors, tensor, address, PARAMETER_DTYPE, GRADIENT_DTYPE
            )
            rate, group, step = options(rows, tensors, tensor, hyper, steps_before)
            beta1 = tl.load(group + 1)
            beta3 = tl.load(group + 2)
            scale = 1.0 / _bias_correction(step + 1.0, tl.load(group + 5))
            root = tl.sqrt(_bias_correction(step + 1.0, tl.load(group + 6)))
            normalised = 1.0 / (tl.load(running) / root + tl.load(group + 7))
            decay = tl.load(group + 8)
            is_inside = tl.load(group + 9) != 0.0
            factor = tl.where(is_inside, inverse * normalised, inverse)
            scale = tl.where(is_inside, scale, scale * normalised)
            inside = tl.where(is_inside, decay, 0.0)
            outside = tl.where(is_inside, 0.0, decay)
            start, numel, first_dim, dim_count, is_plain = chunk_of(rows, tensors, tensor, pid, IS_STRIDED, CHUNK)
            if is_plain:
                at = tl.multiple_of(start, 16) + lanes
                _update(
                    tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16), tl.multiple_of(exp_avg, 16),
                    tl.multiple_of(master, 16), at, at, at, None,
                    factor, inside, beta1, beta3, scale, rate, outside, HAS_MASTER,
                )  # fmt: skip
            else:
                at = start + lanes
                at_parameter, at_gradient = places(at, dims, first_dim, dim_count)
                _update(
                    parameter, gradient, exp_avg, master, at, at_parameter, at_gradient, at < numel,
                    factor, inside, beta1, beta3, scale, rate, outside, HAS_MASTER,
                )  # fmt: skip


def norm_programs(table: TensorTable) -> int:
    """Programs of the norms' launch."""
    limit = hardware.multiprocessors(table.device.index or 0) * LAUNCH.programs_per_multiprocessor
    return max(1, min(limit, table.chunks))


def norm_slots(table: TensorTable) -> int:
    """Places for the norms of stretches."""
    return norm_programs(table) + table.count


def launch_norms(
    signature: UpdateSignature, table: TensorTable, scratch: tuple[Tensor, ...], shared: Shared, *, is_whole: bool
) -> None:
    """The norms of tensors, and where these are whole their running norms; `scratch` as NovoGradRule makes it."""
    limit = {} if table.has_strided_gradients else {"maxnreg": REGISTERS}
    launch(
        _novograd_norm_kernel,
        (norm_programs(table),),
        table.device,
        *table.arguments,
        shared.hyper,
        shared.steps_before,
        shared.divisor,
        shared.skip,
        *scratch,
        int(is_whole),
        GRADIENT_DTYPE=KERNEL_DTYPES[signature.gradient],
        IS_STRIDED=table.has_strided_gradients,
        CHUNK=BLOCK,
        TILE=LAUNCH.tile,
        REDUCE=REDUCE,
        STAGES=LAUNCH.stages,
        num_warps=LAUNCH.warps,
        **limit,
    )


def launch_weights(signature: UpdateSignature, table: TensorTable, shared: Shared) -> None:
    """The weights, by the running norms as they are."""
    launch(
        _novograd_kernel,
        programs(table),
        table.device,
        *table.arguments,
        *shared,
        **constants_of(signature, table),
        CHUNK=BLOCK,
        num_warps=WARPS,
    )


def compilations() -> Iterator[Compilation]:
    """Every combination of dtypes, with and without masters and strides, of both kernels."""
    of_norms = {name: SHARED_SIGNATURE[name] for name in ("hyper", "steps_before", "divisor", "skip")}
    of_norms |= {"partials": "*fp32", "tickets": "*i32", "norms": "*fp32", "is_whole": "i32"}
    for dtype, name in SHORT_NAMES.items():
        for is_strided in (False, True):
            constants = {
                "GRADIENT_DTYPE": KERNEL_DTYPES[dtype],
                "IS_STRIDED": is_strided,
                "CHUNK": BLOCK,
                "TILE": LAUNCH.tile,
                "REDUCE": REDUCE,
                "STAGES": LAUNCH.stages,
            }
            label = f"norms: {name}{', strided' if is_strided else ''}"
            made = compilation(_novograd_norm_kernel, label, constants, of_norms)
            yield replace(made, num_warps=LAUNCH.warps, maximum_registers=None if is_strided else REGISTERS)
    for label, constants in signatures():
        yield compilation(_novograd_kernel, f"weights: {label}", {**constants, "CHUNK": BLOCK})
