"""apex.optimizers: arguments, formulas in float64, states in Apex's layout both ways, and Apex's faults mended."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from apex import optimizers
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from torch import Tensor

from fusestep.errors import UserError

SHAPES = [(7, 13), (31,), (), (3, 1, 5)]

#: Some options of each that are not its own defaults.
CLASSES: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    FusedAdam: {"lr": 0.01, "weight_decay": 0.1},
    FusedLAMB: {"lr": 0.01},
    FusedMixedPrecisionLamb: {"lr": 0.01},
    FusedSGD: {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    FusedNovoGrad: {"lr": 0.01, "weight_decay": 0.1},
    FusedAdagrad: {"lr": 0.01, "weight_decay": 0.1},
}

each_class = pytest.mark.parametrize(("kind", "options"), CLASSES.items(), ids=[kind.__name__ for kind in CLASSES])


def parameters(dtype: torch.dtype = torch.float32, device: Any = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def give_gradients(params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def run(kind: Any, options: dict[str, Any], params: list[Any], steps: range) -> Any:
    optimizer = kind(params, **options)
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return optimizer


# Formulas, each in float64 and one tensor at a time


def adam(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], t: int) -> Tensor:
    b1, b2 = o["betas"]
    c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1.0, 1.0)
    if not o["adam_w_mode"]:
        g = g + o["weight_decay"] * p
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g * g
    u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + o["eps"])
    if o["adam_w_mode"]:
        u = u + o["weight_decay"] * p
    return p - o["lr"] * u


def lamb(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], t: int) -> Tensor:
    b1, b2 = o["betas"]
    c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1.0, 1.0)
    if not o["adam_w_mode"]:
        g = g + o["weight_decay"] * p
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1 if o["grad_averaging"] else 1.0) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g * g
    u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + o["eps"])
    if o["adam_w_mode"]:
        u = u + o["weight_decay"] * p
    ratio = 1.0
    if (o["use_nvlamb"] or o["weight_decay"]) and p.norm() > 0 and u.norm() > 0:
        ratio = float(p.norm() / u.norm())
    return p - o["lr"] * ratio * u


def sgd(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], t: int) -> Tensor:
    if not o["wd_after_momentum"]:
        g = g + o["weight_decay"] * p
    q = g
    if o["momentum"]:
        s["v"] = g if t == 1 else o["momentum"] * s["v"] + (1 - o["dampening"]) * g
        q = g + o["momentum"] * s["v"] if o["nesterov"] else s["v"]
    if o["wd_after_momentum"]:
        q = q + o["weight_decay"] * p
    return p - o["lr"] * q


def novograd(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], t: int) -> Tensor:
    b1, b2 = o["betas"]
    c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1.0, 1.0)
    b3 = 1 - b1 if o["grad_averaging"] else 1.0
    n = float(g.norm() if o["norm_type"] == 2 else g.abs().max())
    if t == 1 and not o["init_zero"]:
        s["n"] = n
    elif o["norm_type"] == 2:
        s["n"] = math.sqrt(b2 * s.get("n", 0.0) ** 2 + (1 - b2) * n * n)
    else:
        s["n"] = b2 * s.get("n", 0.0) + (1 - b2) * n
    d = s["n"] / math.sqrt(c2) + o["eps"]
    if o["reg_inside_moment"]:
        s["m"] = b1 * s.get("m", 0.0) + b3 * (g / d + o["weight_decay"] * p)
        return p - o["lr"] * s["m"] / c1
    s["m"] = b1 * s.get("m", 0.0) + b3 * g
    return p - o["lr"] * (s["m"] / c1 / d + o["weight_decay"] * p)


def adagrad(p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any], t: int) -> Tensor:
    if not o["adagrad_w_mode"]:
        g = g + o["weight_decay"] * p
    s["h"] = s.get("h", 0.0) + g * g
    u = g / (s["h"].sqrt() + o["eps"])
    if o["adagrad_w_mode"]:
        u = u + o["weight_decay"] * p
    return p - o["lr"] * u


ADAM = {"betas": (0.9, 0.999), "bias_correction": True, "weight_decay": 0.0, "eps": 1e-8}
LAMB = {**ADAM, "eps": 1e-6, "weight_decay": 0.01, "adam_w_mode": True, "grad_averaging": True, "use_nvlamb": False}
NOVO = {**ADAM, "grad_averaging": True, "norm_type": 2, "init_zero": False, "reg_inside_moment": False}
SGD = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "wd_after_momentum": False}


@pytest.mark.parametrize(
    ("kind", "formula", "defaults", "options"),
    [
        (FusedAdam, adam, {**ADAM, "adam_w_mode": True}, {"weight_decay": 0.3}),
        (FusedAdam, adam, {**ADAM, "adam_w_mode": True}, {"weight_decay": 0.3, "adam_w_mode": False}),
        (FusedAdam, adam, {**ADAM, "adam_w_mode": True}, {"bias_correction": False, "betas": (0.5, 0.8), "eps": 1e-2}),
        (FusedLAMB, lamb, LAMB, {}),
        (FusedLAMB, lamb, LAMB, {"weight_decay": 0.0}),
        (FusedLAMB, lamb, LAMB, {"weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False}),
        (FusedLAMB, lamb, LAMB, {"weight_decay": 0.3, "adam_w_mode": False, "bias_correction": False}),
        (FusedMixedPrecisionLamb, lamb, LAMB, {"weight_decay": 0.2}),
        (FusedSGD, sgd, SGD, {}),
        (FusedSGD, sgd, SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.3}),
        (FusedSGD, sgd, SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "wd_after_momentum": True}),
        (FusedNovoGrad, novograd, NOVO, {"weight_decay": 0.3}),
        (FusedNovoGrad, novograd, NOVO, {"reg_inside_moment": True, "weight_decay": 0.3, "init_zero": True}),
        (FusedNovoGrad, novograd, NOVO, {"norm_type": 0, "grad_averaging": False, "betas": (0.95, 0.5)}),
        (FusedAdagrad, adagrad, {"weight_decay": 0.0, "eps": 1e-10, "adagrad_w_mode": False}, {"weight_decay": 0.3}),
        (
            FusedAdagrad,
            adagrad,
            {"weight_decay": 0.0, "eps": 1e-10, "adagrad_w_mode": False},
            {"weight_decay": 0.3, "adagrad_w_mode": True},
        ),
    ],
)
def test_steps_follow_the_published_formula(
    kind: Any, formula: Callable[..., Tensor], defaults: dict[str, Any], options: dict[str, Any], device: torch.device
) -> None:
    params = parameters(device=device)
    wanted, states = [p.detach().double() for p in params], [{} for _ in params]
    with_clipping = "max_grad_norm" not in options and formula is lamb
    optimizer = kind(params, lr=0.05, **options)
    for t in range(1, 5):
        give_gradients(params, t)
        gradients = [p.grad.double() for p in params]
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        assert norm > 1.0  # so that LAMB clips
        for i, g in enumerate(gradients):
            g = g / norm if with_clipping else g
            wanted[i] = formula(wanted[i], g, states[i], {**defaults, "lr": 0.05, **options}, t)
        before = [p.grad.clone() for p in params]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))  # left as they were
    for p, w in zip(params, wanted, strict=True):
        torch.testing.assert_close(p.double(), w, rtol=3e-5, atol=3e-6)


def test_positional_arguments_are_in_apexs_order() -> None:
    p = parameters()
    adam_group = FusedAdam(p, 0.5, False, (0.1, 0.2), 1e-3, False, 0.7, False, False, False, True)
    assert adam_group.master_weights
    assert not adam_group.capturable
    assert adam_group.set_grad_none is False
    group = adam_group.param_groups[0]
    assert [group[k] for k in ("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay")] == [
        *(0.5, False, (0.1, 0.2), 1e-3, False, 0.7)
    ]
    group = FusedLAMB(p, 0.5, False, (0.1, 0.2), 1e-3, 0.7, False, False, False, False, 2.0, True).param_groups[0]
    names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "adam_w_mode", "grad_averaging", "max_grad_norm")
    assert [group[k] for k in names] == [0.5, False, (0.1, 0.2), 1e-3, 0.7, False, False, 2.0]
    assert group["use_nvlamb"]
    group = FusedSGD(p, 0.5, 0.1, 0.2, 0.3, False, True).param_groups[0]
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum")
    assert [group[k] for k in names] == [0.5, 0.1, 0.2, 0.3, False, True]
    group = FusedNovoGrad(p, 0.5, False, (0.1, 0.2), 1e-3, 0.7, False, True, False, 0, True).param_groups[0]
    names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "reg_inside_moment", "grad_averaging")
    assert [group[k] for k in names] == [0.5, False, (0.1, 0.2), 1e-3, 0.7, True, False]
    assert (group["norm_type"], group["init_zero"]) == (math.inf, True)
    group = FusedAdagrad(p, 0.5, 1e-3, 0.7, True, True).param_groups[0]
    assert [group[k] for k in ("lr", "eps", "weight_decay", "adagrad_w_mode")] == [0.5, 1e-3, 0.7, True]
    group = FusedMixedPrecisionLamb(p, 0.5, 7, False, (0.1, 0.2), 1e-3, 0.7).param_groups[0]
    assert [group[k] for k in ("lr", "bias_correction", "betas", "eps", "weight_decay")] == [
        *(0.5, False, (0.1, 0.2), 1e-3, 0.7)
    ]
    with pytest.raises(TypeError):
        FusedSGD(p)  # lr is required


def test_amsgrad_raises_as_in_apex() -> None:
    for kind in (FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad):
        with pytest.raises(RuntimeError, match=r"amsgrad=True.*use torch.optim.AdamW"):
            kind(parameters(), amsgrad=True)


GROUP_KEYS = {
    FusedAdam: {"lr", "bias_correction", "betas", "eps", "weight_decay", "step"},
    FusedLAMB: {"lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm", "step"},
    FusedSGD: {"lr", "momentum", "dampening", "weight_decay", "nesterov"},
    FusedNovoGrad: {
        *("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "norm_type", "init_zero"),
        *("step", "exp_avg_sq"),
    },
    FusedAdagrad: {"lr", "eps", "weight_decay"},
}
GROUP_KEYS[FusedMixedPrecisionLamb] = GROUP_KEYS[FusedLAMB]
STATE_KEYS = {
    FusedAdam: {"exp_avg", "exp_avg_sq"},
    FusedLAMB: {"exp_avg", "exp_avg_sq"},
    FusedMixedPrecisionLamb: {"exp_avg", "exp_avg_sq"},
    FusedSGD: {"momentum_buffer"},
    FusedNovoGrad: {"exp_avg"},
    FusedAdagrad: {"sum"},
}


@each_class
def test_state_dicts_have_apexs_layout(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = run(kind, options, params, range(3))
    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)  # leaves initial_lr in the groups
    saved = optimizer.state_dict()
    group = saved["param_groups"][0]
    assert set(group) == GROUP_KEYS[kind] | {"params", "initial_lr"}
    assert group["params"] == [0, 1, 2, 3]
    if "step" in group:
        assert int(group["step"]) == 3
        assert isinstance(group["step"], Tensor if kind is FusedMixedPrecisionLamb else int)
    assert set(saved["state"]) == {0, 1, 2, 3}
    for number, state in saved["state"].items():
        assert set(state) == STATE_KEYS[kind]
        assert all(value.shape == params[number].shape and value.dtype is torch.float32 for value in state.values())
    assert set(saved) == {"state", "param_groups", "step_counts"}


@each_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_equals_one_in_one_piece(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and kind is not FusedMixedPrecisionLamb:
        options = {**options, "master_weights": True}
    whole = parameters(dtype)
    parts = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    run(kind, options, whole, range(6))
    first = run(kind, options, parts, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = kind(parts, **options)
    second.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        give_gradients(parts, step)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert int(second.applied_steps) == 6


def _as_apex_would(kind: Any, optimizer: Any, params: list[Any]) -> dict[str, Any]:
    """What real Apex saves at this point, made from our internal state by hand."""
    group = {k: v for k, v in optimizer.param_groups[0].items() if k in GROUP_KEYS[kind]}
    group["params"] = list(range(len(params)))
    states = {}
    for number, p in enumerate(params):
        states[number] = {k: v.clone() for k, v in optimizer.state[p].items() if k in STATE_KEYS[kind]}
    if kind is FusedNovoGrad:
        norms = [optimizer.state[p]["exp_avg_norm"].item() for p in params]
        group["exp_avg_sq"] = [torch.tensor([]), torch.tensor(norms)]
    if "step" in GROUP_KEYS[kind]:
        group["step"] = 3
    if kind is FusedMixedPrecisionLamb:
        group["step"], group["lr"] = torch.tensor([3], dtype=torch.int32), torch.tensor(group["lr"])
    return {"state": states, "param_groups": [group]}


@each_class
def test_a_state_that_apex_saved_loads_and_goes_on(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    ours = run(kind, options, params, range(3))
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = kind(others, **options)
    loaded.load_state_dict(_as_apex_would(kind, ours, params))
    for step in (3, 4):
        for optimizer, own in ((ours, params), (loaded, others)):
            give_gradients(own, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert isinstance(loaded.param_groups[0]["lr"], float)


def test_moments_of_bf16_parameters_are_loaded_as_they_were_saved() -> None:
    """torch's own loading rounds them to the parameter's dtype."""
    params = parameters(torch.bfloat16)
    first = run(FusedAdam, {"master_weights": True}, params, range(3))
    second = FusedAdam(params, master_weights=True)
    second.load_state_dict(first.state_dict())
    for p in params:
        for key in ("exp_avg", "exp_avg_sq", "master_param"):
            assert second.state[p][key].dtype is torch.float32
            assert torch.equal(first.state[p][key], second.state[p][key])


def test_a_parameter_with_fewer_steps_than_its_group_keeps_its_own_count() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    for step in range(4):
        give_gradients(params, step)
        if step < 3:
            params[1].grad = None
        optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 4
    assert int(saved["state"][1]["step"]) == 1
    assert "step" not in saved["state"][0]
    others = FusedAdam(params)
    others.load_state_dict(saved)
    assert [int(others.state[p]["step"]) for p in params] == [4, 1, 4, 4]


def test_every_group_has_a_step_and_its_options_also_without_parameters() -> None:
    empty: list[Any] = []
    for kind in (FusedAdam, FusedLAMB, FusedNovoGrad):
        params = parameters()
        optimizer = kind([{"params": empty}, {"params": params}])
        assert optimizer.state_dict()["param_groups"][0]["step"] == 0
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        groups = optimizer.state_dict()["param_groups"]
        assert [group["step"] for group in groups] == [2, 2]
        assert set(groups[0]) | {"exp_avg_sq"} == set(groups[1]) | {"exp_avg_sq"}


def test_capturable_saves_tensors_as_apex_does() -> None:
    params = parameters()
    optimizer = run(FusedAdam, {"capturable": True, "lr": 0.25}, params, range(2))
    group = optimizer.state_dict()["param_groups"][0]
    assert torch.equal(group["step"], torch.tensor([2], dtype=torch.int32))
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert group["lr"].shape == ()


def test_novograds_norms_belong_to_parameters_not_to_positions() -> None:
    """By dtype, among those that have been stepped; a parameter without a gradient takes no place."""
    params = [torch.nn.Parameter(torch.randn(5).to(d)) for d in (torch.float16, torch.float32) * 3]
    optimizer = FusedNovoGrad(params, lr=0.1, master_weights=True)
    give_gradients(params, 0)
    params[2].grad = params[1].grad = None
    optimizer.step()
    saved = optimizer.state_dict()
    halves, floats, bfloats = saved["param_groups"][0]["exp_avg_sq"]
    norms = [None if p.grad is None else p.grad.float().norm() for p in params]
    torch.testing.assert_close(halves, torch.stack([norms[0], norms[4]]))
    torch.testing.assert_close(floats, torch.stack([norms[3], norms[5]]))
    assert bfloats.numel() == 0
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    second = FusedNovoGrad(others, lr=0.1, master_weights=True)
    second.load_state_dict(saved)
    for own in (params, others):
        give_gradients(own, 1)  # all of them now
    optimizer.step()
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    all_fp32 = FusedNovoGrad([torch.nn.Parameter(torch.randn(5)) for _ in params])
    with pytest.raises(UserError, match="2 norms in exp_avg_sq and 0 parameters"):
        all_fp32.load_state_dict(saved)


def test_a_state_from_before_the_first_step_loads() -> None:
    for kind, options in CLASSES.items():
        params, others = parameters(), parameters()
        fresh = kind(params, **options)
        second = kind(others, **options)
        second.load_state_dict(fresh.state_dict())
        give_gradients(others, 0)
        second.step()


def test_a_group_that_is_added_later_is_stepped() -> None:
    first, late = parameters(), parameters()
    optimizer = run(FusedAdam, {"lr": 0.1}, first, range(2))
    optimizer.add_param_group({"params": late})
    before = [p.detach().clone() for p in late]
    give_gradients(late, 5)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, late, strict=True))


def test_weights_that_are_loaded_after_the_optimizer_was_made_stay() -> None:
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-6, master_weights=True)
    for p in params:
        p.data.fill_(3.0)
    give_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in params)


def test_bf16_parameters_of_sgd_are_stepped_and_a_new_one_resets_no_other() -> None:
    params = parameters(torch.bfloat16)
    with pytest.warns(UserWarning, match="master_weights=True") as caught:
        optimizer = FusedSGD(params, 0.5, momentum=0.9)
    assert caught[0].filename == __file__
    late = params[-1]
    before = [p.detach().clone() for p in params]
    give_gradients(params, 0)
    late.grad = None
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before[:-1], params[:-1], strict=True))
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in params[:-1]]
    give_gradients(params, 1)
    optimizer.step()
    for p, old in zip(params[:-1], buffers, strict=True):
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.9 * old + p.grad.float())


@each_class
def test_zero_grad_does_what_set_grad_none_says(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = kind(params, **options)
    for given, none in ((None, kind is not FusedSGD), (True, True), (False, False)):
        give_gradients(params, 0)
        if given is None:
            optimizer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=given)
        assert all((p.grad is None) if none else bool((p.grad == 0).all()) for p in params)
    if kind is not FusedMixedPrecisionLamb:
        optimizer = kind(params, **options, set_grad_none=False)
        give_gradients(params, 0)
        optimizer.zero_grad()
        assert all(bool((p.grad == 0).all()) for p in params)


def test_max_grad_norm_0_clips_nothing() -> None:
    params, others = parameters(), []
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    run(FusedLAMB, {"lr": 0.1, "max_grad_norm": 0}, params, range(2))
    run(FusedLAMB, {"lr": 0.1, "max_grad_norm": 1e30}, others, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_mixed_precision_lamb_counts_from_its_first_step() -> None:
    params = parameters()
    wanted, states = [p.detach().double() for p in params], [{} for _ in params]
    optimizer = FusedMixedPrecisionLamb(params, 0.05, 5, max_grad_norm=0)
    give_gradients(params, 0)
    optimizer.step()
    for i, p in enumerate(params):
        wanted[i] = lamb(wanted[i], p.grad.double(), states[i], {**LAMB, "lr": 0.05}, 6)
        torch.testing.assert_close(p.double(), wanted[i], rtol=3e-5, atol=3e-6)
    assert int(optimizer.state_dict()["param_groups"][0]["step"]) == 6


def test_the_old_arguments_of_step_raise_as_in_apex() -> None:
    optimizer = FusedAdam(parameters())
    for old in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match=r"FusedAdam\.step takes no grads"):
            optimizer.step(**{old: 1.0})
    with pytest.raises(TypeError, match="has no argument 'momentum'"):
        optimizer.step(momentum=1.0)


def test_a_closure_runs_once_with_gradients_enabled() -> None:
    for kind, options in CLASSES.items():
        params = parameters()
        calls = []

        def closure(params: list[Any] = params, calls: list[bool] = calls) -> float:
            calls.append(torch.is_grad_enabled())
            give_gradients(params, 0)
            return 1.5

        assert kind(params, **options).step(closure) == 1.5
        assert calls == [True]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(
            (kind, way)
            for kind in (FusedAdam, FusedMixedPrecisionLamb)
            for way in ("scaler.step", "unscaled", "argument")
        ),
        *((FusedSGD, way) for way in ("scaler.step", "unscaled")),
    ],
)
def test_a_scaler_unscales_and_skips_without_counting(kind: Any, way: str) -> None:
    options = CLASSES[kind]
    params = parameters()
    plain = [torch.nn.Parameter(p.detach().clone()) for p in params]
    run(kind, options, plain, range(2))

    optimizer = kind(params, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in (0, None, 1):  # None: an overflow between them
        give_gradients(params, step or 0)
        for p in params:
            p.grad *= scaler.get_scale() if step is not None else math.inf
        scaler.scale(torch.ones(()))
        if way == "unscaled":
            scaler.unscale_(optimizer)
        if way == "argument":
            optimizer.step(grad_scaler=scaler)
        else:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    for a, b in zip(params, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    if kind is not FusedSGD:
        assert int(optimizer.state_dict()["param_groups"][0]["step"]) == 2


def test_step_hooks_run_once_also_beside_an_optimizer_of_fusesteps() -> None:
    from fusestep import optim

    optim.FusedAdam(parameters())  # torch wraps the step of its class now
    params = parameters()
    optimizer = FusedAdam(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    give_gradients(params, 0)
    optimizer.step()
    assert calls == ["before", "after"]


@each_class
def test_optimizers_survive_pickling_and_copying(kind: Any, options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = run(kind, options, params, range(2))
    optimizer.set_grad_none = False
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        own = twin.param_groups[0]["params"]
        give_gradients(own, 2)
        twin.step()
        twin.zero_grad()
        assert all(bool((p.grad == 0).all()) for p in own)
        assert twin.state_dict()["param_groups"][0].keys() == optimizer.state_dict()["param_groups"][0].keys()


@pytest.mark.gpu
@each_class
def test_a_step_with_a_scaler_waits_for_nothing(
    kind: Any, options: dict[str, Any], no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    params = parameters(device="cuda")
    optimizer = run(kind, options, params, range(2))
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    give_gradients(params, 2)
    scaler.step(optimizer)
    scaler.update()
    give_gradients(params, 3)
    with no_waiting():
        scaler.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.gpu
def test_a_captured_step_follows_the_learning_rate_as_capturable_promises() -> None:
    params = parameters(torch.bfloat16, "cuda")
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = run(FusedAdam, {"lr": 0.1, "capturable": True, "master_weights": True}, params, range(1))
    eager = run(FusedAdam, {"lr": 0.1, "capturable": True, "master_weights": True}, twins, range(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for lr in (0.1, 0.01, 0.001):
        optimizer.param_groups[0]["lr"].fill_(lr)
        eager.param_groups[0]["lr"].fill_(lr)
        graph.replay()
        eager.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))
    group = optimizer.state_dict()["param_groups"][0]
    assert torch.equal(group["step"], torch.tensor([4], dtype=torch.int32, device="cuda"))


class OwnAdam(FusedAdam):
    """As libraries derive from Apex's: it steps through amp_C and counts in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(p))
            lists = [
                [p.grad for p in group["params"]],
                list(group["params"]),
                *([self.state[p][key] for p in group["params"]] for key in ("exp_avg", "exp_avg_sq")),
            ]
            multi_tensor_applier(
                *(self.multi_tensor_adam, self._dummy_overflow_buf, lists, group["lr"], *group["betas"]),
                *(group["eps"], group["step"], self.adam_w_mode, 1, group["weight_decay"]),
            )


def test_a_class_derived_from_it_may_step_through_amp_c_and_its_state_goes_on_here() -> None:
    options = {"lr": 0.1, "weight_decay": 0.2}
    whole = parameters()
    parts = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    run(FusedAdam, options, whole, range(4))
    saved = run(OwnAdam, options, parts, range(2)).state_dict()
    assert saved["param_groups"][0]["step"] == 2
    second = FusedAdam(parts, **options)
    second.load_state_dict(saved)
    for step in (2, 3):
        give_gradients(parts, step)
        second.step()
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_sparse_gradients_raise_before_anything_is_stepped() -> None:
    dense, table = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(4, 2))
    optimizer = FusedAdam([{"params": [dense]}, {"params": [table]}])
    dense.grad = torch.ones(3)
    table.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense, before)


def test_schedulers_of_torch_drive_them() -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizers.__all__ == sorted(optimizers.__all__)


counting = pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad])


@counting
def test_groups_show_how_many_steps_were_taken(kind: Any) -> None:
    """BERT's schedule reads it: without a count its learning rate would stay where the warm-up begins."""
    params = parameters()
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}], **CLASSES[kind])
    assert "step" not in optimizer.param_groups[0]
    for step in range(1, 4):
        give_gradients(params, step)
        optimizer.step()
        assert [int(group["step"]) for group in optimizer.param_groups] == [step, step]
    if kind is FusedAdam:
        assert type(optimizer.param_groups[0]["step"]) is int  # nothing on a device decides whether it counts
    optimizer.zero_grad()
    optimizer.step()  # without gradients
    later = torch.nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [later]})
    give_gradients([*params, later], 4)
    optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [4, 4, 1]
    for same in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [int(group["step"]) for group in same.param_groups] == [4, 4, 1]
        give_gradients([p for group in same.param_groups for p in group["params"]], 5)
        same.step()
        assert [int(group["step"]) for group in same.param_groups] == [5, 5, 2]
    other = kind([{"params": params[:2]}, {"params": params[2:]}, {"params": [later]}], **CLASSES[kind])
    other.load_state_dict(optimizer.state_dict())
    assert [group["step"] for group in other.param_groups] == [4, 4, 1]


@counting
def test_a_step_that_a_script_puts_into_a_group_is_counted_from(kind: Any) -> None:
    params = parameters()
    optimizer = run(kind, CLASSES[kind], params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["step"] = torch.tensor([40]) if kind is FusedMixedPrecisionLamb else 40
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = kind(others, **CLASSES[kind])
    other.load_state_dict(saved)
    optimizer.param_groups[0]["step"] = 40
    for members, one in ((params, optimizer), (others, other)):
        give_gradients(members, 7)
        one.step()
        assert int(one.param_groups[0]["step"]) == int(one.state_dict()["param_groups"][0]["step"]) == 41
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_a_step_that_a_scaler_skips_is_not_shown() -> None:
    params = parameters()
    optimizer = run(FusedAdam, {}, params, range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, wanted in ((1.0, 3), (math.inf, 3), (1.0, 4)):
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in params) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert int(optimizer.param_groups[0]["step"]) == wanted
