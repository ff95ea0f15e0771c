"""Scaling state of modules: when it changes and when not, and what becomes of it when modules are saved and copied."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fusestep.errors import UserError
from fusestep.fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    count_saturation,
    export_state_dict,
    fp8_autocast,
)
from fusestep.fp8.context import is_enabled
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.state import KEYS
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear
from fusestep.optim import FusedAdam

RECIPE = DelayedScaling(amax_history_len=4)
MODULES: dict[str, Callable[..., Any]] = {
    "linear": lambda **options: Linear(24, 24, **options),
    "norm and linear": lambda **options: LayerNormLinear(24, 24, **options),
    "mlp": lambda **options: LayerNormMLP(24, 40, **options),
}


@pytest.fixture(params=list(MODULES))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return MODULES[request.param]


def batch(seed: int, device: Any = "cpu") -> Tensor:
    return torch.randn(10, 24, generator=torch.Generator().manual_seed(seed)).to(device)


def step(module: nn.Module, x: Tensor, recipe: Any = RECIPE) -> Tensor:
    """One forward and backward; the weights move a little."""
    with fp8_autocast(recipe=recipe):
        y = module(x)
    y.square().mean().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return y.detach()


def state(module: nn.Module) -> dict[str, Tensor]:
    """The state once all that was recorded has entered it."""
    with fp8_autocast(recipe=RECIPE):
        pass
    return {name: value.clone() for name, value in module.fp8_state.as_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


# When state changes


@pytest.mark.parametrize("mode", ["no_grad in training", "evaluation", "evaluation with gradients"])
def test_evaluation_between_steps_changes_nothing(mode: str, make: Callable[..., Any], device: torch.device) -> None:
    module = make(device=device)
    other = copy.deepcopy(module)
    for number in range(6):
        step(module, batch(number, device))
    for number in range(6):
        step(other, batch(number, device))
        if number == 2:
            before = state(other)
            large = (batch(9, device) * 1000).requires_grad_()
            other.train(mode == "no_grad in training")
            with torch.set_grad_enabled(mode == "evaluation with gradients"), fp8_autocast(recipe=RECIPE):
                y = other(large)
            if y.requires_grad:
                y.sum().backward()
                assert large.grad.isfinite().all()
                assert large.grad.any()
                other.zero_grad()
            other.train()
            if mode != "evaluation with gradients":  # which begins a region with gradients, and so a new step
                assert_equal(state(other), before)
    assert_equal(state(module), state(other))
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_of_a_module_that_never_trained_leaves_no_state(make: Callable[..., Any]) -> None:
    module = make()
    keys = list(module.state_dict())
    with torch.no_grad(), fp8_autocast(recipe=RECIPE):
        module(batch(0))
    assert module.fp8_state is None
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", ["around", "around forward alone", "within"])
@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()], ids=["delayed", "current"])
def test_recomputation_gives_the_same_gradients_and_state(
    reentrant: bool, region: str, recipe: Any, make: Callable[..., Any], device: torch.device
) -> None:
    if region == "within" and reentrant and recipe is RECIPE:
        pytest.skip("such a region sees no gradients enabled, and so begins no step")
    module = make(device=device)
    other = copy.deepcopy(module)

    def run(target: nn.Module, x: Tensor, recompute: bool) -> Tensor:
        x = x.requires_grad_()

        def forward(x: Tensor) -> Tensor:
            if region == "within":
                with fp8_autocast(recipe=recipe):
                    return target(x)
            return target(x)

        def call() -> Tensor:
            return checkpoint(forward, x, use_reentrant=reentrant) if recompute else forward(x)

        target.zero_grad()
        if region == "within":
            call().square().sum().backward()
        else:
            with fp8_autocast(recipe=recipe):
                y = call()
                if region == "around":
                    y.square().sum().backward()
            if region != "around":
                y.square().sum().backward()
        return x.grad

    for number in range(3):
        plain = run(module, batch(number, device), False)
        assert torch.equal(plain, run(other, batch(number, device), True))
        for a, b in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    if recipe is RECIPE:
        assert_equal(state(module), state(other))


def test_histories_roll_once_a_step_for_a_module_that_is_called_twice(make: Callable[..., Any]) -> None:
    module = make()
    for number in range(3):
        with fp8_autocast(recipe=RECIPE):
            (module(batch(number)) + module(batch(number + 1) * 3)).sum().backward()
    with fp8_autocast(recipe=RECIPE):
        pass
    assert module.fp8_state.rolls.eq(3).all()
    if isinstance(module, Linear) and not isinstance(module, LayerNormLinear):
        wanted = [max(batch(n).abs().max(), 3 * batch(n + 1).abs().max()) for n in range(3)]
        assert torch.equal(module.fp8_state.ordered_history()[1:, 0], torch.stack(wanted))


def test_a_module_under_two_parents_has_one_state(make: Callable[..., Any]) -> None:
    shared = make()
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    for number in range(3):
        with fp8_autocast(recipe=RECIPE):
            (model["a"](batch(number)) + model["b"](batch(number))).sum().backward()
    assert shared.fp8_state.rolls.eq(2).all()
    saved = model.state_dict()
    assert torch.equal(saved["a.0.fp8_slots"], saved["b.0.fp8_slots"])
    model.load_state_dict(saved)


def test_a_module_that_does_not_run_keeps_its_scales(make: Callable[..., Any]) -> None:
    a, b = make(), make()
    recipe = DelayedScaling(amax_history_len=2)
    for module in (a, b):
        step(module, batch(0) * 5, recipe)
        step(module, batch(0) * 5, recipe)
    with fp8_autocast(recipe=recipe):
        pass
    before = state(b)
    for number in range(5):
        step(a, batch(number), recipe)
    assert_equal(state(b), before)


def test_a_frozen_module_passes_gradients_and_records_its_input(make: Callable[..., Any]) -> None:
    module = make().requires_grad_(False)
    for number in range(2):
        x = batch(number).requires_grad_()
        with fp8_autocast(recipe=RECIPE):
            module(x).sum().backward()
        assert x.grad.any()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (module.fp8_state.scale > 0).all()


def test_a_value_that_is_not_finite_keeps_the_scale_and_is_counted(device: torch.device) -> None:
    module = Linear(24, 24, device=device)
    for number in range(3):
        step(module, batch(number, device))
    with fp8_autocast(recipe=RECIPE):
        scale = module.fp8_state.scale.clone()
        x = batch(3, device)
        x[0, 0] = torch.inf
        module(x)
    with fp8_autocast(recipe=RECIPE):
        pass
    assert torch.equal(module.fp8_state.scale[0], scale[0])
    assert module.fp8_state.refused.tolist() == [1, 0, 0]


def test_calibration_records_and_computes_in_high_precision(make: Callable[..., Any], device: torch.device) -> None:
    module = make(device=device)
    x = batch(0, device)
    plain = module(x)
    with fp8_autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = module(x)
        assert torch.equal(y, plain)
        y.sum().backward()
    recorded = module.fp8_state.amax.clone()
    assert (recorded > 0).all()
    other = copy.deepcopy(module)
    other._reset_fp8()
    with fp8_autocast(recipe=RECIPE):
        other(x).sum().backward()
    torch.testing.assert_close(recorded, other.fp8_state.amax, rtol=0.2, atol=0)
    module.eval()
    with torch.no_grad(), fp8_autocast(recipe=RECIPE):
        module(x)


def test_calibration_without_gradients_serves_inference(device: torch.device) -> None:
    module = Linear(24, 24, device=device).eval()
    x = batch(0, device)
    with torch.no_grad():
        with fp8_autocast(enabled=False, calibrating=True, recipe=RECIPE):
            module(x * 4)
        with fp8_autocast(recipe=RECIPE):
            y = module(x)
    amax = 4 * x.abs().amax()
    assert torch.equal(module.fp8_state.amax[0], amax)
    scale = torch.full_like(amax, 448) / amax
    weight = module.weight.detach()
    weight_scale = torch.full_like(amax, 448) / weight.abs().amax()
    wanted = (x * scale).to(torch.float8_e4m3fn).double() @ (weight * weight_scale).to(torch.float8_e4m3fn).double().t()
    wanted = wanted / scale.double() / weight_scale.double()
    assert (y - wanted).norm() < 1e-3 * wanted.norm()


def test_casts_are_counted_while_asked_for(make: Callable[..., Any]) -> None:
    module = make()
    step(module, batch(0))
    assert not module.fp8_state.counts.any()
    count_saturation()
    try:
        step(module, batch(0) * 2)
    finally:
        count_saturation(False)
    counted = module.fp8_state.counts.clone()
    assert (counted[:, 0] > 0).all()
    if isinstance(module, Linear) and not isinstance(module, LayerNormLinear):
        assert counted[0].tolist() == [240, int((batch(0).abs() * 2 > batch(0).abs().max()).sum()), 0]
    step(module, batch(0))
    assert torch.equal(module.fp8_state.counts, counted)


# Regions


def test_a_region_ends_with_an_exception_and_the_module_is_plain_again(make: Callable[..., Any]) -> None:
    module = make()
    plain = module(batch(0))
    with pytest.raises(UserError, match="last dimension 3"), fp8_autocast(recipe=RECIPE):
        module(torch.randn(2, 3))
    assert not is_enabled()
    assert torch.equal(module(batch(0)), plain)
    with fp8_autocast(recipe=RECIPE):
        with fp8_autocast(enabled=False):
            assert torch.equal(module(batch(0)), plain)
        assert not torch.equal(module(batch(0)), plain)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(module(batch(0))))
        thread.start()
        thread.join()
        assert torch.equal(found[0], plain)


def test_recipes_may_alternate(make: Callable[..., Any]) -> None:
    module = make()
    other = copy.deepcopy(module)
    current = Float8CurrentScaling()
    for number in range(3):
        step(module, batch(number), DelayedScaling(amax_history_len=4))  # a new object, the same recipe
        step(other, batch(number))
        assert torch.equal(step(module, batch(number), current), step(other, batch(number), current))
    assert_equal(state(module), state(other))
    longer = DelayedScaling(amax_history_len=7, fp8_format=Format.E4M3)
    step(module, batch(0), longer)
    assert module.fp8_state.history.shape[1] == 7
    assert module.fp8_state.slots[-1, 2] == 448


# Saving and loading


def test_training_continues_bit_for_bit_from_a_saved_state(make: Callable[..., Any], device: torch.device) -> None:
    module = make(device=device)
    for number in range(5):
        step(module, batch(number, device))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make(device=device)
    other.load_state_dict(torch.load(file))
    for number in range(5, 9):
        assert torch.equal(step(module, batch(number, device)), step(other, batch(number, device)))
    assert_equal(state(module), state(other))


def test_a_loop_that_rolls_before_the_optimizer_casts_resumes_bit_for_bit(make: Callable[..., Any]) -> None:
    """From a state dict and by a copy; the amax that the optimizer's cast left enters no history twice."""

    def run(module: Any, optimizer: Any, seeds: range) -> list[Tensor]:
        outputs = []
        for seed in seeds:
            with fp8_autocast(recipe=RECIPE):
                y = module(batch(seed))
            optimizer.zero_grad()
            y.square().mean().backward()
            with fp8_autocast(recipe=RECIPE):
                pass
            optimizer.step()
            outputs.append(y.detach())
        return outputs

    module = make()
    optimizer = FusedAdam(module.parameters(), lr=0.02)
    run(module, optimizer, range(4))
    others = [make(), copy.deepcopy(module)]
    others[0].load_state_dict(module.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    wanted = run(module, optimizer, range(4, 7))
    for other in others:
        again = FusedAdam(other.parameters(), lr=0.02)
        again.load_state_dict(saved)
        for y, one in zip(wanted, run(other, again, range(4, 7)), strict=True):
            assert torch.equal(y, one)
        assert_equal(state(module), state(other))


def test_a_state_loads_over_another_and_across_lengths_and_formats() -> None:
    module, other = Linear(24, 24), Linear(24, 24)
    for number in range(6):
        step(module, batch(number))
        step(other, batch(number) * 7, DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3))
    other.load_state_dict(module.state_dict())
    assert other.fp8_state.history.shape[1] == 2
    assert torch.equal(other.fp8_state.ordered_history(), module.fp8_state.ordered_history()[-2:])
    step(other, batch(0))
    assert other.fp8_state.history.shape[1] == 4


def test_states_go_to_and_from_torchs_linear_strictly() -> None:
    module, theirs, fresh = Linear(24, 24), nn.Linear(24, 24), Linear(24, 24)
    assert list(fresh.state_dict()) == ["weight", "bias"]
    theirs.load_state_dict(fresh.state_dict())
    step(module, batch(0))
    step(module, batch(1))
    assert list(module.state_dict()) == ["weight", "bias", *KEYS]
    fresh.load_state_dict(module.state_dict())
    assert_equal(fresh.fp8_state.as_dict(), module.fp8_state.as_dict())
    exported = export_state_dict({f"blocks.0.{key}": value for key, value in module.state_dict().items()})
    assert list(exported) == ["blocks.0.weight", "blocks.0.bias"]
    theirs.load_state_dict(export_state_dict(module.state_dict()))
    # Other weights come without scales: those of the old ones go.
    module.load_state_dict(theirs.state_dict())
    assert module.fp8_state is None
    module.load_state_dict(theirs.state_dict() | {"_extra_state": torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Transformer Engine pickled"):
        module.load_state_dict(theirs.state_dict() | {"_extra_state": torch.ones(9, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(theirs.state_dict() | {"other": torch.ones(1)})
    mlp = LayerNormMLP(24, 24)
    step(mlp, batch(0))
    with pytest.raises(RuntimeError, match=r"FP8 state of 6 tensors does not fit"):
        module.load_state_dict(theirs.state_dict() | {key: mlp.state_dict()[key] for key in KEYS})


def test_the_saved_state_does_not_grow() -> None:
    module = Linear(24, 24)
    sizes = []
    for count in (10, 60):
        for number in range(count):
            step(module, batch(number))
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] == sizes[1]


# Moving and copying


def test_state_keeps_its_dtype_and_values_when_the_module_changes_its_own(make: Callable[..., Any]) -> None:
    module = make()
    for number in range(3):
        step(module, batch(number))
    before = state(module)
    for change in (module.bfloat16, module.half, module.float, lambda: module.to("cpu", torch.bfloat16)):
        change()
        assert_equal(state(module), before)
    step(module.float(), batch(4))


@pytest.mark.gpu
def test_state_moves_with_the_module(make: Callable[..., Any]) -> None:
    module = make()
    for number in range(3):
        step(module, batch(number))
    before = state(module)
    module.cuda()
    assert module.fp8_state.slots.is_cuda
    step(module, batch(3, "cuda"))
    module.load_state_dict(module.state_dict() | before)
    module.cpu()
    assert_equal(state(module), before)


def test_copies_are_independent(make: Callable[..., Any]) -> None:
    module = make()
    for number in range(3):
        step(module, batch(number))
    before = state(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert_equal(other.fp8_state.as_dict(), before)
        step(other, batch(3) * 100)
        step(other, batch(3) * 100)
        assert_equal(state(module), before)
        assert not torch.equal(other.fp8_state.scale, module.fp8_state.scale)


def test_a_module_that_is_initialised_anew_has_no_scales(make: Callable[..., Any]) -> None:
    module = make()
    step(module, batch(0))
    module.to("meta")
    assert module.fp8_state is None
    module.to_empty(device="cpu")
    module.reset_parameters()
    step(module, batch(0))
    step(module, batch(1))
    assert module.fp8_state.rolls.eq(1).all()
    module.reset_parameters()
    assert module.fp8_state is None
    step(module, batch(0))


def weight_name(module: nn.Module) -> str:
    return next(name for name, parameter in module.named_parameters() if parameter.dim() == 2)


@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()])
def test_a_weight_that_is_computed_from_others_is_used_as_it_is(make: Callable[..., Any], recipe: Recipe) -> None:
    torch.manual_seed(0)
    plain = make()
    computed = copy.deepcopy(plain)
    nn.utils.parametrizations.weight_norm(computed, weight_name(computed))
    x = batch(0)
    for module in (plain, computed):
        with fp8_autocast(recipe=recipe):
            y = module(x)
        y.square().mean().backward()
    # The weight is the same until a step, but for the rounding of its norm.
    with fp8_autocast(recipe=recipe), torch.no_grad():
        assert (plain(x) - computed(x)).norm() < 0.01 * plain(x).norm()
    assert all(parameter.grad is not None for parameter in computed.parameters())


def test_a_pruned_weight_is_pruned_in_fp8_too(make: Callable[..., Any]) -> None:
    module = make()
    name = weight_name(module)
    prune.random_unstructured(module, name, 0.5)
    step(module, batch(0))
    with fp8_autocast(recipe=RECIPE):
        module(batch(1)).sum().backward()
    gradient = getattr(module, name + "_orig").grad
    assert 0.4 < float((gradient == 0).float().mean()) < 0.6


def test_a_replica_runs_as_its_module(make: Callable[..., Any]) -> None:
    """What nn.DataParallel makes: plain tensors stand where parameters were."""
    module = make()
    replica = module._replicate_for_data_parallel()
    for name, parameter in module.named_parameters():
        setattr(replica, name, parameter.clone())
    x = batch(0)
    with fp8_autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(replica(x), module(x))
        replica(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_replicas_are_refused_where_they_would_share_scales_or_miss_the_region(make: Callable[..., Any]) -> None:
    module = make()
    replica, x = module._replicate_for_data_parallel(), batch(0)
    for name, parameter in module.named_parameters():
        setattr(replica, name, parameter.clone())
    for options in ({"enabled": True}, {"enabled": False, "calibrating": True}):
        with fp8_autocast(**options), pytest.raises(UserError, match=r"replicas of .* would share"):
            replica(x)
        with fp8_autocast(**options), pytest.raises(UserError, match="which this fp8_autocast region does not reach"):
            module._replicate_for_data_parallel()
    assert module.fp8_state is None
    assert torch.equal(replica(x), module(x))
