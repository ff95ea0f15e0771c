"""Every launch of the norms' kernels, for the checks that compile each for GPUs that are not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusestep.ops import norm_backward, norm_backward_chunks, norm_forward
from fusestep.ops.registry import Compilation

#: One width for each launch that can be chosen, each narrower than its block, so that padding is masked.
COMPILED_WIDTHS = (*(3 * 2**power // 4 for power in range(2, 16)), 1, 2, 40000)
#: Wider rows in a block of their own launch, forward alone.
FORWARD_WIDTHS = (*COMPILED_WIDTHS, 2000, 4080, 8176)

#: Multiprocessors of the GPU that the launches are chosen for; they decide the number of programs alone.
MULTIPROCESSORS = 132


def compilations(centred: bool) -> Iterator[Compilation]:
    """Every launch that LayerNorm (`centred`) or RMSNorm can make."""
    yield from _forward(centred)
    yield from _backward(centred)


def _forward(centred: bool) -> Iterator[Compilation]:
    """Every kernel at every launch choice; for the wider blocks also fp32 rows with a residual."""
    for width in FORWARD_WIDTHS:
        variants = [("bf16", False), ("fp32", True)]
        for element, has_residual in variants if width > 512 else variants[:1]:
            itemsize = (2 if element == "bf16" else 4) * (1 + has_residual)
            choice = norm_forward.forward_launch(width, MULTIPROCESSORS, centred, itemsize)
            statistics = (2 if element == "bf16" else 3) if centred else 1
            constexprs: dict[str, Any] = {"WIDTH": width, "BLOCK": choice.block, "STAGES": choice.stages}
            constexprs["STATISTICS"] = statistics
            kernel = norm_forward._norm_forward_wide_kernel
            if not choice.wide:
                kernel = norm_forward._norm_forward_kernel
                constexprs |= {"ROWS": choice.rows, "COLUMNS": choice.columns}
            pointers = {
                "x_ptr": element,
                "residual_ptr": element if has_residual else None,
                "weight_ptr": element,
                "bias_ptr": element if centred else None,
                "y_ptr": element,
                "sum_ptr": element if has_residual else None,
                "statistics_ptr": "fp32",
            }
            numbers = {"rows": "i32", "x_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
            label = f"forward {width}, {element}{', residual' if has_residual else ''}"
            yield _aligned(kernel, label, pointers, numbers, constexprs, choice.warps)


def _backward(centred: bool) -> Iterator[Compilation]:
    """Every kernel at every launch choice: the fewest and the most bytes a column, what lies between, and few rows."""
    for width in COMPILED_WIDTHS:
        variants = [("bf16", False, False, False), ("bf16", False, False, True)]
        if width > 512:
            variants.append(("fp32", True, True, False))
        if 512 < width <= 16384:
            variants.append(("bf16", True, False, False))
        for element, has_dsum, from_output, is_lone in variants:
            itemsize = 2 if element == "bf16" else 4
            # The gradient of a branch in 16 bits, beside that of a residual stream in fp32.
            has_copy = has_dsum and element == "fp32"
            choice = norm_backward.backward_launch(
                *(width, (3 if has_dsum else 2) * itemsize, itemsize, MULTIPROCESSORS, centred),
                2 if has_copy and from_output else 0,
            )
            statistics = (2 if element == "bf16" else 3) if centred else 1
            common: dict[str, Any] = {"WIDTH": width, "STATISTICS": statistics, "FROM_OUTPUT": from_output}
            constexprs = common | {
                "BLOCK": choice.block,
                "ROWS": choice.rows,
                "STAGES": choice.stages,
                "WEIGHT_GRADIENT": True,
                "BIAS_GRADIENT": centred,
            }
            read: dict[str, str | None] = {
                "dy_ptr": element,
                "x_ptr": element,
                "weight_ptr": element,
                "bias_ptr": element if centred and from_output else None,
                "statistics_ptr": "fp32",
            }
            written: dict[str, str | None] = {
                "dsum_ptr": element if has_dsum else None,
                "dx_ptr": element,
                "copy_ptr": "bf16" if has_copy else None,
                "first_ptr": element if is_lone else "fp32",
                "second_ptr": element if is_lone and centred else None,
            }
            numbers = {"rows": "i32", "dy_stride": "i32", "x_stride": "i32"}
            more = {", dsum": has_dsum, ", from the output": from_output, ", few rows": is_lone}
            label = f"{width}, {element}{''.join(text for text, holds in more.items() if holds)}"
            if choice.chunks:
                del constexprs["ROWS"], constexprs["STAGES"]
                constexprs |= {"CHUNKS": -(-width // choice.block), "AHEAD": choice.ahead}
                constexprs["PREFETCH"] = not choice.ahead
                yield _aligned(
                    norm_backward_chunks.norm_backward_chunks_kernel,
                    f"backward in chunks {label}",
                    read | written,
                    numbers,
                    constexprs,
                    choice.warps,
                )
            elif choice.block >= width:
                yield _aligned(
                    norm_backward._norm_backward_kernel,
                    f"backward {label}",
                    read | written,
                    numbers,
                    constexprs,
                    choice.warps,
                )
            else:
                means: dict[str, str | None] = {"means_ptr": "fp32"}
                yield _aligned(
                    norm_backward._norm_backward_wide_kernel,
                    f"wide backward {label}",
                    read | written | means,
                    numbers,
                    constexprs,
                    choice.warps,
                )
                if not is_lone:
                    yield _aligned(
                        norm_backward._row_means_kernel,
                        f"row means {label}",
                        read | means,
                        numbers,
                        common | {"BLOCK": norm_backward.MEANS_BLOCK},
                        4,
                    )
    for width in (768, 3072):
        yield _aligned(
            norm_backward._sum_partials_kernel,
            f"sum of partials {width}",
            {"partials_ptr": "fp32", "first_ptr": "bf16", "second_ptr": "bf16" if centred else None},
            {"programs": "i32"},
            {"WIDTH": width, "ROWS": norm_backward.SUM_ROWS, "COLUMNS": norm_backward.sum_columns(width)},
            4,
        )


def _aligned(
    kernel: Any,
    label: str,
    pointers: dict[str, str | None],
    numbers: dict[str, str],
    constexprs: dict[str, Any],
    warps: int,
) -> Compilation:
    """A configuration with aligned pointers; a pointer of None is not there, which Triton treats as a constant."""
    there = {name: f"*{element}" for name, element in pointers.items() if element is not None}
    constants = {name: None for name, element in pointers.items() if element is None} | constexprs
    signature = there | numbers | dict.fromkeys(constants, "constexpr")
    strides = {name for name in numbers if name.endswith("stride")}
    return Compilation(kernel, label, signature, constants, warps, divisible_by_16=frozenset(there) | strides)
