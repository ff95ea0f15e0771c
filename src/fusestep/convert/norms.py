"""LayerNorm and RMSNorm: torch's own, and what other libraries call so.

A norm of another library is known by its name and its single weight. Which of the forms below it has is found out by
trial, its eps included if no attribute tells it, so that a library may rename what it likes:

    scaled         w · (x / rms(x)), of the dtype that w · x has (Llama, Qwen, Mistral)
    rounded        the same, of x's dtype (OLMo)
    T5's           the same, but fp32 unless the weight has 16 bits, and then of its dtype
    zero-centred   (1 + w) · (x / rms(x)), of x's dtype (Gemma)
    centred        torch's layer_norm with an eps that is written in the code

Ours compute in fp32 and round once, to the dtype that the old norm gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.convert.agreement import HALVES, Call, Probe, Trial, usual_trials
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, is_a, takes
from fusestep.dispatch import Choice
from fusestep.nn import FusedLayerNorm, FusedRMSNorm
from fusestep.ops.norm import explain, normalise

_NAMED_NORM = re.compile(r"(rms|layer)_?norm", re.IGNORECASE)
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")

#: What eps is taken to be where no attribute tells it; trials on small rows tell these apart.
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)


class FusedNorm(Kind):
    """What the kinds share: the norm of x, or of x + residual, over the last dimension."""

    _centred = False
    weight: Tensor
    fused_eps: str | float  # its attribute's name, or itself

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())  # libraries name their input differently
        y: Tensor = self._norm(x, None)
        return y

    def with_residual(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)"""
        y, total = self._norm(x, residual)
        return y, total

    def _norm(self, x: Tensor, residual: Tensor | None) -> Any:
        eps = self.fused_eps
        if isinstance(eps, str):
            eps = getattr(self, eps)
        weight = self._scale()
        total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        dtype = self._dtype(total)
        bias = getattr(self, "bias", None) if self._centred else None
        who = type(self).__name__
        return normalise(self._centred, who, x, weight.shape, weight, bias, eps, residual, False, dtype)

    def _scale(self) -> Tensor:
        """What the normalised row is multiplied by."""
        return self.weight

    def _dtype(self, x: torch.dtype) -> torch.dtype | None:
        """The output's dtype; None: torch's own rule."""
        raise NotImplementedError

    def implementation(self) -> Choice:
        """What a call gets on the device of the weight, and why."""
        return explain(self._centred, self.weight, None)


class ScaledRMSNorm(FusedNorm):
    """w · (x / rms(x)), of the dtype of the product."""

    def _dtype(self, x: torch.dtype) -> torch.dtype:
        return torch.promote_types(x, self.weight.dtype)


class RoundedRMSNorm(FusedNorm):
    """w · (x / rms(x)), of x's dtype."""

    def _dtype(self, x: torch.dtype) -> torch.dtype:
        return x


class T5RMSNorm(FusedNorm):
    """w · (x / rms(x)), in fp32 unless the weight has 16 bits."""

    def _dtype(self, x: torch.dtype) -> torch.dtype:
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            return self.weight.dtype
        return torch.promote_types(torch.promote_types(x, torch.float32), self.weight.dtype)


class ZeroCentredRMSNorm(FusedNorm):
    """(1 + w) · x / rms(x), of x's dtype."""

    def _scale(self) -> Tensor:
        return 1.0 + self.weight.float()  # bf16 holds a small w, but not 1 and a small w

    def _dtype(self, x: torch.dtype) -> torch.dtype:
        return x


class CentredNorm(FusedNorm):
    """(x − mean(x)) / √var(x) · w + b, as torch.nn.functional.layer_norm."""

    _centred = True

    def _dtype(self, x: torch.dtype) -> None:  # noqa: ARG002
        return None


def _torch_norm(kind: type[nn.Module], fused: type[nn.Module]) -> Pattern:
    def matches(module: nn.Module) -> bool | str:
        if not isinstance(module, kind) or is_a(module, fused):
            return False
        if type(module).forward is not kind.forward:
            return f"{type(module).__name__} overrides the forward of nn.{kind.__name__}"
        missing = [
            name for name in ("weight", "bias") if name in module.__dict__ or name + "_orig" in module._parameters
        ]
        return f"its {missing[0]} is computed from others" if missing else True

    def inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
        return _norm_inputs(tuple(module.normalized_shape), module.eps, probe)  # type: ignore[arg-type]

    return Pattern(
        f"{kind.__name__}, one kernel each way",
        fused,
        matches,
        inputs,
        lambda module: {"memory_efficient": False},  # noqa: ARG005
    )


def _norm_inputs(shape: tuple[int, ...], eps: object, probe: Probe) -> Sequence[Call]:
    """Rows of usual size, away from zero; rows so small that eps counts; and rows that are large."""
    small = (eps if isinstance(eps, float) and eps > 0 else 1e-6) ** 0.5
    sizes = (1.0, small, 30.0)
    return [(((probe.randn(3, 11, *shape) + (0.3 if size == 1.0 else 0.0)) * size,), {}) for size in sizes]


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in _EPS_NAMES if isinstance(module.__dict__.get(name), float)), None)


def _named_norm(kind: type[FusedNorm], what: str, eps: float | None) -> Pattern:
    """A norm of another library: with an attribute that holds eps, or with this eps."""

    def matches(module: nn.Module) -> bool | str:
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm, FusedNorm)) or not _NAMED_NORM.search(type(module).__name__):
            return False
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        allowed = {"weight", "bias"} if kind._centred else {"weight"}
        if next(module.children(), None) is not None or (_eps_name(module) is None) is (eps is None):
            return False
        if "weight" not in parameters or not parameters.keys() <= allowed or module._buffers or takes(module) != 1:
            return False
        return parameters["weight"].dim() == 1

    def inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
        name = _eps_name(module)
        return _norm_inputs(tuple(module.weight.shape), eps if name is None else getattr(module, name), probe)  # type: ignore[arg-type]

    def trials(dtype: torch.dtype, device: torch.device) -> list[Trial]:
        """With weights of both widths: forms differ in what they give of them, and the model may be cast later."""
        usual = usual_trials(dtype, device)
        other = torch.float32 if dtype in HALVES else torch.bfloat16
        casts = [
            Trial(f"{one.name or 'plain'}, weights in {other}", one.dtype, one.region, narrow=True, weights=other)
            for one in usual
            if not one.other_mode
        ]
        return usual if dtype is torch.float64 else usual + casts

    return Pattern(what, kind, matches, inputs, lambda module: {"fused_eps": _eps_name(module) or eps}, trials=trials)


_FORMS = (
    (ScaledRMSNorm, "RMSNorm, one kernel each way"),
    (RoundedRMSNorm, "RMSNorm, one kernel each way"),
    (T5RMSNorm, "T5's RMSNorm, one kernel each way"),
    (ZeroCentredRMSNorm, "RMSNorm with 1 + weight, one kernel each way"),
    (CentredNorm, "LayerNorm, one kernel each way"),
)

PATTERNS = (
    _torch_norm(nn.LayerNorm, FusedLayerNorm),
    _torch_norm(nn.RMSNorm, FusedRMSNorm),
    *(_named_norm(kind, what, eps) for eps in (None, *_USUAL_EPS) for kind, what in _FORMS),
)
