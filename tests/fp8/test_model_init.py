"""Weights that live in FP8 only: how they are made, act as tensors, are saved, loaded and trained."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    fp8_model_init,
)
from fusestep.fp8.gathered import GatheredWeight
from fusestep.fp8.model_init import prepare_weights
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.tensor import Float8Tensor, quantized_weight
from fusestep.optim import FusedAdam

RECIPES = [DelayedScaling(), Float8CurrentScaling(use_power_2_scales=True), Float8BlockScaling(), MXFP8BlockScaling()]


class Layer(nn.Module):
    """What a module of ours does with its weights."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, 21, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.randn(37, dtype=dtype, device=device))
        prepare_weights(self, ("weight",))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        prepare_weights(self, ("weight",))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def layer(recipe: Recipe | None = None, preserve: bool = True, dtype: torch.dtype = torch.bfloat16) -> Layer:
    with fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return Layer(dtype)


def fp8(module: Layer) -> Float8Tensor:
    assert isinstance(module.weight, Float8Tensor)
    return module.weight


@pytest.fixture(params=RECIPES, ids=lambda recipe: type(recipe).__name__)
def recipe(request: pytest.FixtureRequest) -> Iterator[Recipe]:
    return request.param  # type: ignore[no-any-return]


def test_weights_live_in_fp8_and_the_rest_does_not(recipe: Recipe) -> None:
    module = layer(recipe)
    weight = fp8(module)
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.dtype == torch.bfloat16
    assert type(module.bias) is nn.Parameter
    initial = weight.get_high_precision_init_val()
    assert initial is not None
    torch.testing.assert_close(weight.dequantize(), initial, rtol=0.07, atol=0.01)
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None


def test_no_copy_in_high_precision_is_held(recipe: Recipe) -> None:
    weight = fp8(layer(recipe, preserve=False))
    assert weight.untyped_storage().nbytes() == 0 or weight.data_ptr() == 0
    held = [t for t in (weight.quantized.data, weight.quantized.transposed) if t is not None]
    assert sum(t.numel() * t.element_size() for t in held) == 48 * 32


def test_init_nests_and_is_put_back() -> None:
    with fp8_model_init():
        with fp8_model_init(enabled=False):
            assert not isinstance(Layer().weight, Float8Tensor)
        assert isinstance(Layer().weight, Float8Tensor)
    with pytest.raises(ZeroDivisionError), fp8_model_init():
        raise ZeroDivisionError
    assert not isinstance(Layer().weight, Float8Tensor)
    with pytest.raises(UserError, match="recipe is 3"), fp8_model_init(recipe=3):  # type: ignore[arg-type]
        pass


def test_weights_without_values_are_cast_once_they_have_some() -> None:
    with fp8_model_init():
        module = Layer(device="meta")
        assert not isinstance(module.weight, Float8Tensor)
        module.to_empty(device="cpu")
        module.reset_parameters()
    assert isinstance(module.weight, Float8Tensor)


def test_other_operations_meet_the_values(recipe: Recipe) -> None:
    module = layer(recipe)
    weight, x = fp8(module), torch.randn(5, 21, dtype=torch.bfloat16, requires_grad=True)
    values = weight.dequantize()
    y = module(x)
    assert torch.equal(y, nn.functional.linear(x, values, module.bias))
    y.sum().backward()
    assert type(weight.grad) is Tensor
    assert x.grad is not None
    assert torch.equal(weight.t() + 1, values.t() + 1)
    assert torch.equal(weight[3:5], values[3:5])
    assert type(torch.zeros_like(weight)) is Tensor


def test_writing_in_place_casts_again_in_every_form(recipe: Recipe) -> None:
    weight = fp8(layer(recipe))
    weight.quantized_both_ways()
    version = weight._version
    new = torch.randn(37, 21, dtype=torch.bfloat16) * 7
    with torch.no_grad():
        weight.copy_(new)
    assert weight._version > version
    torch.testing.assert_close(weight.dequantize(), new, rtol=0.07, atol=0.05)
    weight.data.mul_(2)
    torch.testing.assert_close(weight.dequantize(), new * 2, rtol=0.14, atol=0.1)
    both = quantized_weight(weight, transposed=True)
    assert both is not None
    from_transposed = type(both)(
        both.shape, None, both.transposed, both.scale_inv, both.transposed_scale_inv, both.block
    ).dequantize(torch.bfloat16)
    torch.testing.assert_close(from_transposed, weight.dequantize(), rtol=0.07, atol=0.05)
    with torch.no_grad():
        nn.init.zeros_(weight)
    assert not weight.dequantize().any()


def test_foreign_weights_are_none() -> None:
    assert quantized_weight(nn.Parameter(torch.randn(3, 4))) is None


def test_moves_keep_the_bytes_and_dtypes_are_nominal(recipe: Recipe) -> None:
    module = layer(recipe)
    before, scale = fp8(module)._data.view(torch.uint8).clone(), fp8(module)._scale_inv.clone()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module.to(dtype)
        assert fp8(module).dtype == module.bias.dtype == dtype
        assert torch.equal(fp8(module)._data.view(torch.uint8), before)
        assert torch.equal(fp8(module)._scale_inv, scale)
    assert fp8(module).quantized.scale_inv.dtype in (torch.float32, torch.uint8)
    module.to("meta")
    assert fp8(module).device.type == "meta"


def test_copies_and_pickles_are_independent_and_equal(recipe: Recipe) -> None:
    module = layer(recipe)
    twin = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert isinstance(other.weight, Float8Tensor)
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight.requires_grad
        assert torch.equal(other.weight.dequantize(), fp8(module).dequantize())
        assert other.weight._data.data_ptr() != fp8(module)._data.data_ptr()
    with torch.no_grad():
        twin.weight.zero_()
    assert fp8(module).dequantize().any()


def test_a_state_dict_holds_plain_tensors_that_every_reader_takes(recipe: Recipe) -> None:
    module = layer(recipe)
    state = module.state_dict()
    assert {type(value) for value in state.values()} == {Tensor}
    assert state["weight"].shape == (37, 21)
    assert state["weight"].dtype == torch.float8_e4m3fn
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), load(save(state))):
        again = layer(recipe)
        again.load_state_dict(loaded)
        assert torch.equal(fp8(again)._data.view(torch.uint8), fp8(module)._data.view(torch.uint8))
        assert torch.equal(fp8(again)._scale_inv, fp8(module)._scale_inv)
        ordinary = Layer()
        ordinary.load_state_dict(loaded)
        assert torch.equal(ordinary.weight, fp8(module).dequantize())


def test_weights_in_high_precision_load_too(recipe: Recipe) -> None:
    module, ordinary = layer(recipe), Layer()
    module.load_state_dict(ordinary.state_dict())
    torch.testing.assert_close(fp8(module).dequantize(), ordinary.weight.detach(), rtol=0.07, atol=0.01)


def test_one_format_loads_into_another() -> None:
    module, other = layer(DelayedScaling()), layer(Float8BlockScaling())
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(fp8(module).dequantize(), fp8(other).dequantize(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_start_from_the_preserved_values_and_are_what_is_cast(recipe: Recipe, dtype: torch.dtype) -> None:
    module = layer(recipe, dtype=dtype)
    weight = fp8(module)
    weight.quantized_both_ways()
    initial = weight.get_high_precision_init_val()
    assert initial is not None
    optimizer = FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    theirs = nn.Parameter(initial.float().clone())
    oracle = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(37, 21, dtype=dtype)
        weight.grad, theirs.grad = gradient, gradient.float()
        optimizer.step()
        oracle.step()
        master = optimizer.state[weight]["master_param"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, theirs.detach(), rtol=1e-5, atol=1e-6)
        cast = Float8Tensor.of(master, weight.form)
        assert torch.equal(weight._data.view(torch.uint8), cast._data.view(torch.uint8))
        assert torch.equal(weight._scale_inv, cast._scale_inv)
        both, wanted = weight.quantized_both_ways(), cast.copies().cast(master)
        assert both.dequantize(torch.float32).equal(wanted.dequantize(torch.float32))


def test_without_preserved_values_masters_start_from_the_fp8_ones() -> None:
    module = layer(preserve=False)
    optimizer = FusedAdam(module.parameters(), lr=0.0, master_weights=True)
    values = fp8(module).dequantize().float()
    module.weight.grad = torch.ones(37, 21, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["master_param"], values)


def test_training_without_masters_is_refused() -> None:
    with pytest.raises(UserError, match=r"lives in FP8 only .* pass master_weights=True"):
        FusedAdam(layer().parameters())


def test_training_resumes_from_model_and_optimizer_states(recipe: Recipe) -> None:
    module = layer(recipe)
    optimizer = FusedAdam(module.parameters(), lr=0.01, master_weights=True)
    x = torch.randn(5, 21, dtype=torch.bfloat16)

    def step(one: Layer, its: FusedAdam) -> None:
        its.zero_grad()
        one(x).float().square().mean().backward()
        its.step()

    step(module, optimizer)
    again = layer(recipe)
    again.load_state_dict(copy.deepcopy(module.state_dict()))
    second = FusedAdam(again.parameters(), lr=0.01, master_weights=True)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(module, optimizer)
        step(again, second)
    assert torch.equal(fp8(again).dequantize(), fp8(module).dequantize())
    assert torch.equal(again.bias, module.bias)


def test_other_optimizers_step_the_values(recipe: Recipe) -> None:
    module = layer(recipe)
    before = fp8(module).dequantize()
    module(torch.randn(5, 21, dtype=torch.bfloat16)).sum().backward()
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    assert isinstance(module.weight, Float8Tensor)
    assert not torch.equal(fp8(module).dequantize(), before)


def test_room_for_a_shard_is_of_the_weight_and_everything_else_is_plain() -> None:
    with fp8_model_init(recipe=Float8CurrentScaling()):
        weight = Layer().weight
    shard = weight.detach().new_zeros(3, 21)
    assert type(shard) is GatheredWeight
    assert (shard.dtype, tuple(shard.shape)) == (torch.bfloat16, (3, 21))
    assert type(weight.detach().new_zeros((3, 21), dtype=torch.int64)) is torch.Tensor
    assert type(weight.detach().new_zeros(7)) is torch.Tensor
    same = torch.as_strided(weight.detach(), (37, 21), (21, 1), 0)
    assert type(same) is Float8Tensor
    assert same.quantized is weight.quantized
    corner = torch.as_strided(weight.detach(), (2, 3), (21, 1), 22)
    assert torch.equal(corner, weight.dequantize()[1:3, 1:4])
