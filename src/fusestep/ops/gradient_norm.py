"""The L2 norm of many gradients together, and what follows from it, on the device.

    norm = √Σ g²        divisor = scale · max(1, (norm + 1e-6) / max_norm)        skip = norm is not finite

with g the gradients divided by `scale` (a loss scaler's, else 1). Whoever uses a gradient afterwards divides it by
`divisor`: that takes the scale out and clips in one go, as torch.nn.utils.clip_grad_norm_ would.

Squares are formed in fp32 in three ranges, so that neither 1e20 nor 1e-30 is lost (Blue 1978, A portable Fortran
program to find the Euclidean norm of a vector). Each program sums a fixed run of chunks; the last to finish adds the
programs' sums in a fixed order. The ticket that tells the last one is an integer: no float is added atomically, so the
same gradients give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.dispatch import one_device, uses_triton
from fusestep.language import tl, triton
from fusestep.ops.dtypes import KERNEL_DTYPES, SHORT_NAMES, dtype_name
from fusestep.ops.launch import launch
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, relative_error
from fusestep.ops.tensor_table import (
    BLOCK,
    FIRST_CHUNK,
    FIRST_DIM,
    GRADIENT,
    GRADIENT_DIM_COUNT,
    NUMEL,
    TABLE_SIGNATURE,
    TensorTable,
    build_table,
    entry,
    flat,
    is_dense,
    strided_offsets,
)

#: Added to the norm before max_norm is divided by it, as torch.nn.utils.clip_grad_norm_ does.
_EPSILON = 1e-6
EPSILON: tl.constexpr = tl.constexpr(_EPSILON)

#: |g| above 2^40 is squared at a scale of 2^-84, below 2^-40 at 2^84; 2^39 squares of any range fit fp32.
LARGE: tl.constexpr = tl.constexpr(2.0**40)
SMALL: tl.constexpr = tl.constexpr(2.0**-40)
DOWN: tl.constexpr = tl.constexpr(2.0**-84)
UP: tl.constexpr = tl.constexpr(2.0**84)

#: Elements that the reference adds in fp32 before it widens.
RUN = 1 << 16


def norm_reference(gradients: Sequence[Tensor]) -> Tensor:
    """√Σ g² over all gradients of one device, 0-d fp32."""
    full = [g for g in gradients if g.numel()]
    if not full:
        return torch.zeros((), device=gradients[0].device)
    total: Tensor
    if full[0].device.type == "cpu" and all(g.dtype != torch.float64 for g in full):
        # Short runs in fp32, added in float64: a long fp32 sum stalls (10⁻³ off at 38 M), a float64 one takes 20 times
        # as long.
        runs = [run for g in full for run in flat(g if is_dense(g) else g.contiguous()).split(RUN)]
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(runs, 2, dtype=torch.float32)).double())
        if 1e-15 < total < 1e18:  # no square left fp32's range in a way that matters
            return total.float()
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(full, 2, dtype=torch.float64)))
    return total.float()


def tensor_norm(tensor: Tensor) -> Tensor:
    """√Σ x² of one tensor, 0-d: fp32, of a float64 tensor float64."""
    if tensor.dtype == torch.float64:
        norm: Tensor = torch.linalg.vector_norm(tensor)
        return norm
    return norm_reference([tensor])


@triton.jit
def _accumulate(g, large, middle, small):
    size = tl.abs(g)
    # NaN is neither large nor small and so reaches the middle sum; infinity reaches the large one.
    is_large = size > LARGE
    is_small = size < SMALL
    scaled = g * tl.where(is_large, DOWN, tl.where(is_small, UP, 1.0))
    square = scaled * scaled
    large += tl.where(is_large, square, 0.0)
    middle += tl.where(is_large | is_small, 0.0, square)
    small += tl.where(is_small, square, 0.0)
    return large, middle, small


@triton.jit
def _combine(large, middle, small):
    """√ of the three sums together, at the scale of the range that decides, so that nothing overflows on the way."""
    from_large = UP * tl.sqrt(large + middle * DOWN * DOWN)
    from_middle = tl.sqrt(middle + small * DOWN * DOWN)
    from_small = DOWN * tl.sqrt(small)
    return tl.where(large != 0.0, from_large, tl.where(middle != 0.0, from_middle, from_small))


@triton.jit(do_not_specialize=["tensors", "chunks", "first_partial", "total"])
def _gradient_norm_kernel(
    rows,  # (rows, tensors) int64: the table
    tensors,  # columns of the table
    chunk_tensor,  # (chunks,) int32
    chunks,
    dims,  # (n, 3) int64
    partials,  # (3, total) fp32
    first_partial,  # of this launch, where several launches share one norm
    total,  # programs of all those launches
    ticket,  # int32, 0 before and after
    verdict,  # (3,) fp32: norm, divisor, skip
    scale,  # fp32, of the loss
    found_inf,  # fp32, not 0 where a loss scaler has seen a non-finite gradient
    max_norm,  # fp32
    GRADIENT_DTYPE: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,  # elements a load
    REDUCE: tl.constexpr,  # partial sums a load, in the last program
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(0)
    pid = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    large = tl.zeros([TILE], tl.float32)
    middle = tl.zeros([TILE], tl.float32)
    small = tl.zeros([TILE], tl.float32)

    chunk = pid * chunks // programs
    end = (pid + 1) * chunks // programs
    while chunk < end:
        # One stretch of one tensor at a time: the loads of its rows are waited for once, not once a chunk.
        tensor = tl.load(chunk_tensor + chunk)
        gradient = tl.load(rows + tensors * GRADIENT + tensor)
        numel = tl.load(rows + tensors * NUMEL + tensor)
        first_chunk = tl.load(rows + tensors * FIRST_CHUNK + tensor)
        after = tl.minimum(end, first_chunk + (numel + CHUNK - 1) // CHUNK)
        start = (chunk - first_chunk) * CHUNK
        stop = tl.minimum(numel, (after - first_chunk) * CHUNK)
        if gradient != 0:
            whole_end = start + (stop - start) // TILE * TILE
            first_dim = tl.full([], 0, tl.int64)
            dim_count = tl.full([], 0, tl.int64)
            if IS_STRIDED:
                first_dim = tl.load(rows + tensors * FIRST_DIM + tensor)
                dim_count = tl.load(rows + tensors * GRADIENT_DIM_COUNT + tensor)
                whole_end = tl.where(dim_count == 0, whole_end, start)
            pointer = gradient.to(tl.pointer_type(GRADIENT_DTYPE))
            aligned = tl.multiple_of(pointer, 16)
            for at in tl.range(start, whole_end, TILE, num_stages=STAGES):
                g = tl.load(aligned + tl.multiple_of(at, 16) + lanes).to(tl.float32)
                large, middle, small = _accumulate(g, large, middle, small)
            for at in tl.range(whole_end, stop, TILE, num_stages=1):
                offset = at + lanes
                mask = offset < stop
                if dim_count != 0:
                    _, offset = strided_offsets(offset, dims, first_dim, dim_count)
                g = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
                large, middle, small = _accumulate(g, large, middle, small)
        chunk = after

    slot = partials + first_partial + pid
    tl.store(slot, tl.sum(large, 0))
    tl.store(slot + total, tl.sum(middle, 0))
    tl.store(slot + 2 * total, tl.sum(small, 0))
    tl.debug_barrier()
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel")  # integer ticket
    if arrived == total - 1:
        index = tl.arange(0, REDUCE)
        large_sums = tl.zeros([REDUCE], tl.float32)
        middle_sums = tl.zeros([REDUCE], tl.float32)
        small_sums = tl.zeros([REDUCE], tl.float32)
        for at in tl.range(0, total, REDUCE, num_stages=1):
            mask = at + index < total
            here = partials + at + index
            # Past the first-level cache, which other programs' stores do not reach.
            large_sums += tl.load(here, mask=mask, other=0.0, cache_modifier=".cg")
            middle_sums += tl.load(here + total, mask=mask, other=0.0, cache_modifier=".cg")
            small_sums += tl.load(here + 2 * total, mask=mask, other=0.0, cache_modifier=".cg")
        norm = _combine(tl.sum(large_sums, 0), tl.sum(middle_sums, 0), tl.sum(small_sums, 0))
        divisor = tl.full([], 1.0, tl.float32)
        seen = tl.full([], 0.0, tl.float32)
        if IS_SCALED:
            divisor = tl.load(scale)
            seen = tl.load(found_inf)
            norm = norm / divisor
        is_finite = norm < float("inf")  # false for NaN too
        divisor = divisor * tl.maximum((tl.where(is_finite, norm, 0.0) + EPSILON) / max_norm, 1.0)
        # A divisor past fp32's range would turn every gradient into 0.
        is_usable = is_finite & (divisor < float("inf")) & (seen == 0.0)
        tl.store(verdict, norm)
        tl.store(verdict + 1, divisor)
        tl.store(verdict + 2, tl.where(is_usable, 0.0, 1.0))
        tl.store(ticket, 0)


@dataclass(frozen=True)
class NormLaunch:
    """How the kernel is launched.

    On an H200 this read 124 M fp32 gradients at 0.985 of the rate of a copy, 29 M at 0.78. Tiles of 4,096 on 8 warps
    and 3 stages reached 0.94 and 0.67; without stages (one load at a time in flight) 0.62 and 0.52.
    """

    programs_per_multiprocessor: int = 8
    tile: int = 1024
    warps: int = 4
    stages: int = 4


LAUNCH = NormLaunch()
REDUCE_TILE = 1024


def verdict_of(norm: Tensor, max_norm: float, scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """(norm, divisor, skip) in fp32 from the norm of still scaled gradients, in torch ops and without waiting."""
    norm = norm.float()
    divisor = torch.ones_like(norm)
    if scale is not None:
        divisor = to_device(scale, norm.device)
        norm = norm / divisor
    is_finite = torch.isfinite(norm)
    divisor = divisor * ((norm.where(is_finite, 0.0) + _EPSILON) / max_norm).clamp(min=1.0)
    skip = ~(is_finite & torch.isfinite(divisor))
    if found_inf is not None:
        skip = skip | (to_device(found_inf, norm.device) != 0)
    return torch.stack([norm, divisor, skip.float()])


class NormScratch:
    """What the norm launches of one device share: partial sums, ticket and verdict. Reused step after step.

    Args:
        verdict: (3,) fp32, where the kernel writes norm, divisor and skip (1 or 0).
    """

    def __init__(
        self, device: torch.device, tables: Sequence[tuple[TensorTable, torch.dtype]], verdict: Tensor
    ) -> None:
        self.tables = list(tables)
        limit = hardware.multiprocessors(device.index or 0) * LAUNCH.programs_per_multiprocessor
        self.programs = [max(1, min(limit, table.chunks)) for table, _ in self.tables]
        self.partials = torch.empty(3, sum(self.programs), device=device)
        self.ticket = torch.zeros((), dtype=torch.int32, device=device)
        self.verdict = verdict

    def launch(self, max_norm: float, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Write the verdict on the gradients that the tables hold now: one launch a table, no wait.

        Args:
            max_norm: the norm to clip to; infinity clips nothing.
            scale, found_inf: fp32 of one element each on this device, from a loss scaler; both or neither.
        """
        first, total = 0, sum(self.programs)
        for (table, dtype), programs in zip(self.tables, self.programs, strict=True):
            launch(
                _gradient_norm_kernel,
                (programs,),
                table.device,
                *table.arguments,
                self.partials,
                first,
                total,
                self.ticket,
                self.verdict,
                self.verdict if scale is None else scale,
                self.verdict if found_inf is None else found_inf,
                max_norm,
                GRADIENT_DTYPE=KERNEL_DTYPES[dtype],
                IS_STRIDED=table.has_strided_gradients,
                IS_SCALED=scale is not None,
                CHUNK=BLOCK,
                TILE=LAUNCH.tile,
                REDUCE=REDUCE_TILE,
                STAGES=LAUNCH.stages,
                num_warps=LAUNCH.warps,
            )
            first += programs


def to_device(scalar: Tensor, device: torch.device) -> Tensor:
    """One element as 0-d fp32 on a device; waits only where the host has to read what another device wrote."""
    return scalar.to(device, torch.float32, non_blocking=device.type == "cuda").reshape(())


def combine_norms(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """√Σ n² of 0-d norms from several devices, on one of them; float64, since a norm may be 1e30."""
    there = [to_device(norm, device).double() for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(there))
    return total.float()


def unsupported(gradients: Iterable[Tensor]) -> str | None:
    """Why the kernel cannot take these gradients, or None."""
    for dtype in {g.dtype for g in gradients}:
        if dtype not in KERNEL_DTYPES:
            return f"{dtype_name(dtype)} gradients"
    return None


def _gradient_norm(gradients: list[Tensor]) -> Tensor:
    real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    device = one_device("gradient_norm", **{f"gradient {i}": g for i, g in enumerate(real)})
    reason = unsupported(real)
    if reason is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        reason = "a table of addresses cannot be built while a CUDA graph is captured"
    if not uses_triton("gradient_norm", device, reason):
        return norm_reference(real)
    dtypes = sorted({g.dtype for g in real}, key=str)
    tables = [(build_table(device, [entry(g, g) for g in real if g.dtype == dtype]), dtype) for dtype in dtypes]
    verdict = torch.empty(3, device=device)
    NormScratch(device, tables, verdict).launch(float("inf"))
    return verdict[0].clone()


def _gradient_norm_fake(gradients: list[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=gradients[0].device)


_gradient_norm_op = define("gradient_norm(Tensor[] gradients) -> Tensor", _gradient_norm, _gradient_norm_fake)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, as if they were one vector.

    Args:
        gradients: at least one; any shapes and strides, fp32, bf16, fp16, float64 or complex, all on one device.
    Returns: 0-d fp32 on that device; infinity or NaN where a gradient holds one. No wait for the device.
    Raises: UserError for gradients on several devices.
    Source: Blue 1978, ACM TOMS 4(1), for the three ranges.
    """
    norm: Tensor = _gradient_norm_op(list(gradients))
    return norm


def _prove(device: torch.device) -> list[Proof]:
    generator = torch.Generator().manual_seed(0)
    proofs = []
    for dtype in KERNEL_DTYPES:
        gradients = [
            torch.randn(size, generator=generator).to(device, dtype) for size in ((3, 17), (1025,), (), (64, 129))
        ]
        gradients.append(torch.randn(33, 31, generator=generator).to(device, dtype).t())
        error = relative_error(gradient_norm(gradients), norm_reference(gradients))
        proofs.append(Proof(f"gradient_norm of {dtype_name(dtype)}", error, 1e-6))
    return proofs


def _compilations() -> Iterable[Compilation]:
    constants = ("GRADIENT_DTYPE", "IS_STRIDED", "IS_SCALED", "CHUNK", "TILE", "REDUCE", "STAGES")
    signature = {
        **TABLE_SIGNATURE,
        "partials": "*fp32",
        "first_partial": "i32",
        "total": "i32",
        "ticket": "*i32",
        "verdict": "*fp32",
        "scale": "*fp32",
        "found_inf": "*fp32",
        "max_norm": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = frozenset(name for name, kind in signature.items() if kind.startswith("*"))
    for dtype, name in SHORT_NAMES.items():
        for is_strided in (False, True):
            for is_scaled in (False, True):
                values = (KERNEL_DTYPES[dtype], is_strided, is_scaled, BLOCK, LAUNCH.tile, REDUCE_TILE, LAUNCH.stages)
                label = f"{name}{' strided' if is_strided else ''}{' scaled' if is_scaled else ''}"
                yield Compilation(
                    _gradient_norm_kernel,
                    label,
                    signature,
                    dict(zip(constants, values, strict=True)),
                    LAUNCH.warps,
                    divisible_by_16=aligned,
                )


catalogue(Op("gradient_norm", "L2 norm of many gradients in one launch", _prove, _compilations))
