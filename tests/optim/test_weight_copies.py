"""FusedAdam writes FP8 copies of weights: the bytes that a cast of the new weight gives, and when they are current."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusestep
from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    fp8_model_init,
)
from fusestep.fp8.copies import attach, copies_of, current_copy, revision
from fusestep.fp8.pending import Pending
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots
from fusestep.nn import Linear
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.quantize import quantize
from fusestep.ops.quantized import Quantized
from fusestep.ops.roll_scales import AMAX, SCALE
from fusestep.optim import FusedAdam, accumulate_in_fp32

RECIPES = [
    pytest.param(DelayedScaling(margin=1), id="delayed"),
    pytest.param(Float8CurrentScaling(), id="current"),
    pytest.param(Float8CurrentScaling(use_power_2_scales=True), id="current, powers of two"),
    pytest.param(Float8BlockScaling(), id="tiles"),
    pytest.param(MXFP8BlockScaling(), id="microblocks"),
]
DELAYED = DelayedScaling()


def parameter(rows: int, columns: int, place: torch.device, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(rows, columns) * 0.1).to(place, dtype))


def slots(place: torch.device, recipe: DelayedScaling = DELAYED) -> Slots:
    return Slots(("input", "weight", "grad_output"), recipe, place)


def ask(weight: Tensor, recipe: Recipe) -> Slots | None:
    """As a module does in its forward: the weight's amax is in its slot, and copies are asked for."""
    if not isinstance(recipe, DelayedScaling):
        attach(weight, recipe)
        return None
    state = slots(weight.device, recipe)
    cast(weight, recipe, state.slots)
    attach(weight, recipe, state.slots, 1)
    return state


def cast(weight: Tensor, recipe: Recipe, given: Tensor | None = None) -> Quantized:
    """What a module's own cast of the weight makes."""
    weight, dtype = weight.detach(), recipe.fp8_format.forward
    if isinstance(recipe, Float8BlockScaling):
        return quantize_blocks(weight, dtype, (128, 128), columnwise=True, power_of_two=not recipe.use_f32_scales)[0]
    if isinstance(recipe, MXFP8BlockScaling):
        return quantize_blocks(weight, dtype, (1, 32), columnwise=True)[0]
    index, margin = (1, recipe.margin) if isinstance(recipe, DelayedScaling) else (0, 0)
    if given is None:
        given = torch.zeros(2, 4, device=weight.device)
    power_of_two = isinstance(recipe, Float8CurrentScaling) and recipe.use_power_2_scales
    return quantize(
        weight, given, index, dtype, columnwise=True, record=True, margin=margin, power_of_two=power_of_two
    )[0]


def roll(state: Slots) -> None:
    """As the next region does when it begins."""
    pending = Pending()
    pending.add(state)
    pending.roll()


def same(ours: Quantized | None, theirs: Quantized) -> None:
    assert ours is not None
    assert ours.shape == theirs.shape
    assert ours.block == theirs.block
    for name in ("data", "transposed", "scale_inv", "transposed_scale_inv"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one.shape == other.shape, name
        if one.dtype.itemsize == 1:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        assert torch.equal(one, other), name


def give_gradients(*weights: Tensor) -> None:
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(weight.device, weight.dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(33, 70), (5, 1), (130, 144)])
def test_copies_are_the_bytes_of_a_cast_of_the_new_weight(
    place: torch.device, recipe: Recipe, shape: tuple[int, int]
) -> None:
    weight, plain = parameter(*shape, place), nn.Parameter(torch.ones(7, device=place))
    state = ask(weight, recipe)
    optimizer = FusedAdam([weight, plain], lr=0.03)
    for _ in range(3):
        give_gradients(weight, plain)
        before = None if state is None else state.slots.clone()
        optimizer.step()
        same(current_copy(weight), cast(weight, recipe, before))
        if state is not None:
            assert before is not None
            assert torch.equal(state.slots[:, SCALE], before[:, SCALE])
            assert state.slots[1, AMAX] == before[1, AMAX] >= weight.detach().abs().max()
            roll(state)


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling(), Float8BlockScaling()])
def test_the_step_itself_is_the_same_with_and_without_copies(place: torch.device, recipe: Recipe) -> None:
    weight = parameter(40, 70, place)
    other = nn.Parameter(weight.detach().clone())
    ask(weight, recipe)
    optimizers = [FusedAdam([one], lr=0.03, weight_decay=0.1, max_grad_norm=0.5) for one in (weight, other)]
    for _ in range(3):
        give_gradients(weight)
        assert weight.grad is not None
        other.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(weight, other)
    for key, value in optimizers[0].state[weight].items():
        assert torch.equal(value, optimizers[1].state[other][key]), key


@pytest.mark.parametrize("recipe", [DELAYED, Float8BlockScaling()])
def test_copies_of_16_bit_weights_with_masters_are_of_the_rounded_weight(place: torch.device, recipe: Recipe) -> None:
    weight = parameter(33, 48, place, torch.bfloat16)
    state = ask(weight, recipe)
    optimizer = FusedAdam([weight], lr=0.03, master_weights=True)
    handle = accumulate_in_fp32([weight])
    for _ in range(2):
        (weight.float() * torch.randn(33, 48).to(place)).sum().backward()
        before = None if state is None else state.slots.clone()
        optimizer.step()
        optimizer.zero_grad()
        same(current_copy(weight), cast(weight, recipe, before))
    handle.remove()


def test_layouts_that_the_kernel_does_not_take_have_copies_too(place: torch.device) -> None:
    across = nn.Parameter(torch.randn(48, 32).to(place).t())
    aside = parameter(40, 24, place)
    for weight in (across, aside):
        ask(weight, DELAYED)
    optimizer = FusedAdam([across, aside], lr=0.01)
    for _ in range(2):
        across.grad = torch.randn(32, 48).to(place)
        aside.grad = torch.randn(24, 40).to(place).t()
        optimizer.step()
        for weight in (across, aside):
            copies = copies_of(weight)
            assert copies is not None
            assert copies.slots is not None
            same(current_copy(weight), cast(weight, DELAYED, copies.slots.clone()))


def test_a_weight_at_an_odd_address_has_copies(place: torch.device) -> None:
    weight = nn.Parameter(torch.randn(1 + 32 * 48).to(place)[1:].view(32, 48))
    ask(weight, Float8CurrentScaling())
    optimizer = FusedAdam([weight], lr=0.01)
    give_gradients(weight)
    optimizer.step()
    same(current_copy(weight), cast(weight, Float8CurrentScaling()))


def test_weights_of_zeros_start_with_the_scale_of_their_first_values(place: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(20, 30, device=place))
    state = ask(weight, DELAYED)
    assert state is not None
    give_gradients(weight)
    FusedAdam([weight], lr=1e-3).step()
    copies = current_copy(weight)
    assert copies is not None
    # A scale of 1 would flush steps of 10⁻³ to zero.
    torch.testing.assert_close(copies.dequantize(torch.float32), weight.detach(), rtol=0.07, atol=1e-6)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.randn(24, 16)}),
    "copy_": lambda m: m.weight.copy_(torch.randn(24, 16)),
    "averaging": lambda m: m.weight.lerp_(torch.zeros(24, 16, device=m.weight.device), 0.1),
    "another optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    "foreach": lambda m: torch._foreach_mul_([m.weight], 0.5),
    "another FusedAdam": lambda m: _step_without_copies(m.weight),
    "new memory": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "data and refresh": lambda m: _write_data(m),
}


def _write_data(module: nn.Linear) -> None:
    module.weight.data.mul_(2)
    fusestep.refresh(module)


def _step_without_copies(weight: Tensor) -> None:
    """A step by a kernel of an optimizer that does not see the copies, of the same memory."""
    twin = nn.Parameter(weight.detach())
    twin.grad = weight.grad
    FusedAdam([twin]).step()


@pytest.mark.parametrize("change", CHANGES)
def test_every_other_change_of_a_weight_makes_its_copies_stale(place: torch.device, change: str) -> None:
    module = nn.Linear(16, 24, bias=False, device=place)
    ask(module.weight, DELAYED)
    optimizer = FusedAdam(module.parameters(), lr=0.01)
    for _ in range(2):
        give_gradients(module.weight)
        optimizer.step()
        assert current_copy(module.weight) is not None
    with torch.no_grad():
        CHANGES[change](module)
    assert current_copy(module.weight) is None
    give_gradients(module.weight)
    optimizer.step()
    assert current_copy(module.weight) is not None


def test_a_step_counts_as_a_change_for_autograd(place: torch.device) -> None:
    weight = parameter(8, 16, place)
    x = torch.randn(4, 16, requires_grad=True, device=place)
    loss = (x @ weight.t()).square().sum()
    optimizer = FusedAdam([weight])
    give_gradients(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling(), Float8BlockScaling()])
def test_a_skipped_step_leaves_weight_and_copies(place: torch.device, recipe: Recipe) -> None:
    weight = parameter(20, 48, place)
    ask(weight, recipe)
    optimizer = FusedAdam([weight], lr=0.03, max_grad_norm=1.0)
    give_gradients(weight)
    optimizer.step()
    kept, bytes_before = weight.detach().clone(), copy.deepcopy(current_copy(weight))
    assert bytes_before is not None
    weight.grad = torch.full_like(weight, math.inf)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    assert torch.equal(weight, kept)
    same(current_copy(weight), bytes_before)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times zero
@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling(), Float8BlockScaling()])
def test_an_infinite_weight_is_nan_in_its_copies(place: torch.device, recipe: Recipe) -> None:
    weight = parameter(20, 48, place)
    with torch.no_grad():
        weight[3, 5] = math.inf
    ask(weight, recipe)
    optimizer = FusedAdam([weight], lr=0.03, max_grad_norm=1.0)
    for _ in range(2):
        weight.grad = torch.full_like(weight, math.inf)
        optimizer.step()
    copies = copies_of(weight)
    assert copies is not None
    assert copies.quantized is not None
    for data in (copies.quantized.data, copies.quantized.transposed):
        assert data is not None
        found = data if data.shape[1] == 48 else data.t()
        assert int(found.view(torch.uint8)[3, 5]) == 0x7F
        assert int(found.float().isnan().sum()) == 1


def test_a_skipped_step_never_passes_stale_copies_for_current(place: torch.device) -> None:
    weight = parameter(20, 48, place)
    ask(weight, Float8CurrentScaling())
    optimizer = FusedAdam([weight], lr=0.03, max_grad_norm=1.0)
    give_gradients(weight)
    optimizer.step()
    with torch.no_grad():
        weight.copy_(torch.randn(20, 48))
    weight.grad = torch.full_like(weight, math.nan)
    optimizer.step()
    found = current_copy(weight)
    if found is not None:
        same(found, cast(weight, Float8CurrentScaling()))


def test_a_loss_scaler_that_saw_an_infinity_leaves_copies_current(place: torch.device) -> None:
    weight = parameter(20, 48, place)
    ask(weight, DELAYED)
    optimizer = FusedAdam([weight], lr=0.03)
    scaler = torch.amp.GradScaler(place.type, init_scale=8.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * torch.randn(20, 48).to(place)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        found, copies = current_copy(weight), copies_of(weight)
        assert copies is not None
        assert copies.slots is not None
        same(found, cast(weight, DELAYED, copies.slots.clone()))


def test_only_weights_with_gradients_are_written(place: torch.device) -> None:
    first, second = parameter(20, 32, place), parameter(20, 32, place)
    for weight in (first, second):
        ask(weight, Float8CurrentScaling())
    optimizer = FusedAdam([{"params": [first]}, {"params": [second], "lr": 0.1}], lr=0.01)
    give_gradients(first, second)
    optimizer.step()
    written = copy.deepcopy(current_copy(second))
    assert written is not None
    second.grad = None
    give_gradients(first)
    optimizer.step()
    same(current_copy(second), written)
    same(current_copy(first), cast(first, Float8CurrentScaling()))


def test_copies_may_be_asked_for_between_steps_and_in_another_format(place: torch.device) -> None:
    weight = parameter(20, 32, place)
    optimizer = FusedAdam([weight], lr=0.01)
    give_gradients(weight)
    optimizer.step()
    assert current_copy(weight) is None
    e5m2 = Float8CurrentScaling()
    object.__setattr__(e5m2, "fp8_format", Format.E5M2)
    for recipe in (Float8CurrentScaling(), Float8BlockScaling(use_f32_scales=True), e5m2):
        ask(weight, recipe)
        give_gradients(weight)
        optimizer.step()
        same(current_copy(weight), cast(weight, recipe))


def test_copies_are_no_part_of_any_state(place: torch.device) -> None:
    module = nn.Linear(16, 24, device=place)
    optimizer = FusedAdam(module.parameters(), lr=0.01)
    keys = set(module.state_dict())
    ask(module.weight, DELAYED)
    give_gradients(module.weight, module.bias)
    optimizer.step()
    assert set(module.state_dict()) == keys
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    twin = copy.deepcopy(module)
    assert copies_of(twin.weight) is None
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, module.weight)
    assert copies_of(loaded) is None
    pickled = copy.deepcopy(optimizer)
    assert all(copies_of(p) is None for group in pickled.param_groups for p in group["params"])


def test_a_resumed_run_writes_the_same_copies(place: torch.device) -> None:
    weight = parameter(20, 32, place)
    state = ask(weight, DELAYED)
    assert state is not None
    optimizer = FusedAdam([weight], lr=0.01)
    give_gradients(weight)
    optimizer.step()
    roll(state)
    resumed, scales = nn.Parameter(weight.detach().clone()), slots(place)
    scales.load(state.as_dict())
    attach(resumed, DELAYED, scales.slots, 1)
    second = FusedAdam([resumed], lr=0.01)
    second.load_state_dict(optimizer.state_dict())
    give_gradients(weight)
    assert weight.grad is not None
    resumed.grad = weight.grad.clone()
    optimizer.step()
    second.step()
    theirs = current_copy(weight)
    assert theirs is not None
    same(current_copy(resumed), theirs)
    assert torch.equal(state.slots, scales.slots)


def test_steps_of_weights_that_live_in_fp8_keep_their_plan(place: torch.device) -> None:
    with fp8_model_init(recipe=Float8CurrentScaling()):
        module = Linear(32, 48, bias=False, device=place)
    optimizer = FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    seen = []
    for _ in range(3):
        module.weight.grad = torch.randn(48, 32).to(place)
        optimizer.step()
        seen.append((revision(), optimizer._plan))
    assert seen[1] == seen[2]
