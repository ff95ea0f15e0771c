"""Where an optimizer test runs: the reference on the CPU, the kernels through the interpreter, a GPU. Oracles."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.optim import FusedAdagrad, FusedLAMB, FusedNovoGrad, FusedSGD


@pytest.fixture(
    params=[
        pytest.param("cpu", id="cpu"),
        pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def through_disk() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A state dict written to a file and read again, as it comes from there."""

    def travel(state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return loaded

    return travel


def sgd(state: dict[str, Any], w: Tensor, g: Tensor, o: dict[str, Any]) -> Tensor:
    """SGD as published, one tensor in float64."""
    if not o["wd_after_momentum"]:
        g = g + o["weight_decay"] * w
    q = g
    if o["momentum"]:
        first = "v" not in state
        state["v"] = g.clone() if first else o["momentum"] * state["v"] + (1 - o["dampening"]) * g
        q = g + o["momentum"] * state["v"] if o["nesterov"] else state["v"]
    if o["wd_after_momentum"]:
        q = q + o["weight_decay"] * w
    return w - o["lr"] * q


def adagrad(state: dict[str, Any], w: Tensor, g: Tensor, o: dict[str, Any]) -> Tensor:
    state["t"] = state.get("t", 0) + 1
    if not o["adagrad_w_mode"]:
        g = g + o["weight_decay"] * w
    state["h"] = state.get("h", torch.full_like(w, o["initial_accumulator_value"])) + g * g
    rate = o["lr"] / (1 + (state["t"] - 1) * o["lr_decay"])
    step = g / (state["h"].sqrt() + o["eps"])
    return w - rate * (step + o["weight_decay"] * w if o["adagrad_w_mode"] else step)


def lamb(state: dict[str, Any], w: Tensor, g: Tensor, o: dict[str, Any]) -> Tensor:
    state["t"] = state.get("t", 0) + 1
    beta1, beta2 = o["betas"]
    if not o["adam_w_mode"]:
        g = g + o["weight_decay"] * w
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1 if o["grad_averaging"] else 1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    c1, c2 = (1 - beta1 ** state["t"], 1 - beta2 ** state["t"]) if o["bias_correction"] else (1, 1)
    u = (state["m"] / c1) / ((state["v"] / c2).sqrt() + o["eps"])
    if o["adam_w_mode"]:
        u = u + o["weight_decay"] * w
    norms = w.square().sum().sqrt(), u.square().sum().sqrt()
    is_adaptive = (o["use_nvlamb"] or o["weight_decay"] != 0) and norms[0] != 0 and norms[1] != 0
    return w - o["lr"] * (norms[0] / norms[1] if is_adaptive else 1) * u


def novograd(state: dict[str, Any], w: Tensor, g: Tensor, o: dict[str, Any]) -> Tensor:
    state["t"] = state.get("t", 0) + 1
    beta1, beta2 = o["betas"]
    is_max = o["norm_type"] == math.inf
    if w.numel():
        n = float(g.abs().max()) if is_max else float(g.square().sum()) ** 0.5
        if "N" not in state:
            state["N"] = 0.0 if o["init_zero"] else n
        if is_max:
            state["N"] = beta2 * state["N"] + (1 - beta2) * n
        else:
            state["N"] = (beta2 * state["N"] ** 2 + (1 - beta2) * n**2) ** 0.5
    c1, c2 = (1 - beta1 ** state["t"], 1 - beta2 ** state["t"]) if o["bias_correction"] else (1, 1)
    d = state.get("N", 0.0) / c2**0.5 + o["eps"]
    beta3 = 1 - beta1 if o["grad_averaging"] else 1
    if o["reg_inside_moment"]:
        state["m"] = beta1 * state.get("m", 0) + beta3 * (g / d + o["weight_decay"] * w)
        return w - o["lr"] * state["m"] / c1
    state["m"] = beta1 * state.get("m", 0) + beta3 * g
    return w - o["lr"] * (state["m"] / c1 / d + o["weight_decay"] * w)


FORMULAS = {FusedSGD: sgd, FusedAdagrad: adagrad, FusedLAMB: lamb, FusedNovoGrad: novograd}


class Oracle:
    """The published formulas in float64, one tensor at a time, with the options of an optimizer's groups.

    `weights` are what each parameter should hold, on the parameters' devices. A step reads their gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        (self.formula,) = (formula for cls, formula in FORMULAS.items() if isinstance(optimizer, cls))
        self.weights: dict[Tensor, Tensor] = {}
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.norm = math.nan

    def step(self, scale: float = 1.0) -> None:
        """Step every parameter that has a gradient; gradients are `scale` times too large."""
        groups = self.optimizer.param_groups
        have = [p for group in groups for p in group["params"] if p.grad is not None]
        self.norm = sum(float(p.grad.double().square().sum()) for p in have) ** 0.5 / scale
        limit = groups[0]["max_grad_norm"]
        factor = 1.0 if limit is None else min(1.0, limit / (self.norm + 1e-6))
        for group in groups:
            options = {**group, "lr": float(group["lr"])}
            for p in group["params"]:
                w = self.weights.setdefault(p, p.detach().double())
                if p.grad is not None:
                    state = self.states.setdefault(p, {})
                    self.weights[p] = self.formula(state, w, p.grad.double() * (factor / scale), options)

    def check(self, rtol: float = 2e-5, atol: float = 2e-6) -> None:
        """Compare the masters, or the parameters where there are none."""
        for p, w in self.weights.items():
            ours = self.optimizer.state[p].get("master_param", p.detach())
            torch.testing.assert_close(ours.double(), w, rtol=rtol, atol=atol)


@pytest.fixture
def oracle() -> type[Oracle]:
    return Oracle


def _all_are(values: Tensor, value: float) -> bool:
    return all(bool((part == value).all()) for part in values.split(1 << 28))


@pytest.fixture
def all_are() -> Callable[[Tensor, float], bool]:
    """Whether every element is that, in pieces; not within an assertion, which would write the tensors out."""
    return _all_are
