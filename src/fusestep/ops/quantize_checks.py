"""What the doctor proves of the cast to FP8, and every launch of its kernels for the checks that compile them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusestep.ops import (
    fp8_cast,
    quantize_joined_kernel,
    quantize_kernel,
    quantize_launch,
    quantize_pair_kernel,
    quantize_scale_kernel,
)
from fusestep.ops.activation import activation_backward_reference, activation_reference
from fusestep.ops.quantize import quantize, quantize_activation, quantize_activation_backward, transpose_bytes
from fusestep.ops.quantized import Quantized
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, relative_error
from fusestep.ops.roll_scales import SLOT

#: Half of the distance between neighbours, relative: E4M3 keeps three bits of mantissa, E5M2 two.
_TOLERANCE = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}


def prove(device: torch.device) -> list[Proof]:
    """Casts and their transposes, against float64, and the bytes of a transpose against those of its original."""
    proofs = []
    for dtype, tolerance in _TOLERANCE.items():
        x, h = (torch.randn(37, columns, device=device) for columns in (101, 202))
        casts = {
            "plain": (quantize(x, _slots(device), 0, dtype, columnwise=True, column_sums=True), x.double()),
            "of gelu": (
                (quantize_activation(x, "gelu", _slots(device), 0, dtype, columnwise=True), None),
                activation_reference(x.double(), "gelu"),
            ),
            "of swiglu's gradient": (
                quantize_activation_backward(x, h, "swiglu", _slots(device), 0, dtype, columnwise=True),
                activation_backward_reference(x.double(), h.double(), "swiglu"),
            ),
        }
        for what, ((quantized, sums), exact) in casts.items():
            label = f"{what}, {str(dtype).removeprefix('torch.')}"
            proofs.append(Proof(label, relative_error(quantized.dequantize(), exact), tolerance))
            proofs.append(Proof(f"transpose, {label}", _misplaced(quantized), 0.0))
            if sums is not None:
                proofs.append(Proof(f"column sums, {label}", relative_error(sums, exact.sum(0)), 1e-5))
    return proofs


def _slots(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, SLOT, device=device)


def _misplaced(quantized: Quantized) -> float:
    """How many bytes of the transpose are not those of the data, as stored and as transposed afterwards."""
    data, transposed = quantized.data, quantized.transposed
    if data is None or transposed is None:
        return float("nan")
    wanted = data.view(torch.uint8).t()
    return float(sum(int((one.view(torch.uint8) != wanted).sum()) for one in (transposed, transpose_bytes(data))))


def compilations() -> Iterator[Compilation]:
    """The cast of each kind of input with its transpose, by the hardware's rounding and by ours; all else once."""
    plain, gelu, swiglu = ("", False), ("gelu", False), ("silu", True)
    for activation, gated in (plain, gelu, swiglu):
        for gradient in (False, True) if activation else (False,):
            yield _cast(activation, gated, gradient, columnwise=True, in_hardware=True)
        yield _amax(activation, gated, gradient=bool(activation))
    yield _cast("", False, False, columnwise=False, in_hardware=True)
    yield _cast("", False, False, columnwise=True, in_hardware=False)
    yield _cast("silu", True, True, columnwise=True, in_hardware=False)
    yield _cast("", False, False, columnwise=True, in_hardware=True, searches=False)
    yield from _pairs()
    yield from _joined()
    choice = quantize_launch.transpose_launch()
    yield _compilation(
        quantize_kernel._transpose_kernel,
        "transpose",
        {"data_ptr": "u8", "transposed_ptr": "u8"},
        {"rows": "i32", "columns": "i32"},
        {"IN_HARDWARE": True, "ROWS": choice.rows, "COLUMNS": choice.columns},
        choice.warps,
    )


_NUMBERS = {"rows": "i32", "columns": "i32", "x_stride": "i32", "h_stride": "i32", "index": "i32"}


def _cast(
    activation: str, gated: bool, gradient: bool, columnwise: bool, in_hardware: bool, searches: bool = True
) -> Compilation:
    """`searches`: the cast finds its amax itself, else a pass before has."""
    finder = quantize_launch.amax_launch(4096)
    choice = quantize_launch.quantize_launch(columnwise, gradient)
    output = ("fp8e5" if gradient else "fp8e4nv") if in_hardware else "u8"
    constants = {
        "ACTIVATION": activation,
        "GATED": gated,
        "E4M3": not gradient,
        "HARDWARE_CAST": in_hardware,
        "RECORD": True,
        "MARGIN": 0,
        "POWER_OF_TWO": False,
        "IN_WORDS": in_hardware,
        "ROWS": choice.rows,
        "COLUMNS": choice.columns,
        "TILES": choice.tiles,
        **quantize_launch.search_constants(finder),
    }
    pointers = {
        "x_ptr": "bf16",
        "h_ptr": "bf16" if gradient else None,
        "data_ptr": output,
        "transposed_ptr": output if columnwise else None,
        "scale_inv_ptr": "fp32",
        "slots_ptr": "fp32",
        "maxima_ptr": None if searches else "i32",
        "counts_ptr": "i64" if not activation else None,
        "partials_ptr": "fp32" if gradient else None,
    }
    what = "gradient of " * gradient + (activation or "plain") + " (gated)" * gated
    label = f"{what}{', both ways' if columnwise else ''}{'' if in_hardware else ', rounded by integers'}"
    label += "" if searches else ", after a pass"
    capability = fp8_cast.CAST_CAPABILITY if in_hardware else (8, 0)
    return _compilation(
        *(quantize_kernel._quantize_kernel, label, pointers, _NUMBERS | {"maxima": "i32"}, constants, choice.warps),
        minimum_capability=10 * capability[0] + capability[1],
    )


def _amax(activation: str, gated: bool, gradient: bool) -> Compilation:
    choice = quantize_launch.amax_launch(4096)
    return _compilation(
        quantize_scale_kernel._amax_kernel,
        f"amax of {activation or 'plain'}{' (gated)' if gated else ''}",
        {"x_ptr": "bf16", "h_ptr": "bf16" if gradient else None, "slots_ptr": "fp32", "maxima_ptr": "i32"},
        _NUMBERS,
        {
            "ACTIVATION": activation,
            "GATED": gated,
            "ROWS": choice.rows,
            "COLUMNS": choice.columns,
            "STAGES": quantize_launch.AMAX_STAGES,
        },
        choice.warps,
    )


def _pairs() -> Iterator[Compilation]:
    """Input and weight in one launch: with slots, and each with the scale of its own."""
    numbers = {"a_rows": "i32", "b_rows": "i32", "columns": "i32", "a_stride": "i32", "b_stride": "i32"}
    numbers |= {"a_index": "i32", "b_index": "i32", "a_programs": "i32"}
    finder, choice = quantize_launch.amax_launch(4096), quantize_launch.quantize_launch(True, False)
    search = {"ROWS": finder.rows, "COLUMNS": finder.columns, "STAGES": quantize_launch.AMAX_STAGES}
    inputs: dict[str, str | None] = {"a_ptr": "bf16", "b_ptr": "fp32"}
    for slots in (None, "fp32"):
        yield _compilation(
            quantize_pair_kernel._amax_pair_kernel,
            f"amaxes of a pair{'' if slots is None else ', slots'}",
            inputs | {"slots_ptr": slots, "maxima_ptr": "i32"},
            numbers,
            search,
            finder.warps,
        )
    for slots, in_hardware in ((None, True), ("fp32", True), ("fp32", False)):
        output = "fp8e4nv" if in_hardware else "u8"
        outputs = ("a_data_ptr", "a_transposed_ptr", "b_data_ptr", "b_transposed_ptr")
        yield _compilation(
            quantize_pair_kernel._quantize_pair_kernel,
            f"a pair, both ways{'' if slots is None else ', slots'}{'' if in_hardware else ', rounded by integers'}",
            inputs
            | dict.fromkeys(outputs, output)
            | {"a_scale_inv_ptr": "fp32", "b_scale_inv_ptr": "fp32", "slots_ptr": slots}
            | {"maxima_ptr": "i32" if slots is None else None, "counts_ptr": None},
            numbers | {"a_maxima": "i32", "b_maxima": "i32"},
            {
                "E4M3": True,
                "HARDWARE_CAST": in_hardware,
                "RECORD": slots is not None,
                "MARGIN": 0,
                "POWER_OF_TWO": False,
                "ROWS": choice.rows,
                "COLUMNS": choice.columns,
                "TILES": choice.tiles,
                **quantize_launch.search_constants(finder),
            },
            choice.warps,
            minimum_capability=90 if in_hardware else 80,
        )


def _joined() -> Iterator[Compilation]:
    """Three matrices as one: with a slot, and with the scale of their own."""
    inputs: dict[str, str | None] = {"a_ptr": "bf16", "b_ptr": "bf16", "c_ptr": "bf16"}
    numbers = {"rows": "i32", "a_stride": "i32", "b_stride": "i32", "c_stride": "i32", "index": "i32"}
    finder, choice = quantize_launch.amax_launch(4096), quantize_launch.quantize_launch(True, True)
    for slots, in_hardware in (("fp32", True), (None, True), ("fp32", False)):
        what = f"three as one{'' if slots is None else ', a slot'}{'' if in_hardware else ', rounded by integers'}"
        yield _compilation(
            quantize_joined_kernel._amax_joined_kernel,
            f"amax of {what}",
            inputs | {"slots_ptr": slots, "maxima_ptr": "i32"},
            numbers | {"a_columns": "i32", "b_columns": "i32", "c_columns": "i32"},
            {"ROWS": finder.rows, "COLUMNS": finder.columns, "STAGES": quantize_launch.AMAX_STAGES},
            finder.warps,
        )
        output = "fp8e5" if in_hardware else "u8"
        yield _compilation(
            quantize_joined_kernel._quantize_joined_kernel,
            what,
            inputs
            | {"data_ptr": output, "transposed_ptr": output, "scale_inv_ptr": "fp32", "slots_ptr": slots}
            | {"maxima_ptr": "i32", "counts_ptr": None, "partials_ptr": "fp32"},
            numbers | {"columns": "i32", "a_width": "i32", "b_width": "i32", "c_width": "i32", "maxima": "i32"},
            {
                "E4M3": False,
                "HARDWARE_CAST": in_hardware,
                "RECORD": slots is not None,
                "MARGIN": 0,
                "POWER_OF_TWO": False,
                "ROWS": choice.rows,
                "COLUMNS": choice.columns,
                "TILES": choice.tiles,
                **quantize_launch.search_constants(finder),
            },
            choice.warps,
            minimum_capability=90 if in_hardware else 80,
        )


def _compilation(
    kernel: Any,
    label: str,
    pointers: dict[str, str | None],
    numbers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    minimum_capability: int = 80,
) -> Compilation:
    """A configuration with aligned pointers; a pointer of None is not there, which Triton treats as a constant."""
    there = {name: f"*{element}" for name, element in pointers.items() if element is not None}
    constants = {name: None for name, element in pointers.items() if element is None} | constants
    aligned = frozenset(there) | {name for name in numbers if name.endswith(("columns", "_width", "_stride"))}
    if kernel is quantize_kernel._transpose_kernel:
        aligned = frozenset(there)
    return Compilation(
        kernel,
        label,
        there | numbers | dict.fromkeys(constants, "constexpr"),
        constants,
        num_warps=warps,
        divisible_by_16=aligned,
        minimum_capability=minimum_capability,
    )


catalogue(Op("quantize", "casts to FP8 with their transposes, of activations too", prove, compilations))
