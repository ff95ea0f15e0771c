"""Telling the report what a name of a shim ran as."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.compat.report import served, told


def ran(name: str, ours: str, op: str, tensor: Tensor) -> None:
    """Note what a call of a name ran as. One look-up after the first; nothing under torch.compile.

    Args:
        name: as the script knows it, with its module.
        ours: what of fusestep serves it, with its module.
        op: the op behind it, as `fusestep doctor` calls it.
        tensor: what the call works on.
    """
    if torch.compiler.is_compiling():
        return
    key = (name, tensor.device, tensor.dtype)
    if key not in told:
        told.add(key)
        served(name, f"{ours}, {choice(op, tensor).implementation}")


def choice(op: str, tensor: Tensor) -> dispatch.Choice:
    """The implementation of an op for a tensor like this one, and why."""
    reason = "the kernel computes in fp32, not fp64" if tensor.dtype is torch.float64 else None
    return dispatch.explain_choice(op, tensor.device.type, tensor.device.index, reason)


def by_torch(name: str, what: str) -> None:
    """Note that a name is served by PyTorch's own operations, and announce it as the fallback that it is.

    Args:
        name: as the script knows it, with its module.
        what: the operations that serve it.
    Raises: StrictFallbackError with FUSESTEP_STRICT=1.
    """
    if torch.compiler.is_compiling():
        return
    served(name, f"{what}, torch")
    if not dispatch.asked_for_torch():
        dispatch.announce(name, f"fusestep has no kernel for {name} yet")


class Applied:
    """A function that scripts know as a torch.autograd.Function: they call `apply`, and look at `forward`'s arguments.

    Attributes:
        apply: the function. `forward` is the same with a first argument, ctx, which is not looked at.
    """

    apply: ClassVar[Callable[..., Tensor]]
    forward: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls) -> None:
        function = cls.apply

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG001
            return function(*args, **kwargs)

        own = inspect.signature(function)
        ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown: Any = forward
        # Megatron asks by it whether a norm takes memory_efficient.
        shown.__signature__ = own.replace(parameters=[ctx, *own.parameters.values()])
        cls.forward = staticmethod(forward)


class ServedModule(nn.Module):
    """A module of a shim. `fusestep.explain` counts it among ours, and the report has it once it was built or called.

    Attributes:
        serves: its name as the script knows it; served_by: what serves it; op: the op behind it.
    """

    serves: ClassVar[str]
    served_by: ClassVar[str]
    op: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        served(self.serves, self.served_by)

    def _ran(self, tensor: Tensor) -> None:
        ran(self.serves, self.served_by, self.op, tensor)

    def implementation(self) -> dispatch.Choice:
        """What a call gets on the device of the parameters, and why."""
        first = next(self.parameters(), None)
        return choice(self.op, torch.empty(0) if first is None else first)
