"""FusedAdam's step: against a float64 oracle and torch's unfused AdamW, on every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fusestep.dispatch import uses_triton
from fusestep.errors import UserError
from fusestep.ops import adam_kernel as adam_op
from fusestep.ops import gradient_norm as norm_op
from fusestep.optim import FusedAdam, accumulate_in_fp32

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(place: torch.device, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Any]:
    return [nn.Parameter(torch.randn(shape).to(place, dtype)) for shape in shapes]


def give_gradients(*lists: Sequence[Any], scale: float = 1.0) -> None:
    """The same random gradients for each list, in each parameter's own dtype."""
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, dtype=torch.complex64 if same[0].is_complex() else None) * scale
        for parameter in same:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def twins(params: Sequence[Any]) -> list[Any]:
    """The same values in float64 on the CPU."""
    return [nn.Parameter(p.detach().cpu().to(torch.complex128 if p.is_complex() else torch.float64)) for p in params]


def oracle_adamw(params: Sequence[Any], **options: Any) -> torch.optim.Optimizer:
    """torch's plain loop; its fused CPU path pairs elements wrongly."""
    return torch.optim.AdamW(params, foreach=False, fused=False, **{**OPTIONS, **options})


def assert_close(params: Sequence[Any], exact: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for p, q in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().cpu().to(q.dtype), q.detach(), rtol=rtol, atol=atol)


def exact_step(state: dict[str, Any], w: Tensor, g: Tensor, options: dict[str, Any]) -> Tensor:
    """Adam in float64, straight from the formula."""
    g = g.double()
    beta1, beta2 = options["betas"]
    if options["adam_w_mode"]:
        w = w * (1 - options["lr"] * options["weight_decay"])
    else:
        g = g + options["weight_decay"] * w
    state["t"] += 1
    state["m"] = beta1 * state["m"] + (1 - beta1) * g
    state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
    c1, c2 = (1 - beta1 ** state["t"], 1 - beta2 ** state["t"]) if options["bias_correction"] else (1.0, 1.0)
    return w - options["lr"] * (state["m"] / c1) / ((state["v"] / c2).sqrt() + options["eps"])


def check_against_formula(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]))
        for i, shape in enumerate(shapes)
    ]
    optimizer = FusedAdam(ours, master_weights=True, **options)
    exact = [p.detach().double() for p in ours]
    states = [{"t": 0, "m": torch.zeros_like(w), "v": torch.zeros_like(w)} for w in exact]
    for _ in range(3):
        for p in ours:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in ours))
        limit = options["max_grad_norm"]
        factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        exact = [
            exact_step(s, w, p.grad.double() * factor, options) for s, w, p in zip(states, exact, ours, strict=True)
        ]
        optimizer.step()
    masters = [optimizer.state[p].get("master_param", p.detach()) for p in ours]
    assert_close(masters, exact, rtol=1e-4, atol=1e-5)


SETS = {
    "shapes": st.lists(st.sampled_from([(), (1,), (7,), (3, 5), (0, 4), (2, 3, 4), (1025,)]), min_size=1, max_size=5),
    "dtypes": st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=1, max_size=3),
    "lr": st.sampled_from([0.0, 1e-3, 0.1]),
    "beta1": st.sampled_from([0.0, 0.9]),
    "beta2": st.sampled_from([0.9, 0.999]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "flags": st.tuples(st.booleans(), st.booleans()),
    "max_grad_norm": st.sampled_from([None, 0.5, 100.0, math.inf]),
}


def run_any_set(**drawn: Any) -> None:
    options = {
        "lr": drawn["lr"],
        "betas": (drawn["beta1"], drawn["beta2"]),
        "eps": 1e-3,
        "weight_decay": drawn["weight_decay"],
        "adam_w_mode": drawn["flags"][0],
        "bias_correction": drawn["flags"][1],
        "max_grad_norm": drawn["max_grad_norm"],
    }
    check_against_formula(drawn["shapes"], drawn["dtypes"], options)


@given(**SETS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_set_of_parameters_and_options_follows_the_formula(**drawn: Any) -> None:
    run_any_set(**drawn)


@pytest.mark.interpreter
@given(**SETS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_set_of_parameters_and_options_follows_the_formula_in_kernels(**drawn: Any) -> None:
    run_any_set(**drawn)


SHAPES = [(3, 5), (), (0, 4), (1023,), (33, 31), (1024,)]


@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
def test_several_steps_equal_torchs_adamw(place: torch.device, max_grad_norm: float | None) -> None:
    ours = parameters(place, SHAPES)
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours, max_grad_norm=max_grad_norm, **OPTIONS), oracle_adamw(exact)
    for _ in range(4):
        give_gradients(exact, ours)
        before = [p.grad.clone() for p in ours]
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(exact, max_grad_norm)
        optimizer.step()
        oracle.step()
        if max_grad_norm is not None:
            assert float(optimizer.last_grad_norm) == pytest.approx(float(norm.detach()), rel=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True)), "gradients are only read"
    assert_close(ours, exact)
    assert int(optimizer.applied_steps) == 4
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_parameter_changes_nothing_wherever_it_stands(place: torch.device, position: int) -> None:
    full = parameters(place, [(7,), (1300,)])
    exact = twins(full)
    ours = [*full[:position], nn.Parameter(torch.zeros(0, 4, device=place)), *full[position:]]
    optimizer, oracle = FusedAdam(ours, **OPTIONS), oracle_adamw(exact)
    for _ in range(2):
        give_gradients(exact, full)
        ours[position].grad = torch.zeros_like(ours[position])
        optimizer.step()
        oracle.step()
    assert_close(full, exact)
    assert float(optimizer.state[ours[position]]["step"]) == 2.0


def test_empty_parameters_alone_step(place: torch.device) -> None:
    ours = nn.Parameter(torch.zeros(0, 4, device=place))
    ours.grad = torch.zeros_like(ours)
    optimizer = FusedAdam([ours], max_grad_norm=1.0)
    optimizer.step()
    assert float(optimizer.state[ours]["step"]) == 1.0
    assert float(optimizer.last_grad_norm) == 0.0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "slice": lambda x: nn.functional.pad(x, (2, 1, 1, 3))[..., 1:-3, 2:-1],
    "odd address": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
}


@pytest.mark.parametrize("of_parameter", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("of_gradient", LAYOUTS)
def test_elements_pair_by_logical_index(place: torch.device, of_parameter: str, of_gradient: str) -> None:
    values = torch.randn(5, 7, 3, 11)
    ours = [nn.Parameter(LAYOUTS[of_parameter](values.to(place)))]
    assert torch.equal(ours[0].detach().cpu(), values)
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours, max_grad_norm=3.0, **OPTIONS), oracle_adamw(exact)
    for _ in range(2):
        gradient = LAYOUTS[of_gradient](torch.randn(values.shape).to(place))
        ours[0].grad, exact[0].grad = gradient, gradient.detach().cpu().double().contiguous()
        torch.nn.utils.clip_grad_norm_(exact, 3.0)
        optimizer.step()
        oracle.step()
    assert_close(ours, exact)


def test_neighbours_of_a_slice_are_untouched(place: torch.device) -> None:
    base = torch.full((40, 50), math.nan, device=place)
    inside = base[3:20, 7:43:2]
    inside.copy_(torch.randn(17, 18))
    ours = [nn.Parameter(inside)]
    assert ours[0].data_ptr() == inside.data_ptr()
    exact = twins(ours)
    give_gradients(exact, ours)
    outside = base.isnan()
    FusedAdam(ours, **OPTIONS).step()
    oracle_adamw(exact).step()
    assert_close([inside], exact)
    assert torch.equal(base.isnan(), outside)


def test_parameters_of_one_buffer_are_all_stepped(place: torch.device) -> None:
    sizes = [3, 1024, 5, 1, 1301]
    buffer = torch.randn(sum(sizes), device=place)
    ours = [nn.Parameter(part) for part in buffer.split(sizes)]
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours, **OPTIONS), oracle_adamw(exact)
    gradients = torch.randn(sum(sizes))
    for p, q, g in zip(ours, exact, gradients.split(sizes), strict=True):
        q.grad = g.double()
        p.grad = g.to(place)
    optimizer.step()
    oracle.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_of_fp32_parameters_are_widened(place: torch.device, dtype: torch.dtype) -> None:
    ours, wide = parameters(place, [(90,)]), parameters(place, [(90,)])
    wide[0].data.copy_(ours[0].data)
    ours[0].main_grad = torch.randn(90).to(place, dtype)
    wide[0].grad = ours[0].main_grad.float()
    for params in (ours, wide):
        FusedAdam(params, **OPTIONS).step()
    assert torch.equal(ours[0], wide[0])


def test_float64_and_complex_parameters_step_as_torchs(place: torch.device) -> None:
    for dtype in (torch.float64, torch.complex64, torch.complex128):
        ours = [nn.Parameter(torch.randn(5, 3).to(place, dtype)), nn.Parameter(torch.randn(4).to(place, dtype))]
        exact = twins(ours)
        optimizer, oracle = FusedAdam(ours, **OPTIONS), oracle_adamw(exact)
        for _ in range(3):
            give_gradients(exact, ours)
            optimizer.step()
            oracle.step()
        assert_close(ours, exact)
        assert optimizer.state[ours[0]]["exp_avg"].dtype == dtype


def test_dtypes_share_a_group_and_one_norm(place: torch.device) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
    ours = [p for dtype in dtypes for p in parameters(place, [(5, 3)], dtype)]
    optimizer = FusedAdam(ours, max_grad_norm=0.5, master_weights=True, **OPTIONS)
    exact = twins(ours)
    oracle = oracle_adamw(exact)
    for _ in range(3):
        give_gradients(exact, ours)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.detach().cpu().to(q.dtype, copy=True)
        norm = torch.nn.utils.clip_grad_norm_(exact, 0.5)
        optimizer.step()
        oracle.step()
        assert float(optimizer.last_grad_norm) == pytest.approx(float(norm.detach()), rel=1e-6)
    assert_close([optimizer.state[p].get("master_param", p.detach()) for p in ours], exact, atol=1e-5)


def test_sparse_gradient_is_refused_before_anything_moves(place: torch.device) -> None:
    embedding = nn.Embedding(5, 3, sparse=True, device=place)
    dense = parameters(place, [(4,)])[0]
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1], device=place)).sum().backward()
    before = dense.detach().clone()
    optimizer = FusedAdam([dense, embedding.weight])
    with pytest.raises(RuntimeError, match=r"torch\.optim\.SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, before)
    assert not optimizer.state


def test_closure_runs_once_first_and_with_gradients_enabled(place: torch.device) -> None:
    (p,) = parameters(place, [(3,)])
    p.grad = torch.full_like(p, 1e6)
    optimizer = FusedAdam([p], lr=0.1)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * 2.0).sum()
        loss.backward()
        return loss.item()

    before = p.detach().clone()
    assert optimizer.step(closure) == pytest.approx(2 * float(before.sum()), rel=1e-5)
    assert calls == [True]
    torch.testing.assert_close(p.detach(), before - 0.1)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full_like(before, 0.2))


def test_step_is_counted_per_parameter_and_missing_gradients_are_passed_over(place: torch.device) -> None:
    ours = parameters(place, [(5,), (1100,), (3, 3)])
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours, max_grad_norm=math.inf, **OPTIONS), oracle_adamw(exact)
    for absent in ((2,), (), (0, 1), (1,), ()):
        give_gradients(exact, ours)
        for i in absent:
            ours[i].grad = exact[i].grad = None
        optimizer.step()
        oracle.step()
    assert_close(ours, exact)
    assert [float(optimizer.state[p]["step"]) for p in ours] == [4.0, 3.0, 4.0]


def test_no_gradient_at_all_is_no_step(place: torch.device) -> None:
    optimizer = FusedAdam(parameters(place, [(5,)]), max_grad_norm=1.0)
    optimizer.step()
    assert not optimizer.state
    assert int(optimizer.applied_steps) == 0
    assert math.isnan(float(optimizer.last_grad_norm))


def test_moved_parameters_gradients_and_state_are_followed(place: torch.device) -> None:
    ours = parameters(place, [(5,), (40, 30)])
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours, **OPTIONS), oracle_adamw(exact)
    for number in range(5):
        give_gradients(exact, ours)
        if number == 1:
            ours[0].data = ours[0].data.clone()
        if number == 2:
            ours[1].data = ours[1].data.t().contiguous().t()
        if number == 3:
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.clone()
        if number == 4:
            optimizer.state[ours[0]] = {key: value.clone() for key, value in optimizer.state[ours[0]].items()}
        optimizer.step()
        oracle.step()
    assert_close(ours, exact)
    assert [float(optimizer.state[p]["step"]) for p in ours] == [5.0, 5.0]


def test_group_added_later_is_stepped_from_0_with_its_own_options(place: torch.device) -> None:
    ours = parameters(place, [(5,), (7,), (9,)])
    exact = twins(ours)
    optimizer, oracle = FusedAdam(ours[:1], **OPTIONS), oracle_adamw(exact[:1])
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": ours[1:], "lr": 0.2, "betas": (0.5, 0.9), "weight_decay": 0.0})
            oracle.add_param_group({"params": exact[1:], "lr": 0.2, "betas": (0.5, 0.9), "weight_decay": 0.0})
        give_gradients(exact, ours)
        optimizer.step()
        oracle.step()
    assert_close(ours, exact)
    assert [float(optimizer.state[p]["step"]) for p in ours] == [4.0, 2.0, 2.0]


def test_group_that_is_empty_keeps_its_options_and_breaks_nothing(place: torch.device) -> None:
    ours = parameters(place, [(5,)])
    optimizer = FusedAdam([{"params": []}, {"params": ours}], max_grad_norm=1.0, **OPTIONS)
    for _ in range(5):
        give_gradients(ours)
        optimizer.step()
    saved = optimizer.state_dict()
    assert all(group["lr"] == OPTIONS["lr"] and group["weight_decay"] == 0.1 for group in saved["param_groups"])
    assert all(state["step"] == 5.0 for state in saved["state"].values())


@pytest.mark.parametrize("kind", ["number", "tensor", "float64 tensor"])
def test_schedulers_drive_numbers_and_tensors_alike(place: torch.device, kind: str) -> None:
    ours = parameters(place, [(5,), (1030,)])
    exact = twins(ours)
    lr: Any = OPTIONS["lr"]
    if kind != "number":
        lr = torch.tensor(lr, device=place, dtype=torch.float64 if "64" in kind else torch.float32)
    optimizer, oracle = FusedAdam(ours, **{**OPTIONS, "lr": lr}), oracle_adamw(exact)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10, cycle_momentum=kind == "number")
        for o in (optimizer, oracle)
    ]
    for _ in range(6):
        give_gradients(exact, ours)
        optimizer.step()
        oracle.step()
        for schedule in schedules:
            schedule.step()
    assert_close(ours, exact)


def test_learning_rate_tensor_may_change_in_place(place: torch.device) -> None:
    ours = parameters(place, [(5,)])
    lr = torch.tensor(0.5, device=place)
    optimizer = FusedAdam(ours, lr=lr)
    ours[0].grad = torch.ones_like(ours[0])
    start = ours[0].detach().clone()
    optimizer.step()
    lr.fill_(0.0)
    optimizer.step()
    torch.testing.assert_close(ours[0].detach(), start - 0.5)


def test_capturable_keeps_the_learning_rate_in_a_tensor(place: torch.device) -> None:
    ours = parameters(place, [(5,)])
    optimizer = FusedAdam(ours, lr=0.5, capturable=True)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert optimizer.param_groups[0]["lr"].device == ours[0].device
    ours[0].grad = torch.ones_like(ours[0])
    start = ours[0].detach().clone()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    torch.testing.assert_close(ours[0].detach(), start - 0.75)


# --- masters and 16-bit parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiny_updates_accumulate_in_masters(place: torch.device, dtype: torch.dtype) -> None:
    steps = 100 if place.type == "cuda" or not uses_triton("adam", place) else 20
    ours = nn.Parameter(torch.ones(3, device=place, dtype=dtype))
    optimizer = FusedAdam([ours], lr=1e-3, master_weights=True)
    ours.grad = torch.ones_like(ours)
    for _ in range(steps):
        optimizer.step()
    master = optimizer.state[ours]["master_param"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master.cpu(), torch.full((3,), 1 - steps * 1e-3), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.detach().float(), master, rtol=2**-7, atol=0)


def test_16_bit_parameters_without_masters_warn_once(place: torch.device) -> None:
    params = parameters(place, [(3,), (4,)], torch.bfloat16)
    with pytest.warns(UserWarning, match="master_weights=True") as caught:
        optimizer = FusedAdam(params[:1])
    assert len(caught) == 1
    assert caught[0].filename == __file__  # not torch's constructor, which calls ours
    optimizer.add_param_group({"params": params[1:]})  # a second warning would fail the test


def test_fp32_parameters_have_no_masters(place: torch.device) -> None:
    ours = parameters(place, [(3,)])
    optimizer = FusedAdam(ours, master_weights=True)
    give_gradients(ours)
    optimizer.step()
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_weights_loaded_after_construction_are_what_is_trained(place: torch.device) -> None:
    (ours,) = parameters(place, [(3,)], torch.bfloat16)
    optimizer = FusedAdam([ours], lr=0.5, master_weights=True)
    with torch.no_grad():
        ours.copy_(torch.tensor([10.0, 20.0, 30.0]))
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[ours]["master_param"].cpu(), torch.tensor([9.5, 19.5, 29.5]))


def test_moments_are_fp32_unless_bf16_is_asked_for(place: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (ours,) = parameters(place, [(1100,)], torch.bfloat16)
        optimizer = FusedAdam([ours], master_weights=True, moment_dtype=dtype)
        give_gradients([ours])
        optimizer.step()
        assert optimizer.state[ours]["exp_avg"].dtype == optimizer.state[ours]["exp_avg_sq"].dtype == dtype


# --- clipping and skipping


def test_norm_is_global_over_groups(place: torch.device) -> None:
    ours = parameters(place, [(1,), (1,)])
    ours[0].grad, ours[1].grad = (torch.full((1,), x, device=place) for x in (3.0, 4.0))
    optimizer = FusedAdam([{"params": ours[:1]}, {"params": ours[1:]}], betas=(0.0, 0.0), max_grad_norm=1.0)
    optimizer.step()
    assert float(optimizer.last_grad_norm) == 5.0
    moments = [float(optimizer.state[p]["exp_avg"]) for p in ours]
    assert moments == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm", [1.0, math.inf])
def test_gradients_that_are_not_finite_skip_the_step(place: torch.device, value: float, max_grad_norm: float) -> None:
    ours = [*parameters(place, [(5,), (1030,)]), *parameters(place, [(7,)], torch.bfloat16)]
    optimizer = FusedAdam(ours, max_grad_norm=max_grad_norm, master_weights=True, **OPTIONS)
    give_gradients(ours)
    optimizer.step()
    before = [t.clone() for p in ours for t in (p.detach(), *optimizer.state[p].values())]
    give_gradients(ours)
    ours[1].grad[1029] = value
    optimizer.step()
    after = [t for p in ours for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not math.isfinite(float(optimizer.last_grad_norm))
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (1, 1)
    give_gradients(ours)
    optimizer.step()
    assert all(p.isfinite().all() for p in ours)
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (2, 1)
    assert all(float(optimizer.state[p]["step"]) == 2.0 for p in ours)


def test_huge_gradients_are_clipped_not_skipped(place: torch.device) -> None:
    (ours,) = parameters(place, [(4,)])
    ours.grad = torch.tensor([1e20, -2e20, 0.0, 2e20], device=place)
    optimizer = FusedAdam([ours], betas=(0.0, 0.0), max_grad_norm=3.0)
    optimizer.step()
    assert float(optimizer.last_grad_norm) == pytest.approx(3e20, rel=1e-6)
    torch.testing.assert_close(optimizer.state[ours]["exp_avg"].cpu(), torch.tensor([1.0, -2.0, 0.0, 2.0]))


def test_fp16_gradients_whose_squares_overflow_are_clipped(place: torch.device) -> None:
    (ours,) = parameters(place, [(2,)], torch.float16)
    ours.grad = torch.full((2,), 6e4, dtype=torch.float16, device=place)
    optimizer = FusedAdam([ours], betas=(0.0, 0.0), max_grad_norm=1.0, master_weights=True)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[ours]["exp_avg"].cpu(), torch.full((2,), 0.5**0.5))


# --- torch.amp.GradScaler


def scaled_run(place: torch.device, way: str, max_grad_norm: float | None = None) -> tuple[list[Any], FusedAdam]:
    torch.manual_seed(5)
    ours = parameters(place, [(6, 5), (1030,)])
    optimizer = FusedAdam(ours, **{**OPTIONS, "eps": 1e-3}, max_grad_norm=max_grad_norm)
    if way == "without the attribute":
        optimizer._step_supports_amp_scaling = False  # type: ignore[misc]
    scaler = torch.amp.GradScaler(place.type, init_scale=2.0**16, enabled=way != "no scaler")
    for _ in range(3):
        optimizer.zero_grad()
        factors = [torch.randn(p.shape).to(place) for p in ours]
        loss = sum(((p * f).sum() for p, f in zip(ours, factors, strict=True)), torch.zeros((), device=place))
        scaler.scale(loss).backward()
        if way == "unscaled by hand":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return ours, optimizer


@pytest.mark.parametrize("way", ["scaler", "unscaled by hand", "without the attribute"])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0])
def test_every_way_of_unscaling_equals_no_scaler(place: torch.device, way: str, max_grad_norm: float | None) -> None:
    plain, reference = scaled_run(place, "no scaler", max_grad_norm)
    ours, optimizer = scaled_run(place, way, max_grad_norm)
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert int(optimizer.applied_steps) == 3
    if max_grad_norm is not None:
        assert float(optimizer.last_grad_norm) == pytest.approx(float(reference.last_grad_norm), rel=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0])
def test_an_overflow_skips_everything_and_lowers_the_scale(
    place: torch.device, by_hand: bool, max_grad_norm: float | None
) -> None:
    # torch's unscale_ refuses fp16 gradients, and its kernel bf16 ones.
    ours = [*parameters(place, [(6, 5)]), *parameters(place, [(9,)], torch.float32 if by_hand else torch.float16)]
    optimizer = FusedAdam(ours, max_grad_norm=max_grad_norm, master_weights=True, **OPTIONS)
    scaler = torch.amp.GradScaler(place.type, init_scale=8.0)
    scales = []
    for number in range(4):
        optimizer.zero_grad()
        factor = math.inf if number == 1 else 1.0
        scaler.scale(sum((p.float().square().sum() for p in ours), torch.zeros((), device=place)) * factor).backward()
        before = [t.clone() for p in ours for t in (p.detach(), *optimizer.state[p].values())]
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if number == 1:
            after = [t for p in ours for t in (p.detach(), *optimizer.state[p].values())]
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0, 4.0]
    assert (int(optimizer.applied_steps), int(optimizer.skipped_steps)) == (3, 1)
    assert float(optimizer.state[ours[0]]["step"]) == 3.0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_found_inf_and_scale_may_have_one_dimension(place: torch.device, shape: tuple[int, ...]) -> None:
    (ours,) = parameters(place, [(5,)])
    optimizer = FusedAdam([ours], betas=(0.0, 0.0))
    ours.grad = torch.full_like(ours, 8.0)
    optimizer.grad_scale = torch.full(shape, 4.0, device=place)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros(shape, device=place)  # type: ignore[attr-defined]
    optimizer.step()
    assert float(optimizer.state[ours]["exp_avg"][0]) == 2.0
    before = ours.detach().clone()
    optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(ours, before)


def test_fp16_parameters_train_with_a_scaler(place: torch.device) -> None:
    (half,), (full,) = parameters(place, [(40,)], torch.float16), parameters(place, [(40,)])
    full.data.copy_(half.data)
    ours = FusedAdam([half], master_weights=True, max_grad_norm=1.0, lr=0.01)
    wide = FusedAdam([full], max_grad_norm=1.0, lr=0.01)
    scaler = torch.amp.GradScaler(place.type, init_scale=128.0)
    for _ in range(3):
        factor = torch.randn(40).to(place).half()
        scaler.scale((half * factor).sum()).backward()
        (full * factor.float()).sum().backward()
        scaler.step(ours)
        scaler.update()
        wide.step()
        for optimizer in (ours, wide):
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state[half]["master_param"], full.detach(), rtol=1e-3, atol=1e-4)


# --- main_grad


def test_main_grad_is_stepped_in_place_of_grad_and_cleared(place: torch.device) -> None:
    (ours,) = parameters(place, [(5,)])
    ours.grad = torch.full_like(ours, math.nan)
    ours.main_grad = torch.full_like(ours, 2.0)
    optimizer = FusedAdam([ours], betas=(0.0, 0.0))
    optimizer.step()
    assert float(optimizer.state[ours]["exp_avg"][0]) == 2.0
    kept = ours.main_grad
    optimizer.zero_grad(set_to_none=False)
    assert ours.main_grad is kept
    assert not kept.any()
    optimizer.zero_grad()
    assert ours.main_grad is None
    assert ours.grad is None


def test_main_grad_is_looked_at_for_overflow_by_the_step_itself(place: torch.device) -> None:
    """A scaler looks at .grad alone."""
    (ours,) = parameters(place, [(5,)], torch.bfloat16)
    handle = accumulate_in_fp32([ours])
    optimizer = FusedAdam([ours], master_weights=True)
    scaler = torch.amp.GradScaler(place.type, init_scale=4.0)
    scaler.scale((ours.float() * math.inf).sum()).backward()
    before = ours.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(ours, before)
    assert int(optimizer.skipped_steps) == 1
    handle.remove()


def test_unscale_that_missed_main_grad_is_refused(place: torch.device) -> None:
    (ours,) = parameters(place, [(5,)])
    ours.main_grad = torch.ones_like(ours)
    optimizer = FusedAdam([ours])
    optimizer.grad_scale, optimizer.found_inf = None, 0  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"unscale_.*max_grad_norm"):
        optimizer.step()


def test_main_grad_of_another_shape_is_refused(place: torch.device) -> None:
    (ours,) = parameters(place, [(5,)])
    ours.main_grad = torch.ones(6, device=place)
    with pytest.raises(UserError, match=r"main_grad of parameter 0 is \(6,\)"):
        FusedAdam([ours]).step()


# --- launches and bits


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [1, 60])
def test_one_update_launch_a_signature_and_one_norm(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    launches = []
    for module, name in ((adam_op, "adam"), (norm_op, "norm")):
        true_launch = module.launch

        def spy(*args: Any, _name: str = name, _true: Any = true_launch, **options: Any) -> None:
            launches.append(_name)
            _true(*args, **options)

        monkeypatch.setattr(module, "launch", spy)
    ours = parameters(torch.device("cpu"), [(3,)] * count)
    ours.append(nn.Parameter(torch.randn(4, 6)[:, ::2]))
    optimizer = FusedAdam(ours)
    give_gradients(ours)
    optimizer.step()
    assert launches == ["adam"]
    for group in optimizer.param_groups:
        group["max_grad_norm"] = 1.0
    optimizer.step()
    assert launches == ["adam", "norm", "adam"]


@pytest.mark.interpreter
def test_unmoved_tensors_keep_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusestep.optim import adam_plan

    built = []
    true_build = adam_plan.build_table
    monkeypatch.setattr(adam_plan, "build_table", lambda *a, **k: built.append(1) or true_build(*a, **k))
    ours = parameters(torch.device("cpu"), [(3,), (5,)])
    optimizer = FusedAdam(ours, lr=0.1)
    keep = []
    for number in range(4):
        optimizer.zero_grad()
        give_gradients(ours)
        keep += [p.grad for p in ours]  # so that every step has gradients at new addresses
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.step()
    assert built == [1]


def test_the_same_steps_give_the_same_bits(place: torch.device) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        ours = parameters(place, [(30, 70), (77,), (3000,)])
        optimizer = FusedAdam(ours, max_grad_norm=0.1, **OPTIONS)
        for _ in range(3):
            give_gradients(ours)
            optimizer.step()
        found.append([p.detach().clone() for p in ours] + [optimizer.last_grad_norm.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- what a person may get wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.ones(2)}, "lr is a tensor of shape"),
        ({"lr": "1e-3"}, "lr is '1e-3'; pass a finite number"),  # as YAML reads 1e-3
        ({"betas": (1.0, 0.9)}, "betas is"),
        ({"betas": (0.9, -0.1)}, "betas is"),
        ({"betas": 0.9}, "betas is"),
        ({"betas": ("0.9", 0.999)}, "betas is"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is"),
        ({"max_grad_norm": "1.0"}, "max_grad_norm is '1.0'"),
        ({"moment_dtype": torch.float16}, "moment_dtype is"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FusedAdam([nn.Parameter(torch.ones(3))], **options)


def test_a_group_with_bad_options_is_not_added() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.ones(3))])
    for options in ({"lr": -1.0}, {"max_grad_norm": 2.0}):
        with pytest.raises(UserError):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_cannot_be_stepped_are_named() -> None:
    with pytest.raises(UserError, match=r"parameter 1 is torch\.int32"):
        FusedAdam([nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.int32)])
    with pytest.raises(UserError, match="share one place in memory"):
        FusedAdam([nn.Parameter(torch.ones(1).expand(3))])
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        FusedAdam(torch.ones(3))


def test_groups_that_disagree_about_the_norm_are_refused_before_a_step() -> None:
    ours = parameters(torch.device("cpu"), [(3,), (3,)])
    optimizer = FusedAdam([{"params": ours[:1]}, {"params": ours[1:]}])
    give_gradients(ours)
    optimizer.param_groups[1]["max_grad_norm"] = 1.0
    with pytest.raises(UserError, match="set one value in all"):
        optimizer.step()
    assert not optimizer.state


def test_named_parameters_are_accepted() -> None:
    model = nn.Linear(3, 2)
    optimizer = FusedAdam(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
