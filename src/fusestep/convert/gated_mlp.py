"""Gated MLPs, down(act(gate(x)) · up(x)): activation and product in one kernel, their gradients in another.

The linear layers stay the modules that they are, whatever they are: FP8, low-rank adapters, hooks. The activation is
computed by ours, so its module must be a known function without hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.convert.activations import recognised
from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, Stage, has_hooks, rows, takes
from fusestep.dispatch import Choice
from fusestep.ops.activation import activation
from fusestep.ops.gated import gated_activation

#: The gated activation that is made of each function of the gate.
_GATED_BY = {"gelu": "geglu", "qgelu": "qgeglu", "relu": "reglu", "srelu": "sreglu", "silu": "swiglu", "sigmoid": "glu"}

_ACTIVATION_NAMES = ("act_fn", "act", "activation_fn", "activation")


@dataclass(frozen=True)
class Names:
    """How a library names the parts of a gated MLP.

    Attributes:
        up: None where one layer gives gate and value side by side.
    """

    gate: str
    up: str | None
    down: str
    dropout: str | None = None

    def children(self) -> set[str]:
        return {name for name in (self.gate, self.up, self.down, self.dropout) if name is not None}


#: Llama and most that came after; T5; Llama's first code; Phi-3 and GLM.
_LIBRARIES = (
    Names("gate_proj", "up_proj", "down_proj"),
    Names("wi_0", "wi_1", "wo", "dropout"),
    Names("w1", "w3", "w2"),
    Names("gate_up_proj", None, "down_proj"),
)


class FusedGatedMLP(Kind):
    """down(act(gate(x)) · up(x))"""

    fused_names: Names
    fused_activation: str
    fused_activation_name: str | None
    fused_known: Any  # what that attribute held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = self.fused_names
        if self.fused_activation_name is not None:
            act = getattr(self, self.fused_activation_name)
            # Another activation than the one that was known, or someone who wants to see it.
            if act is not self.fused_known or (isinstance(act, nn.Module) and has_hooks(act)):
                return super().forward(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        if names.up is None:
            hidden = activation(getattr(self, names.gate)(x), self.fused_activation)
        else:
            gate, up = getattr(self, names.gate)(x), getattr(self, names.up)(x)
            if gate.dtype is not up.dtype:
                return super().forward(*args, **kwargs)
            hidden = gated_activation(gate, up, self.fused_activation)
        down = getattr(self, names.down)
        if names.dropout is not None:
            hidden = _in_dtype_of(down, getattr(self, names.dropout)(hidden))
        return down(hidden)

    def implementation(self) -> Choice:
        """What the activation runs as on the device of the parameters, and why."""
        first = next(self.parameters(), None)
        device = torch.get_default_device() if first is None else first.device
        op = "activation" if self.fused_names.up is None else "gated"
        return dispatch.explain_choice(op, device.type, device.index)


def _in_dtype_of(linear: nn.Module, x: Tensor) -> Tensor:
    """x in the dtype of a layer's weight, as T5 has it, which keeps its last layer in fp32; int8 weights take any."""
    weight = getattr(linear, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype is not x.dtype and weight.dtype is not torch.int8:
        return x.to(weight.dtype)
    return x


def _names_of(module: nn.Module) -> Names | None:
    children = module._modules.keys()
    for names in _LIBRARIES:
        if names.children() <= children <= names.children() | set(_ACTIVATION_NAMES):
            return names
    return None


def _activation_of(module: nn.Module) -> tuple[str | None, Any]:
    """The attribute that holds the activation, and it; SiLU where none does, as in Llama's first code.

    A method of the class is code as well: the trial tells whether it is SiLU.
    """
    for name in _ACTIVATION_NAMES:
        act = module.__dict__.get(name, module._modules.get(name))
        if callable(act):
            return name, act
    return None, nn.functional.silu


def _matches(module: nn.Module) -> bool | str:
    names = _names_of(module)
    if names is None or isinstance(module, FusedGatedMLP) or module._parameters or module._buffers:
        return False
    if takes(module) != 1:
        return "its forward takes more than one argument"
    attribute, act = _activation_of(module)
    if recognised(act) is None:
        return (
            f"our kernels do not know its activation, {type(act).__name__ if attribute else 'which no attribute names'}"
        )
    if isinstance(act, nn.Module) and has_hooks(act):
        return f"hooks on {attribute} want to be called"
    return True


def _attributes(module: nn.Module) -> dict[str, Any]:
    attribute, act = _activation_of(module)
    name = _GATED_BY[recognised(act) or ""]
    return {
        "fused_names": _names_of(module),
        "fused_activation": name,
        "fused_activation_name": attribute,
        "fused_known": act,
    }


def _inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    names = _names_of(module)
    assert names is not None
    return rows(probe, _input_width(getattr(module, names.gate)))


def _input_width(linear: nn.Module) -> int:
    """The features that a layer takes, which may be an adapter around the real one."""
    width = getattr(linear, "in_features", None)
    if isinstance(width, int):
        return width
    return int(next(p for p in linear.parameters() if p.dim() == 2).shape[-1])


def _uses(module: nn.Module) -> Sequence[nn.Module]:
    _, act = _activation_of(module)
    return (act,) if isinstance(act, nn.Module) else ()


def _without_dropout(module: nn.Module) -> None:
    """The module's own dropout stays; but of another dtype, as under autocast, it draws another mask."""
    names = _names_of(module)
    dropout = None if names is None or names.dropout is None else getattr(module, names.dropout)
    if isinstance(dropout, nn.Dropout):
        dropout.p = 0.0


PATTERNS = (
    Pattern(
        "activation and gating, one kernel each way",
        FusedGatedMLP,
        _matches,
        _inputs,
        _attributes,
        Stage.WHOLE,
        _uses,
        stripped=_without_dropout,
    ),
)
