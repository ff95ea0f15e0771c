"""Activations that other libraries write as several operations, and so as several kernels, each with a gradient.

Which function a module computes is found out by calling it, in float64 or, where it rounds to fp32 on its way, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, rows, takes
from fusestep.convert.twins import undisturbed
from fusestep.dispatch import Choice
from fusestep.ops.activation import activation, activation_reference

#: What our kernels know of plain activations, and σ, the gate of "glu".
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: lambda x, name=name: activation_reference(x, name) for name in ("gelu", "qgelu", "relu", "srelu", "silu")
} | {"sigmoid": torch.sigmoid}

#: One kernel in torch already, in whatever class it comes.
_ONE_KERNEL = ("relu", "silu", "sigmoid")


class FusedActivation(Kind):
    """An activation in one kernel, and its gradient too."""

    fused_activation: str

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())  # libraries name their input differently
        return activation(x, self.fused_activation)

    def implementation(self) -> Choice:
        """What a call gets on torch's default device, and why: an activation has no parameters to tell it."""
        device = torch.get_default_device()
        return dispatch.explain_choice("activation", device.type, device.index)


def recognised(act: Any) -> str | None:
    """The name of the function that a callable computes, or None if our kernels do not know it.

    Nothing but a pure function of one tensor is recognised: a module with parameters, buffers or children is not.
    """
    if isinstance(act, nn.Module):
        if any(True for _ in act.parameters()) or any(True for _ in act.buffers()) or any(True for _ in act.children()):
            return None
        act = act.forward
    if not callable(act):
        return None
    with undisturbed(torch.device("cpu")), torch.no_grad():
        x = torch.cat((torch.linspace(-9, 9, 61, device="cpu"), torch.randn(60, device="cpu") * 2)).double()
        try:
            y = act(x)
        except (TypeError, RuntimeError, NotImplementedError):  # not a function of one tensor
            return None
        if not isinstance(y, Tensor) or y.shape != x.shape or y.device != x.device:
            return None
        for name, function in _FUNCTIONS.items():
            if float((y.double() - function(x)).abs().max()) < 1e-6:
                return name
    return None


def _is_candidate(module: nn.Module) -> bool:
    """A module of another library that is named as activations are, and has nothing inside."""
    kind = type(module)
    if isinstance(module, FusedActivation) or kind.__module__.startswith(("torch.", "fusestep.")):
        return False
    name = kind.__name__.lower()
    is_named = name.endswith(("activation", "gelu", "gelutanh", "relu2", "squaredrelu")) or "gelu" in name
    return is_named and not module._parameters and not module._modules and not module._buffers


def _matches(module: nn.Module) -> bool | str:
    if not _is_candidate(module) or takes(module) != 1:
        return False
    found = recognised(module)
    if found is None:
        return "our kernels do not know its function"
    if found in _ONE_KERNEL or _wraps_one_kernel(module, found):
        return "it is one kernel in torch already"
    return True


def _wraps_one_kernel(module: nn.Module, name: str) -> bool:
    """Whether it computes what torch's own kernel does, bit for bit: then it most likely is that kernel."""
    if name != "gelu":
        return False
    with undisturbed(torch.device("cpu")), torch.no_grad():
        x = torch.randn(512, device="cpu")
        return torch.equal(module.forward(x), nn.functional.gelu(x, approximate="tanh"))


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:  # noqa: ARG001
    return rows(probe, 37)


PATTERNS = (
    Pattern(
        "one kernel each way",
        FusedActivation,
        _matches,
        _inputs,
        lambda module: {"fused_activation": recognised(module)},
    ),
)
