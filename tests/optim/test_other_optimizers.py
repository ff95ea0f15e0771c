"""FusedSGD, FusedAdagrad, FusedLAMB, FusedNovoGrad against float64 oracles (conftest.py), in every implementation."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import fp8
from fusestep.errors import UserError
from fusestep.language import tl
from fusestep.nn import Linear
from fusestep.ops import adagrad as adagrad_op
from fusestep.ops import gradient_norm as norm_op
from fusestep.ops import lamb_kernel, novograd_kernel
from fusestep.ops import sgd as sgd_op
from fusestep.optim import FusedAdagrad, FusedLAMB, FusedNovoGrad, FusedSGD, accumulate_in_fp32

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FUSED = [FusedSGD, FusedAdagrad, FusedLAMB, FusedNovoGrad]

#: One set of options for each class, of which none is neutral.
OPTIONS: dict[type[Any], dict[str, Any]] = {
    FusedSGD: {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    FusedAdagrad: {"lr": 0.05, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.4, "eps": 1e-6},
    FusedLAMB: {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "max_grad_norm": None},
    FusedNovoGrad: {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
}

CASES: list[tuple[type[Any], dict[str, Any]]] = [
    (FusedSGD, {"momentum": 0.0}),
    (FusedSGD, {}),
    (FusedSGD, {"dampening": 0.0}),
    (FusedSGD, {"dampening": 0.0, "nesterov": True}),
    (FusedSGD, {"dampening": 0.0, "nesterov": True, "wd_after_momentum": True}),
    (FusedSGD, {"wd_after_momentum": True, "max_grad_norm": 0.7}),
    (FusedAdagrad, {}),
    (FusedAdagrad, {"adagrad_w_mode": True, "max_grad_norm": 0.7}),
    (FusedAdagrad, {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-3}),
    (FusedLAMB, {}),
    (FusedLAMB, {"weight_decay": 0.0}),
    (FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True, "max_grad_norm": 0.7}),
    (FusedLAMB, {"adam_w_mode": False, "grad_averaging": False}),
    (FusedLAMB, {"bias_correction": False, "eps": 1e-3, "max_grad_norm": 100.0}),
    (FusedLAMB, {"betas": (0.0, 0.0)}),
    (FusedNovoGrad, {}),
    (FusedNovoGrad, {"reg_inside_moment": True, "max_grad_norm": 0.7}),
    (FusedNovoGrad, {"reg_inside_moment": True, "grad_averaging": False, "bias_correction": False}),
    (FusedNovoGrad, {"grad_averaging": False, "init_zero": True}),
    (FusedNovoGrad, {"norm_type": math.inf}),
    (FusedNovoGrad, {"norm_type": math.inf, "init_zero": True, "reg_inside_moment": True}),
    (FusedNovoGrad, {"betas": (0.0, 0.0), "eps": 1e-3}),
]
SHAPES = [(3, 5), (), (0, 4), (1023,), (33, 31), (1024,), (2, 1050)]


def parameters(place: torch.device, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [nn.Parameter(torch.randn(shape).to(place, dtype)) for shape in shapes]


def give_gradients(params: Sequence[Any], scale: float = 1.0) -> None:
    for number, p in enumerate(params):
        # Each of another size, so that a norm taken for another's shows.
        gradient = torch.randn(p.shape, dtype=torch.complex64 if p.is_complex() else None) * (scale * (1 + number))
        p.grad = gradient.to(p.device, p.dtype)


def name_of(case: Any) -> str | None:
    if isinstance(case, str):
        return None
    return case.__name__ if isinstance(case, type) else ",".join(f"{k}={v}" for k, v in case.items()) or "usual"


@pytest.mark.parametrize(("cls", "more"), CASES, ids=name_of)
def test_steps_follow_the_published_formula(
    device: torch.device, oracle: Any, cls: type[Any], more: dict[str, Any]
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    ours = [p for i, shape in enumerate(SHAPES) for p in parameters(device, [shape], dtypes[i % 3])]
    optimizer = cls(ours, master_weights=True, **{**OPTIONS[cls], **more})
    exact = oracle(optimizer)
    for absent in ((), (0, 3), ()):
        give_gradients(ours)
        for i in absent:
            ours[i].grad = None
        before = [None if p.grad is None else p.grad.clone() for p in ours]
        exact.step()
        optimizer.step()
        if optimizer.param_groups[0]["max_grad_norm"] is not None:
            assert float(optimizer.last_grad_norm) == pytest.approx(exact.norm, rel=1e-6)
        for p, g in zip(ours, before, strict=True):
            assert g is None or torch.equal(p.grad, g), "gradients are only read"
    exact.check()
    assert int(optimizer.applied_steps) == 3
    for p in ours:
        master = optimizer.state[p].get("master_param")
        assert (master is not None) == (p.dtype != torch.float32)
        if master is not None:  # the interpreter cuts off where a device rounds
            torch.testing.assert_close(
                p.detach().float(), master, rtol=2**-7 if p.dtype == torch.bfloat16 else 2**-10, atol=1e-6
            )


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
def test_groups_of_all_options_follow_the_published_formula_together(
    place: torch.device, oracle: Any, cls: type[Any], max_grad_norm: float | None
) -> None:
    """One launch for all groups of a dtype. Few elements, since the interpreter takes tens of milliseconds a chunk."""
    groups = [
        {
            "params": [*parameters(place, [(3, 5)]), *parameters(place, [(6,)], torch.bfloat16)],
            **options,
            "max_grad_norm": max_grad_norm,
        }
        for its, options in CASES
        if its is cls
    ]
    groups[1]["params"] += [*parameters(place, [(1030,), (0, 4)]), *parameters(place, [()], torch.float16)]
    optimizer = cls(groups, master_weights=True, **{**OPTIONS[cls], "max_grad_norm": max_grad_norm})
    exact = oracle(optimizer)
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    for absent in ((), (0, 5)):
        give_gradients(ours)
        for i in absent:
            ours[i].grad = None
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("more", [{"momentum": 0.0}, {}, {"dampening": 0.0, "nesterov": True}], ids=name_of)
def test_sgd_equals_torchs(device: torch.device, more: dict[str, Any]) -> None:
    check_against_torch(device, FusedSGD, torch.optim.SGD, more)


@pytest.mark.parametrize("more", [{}, {"lr_decay": 0.0}], ids=name_of)
def test_adagrad_equals_torchs(device: torch.device, more: dict[str, Any]) -> None:
    check_against_torch(device, FusedAdagrad, torch.optim.Adagrad, more)


def check_against_torch(place: torch.device, cls: type[Any], theirs: type[Any], more: dict[str, Any]) -> None:
    dtypes = [torch.float32, torch.float64, torch.complex64, torch.complex128]
    ours = [p for dtype in dtypes for p in parameters(place, [(5, 3), (4,)], dtype)]
    wide = [torch.complex128 if p.is_complex() else torch.float64 for p in ours]
    exact = [nn.Parameter(p.detach().cpu().to(dtype)) for p, dtype in zip(ours, wide, strict=True)]
    options = {**OPTIONS[cls], **more}
    optimizer, oracle = cls(ours, **options), theirs(exact, foreach=False, **options)
    for _ in range(3):
        give_gradients(ours)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.cpu().to(q.dtype)
        optimizer.step()
        oracle.step()
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.detach().cpu().to(q.dtype), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", FUSED)
def test_float64_and_complex_parameters_step_in_their_own_dtype(cls: type[Any]) -> None:
    real = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
    pairs = nn.Parameter(torch.view_as_complex(torch.randn(6, 2, dtype=torch.float64)))
    same = nn.Parameter(torch.view_as_real(pairs.detach()).clone())
    optimizers = [cls([p], **OPTIONS[cls]) for p in (real, pairs, same)]
    for _ in range(2):
        give_gradients([real, same])
        pairs.grad = torch.view_as_complex(same.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(pairs.detach()), same.detach())
    states = [value for value in optimizers[0].state[real].values() if value.dim()]
    assert all(value.dtype == torch.float64 for value in states)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slice": lambda x: nn.functional.pad(x, (2, 1, 1, 3))[..., 1:-3, 2:-1],
    "odd address": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
}


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize(
    "of_parameter", ["slice"] if INTERPRETED else ["contiguous", "channels last", "slice", "odd address"]
)
def test_elements_pair_by_logical_index(place: torch.device, oracle: Any, cls: type[Any], of_parameter: str) -> None:
    values = torch.randn(5, 7, 3, 2)
    ours = [nn.Parameter(LAYOUTS[of_parameter](values.clone().to(place))) for _ in LAYOUTS]
    optimizer = cls(ours, **OPTIONS[cls])
    exact = oracle(optimizer)
    for _ in range(1 if INTERPRETED else 2):
        for p, layout in zip(ours, LAYOUTS.values(), strict=True):
            p.grad = layout(torch.randn(values.shape).to(place))
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
def test_without_a_state_too_neighbours_of_a_slice_are_untouched(
    place: torch.device, oracle: Any, cls: type[Any]
) -> None:
    base = torch.full((40, 50), math.nan, device=place)
    inside = base[3:20, 7:43:2]
    inside.copy_(torch.randn(17, 18))
    p = nn.Parameter(inside)
    outside = base.isnan()
    optimizer = cls([p], **{**OPTIONS[cls], **({"momentum": 0.0} if cls is FusedSGD else {})})
    exact = oracle(optimizer)
    give_gradients([p])
    exact.step()
    optimizer.step()
    exact.check()
    assert torch.equal(base.isnan(), outside)


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_empty_parameters_and_groups_change_nothing(
    device: torch.device, oracle: Any, cls: type[Any], position: int
) -> None:
    full = parameters(device, [(7,), (1300,)])
    ours = [*full[:position], nn.Parameter(torch.zeros(0, 4, device=device)), *full[position:]]
    optimizer = cls([{"params": []}, {"params": ours}, {"params": []}], **{**OPTIONS[cls], "max_grad_norm": 0.6})
    exact = oracle(optimizer)
    for _ in range(2):
        give_gradients(ours)
        exact.step()
        optimizer.step()
    exact.check()
    assert all(group["weight_decay"] == 0.1 for group in optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("cls", FUSED)
def test_empty_parameters_alone_step(device: torch.device, cls: type[Any]) -> None:
    p = nn.Parameter(torch.zeros(0, 4, device=device))
    p.grad = torch.zeros_like(p)
    optimizer = cls([p], max_grad_norm=1.0)
    optimizer.step()
    assert int(optimizer.applied_steps) == 1
    assert float(optimizer.last_grad_norm) == 0.0


@pytest.mark.parametrize("cls", FUSED)
def test_group_added_later_is_stepped_with_its_own_options(device: torch.device, oracle: Any, cls: type[Any]) -> None:
    ours = [*parameters(device, [(5,), (7,)]), *parameters(device, [(1030,)], torch.bfloat16)]
    optimizer = cls(ours[:1], master_weights=True, **OPTIONS[cls])
    exact = oracle(optimizer)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": ours[1:], "lr": 0.2, "weight_decay": 0.0})
        give_gradients(ours)
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
def test_moved_parameters_and_state_are_followed(device: torch.device, oracle: Any, cls: type[Any]) -> None:
    ours = parameters(device, [(5,), (40, 30)])
    optimizer = cls(ours, **OPTIONS[cls])
    exact = oracle(optimizer)
    for number in range(4):
        give_gradients(ours)
        if number == 1:
            ours[0].data = ours[0].data.clone()
        if number == 2:
            ours[1].data = ours[1].data.t().contiguous().t()
        if number == 3:
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.clone()
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("kind", ["tensor"] if INTERPRETED else ["number", "tensor", "capturable"])
def test_learning_rates_are_followed(place: torch.device, oracle: Any, cls: type[Any], kind: str) -> None:
    ours = parameters(place, [(5,), (70,)])
    lr: Any = torch.tensor(0.05, device=place) if kind == "tensor" else 0.05
    optimizer = cls(ours, capturable=kind == "capturable", **{**OPTIONS[cls], "lr": lr})
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == (kind != "number")
    exact = oracle(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=3)
    for _ in range(4):
        give_gradients(ours)
        exact.step()
        optimizer.step()
        schedule.step()
    exact.check()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


# --- clipping, skipping, loss scaling


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("value", [math.nan] if INTERPRETED else [math.inf, math.nan])
def test_gradients_that_are_not_finite_skip_the_step(place: torch.device, cls: type[Any], value: float) -> None:
    ours = [*parameters(place, [(5,), (530,)]), *parameters(place, [(7,)], torch.bfloat16)]
    optimizer = cls(ours, master_weights=True, **{**OPTIONS[cls], "max_grad_norm": 1.0})
    give_gradients(ours)
    optimizer.step()
    before = [t.clone() for p in ours for t in (p.detach(), *optimizer.state[p].values())]
    give_gradients(ours)
    ours[1].grad[529] = value
    optimizer.step()
    after = [t for p in ours for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not math.isfinite(float(optimizer.last_grad_norm))
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (1, 1)
    give_gradients(ours)
    optimizer.step()
    assert all(p.isfinite().all() for p in ours)
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)


@pytest.mark.parametrize("cls", FUSED)
def test_a_first_step_that_is_skipped_leaves_the_first_step_to_come(
    place: torch.device, oracle: Any, cls: type[Any]
) -> None:
    ours = parameters(place, [(5,), (70,)])
    optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": math.inf})
    give_gradients(ours)
    ours[0].grad[2] = math.nan
    optimizer.step()
    exact = oracle(optimizer)
    for _ in range(2):
        give_gradients(ours)
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0])
def test_loss_scaling_changes_nothing_and_an_overflow_skips(
    device: torch.device, oracle: Any, cls: type[Any], by_hand: bool, max_grad_norm: float | None
) -> None:
    ours = parameters(device, [(6, 5), (1030,)])
    optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": max_grad_norm})
    exact = oracle(optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    for number in range(3):
        optimizer.zero_grad()
        factors = [torch.randn(p.shape).to(device) for p in ours]
        loss = sum(((p * f).sum() for p, f in zip(ours, factors, strict=True)), torch.zeros((), device=device))
        if number == 1:
            loss = loss * math.inf
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        if number != 1:
            exact.step(scale)
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    exact.check()
    assert scaler.get_scale() == 2.0**9
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)


def test_lamb_clips_over_all_groups_and_refuses_different_limits(device: torch.device) -> None:
    ours = parameters(device, [(1,), (1,)])
    ours[0].grad, ours[1].grad = (torch.full((1,), x, device=device) for x in (3.0, 4.0))
    optimizer = FusedLAMB([{"params": ours[:1]}, {"params": ours[1:]}], betas=(0.0, 0.0))
    optimizer.step()
    assert float(optimizer.last_grad_norm) == 5.0
    assert [float(optimizer.state[p]["exp_avg"]) for p in ours] == pytest.approx([0.6, 0.8], rel=1e-6)
    with pytest.raises(UserError, match=r"FusedLAMB: max_grad_norm is 2\.0 in group 2 and 1\.0 in group 0"):
        optimizer.add_param_group({"params": parameters(device, [(3,)]), "max_grad_norm": 2.0})
    with pytest.raises(UserError, match="max_grad_norm is 0; pass a number above 0, or None"):
        FusedLAMB(ours, max_grad_norm=0)


# --- what is particular to one of them


@pytest.mark.parametrize("size", [1e-22, 3e20] if INTERPRETED else [1e-22, 1e-12, 1e15, 3e20])
def test_trust_ratios_hold_for_weights_and_updates_of_any_size(place: torch.device, oracle: Any, size: float) -> None:
    """Squares of these leave the range of fp32."""
    ours = [nn.Parameter((torch.randn(1500) * size).to(place)), *parameters(place, [(1500,)])]
    optimizer = FusedLAMB(
        ours, lr=0.05, weight_decay=0.0, use_nvlamb=True, max_grad_norm=None, eps=1.0, betas=(0.0, 0.0)
    )
    exact = oracle(optimizer)
    ours[0].grad = torch.randn(1500).to(place)
    # An update of that size too, by gradients far below eps; the second moment of such small ones is 0.
    ours[1].grad = (torch.randn(1500) * (size if size < 1 else 1e-3)).to(place)
    exact.step()
    optimizer.step()
    for p in ours:
        scale = max(size, 1.0) if p is ours[1] else size
        torch.testing.assert_close(p.detach().double() / scale, exact.weights[p] / scale, rtol=2e-5, atol=1e-6)


def test_trust_ratios_are_1_where_a_norm_is_0(place: torch.device, oracle: Any) -> None:
    ours = [nn.Parameter(torch.zeros(1030, device=place)), *parameters(place, [(5,), (6,)])]
    optimizer = FusedLAMB(ours, lr=0.05, weight_decay=0.125, adam_w_mode=False, max_grad_norm=None)
    exact = oracle(optimizer)
    give_gradients(ours)
    ours[1].grad = -0.125 * ours[1].detach()  # which the penalty takes to 0
    exact.step()
    optimizer.step()
    exact.check()


@pytest.mark.interpreter
def test_lamb_takes_more_chunks_than_are_combined_at_once(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb_kernel, "REDUCE", tl.constexpr(2))
    ours = parameters(torch.device("cpu"), [(4 * 1024 + 5,), (9,)])
    optimizer = FusedLAMB(ours, **OPTIONS[FusedLAMB])
    exact = oracle(optimizer)
    give_gradients(ours)
    exact.step()
    optimizer.step()
    exact.check()


@pytest.mark.parametrize("programs", [3] if INTERPRETED else [1, 2, 3, 7, 50])
@pytest.mark.parametrize("norm_type", [2] if INTERPRETED else [2, math.inf])
def test_novograds_norms_do_not_depend_on_how_programs_share_the_tensors(
    place: torch.device, oracle: Any, programs: int, norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(novograd_kernel, "norm_programs", lambda table: min(programs, max(1, table.chunks)))
    ours = parameters(place, [(5,), (0,), (2050,), (1024,), (7,), (1025,)])
    optimizer = FusedNovoGrad(ours, lr=0.05, betas=(0.8, 0.95), norm_type=norm_type)
    exact = oracle(optimizer)
    for absent in ((), (2,)):
        give_gradients(ours)
        for i in absent:
            ours[i].grad = None
        exact.step()
        optimizer.step()
    exact.check()
    for p in ours:
        if p.numel():
            assert float(optimizer.state[p]["exp_avg_norm"]) == pytest.approx(exact.states[p]["N"], rel=1e-6)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_novograd_normalises_gradients_of_any_size(place: torch.device, oracle: Any, size: float) -> None:
    ours = parameters(place, [(1500,)])
    optimizer = FusedNovoGrad(ours, lr=0.05, eps=0.0, reg_inside_moment=True)
    exact = oracle(optimizer)
    for _ in range(2):
        give_gradients(ours, size)
        exact.step()
        optimizer.step()
    exact.check()


def test_novograds_norms_follow_their_parameter_whoever_has_gradients(place: torch.device, oracle: Any) -> None:
    ours = parameters(place, [(5,), (6,), (8, 9)])
    optimizer = FusedNovoGrad(ours, **OPTIONS[FusedNovoGrad])
    exact = oracle(optimizer)
    for absent in ((2,), (0,), (0, 1), ()):
        give_gradients(ours)
        for i in absent:
            ours[i].grad = None
        exact.step()
        optimizer.step()
    exact.check()


def test_a_parameter_that_joins_late_has_a_first_momentum_of_its_own(place: torch.device, oracle: Any) -> None:
    ours = [*parameters(place, [(5,), (70,)]), *parameters(place, [(6,)], torch.bfloat16)]
    optimizer = FusedSGD(ours, master_weights=True, **OPTIONS[FusedSGD])
    exact = oracle(optimizer)
    for absent in ((2,), (1, 2), (), ()):
        give_gradients(ours)
        for i in absent:
            ours[i].grad = None
        exact.step()
        optimizer.step()
    exact.check()


def test_momentum_that_is_switched_on_later_starts_with_the_gradient(place: torch.device, oracle: Any) -> None:
    ours = parameters(place, [(5,), (70,)])
    optimizer = FusedSGD(ours, **{**OPTIONS[FusedSGD], "momentum": 0.0})
    exact = oracle(optimizer)
    for momentum in (0.0, 0.8, 0.8, 0.0):
        optimizer.param_groups[0]["momentum"] = momentum
        give_gradients(ours)
        exact.step()
        optimizer.step()
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
def test_bf16_parameters_without_masters_move_and_warn(device: torch.device, oracle: Any, cls: type[Any]) -> None:
    ours = parameters(device, [(1030,)], torch.bfloat16)
    with pytest.warns(UserWarning, match="master_weights=True"):
        optimizer = cls(ours, **{**OPTIONS[cls], "lr": 0.5})
    exact = oracle(optimizer)
    give_gradients(ours)
    exact.step()
    optimizer.step()
    exact.check(rtol=2**-7, atol=2**-7)


# --- gradients, closures, refusals


@pytest.mark.parametrize("cls", FUSED)
def test_main_grad_is_what_is_stepped(device: torch.device, cls: type[Any]) -> None:
    ours, wide = (parameters(device, [(90,)], dtype)[0] for dtype in (torch.bfloat16, torch.float32))
    wide.data.copy_(ours.data)
    handle = accumulate_in_fp32([ours])
    optimizers = [cls([p], master_weights=True, **OPTIONS[cls]) for p in (ours, wide)]
    total = torch.zeros(90, device=device)
    for _ in range(3):
        factor = torch.randn(90).to(device, torch.bfloat16)
        (ours * factor).sum().backward()
        total += factor.float()
    wide.grad = total
    for optimizer in optimizers:
        optimizer.step()
    handle.remove()
    assert torch.equal(optimizers[0].state[ours]["master_param"], wide.detach())
    optimizers[0].zero_grad()
    assert ours.main_grad is None


@pytest.mark.parametrize("cls", FUSED)
def test_closure_runs_once_first_and_with_gradients_enabled(device: torch.device, oracle: Any, cls: type[Any]) -> None:
    (p,) = parameters(device, [(3,)])
    p.grad = torch.full_like(p, 1e6)
    optimizer = cls([p], **OPTIONS[cls])
    exact = oracle(optimizer)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * torch.arange(3.0, device=device)).sum()
        loss.backward()
        exact.step()
        return loss.item()

    before = float((p.detach().cpu() * torch.arange(3.0)).sum())
    assert optimizer.step(closure) == pytest.approx(before, rel=1e-5)
    assert calls == [True]
    exact.check()


@pytest.mark.parametrize("cls", FUSED)
def test_sparse_gradients_are_refused_before_anything_moves(cls: type[Any]) -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    (dense,) = parameters(torch.device("cpu"), [(4,)])
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1])).sum().backward()
    before = dense.detach().clone()
    optimizer = cls([dense, embedding.weight])
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}\.step: the gradient of parameter 1 is sparse"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (FusedSGD, {"lr": -1.0}, "FusedSGD: lr is -1.0"),
        (FusedSGD, {"momentum": -0.5}, "FusedSGD: momentum is -0.5"),
        (FusedSGD, {"nesterov": True}, "nesterov takes a momentum above 0 and no dampening"),
        (FusedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "no dampening"),
        (FusedAdagrad, {"lr_decay": math.nan}, "FusedAdagrad: lr_decay is nan"),
        (FusedAdagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value is -1"),
        (FusedAdagrad, {"weight_decay": math.inf}, "weight_decay is inf"),
        (FusedLAMB, {"betas": (0.9, 1.0)}, "FusedLAMB: betas is"),
        (FusedLAMB, {"eps": -1e-6}, "eps is -1e-06"),
        (FusedNovoGrad, {"norm_type": 1}, "norm_type is 1; pass 2, or math.inf"),
        (FusedNovoGrad, {"betas": 0.9}, "FusedNovoGrad: betas is 0.9"),
    ],
    ids=name_of,
)
def test_options_out_of_range_are_one_sentence(cls: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cls(parameters(torch.device("cpu"), [(3,)]), **options)


# --- FP8


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("lives_in_fp8", [False, True])
def test_fp8_modules_multiply_by_the_weights_after_the_step(
    device: torch.device, cls: type[Any], lives_in_fp8: bool
) -> None:
    with fp8.fp8_model_init(enabled=lives_in_fp8):
        layer = Linear(32, 48, device=device)
    optimizer = cls(layer.parameters(), master_weights=True, **{**OPTIONS[cls], "max_grad_norm": math.inf})
    x = torch.randn(16, 32).to(device)
    for number in range(3):
        with fp8.fp8_autocast(recipe=fp8.Float8CurrentScaling()):
            loss = layer(x).square().mean() * (math.nan if number == 1 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)
    weight = optimizer.state[layer.weight]["master_param"] if lives_in_fp8 else layer.weight.detach()
    fresh = Linear(32, 48, device=device)
    with torch.no_grad():
        fresh.weight.copy_(weight)
        fresh.bias.copy_(layer.bias)
    with fp8.fp8_autocast(recipe=fp8.Float8CurrentScaling()):
        assert torch.equal(layer(x), fresh(x))


# --- launches


@pytest.mark.interpreter
@pytest.mark.parametrize(("cls", "launches"), [(FusedSGD, 1), (FusedAdagrad, 1), (FusedLAMB, 2), (FusedNovoGrad, 2)])
@pytest.mark.parametrize("max_grad_norm", [1.0])
def test_launches_do_not_grow_with_the_number_of_parameters(
    cls: type[Any], launches: int, max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for module in (sgd_op, adagrad_op, lamb_kernel, novograd_kernel, norm_op):
        true_launch = module.launch  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "launch", lambda *a, of=true_launch, **k: made.append(a[0]) or of(*a, **k))
    ours = parameters(torch.device("cpu"), [(3, 4)] * 5)
    optimizer = cls(
        [{"params": ours[:2]}, {"params": ours[2:], "lr": 0.3}], **{**OPTIONS[cls], "max_grad_norm": max_grad_norm}
    )
    give_gradients(ours)
    optimizer.step()
    assert len(made) == launches + (max_grad_norm is not None)


@pytest.mark.interpreter
@pytest.mark.parametrize("cls", FUSED)
def test_the_same_step_gives_the_same_bits(cls: type[Any]) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        ours = parameters(torch.device("cpu"), [(1030,), (7,)])
        optimizer = cls(ours, **{**OPTIONS[cls], "max_grad_norm": 0.5})
        give_gradients(ours)
        optimizer.step()
        found.append([p.detach().clone() for p in ours])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- states


def stepped(optimizer: Any, params: Sequence[Any], steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        give_gradients(params)
        optimizer.step()


def copies_of(params: Sequence[Any]) -> list[Any]:
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("way", ["state dict", "pickle", "deepcopy"])
def test_resuming_is_bitwise_the_uninterrupted_run(
    device: torch.device, cls: type[Any], way: str, tmp_path: Any
) -> None:
    ours = [
        *parameters(device, [(5,), (30, 40)]),
        *parameters(device, [(9, 7)], torch.bfloat16),
        *parameters(device, [(4,)]),
    ]
    options = {**OPTIONS[cls], "master_weights": True, "max_grad_norm": 5.0}
    optimizer = cls(ours, **options)
    stepped(optimizer, ours[:-1], 3, seed=1)
    if way == "state dict":
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        others = copies_of(ours)
        other = cls(others, **options)
        other.load_state_dict(saved)
        for key, value in saved["state"].items():
            for name, tensor in value.items():
                again = other.state_dict()["state"][key][name]
                assert again.dtype == tensor.dtype
                assert torch.equal(again, tensor)
    else:
        both = ([optimizer], ours)
        (other,), others = pickle.loads(pickle.dumps(both)) if way == "pickle" else copy.deepcopy(both)
    stepped(optimizer, ours, 3, seed=2)
    stepped(other, others, 3, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))
    assert int(other.applied_steps) == 6


TORCHS = [(FusedSGD, torch.optim.SGD), (FusedAdagrad, torch.optim.Adagrad)]


@pytest.mark.parametrize(
    ("cls", "theirs", "more"), [(*TORCHS[0], {}), (*TORCHS[0], {"momentum": 0.0}), (*TORCHS[1], {})]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_states_go_to_torchs_optimizer_and_back(
    device: torch.device, cls: type[Any], theirs: type[Any], more: dict[str, Any], steps: int
) -> None:
    options = {**OPTIONS[cls], **more}
    ours = parameters(device, [(5,), (30, 40), (7,)])
    optimizer = cls(ours, **options)
    stepped(optimizer, ours[:2], steps, seed=1)  # one never had a gradient
    others = copies_of(ours)
    other = theirs(others, lr=7.0, foreach=False)
    other.load_state_dict(optimizer.state_dict())
    straight, again = copies_of(ours), copies_of(ours)
    same = cls(straight, **options)
    same.load_state_dict(optimizer.state_dict())
    stepped(other, others, 2, seed=2)
    stepped(same, straight, 2, seed=2)
    for p, q in zip(straight, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    back = cls(again, lr=7.0)
    for p, q in zip(again, others, strict=True):
        p.data.copy_(q.data)
    back.load_state_dict(other.state_dict())
    stepped(back, again, 2, seed=3)
    stepped(other, others, 2, seed=3)
    for p, q in zip(again, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_sgds_state_has_torchs_keys_and_a_buffer_without_a_step_is_none() -> None:
    ours = parameters(torch.device("cpu"), [(5,)])
    for momentum, keys in ((0.0, set()), (0.9, {"momentum_buffer"})):
        optimizer = FusedSGD(ours, momentum=momentum, max_grad_norm=math.inf)
        ours[0].grad = torch.full((5,), math.nan)
        optimizer.step()
        assert all(state == {"momentum_buffer": None} for state in optimizer.state_dict()["state"].values())
        give_gradients(ours)
        optimizer.step()
        assert {key for state in optimizer.state_dict()["state"].values() for key in state} == keys


@pytest.mark.parametrize("cls", FUSED)
def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(cls: type[Any]) -> None:
    ours = parameters(torch.device("cpu"), [(5,)])
    foreign = torch.optim.Rprop(ours)
    optimizer = cls(ours, **OPTIONS[cls])
    stepped(foreign, ours, 1, seed=1)
    stepped(optimizer, ours, 1, seed=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=rf"{cls.__name__}\.load_state_dict: the state of parameter 0 has .* Nothing"):
        optimizer.load_state_dict(foreign.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())


@pytest.mark.parametrize(("cls", "theirs"), TORCHS)
def test_a_state_trained_upwards_is_refused(cls: type[Any], theirs: type[Any]) -> None:
    ours = parameters(torch.device("cpu"), [(5,)])
    with pytest.raises(UserError, match="trained with maximize=True"):
        cls(ours).load_state_dict(theirs(ours, maximize=True).state_dict())


@pytest.mark.parametrize("cls", FUSED)
def test_loaded_options_replace_the_constructors_before_the_first_step(
    device: torch.device, oracle: Any, cls: type[Any]
) -> None:
    ours = parameters(device, [(5,), (1030,)])
    saved = cls(ours, **OPTIONS[cls]).state_dict()
    optimizer = cls(ours, lr=9.0)
    optimizer.load_state_dict(saved)
    exact = oracle(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.05
    give_gradients(ours)
    exact.step()
    optimizer.step()
    exact.check()
