"""FusedAdam that stores remainders: the masters are those of whole ones, in every route, and in states."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_model_init
from fusestep.fp8.copies import attach, current_copy
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots
from fusestep.nn import Linear
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.quantize import quantize
from fusestep.ops.quantized import Quantized
from fusestep.optim import FusedAdam, FusedSGD

#: Where what a state holds is tested: that of the interpreter's kernels is no other.
on_devices = pytest.mark.parametrize(
    "place",
    [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)],
    ids=lambda place: place.type,
)
OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "master_weights": True}


def parameters(place: torch.device) -> list[nn.Parameter]:
    """bf16 of every layout, and one in fp32 beside them."""
    torch.manual_seed(1)
    base = torch.randn(40, 30).to(place, torch.bfloat16)
    made = [torch.randn(shape).to(place, torch.bfloat16) for shape in [(3, 5), (1030,), (), (0, 4), (4, 6)]]
    made += [torch.randn(5, 7).to(place, torch.bfloat16).t(), base[2:30:3, 4:], base[0, :3], torch.randn(9).to(place)]
    return [nn.Parameter(one) for one in made]


def optimizer_of(params: list[nn.Parameter], store: bool, **options: Any) -> FusedAdam:
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.01, "weight_decay": 0.0}]
    return FusedAdam(groups, store_param_remainders=store, **{**OPTIONS, **options})


def train(optimizer: FusedAdam, steps: range, scale: float = 1.0) -> None:
    """Steps whose gradients depend on their number alone."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)
        optimizer.step()


def masters(optimizer: FusedAdam) -> list[Tensor]:
    return [state["master_param"] for state in optimizer.state_dict()["state"].values() if "master_param" in state]


def rounded_away(master: Tensor) -> Tensor:
    """A finite master in bf16, ties away from zero: in float64, by its exponent."""
    exact = master.double()
    place = torch.exp2(torch.frexp(exact).exponent.double().clamp(min=-125) - 8)
    return ((exact.abs() / place + 0.5).floor() * place * exact.sign()).to(master.dtype)


def check(ours: FusedAdam, others: FusedAdam) -> None:
    """Two optimizers of the same model hold the same state and the first one's parameters are its masters rounded."""
    saved, expected = ours.state_dict(), others.state_dict()
    assert saved["step_counts"] == expected["step_counts"]
    for key, state in expected["state"].items():
        assert set(saved["state"][key]) == set(state)
        assert all(torch.equal(saved["state"][key][name], value) for name, value in state.items())
    stored = [p for p in ours.state if p.dtype == torch.bfloat16]
    for p, master in zip(stored, masters(ours), strict=True):
        assert torch.equal(p.float(), rounded_away(master))


@pytest.mark.parametrize(("max_grad_norm", "moment_dtype"), [(None, torch.float32), (1.0, torch.bfloat16)])
def test_every_route_keeps_the_masters_of_whole_ones(
    place: torch.device, max_grad_norm: float | None, moment_dtype: torch.dtype
) -> None:
    options = {"max_grad_norm": max_grad_norm, "moment_dtype": moment_dtype}
    ours, others = (optimizer_of(parameters(place), store, **options) for store in (True, False))
    for optimizer in (ours, others):
        train(optimizer, range(2))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if max_grad_norm is not None:  # a step that is skipped
            params[1].grad[7] = math.nan
            optimizer.step()
        for p in params[:3]:  # fp32 gradients, and parameters without one
            p.main_grad = torch.full_like(p, 0.25, dtype=torch.float32)
        for p in params[3:6]:
            p.grad = None
        optimizer.step()
        for p in params[:3]:
            p.main_grad = None
        optimizer.found_inf = torch.ones((), device=place)  # as a scaler leaves it
        optimizer.grad_scale = torch.full((), 4.0, device=place)
        train(optimizer, range(2, 3))
        optimizer.found_inf.zero_()
        train(optimizer, range(2, 4), scale=4.0)
    check(ours, others)
    kept = [{key: value.dtype for key, value in state.items()} for state in ours.state.values()]
    whole = {"step": torch.float32, "exp_avg": moment_dtype, "exp_avg_sq": moment_dtype}
    assert kept == [{**whole, "master_remainder": torch.int16}] * 8 + [whole]


def test_neighbours_of_a_view_are_untouched(place: torch.device) -> None:
    base = torch.full((40, 60), math.nan, dtype=torch.bfloat16, device=place)
    view = base[3:30:2, 5:50]
    view.copy_(torch.randn(view.shape))
    outside = base.isnan()
    optimizer = FusedAdam([nn.Parameter(view)], store_param_remainders=True, **OPTIONS)
    train(optimizer, range(2))
    assert torch.equal(base.isnan(), outside)
    assert torch.equal(view.float(), rounded_away(masters(optimizer)[0]))


@on_devices
@pytest.mark.parametrize("stores", [(True, True), (True, False), (False, True)], ids=str)
def test_resume_continues_bit_for_bit_in_either_way_of_keeping(
    place: torch.device, stores: tuple[bool, bool], through_disk: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Saved and loaded at every step, from one way into another, and the model before or after the optimizer."""
    straight = optimizer_of(parameters(place), False, max_grad_norm=1.0)
    train(straight, range(5))
    params = parameters(place)
    optimizer = optimizer_of(params, stores[0], max_grad_norm=1.0)
    for number in range(4):
        train(optimizer, range(number, number + 1))
        saved = through_disk(optimizer.state_dict())
        assert all(state["master_param"].dtype == torch.float32 for state in list(saved["state"].values())[:8])
        weights = [p.detach().clone() for p in params]
        params = parameters(place)
        optimizer = optimizer_of(params, stores[(number + 1) % 2], max_grad_norm=1.0)
        for part in ("model", "optimizer") if number % 3 else ("optimizer", "model"):
            if part == "optimizer":
                optimizer.load_state_dict(saved)
            with torch.no_grad():
                for p, weight in zip(params if part == "model" else (), weights, strict=part == "model"):
                    p.copy_(weight)
        for key, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value.cpu(), saved["state"][key][name]) for name, value in state.items())
    train(optimizer, range(4, 5))
    assert all(map(torch.equal, masters(optimizer), masters(straight)))
    if optimizer.store_param_remainders:
        check(optimizer, straight)


@on_devices
@pytest.mark.parametrize("is_model_first", [True, False])
def test_a_tie_that_whole_masters_rounded_to_even_loads_exactly(place: torch.device, is_model_first: bool) -> None:
    """1 + 2^-8 lies half way: a cast gives 1, and the pair holds it as the next number and −2^15."""
    tie = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 0.1], device=place)
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=place))
    optimizer = FusedAdam([weight], store_param_remainders=True, **{**OPTIONS, "weight_decay": 0.0})
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_param"] = tie.clone()
    for part in range(2):
        if bool(part) == is_model_first:
            optimizer.load_state_dict(saved)
        else:
            with torch.no_grad():
                weight.copy_(tie.bfloat16())
    assert ("master_param" in optimizer.state[weight]) is not is_model_first  # whole until the model is there
    assert torch.equal(masters(optimizer)[0], tie)
    optimizer.step()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq", "master_remainder"}
    assert torch.equal(masters(optimizer)[0], tie)
    assert torch.equal(weight.float(), rounded_away(tie))


@on_devices
def test_states_without_masters_start_them_from_the_parameters(place: torch.device) -> None:
    params = parameters(place)
    optimizer = optimizer_of(params, True)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.pop("master_param", None)
    optimizer.load_state_dict(saved)
    wanted = [p.detach().float() for p in params[:8]]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, masters(optimizer), wanted))


@on_devices
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alone(place: torch.device, how: str) -> None:
    optimizer, others = (optimizer_of(parameters(place), store) for store in (True, False))
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for one in (twin, optimizer, others):
        train(one, range(0 if one is others else 2, 4))
    check(twin, others)
    check(optimizer, others)


def test_what_a_script_writes_is_stepped_from_there(place: torch.device) -> None:
    """Zeros beside negative remainders among it: their bits put together would be those of a NaN."""
    weight = nn.Parameter(torch.randn(2000).to(place, torch.bfloat16))
    optimizer = FusedAdam([weight], store_param_remainders=True, **OPTIONS)
    train(optimizer, range(2))
    assert bool((optimizer.state[weight]["master_remainder"] < 0).any())
    with torch.no_grad():
        weight[:1000] = 0.0
        weight[1000:] = 3.0
    weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert bool((weight[:1000] == 0).all())
    assert bool((weight[1000:] == 3.0).all())
    assert float((masters(optimizer)[0][1000:] - 3.0).abs().max()) <= 2**-7


@on_devices
def test_moved_parameters_are_followed(place: torch.device) -> None:
    """Into other memory, and into another order of memory: the remainder goes along."""
    ours, others = (optimizer_of(parameters(place), store) for store in (True, False))
    for optimizer in (ours, others):
        train(optimizer, range(2))
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.data = p.data.clone() if p.dim() < 2 else p.data.t().contiguous().t()
        train(optimizer, range(2, 4))
    check(ours, others)


def cast(weight: Tensor, recipe: Recipe, slots: Tensor | None) -> Quantized:
    weight = weight.detach()
    if isinstance(recipe, Float8BlockScaling):
        return quantize_blocks(weight, recipe.fp8_format.forward, (128, 128), columnwise=True, power_of_two=True)[0]
    index = 1 if isinstance(recipe, DelayedScaling) else 0
    slots = torch.zeros(2, 4, device=weight.device) if slots is None else slots
    return quantize(weight, slots, index, recipe.fp8_format.forward, columnwise=True, record=True)[0]


def same(found: Quantized | None, wanted: Quantized) -> None:
    assert found is not None
    for name in ("data", "transposed", "scale_inv", "transposed_scale_inv"):
        one, other = (getattr(q, name).flatten().view(torch.uint8) for q in (found, wanted))
        assert torch.equal(one, other), name


RECIPES = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_fp8_copies_are_of_the_parameters_as_they_are_stored(place: torch.device, recipe: Recipe) -> None:
    start = torch.randn(37, 70) * 0.1  # neither side a multiple of 16
    weight, plain = (nn.Parameter(start.to(place, torch.bfloat16)) for _ in range(2))
    slots: Tensor | None = None
    if isinstance(recipe, DelayedScaling):
        slots = Slots(("input", "weight", "grad_output"), recipe, place).slots
        cast(weight, recipe, slots)
        attach(weight, recipe, slots, 1)
    else:
        attach(weight, recipe)
    ours, others = (
        FusedAdam([p], store_param_remainders=p is weight, max_grad_norm=1.0, **OPTIONS) for p in (weight, plain)
    )
    for number in range(2):
        for optimizer in (ours, others):
            p = optimizer.param_groups[0]["params"][0]
            generator = torch.Generator().manual_seed(number)
            p.grad = torch.randn(p.shape, generator=generator).to(place, torch.bfloat16)
            if number == 1:
                p.grad[3, 0] = math.nan  # skipped
            before = None if slots is None else slots.clone()
            optimizer.step()
            if optimizer is ours:
                same(current_copy(weight), cast(weight, recipe, before))
    check(ours, others)


@on_devices
def test_weights_that_live_in_fp8_keep_whole_masters(place: torch.device) -> None:
    with fp8_model_init():
        model = Linear(32, 48, dtype=torch.bfloat16, device=place)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=True, **OPTIONS)
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=torch.bfloat16, device=place)
    optimizer.step()
    assert optimizer.state[model.weight]["master_param"].dtype == torch.float32
    assert optimizer.state[model.bias]["master_remainder"].dtype == torch.int16


@on_devices
def test_what_has_no_remainder_is_refused_in_words(place: torch.device) -> None:
    half = nn.Parameter(torch.ones(3, dtype=torch.float16, device=place))
    whole = nn.Parameter(torch.ones(3, device=place))
    with pytest.raises(UserError, match="parameter 1 is float16, of whose master no 16 bits remain"):
        FusedAdam([whole, half], master_weights=True, store_param_remainders=True)
    with pytest.raises(UserError, match="master_weights is False; pass master_weights=True too"):
        FusedAdam([whole], store_param_remainders=True)
    with pytest.raises(TypeError, match="store_param_remainders"):
        FusedSGD([whole], lr=0.1, master_weights=True, store_param_remainders=True)  # type: ignore[call-arg]
