"""Launch a Triton kernel on the device of its tensors, at the least cost to the host.

Triton's own launch works out anew, every time, which compiled kernel the arguments need: about half of what a launch
costs the host. Here the compiled kernel is kept under all that it was specialised for, and called directly with
addresses, which also spares the launcher a question to the driver for each pointer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on `device`, whatever the current device is.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters come last.
        grid: programs along one to three axes; an axis of 0 launches nothing.
        args: the run-time arguments, in order: tensors, integers, floats, or None for a tensor that is not there.
        options: the constexpr parameters by name, num_warps and num_stages.
    """
    if 0 in grid:
        return
    if device.type != "cuda":  # the interpreter
        kernel[grid](*args, **options)
    elif device.index is None or device.index == torch.cuda.current_device():
        _launch_on_current_device(kernel, grid, args, options)
    else:  # Triton launches on the current device, not on its tensors' (triton#2441)
        with torch.cuda.device(device):
            _launch_on_current_device(kernel, grid, args, options)


def _launch_on_current_device(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    # The key is at least as fine as Triton's own specialisation: a pointer's type and its 16-byte alignment; of an
    # integer whether it is 1, divisible by 16, and wider than 32 bits; every constexpr and option.
    key: list[Any] = [kernel, torch.cuda.current_device(), *options.items()]
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            key.append(arg.dtype)
            key.append(address & 15 == 0)
            values.append(address)
        else:
            if type(arg) is int:
                key.append((arg == 1, arg & 15 == 0, arg.bit_length() >> 5))
            else:
                key.append(arg if arg is None else type(arg))
            values.append(arg)
    found = _compiled.get(tuple(key))
    if found is not None:
        compiled, constants = found
        compiled[grid if len(grid) == 3 else (*grid, 1, 1)[:3]](*values, *constants)
        return
    # Said outright, for the same numbers from every Triton: 3.10 changes its default, 3.9 warns of that.
    compiled = kernel[grid](*args, enable_fp_fusion=True, **options)
    if compiled is not None:  # the interpreter gives no kernel
        _compiled[tuple(key)] = (compiled, _constants(kernel, len(args), options))


def _constants(kernel: Any, arguments: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of the constexpr parameters, which a compiled kernel takes after its run-time arguments."""
    if any(parameter.is_constexpr for parameter in kernel.params[:arguments]):
        raise TypeError(f"launch: a constexpr of {kernel.__name__} was passed by position; pass it by name.")
    parameters = kernel.signature.parameters
    return tuple(options.get(name, parameters[name].default) for name in kernel.arg_names[arguments:])
