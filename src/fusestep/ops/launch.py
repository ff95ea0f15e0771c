"""Launch a Triton kernel on the device of its tensors, at the least cost to the host.

Triton's own launch works out anew, every time, which compiled kernel the arguments need: about half of what a launch
costs the host. Here the compiled kernel is kept under all that it was specialised for, and called directly with
addresses, which also spares the launcher a question to the driver for each pointer.

- `launch(kernel, grid, device, *args, **options)` finds the compiled kernel from the arguments;
- `PreparedLaunch` fixes all but the addresses beforehand, for a caller that makes the same launch again and again;
  `PreparedLaunch.at` takes the addresses themselves from one that has them at hand.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusestep.language import triton

#: A function, what it is given between the stream and the arguments, and whether those come as one tuple.
_Route = tuple[Any, tuple[Any, ...], bool]

_compiled: dict[tuple[Any, ...], _Compiled] = {}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on `device`, whatever the current device is.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters come last.
        grid: programs along one to three axes; an axis of 0 launches nothing.
        device: of the tensors, with its index.
        args: the run-time arguments, in order: tensors, integers, floats, or None for a tensor that is not there.
        options: the constexpr parameters by name, num_warps and num_stages.
    """
    if 0 in grid:
        return None
    index = device.index if device.type == "cuda" else None
    if index is not None and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):  # Triton launches on the current device, not on its tensors' (triton#2441)
            return launch(kernel, grid, device, *args, **options)
    # The key is at least as fine as Triton's own specialisation: a pointer's type and its 16-byte alignment; of an
    # integer whether it is 1, divisible by 16, and wider than 32 bits; every constexpr and option.
    key: list[Any] = [kernel, device, *options.items()]
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            values.append(arg.data_ptr())
            key.append((arg.dtype, values[-1] & 15 == 0))
        else:
            values.append(arg)
            if type(arg) is int:
                key.append((arg == 1, arg & 15 == 0, arg.bit_length() >> 5))
            else:
                key.append(arg if arg is None else type(arg))
    found = _compiled.get(tuple(key))
    if found is None:
        found = _compile_and_launch(kernel, grid, args, options)
        if found is not None:
            _compiled[tuple(key)] = found
    else:
        found.launch((*grid, 1, 1)[:3], index, values)
    return None


class PreparedLaunch:
    """A launch of which all is fixed but the tensors' addresses: it costs the host about half of `launch`.

    Args:
        kernel: a `triton.jit` function with tensors first, then numbers, then constexprs.
        grid, device: as of `launch`.
        numbers: the integers and floats that follow the tensors.
        options: the constexpr parameters by name, num_warps and num_stages.

    Attributes:
        was_launched: whether it was before, so that its kernel is there; a capture can load none.
    """

    __slots__ = (
        "_aligned",
        "_grid",
        "_index",
        "_kernel",
        "_numbers",
        "_options",
        "_types",
        "_unaligned",
        "was_launched",
    )

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], device: torch.device, numbers: tuple[Any, ...], **options: Any
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, (*grid, 1, 1)[:3], numbers, options
        self._index = device.index if device.type == "cuda" else None
        self._aligned: _Compiled | None = None
        self._unaligned: dict[tuple[int, ...], _Compiled] = {}
        self._types: list[torch.dtype | None] | None = None
        self.was_launched = False

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on these tensors, whose dtypes are the same in every call; None for one that is not there.

        Raises: TypeError for other dtypes, or another that is not there, where that is looked at: at each compilation,
            and in every call through the interpreter. A kernel that was compiled for others would give wrong numbers.
        """
        index = self._index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(*tensors)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits & 15:
            key = tuple([address & 15 for address in addresses])
            found = self._unaligned.get(key)
            if found is None:
                found = self._first(tensors)
                if found is not None:
                    self._unaligned[key] = found
                return None
        else:
            found = self._aligned
            if found is None:
                self._aligned = self._first(tensors)
                return None
        found.launch(self._grid, index, addresses)
        return None

    def at(self, addresses: tuple[int, ...]) -> bool:
        """Launch at these addresses, if tensors there were launched on before, and say whether.

        Args:
            addresses: of tensors as a call takes them, all of them multiples of 16; 0 for one that is not there. The
                device of the launch is the current one.
        """
        found = self._aligned
        if found is None:
            return False
        found.launch(self._grid, self._index, addresses)
        return True

    def _first(self, tensors: tuple[Tensor | None, ...]) -> _Compiled | None:
        """Launch on tensors of other alignments than before."""
        types = [None if tensor is None else tensor.dtype for tensor in tensors]
        if self._types is None:
            self._types = types
        elif self._types != types:
            raise TypeError(f"a launch of {self._kernel.__name__} is prepared for {self._types}, not for {types}")
        args = (*tensors, *self._numbers)
        found = _compile_and_launch(self._kernel, self._grid, args, self._options, self._numbers)
        self.was_launched = True
        return found


class _Compiled:
    """A compiled kernel and the last arguments of its launches, which are the same in every one."""

    __slots__ = ("_kernel", "_last", "_route")

    def __init__(self, kernel: Any, last: tuple[Any, ...]) -> None:
        self._kernel, self._last = kernel, last
        self._route: _Route | None = None

    def launch(self, grid: tuple[int, ...], index: int | None, first: Sequence[Any]) -> None:
        """Launch on the current stream of the current device, which is `index`, on the first arguments and the last."""
        runtime = triton.knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler listens
            self._kernel[grid](*first, *self._last)
            return
        # What that does as well, without building for each launch what only hooks read.
        stream = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
        route = self._route
        if route is None:
            route = self._route = self._find_route(grid, stream, (*first, *self._last))
        function, between, is_nested = route
        if is_nested:
            function(*grid, stream, *between, (*first, *self._last))
        else:
            function(*grid, stream, *between, *first, *self._last)

    def _find_route(self, grid: tuple[int, ...], stream: int, args: tuple[Any, ...]) -> _Route:
        """Learn from Triton's launcher what it hands to its C function, to call that without the launcher's Python.

        Triton's versions hand over different things in between, and the arguments one by one or in a tuple. A kernel
        that needs memory of the launcher's own in each launch keeps the launcher.
        """
        kernel = self._kernel
        between = (kernel.function, kernel.packed_metadata, None, None, None)
        launcher = kernel.run
        usual = (launcher, between, False)
        scratch = [getattr(launcher, f"{kind}_scratch_size", 1) for kind in ("global", "profile")]
        if any(scratch) or not hasattr(launcher, "launch"):
            return usual
        handed: list[tuple[Any, ...]] = []
        # A copy listens in, since another thread may be launching.
        listening = copy.copy(launcher)
        listening.launch = lambda *given: handed.append(given)
        listening(*grid, stream, *between, *args)
        (given,) = handed
        if given[:4] != (*grid, stream):
            return usual
        if given[-1] == args:
            return launcher.launch, given[4:-1], True
        if given[len(given) - len(args) :] == args:
            return launcher.launch, given[4 : len(given) - len(args)], False
        return usual


def _compile_and_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], last: tuple[Any, ...] = ()
) -> _Compiled | None:
    """Launch through Triton; return what makes the same launch again, or None from the interpreter.

    `last` are those of the arguments, at their end, that are the same in every launch.
    """
    # Said outright, for the same numbers from every Triton: 3.10 changes its default, 3.9 warns of that.
    compiled = kernel[grid](*args, enable_fp_fusion=True, **options)
    if compiled is None:
        return None
    if any(parameter.is_constexpr for parameter in kernel.params[: len(args)]):
        raise TypeError(f"launch: a constexpr of {kernel.__name__} was passed by position; pass it by name.")
    parameters = kernel.signature.parameters
    constants = [options.get(name, parameters[name].default) for name in kernel.arg_names[len(args) :]]
    return _Compiled(compiled, (*last, *constants))
