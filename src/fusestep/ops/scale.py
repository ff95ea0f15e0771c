"""A tensor times a number that lies on the device, rounded once to a dtype: how a gradient takes the loss's.

    y = x · s

The product is in fp32. PyTorch's own with an output of another dtype walks single elements; this reads and writes whole
vectors, at a copy's rate. In place, where s is 1, nothing is read or written at all: most losses are differentiated by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.language import tl, triton
from fusestep.ops.dtypes import CASTABLE
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.layouts import keep
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, define, relative_error

#: Elements of a program, and its warps.
BLOCK, WARPS = 2048, 4

#: Blocks of a program in place: few programs, since most of them have nothing to do.
BLOCKS_IN_PLACE = 8


@triton.jit(do_not_specialize=["elements"])
def _scale_kernel(x_ptr, scale_ptr, y_ptr, elements, BLOCK: tl.constexpr):
    """A block of elements a program."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr).to(tl.float32)
    # Compared with an end of which nothing is known, elements would be read and written one by one: the last block is.
    if start + BLOCK <= elements:
        tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float32) * scale)
    else:
        mask = at < elements
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale, mask=mask)


@triton.jit(do_not_specialize=["elements"])
def _scale_in_place_kernel(x_ptr, scale_ptr, elements, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """BLOCKS blocks of elements a program, unless the factor is 1."""
    scale = tl.load(scale_ptr).to(tl.float32)
    if scale != 1.0:
        first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
        for block in range(BLOCKS):
            start = first + block * BLOCK
            at = start + tl.arange(0, BLOCK)
            if start + BLOCK <= elements:
                tl.store(x_ptr + at, tl.load(x_ptr + at).to(tl.float32) * scale)
            else:
                mask = at < elements
                tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale, mask=mask)


def scale_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in plain PyTorch."""
    # With a dimension, for torch would round a 0-d factor to the dtype of x first.
    y = torch.empty(x.numel(), dtype=dtype, device=x.device)
    return torch.mul(x.reshape(-1), scale.reshape(1), out=y).view(x.shape)


#: By dtypes, that of the product None in place, and the number of elements; see `keep`.
_known: dict[tuple[Any, ...], PreparedLaunch] = {}


def run_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in `dtype`; x contiguous, of any shape, scale of one element, in fp32 (fp64 for fp64)."""
    if x.numel() == 0 or not uses_triton(x, dtype):
        return scale_reference(x, scale, dtype)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    key = (x.device, x.dtype, scale.dtype, dtype, x.numel())
    known = _known.get(key)
    if known is None:
        grid = (-(-x.numel() // BLOCK),)
        launch = PreparedLaunch(_scale_kernel, grid, x.device, (x.numel(),), BLOCK=BLOCK, num_warps=WARPS)
        known = keep(_known, key, launch)
    known(x, scale, y)
    return y


def scale_in_place(x: Tensor, scale: Tensor) -> Tensor:
    """x itself, multiplied by `scale`, which is as of `run_scale`; x contiguous, of any shape."""
    if x.numel() == 0:
        return x
    if not uses_triton(x, x.dtype):
        return x.copy_(scale_reference(x, scale, x.dtype))
    key = (x.device, x.dtype, scale.dtype, None, x.numel())
    known = _known.get(key)
    if known is None:
        grid = (-(-x.numel() // (BLOCK * BLOCKS_IN_PLACE)),)
        constants = {"BLOCK": BLOCK, "BLOCKS": BLOCKS_IN_PLACE, "num_warps": WARPS}
        launch = PreparedLaunch(_scale_in_place_kernel, grid, x.device, (x.numel(),), **constants)
        known = keep(_known, key, launch)
    known(x, scale)
    return x


def uses_triton(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel runs."""
    fits = x.dtype in CASTABLE and dtype in CASTABLE
    return dispatch.uses_triton("scale", x.device, None if fits else "the kernel computes in fp32, not fp64")


scale_op = define(
    "scale(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    run_scale,
    lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),  # noqa: ARG005
)


def prove(device: torch.device) -> list[Proof]:
    """Against float64 on fresh random inputs."""
    proofs = []
    scale = torch.rand((), device=device) + 0.5
    for source in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 1501, device=device).to(source)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
            error = relative_error(run_scale(x, scale, dtype), x.double() * scale.double())
            proofs.append(Proof(f"{source} to {dtype}".replace("torch.", ""), error, tolerance))
        error = relative_error(scale_in_place(x.clone(), scale), x.double() * scale.double())
        proofs.append(
            Proof(f"{source} in place".replace("torch.", ""), error, 1e-6 if source is torch.float32 else 4e-3)
        )
    return proofs


def compilations() -> Iterator[Compilation]:
    """Sums of gradients and gradients themselves, to what parameters are in, and in place where they are in it."""
    for source in ("fp32", "bf16"):
        for dtype in ("fp32", "bf16", "fp16"):
            pointers = {"x_ptr": f"*{source}", "scale_ptr": "*fp32", "y_ptr": f"*{dtype}"}
            yield Compilation(
                _scale_kernel,
                f"{source} to {dtype}",
                {**pointers, "elements": "i64", "BLOCK": "constexpr"},
                {"BLOCK": BLOCK},
                num_warps=WARPS,
                divisible_by_16=frozenset(pointers),
            )
    for dtype in ("fp32", "bf16", "fp16"):
        pointers = {"x_ptr": f"*{dtype}", "scale_ptr": "*fp32"}
        yield Compilation(
            _scale_in_place_kernel,
            f"{dtype} in place",
            {**pointers, "elements": "i64", "BLOCK": "constexpr", "BLOCKS": "constexpr"},
            {"BLOCK": BLOCK, "BLOCKS": BLOCKS_IN_PLACE},
            num_warps=WARPS,
            divisible_by_16=frozenset(pointers),
        )


catalogue(Op("scale", "a tensor times a number on the device, rounded once", prove, compilations))
