"""Copies of weights that are several parameters: the bytes, padding and scales of a cast of them put together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import fusestep
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from fusestep.fp8.copies import WeightCopies, attach, copies_of, current_copy
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import Slots
from fusestep.language import interpreted
from fusestep.ops.block_scaling import quantize_blocks
from fusestep.ops.quantize import quantize
from fusestep.ops.quantized import Quantized
from fusestep.ops.roll_scales import AMAX
from fusestep.optim import FusedAdam

DELAYED, CURRENT, TILES = DelayedScaling(margin=1), Float8CurrentScaling(), Float8BlockScaling()
RECIPES = [
    pytest.param(DELAYED, id="delayed"),
    pytest.param(CURRENT, id="current"),
    pytest.param(TILES, id="tiles"),
    pytest.param(MXFP8BlockScaling(), id="microblocks"),
]


def parameters(place: torch.device, *heights: int, width: int = 48) -> list[nn.Parameter]:
    """The last is the largest, so that a scale of the first alone would saturate."""
    return [nn.Parameter((torch.randn(h, width) * 0.1 * (n + 1)).to(place)) for n, h in enumerate(heights)]


def cast(weights: Sequence[Tensor], recipe: Recipe, slots: Tensor | None = None) -> Quantized:
    """What a module's own cast of the weights put together makes."""
    whole, dtype = torch.cat([weight.detach() for weight in weights]), recipe.fp8_format.forward
    if isinstance(recipe, Float8BlockScaling):
        return quantize_blocks(whole, dtype, (128, 128), columnwise=True, power_of_two=not recipe.use_f32_scales)[0]
    if isinstance(recipe, MXFP8BlockScaling):
        return quantize_blocks(whole, dtype, (1, 32), columnwise=True)[0]
    index, margin = (1, recipe.margin) if isinstance(recipe, DelayedScaling) else (0, 0)
    slots = torch.zeros(2, 4, device=whole.device) if slots is None else slots
    return quantize(whole, slots, index, dtype, columnwise=True, record=True, margin=margin)[0]


def ask(weights: Sequence[Tensor], recipe: Recipe) -> Tensor | None:
    """As a module does in its forward; returns its slots."""
    if not isinstance(recipe, DelayedScaling):
        attach(weights, recipe)
        return None
    slots = Slots(("input", "weight", "grad_output"), recipe, weights[0].device).slots
    cast(weights, recipe, slots)
    attach(weights, recipe, slots, 1)
    return slots


def same(ours: Quantized | None, theirs: Quantized) -> None:
    assert ours is not None
    assert (ours.shape, ours.block) == (theirs.shape, theirs.block)
    for name in ("data", "transposed", "scale_inv", "transposed_scale_inv"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one.shape == other.shape, name
        if one.dtype.itemsize == 1:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        assert torch.equal(one, other), name


def give_gradients(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(weight.device)


def forbid_casts(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run, have them write the copies or fail."""

    def write(*_arguments: object) -> None:
        raise AssertionError("cast after the step, not in it")

    if place.type == "cuda" or interpreted():
        monkeypatch.setattr(WeightCopies, "write", write)


@pytest.mark.parametrize(
    ("recipe", "heights"), [(DELAYED, (32, 64, 19)), (CURRENT, (32, 64, 19)), (TILES, (128, 256, 67))]
)
def test_the_kernel_writes_the_bytes_of_a_cast_of_the_whole(
    place: torch.device, recipe: Recipe, heights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_casts(place, monkeypatch)
    weights, other = parameters(place, *heights), nn.Parameter(torch.ones(7, device=place))
    slots = ask(weights, recipe)
    optimizer = FusedAdam([*weights, other], lr=0.03)
    for _ in range(2):
        give_gradients([*weights, other])
        before = None if slots is None else slots.clone()
        optimizer.step()
        same(current_copy(*weights), cast(weights, recipe, before))
        if slots is not None:
            largest = max(float(weight.detach().abs().max()) for weight in weights)
            assert before is not None
            assert float(slots[1, AMAX]) == float(before[1, AMAX]) >= largest


@pytest.mark.parametrize("recipe", [DELAYED, CURRENT])
@pytest.mark.parametrize(("heights", "width"), [((5, 17, 1, 30), 70), ((1, 1), 16), ((31, 33), 64)])
def test_parameters_that_begin_anywhere_fill_their_columns_of_the_transpose(
    place: torch.device, recipe: Recipe, heights: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_casts(place, monkeypatch)
    weights = parameters(place, *heights, width=width)
    slots = ask(weights, recipe)
    optimizer = FusedAdam(weights[::-1], lr=0.03)  # no later parameter mends what an earlier one writes beyond its own
    for _ in range(2):
        give_gradients(weights)
        before = None if slots is None else slots.clone()
        optimizer.step()
        same(current_copy(*weights), cast(weights, recipe, before))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_no_kernel_writes_is_cast_after_the_step(place: torch.device, recipe: Recipe) -> None:
    weights = parameters(place, 20, 33)  # a tile of 128 × 128 would be shared
    weights[1] = nn.Parameter(torch.randn(48, 33).to(place).t())  # and these rows do not lie in memory as such
    slots = ask(weights, recipe)
    optimizer = FusedAdam([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.1}], lr=0.03)
    for _ in range(2):
        give_gradients(weights)
        before = None if slots is None else slots.clone()
        optimizer.step()
        same(current_copy(*weights), cast(weights, recipe, before))


def test_the_first_scale_is_that_of_the_whole(place: torch.device) -> None:
    weights = [nn.Parameter(torch.zeros(h, 32, device=place)) for h in (16, 32)]
    ask(weights, DELAYED)
    weights[0].grad, weights[1].grad = (torch.full_like(w, 1.0) for w in weights)
    optimizer = FusedAdam([{"params": weights[:1], "lr": 1e-3}, {"params": weights[1:], "lr": 1.0}])
    optimizer.step()
    found = current_copy(*weights)
    assert found is not None
    whole = torch.cat([w.detach() for w in weights])
    torch.testing.assert_close(found.dequantize(torch.float32), whole, rtol=0.07, atol=2e-3)


@pytest.mark.parametrize(("recipe", "height"), [(DELAYED, 32), (CURRENT, 32), (TILES, 128)])
def test_a_step_of_some_parameters_leaves_no_copy_of_two_scales(
    place: torch.device, recipe: Recipe, height: int
) -> None:
    weights = parameters(place, height, 17)
    slots = ask(weights, recipe)
    optimizer = FusedAdam(weights, lr=0.03)
    give_gradients(weights)
    optimizer.step()
    weights[0].grad = None
    before = None if slots is None else slots.clone()
    optimizer.step()
    same(current_copy(*weights), cast(weights, recipe, before))
    give_gradients(weights)
    before = None if slots is None else slots.clone()
    optimizer.step()
    same(current_copy(*weights), cast(weights, recipe, before))


def test_parameters_of_which_another_optimizer_steps_one_have_no_copies(place: torch.device) -> None:
    weights = parameters(place, 16, 32)
    ask(weights, CURRENT)
    optimizers = [FusedAdam([weight], lr=0.01) for weight in weights]
    for _ in range(2):
        give_gradients(weights)
        for optimizer in optimizers:
            optimizer.step()
        assert current_copy(*weights) is None


@pytest.mark.parametrize(("recipe", "height"), [(DELAYED, 32), (CURRENT, 32), (TILES, 128)])
def test_a_skipped_step_leaves_weights_and_copies(place: torch.device, recipe: Recipe, height: int) -> None:
    weights = parameters(place, height, 17)
    slots = ask(weights, recipe)
    optimizer = FusedAdam(weights, lr=0.03, max_grad_norm=1.0)
    give_gradients(weights)
    optimizer.step()
    with torch.no_grad():
        weights[1].mul_(0.5)
    assert current_copy(*weights) is None
    kept = [weight.detach().clone() for weight in weights]
    weights[0].grad = torch.full_like(weights[0], math.inf)
    before = None if slots is None else slots.clone()
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    assert all(torch.equal(weight, was) for weight, was in zip(weights, kept, strict=True))
    same(current_copy(*weights), cast(weights, recipe, before))


@pytest.mark.parametrize("which", [0, 1])
def test_a_change_of_any_parameter_makes_the_copies_stale(which: int) -> None:
    weights = parameters(torch.device("cpu"), 5, 7)
    ask(weights, CURRENT)
    optimizer = FusedAdam(weights, lr=0.01)
    give_gradients(weights)
    optimizer.step()
    assert current_copy(*weights) is not None
    assert current_copy(*reversed(weights)) is None
    with torch.no_grad():
        weights[which].add_(1)
    assert current_copy(*weights) is None


def test_refresh_drops_the_copies_of_all_parameters() -> None:
    model = nn.ParameterList(parameters(torch.device("cpu"), 5, 7))
    weights = list(model)
    ask(weights, CURRENT)
    optimizer = FusedAdam(weights, lr=0.01)
    give_gradients(weights)
    optimizer.step()
    weights[1].data.mul_(2)
    assert current_copy(*weights) is not None
    fusestep.refresh(nn.ParameterList(weights[1:]))
    assert current_copy(*weights) is None


def test_asking_for_other_parts_starts_anew() -> None:
    weights = parameters(torch.device("cpu"), 5, 7, 3)
    first = attach(weights, CURRENT)
    assert attach(weights, CURRENT) is first
    assert attach(weights[:2], CURRENT) is not first
    assert attach(weights, CURRENT) is not first
    alone = attach(weights[0], CURRENT)
    assert copies_of(weights[0]) is alone
    assert current_copy(*weights) is None


def test_backward_after_a_step_between_is_refused(place: torch.device) -> None:
    """Copies are written over in place, which autograd has to notice of what a forward has saved."""
    from fusestep.fp8 import fp8_autocast
    from fusestep.nn import Linear

    layer = Linear(32, 48, device=place, parameters_split=("query", "key"))
    optimizer = FusedAdam(layer.parameters(), lr=0.01)
    x = torch.randn(8, 32, device=place, requires_grad=True)
    for _ in range(2):
        with fp8_autocast(recipe=CURRENT):
            loss = layer(x).square().sum()
        loss.backward()
        optimizer.step()
    with fp8_autocast(recipe=CURRENT):
        loss = layer(x).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
