"""Linear: what it computes in FP8, at any shape, and what it keeps of torch.nn.Linear."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    fp8_autocast,
)
from fusestep.fp8.recipes import Recipe
from fusestep.nn import Linear

Close = Callable[..., None]
SHAPES = [(5, 33, 47), (1, 1, 1), (17, 16, 20), (130, 129, 257), (48, 32, 64)]


def made(features: int, out: int, device: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Linear:
    layer = Linear(features, out, device=device, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) + 0.1)
    return layer


def run(layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """(y, dx), gradients of parameters in .grad."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with fp8_autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **options)
    y.backward(dy)
    return y.detach(), x.grad


# Numbers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradients_equal_quantised_operands_multiplied_in_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, recipe: Recipe, oracle: Any, close: Close, device: torch.device
) -> None:
    rows, features, out = shape
    layer = made(features, out, device, dtype)
    x = torch.randn(rows, features, device=device, dtype=dtype) - 0.2
    dy = torch.randn(rows, out, device=device, dtype=dtype) * 1e-3
    y, dx = run(layer, x, dy, recipe)
    wanted_dx, wanted_dweight, wanted_dbias = oracle.gradients(dy, x, layer.weight)
    close(y, oracle.product(x, layer.weight, layer.bias))
    close(dx, wanted_dx)
    close(layer.weight.grad, wanted_dweight)
    close(layer.bias.grad, wanted_dbias)
    assert y.dtype == dx.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


def test_stays_near_the_product_in_high_precision(recipe: Recipe, close: Close, device: torch.device) -> None:
    layer = made(200, 130, device)
    x, dy = torch.randn(90, 200, device=device), torch.randn(90, 130, device=device)
    y, dx = run(layer, x, dy, recipe)
    dweight = layer.weight.grad
    plain_y, plain_dx = run(layer, x, dy, None)
    # E4M3 rounds to within 1/16, E5M2 to within 1/8, and errors of random operands add as squares.
    close(y, plain_y, 0.05)
    close(dx, plain_dx, 0.08)
    close(dweight, layer.weight.grad, 0.08)


@hypothesis.settings(max_examples=40)
@hypothesis.given(*[strategies.integers(1, 70)] * 3)
@hypothesis.example(1, 4100, 1)
@hypothesis.example(4099, 1, 3)
@hypothesis.example(2, 17, 4097)
def test_any_shape_multiplies_in_emulation(rows: int, features: int, out: int) -> None:
    check_against_unpadded(rows, features, out, torch.device("cpu"), 1e-5)


@pytest.mark.gpu
def test_any_shape_multiplies_on_the_gpu() -> None:
    sizes = torch.randint(1, 4101, (60, 3), generator=torch.Generator().manual_seed(7)).tolist()
    for rows, features, out in sizes:
        check_against_unpadded(rows, features, out, torch.device("cuda", 0), 2e-3)


def check_against_unpadded(rows: int, features: int, out: int, device: torch.device, tolerance: float) -> None:
    """The whole layer against float64 products of the operands without padding, as ops.quantize casts them."""
    generator = torch.Generator(device).manual_seed(rows + 5000 * features + out)
    x, weight, dy = (
        torch.randn(size, generator=generator, device=device)
        for size in ((rows, features), (out, features), (rows, out))
    )
    layer = Linear(features, out, device=device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.normal_()
    y, dx = run(layer, x, dy, Float8CurrentScaling())

    def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
        largest = torch.finfo(dtype).max
        amax = t.abs().amax()
        scale = torch.full_like(amax, largest) / amax
        q = (t * scale).clamp(-largest, largest).to(dtype)
        return q.double() * (torch.ones_like(scale) / scale).double()

    q_x, q_weight, q_dy = (
        cast(t, d) for t, d in ((x, torch.float8_e4m3fn), (weight, torch.float8_e4m3fn), (dy, torch.float8_e5m2))
    )
    for value, wanted in (
        (y, q_x @ q_weight.t() + layer.bias.detach().double()),
        (dx, q_dy @ q_weight),
        (layer.weight.grad, q_dy.t() @ q_x),
        (layer.bias.grad, dy.double().sum(0)),
    ):
        # A lone sum that cancels has no digits to compare.
        assert (value.double() - wanted).norm() <= tolerance * (wanted.norm() + 0.1)


def test_a_later_step_uses_the_scale_of_earlier_ones(close: Close, device: torch.device) -> None:
    layer, recipe = made(40, 24, device), DelayedScaling(amax_history_len=2)
    x, dy = torch.randn(16, 40, device=device), torch.randn(16, 24, device=device)
    run(layer, x, dy, recipe)
    y, _ = run(layer, x * 0.25, dy, recipe)
    scale, weight_scale = (448 / t.abs().amax() for t in (x, layer.weight.detach()))
    q_x = (x * 0.25 * scale).to(torch.float8_e4m3fn).double() / scale.double()
    q_weight = (layer.weight.detach() * weight_scale).to(torch.float8_e4m3fn).double() / weight_scale.double()
    close(y, q_x @ q_weight.t() + layer.bias.detach().double())


def test_a_tensor_that_grows_saturates_and_the_next_step_has_adapted(close: Close, device: torch.device) -> None:
    layer, recipe = made(32, 16, device), DelayedScaling(amax_history_len=4)
    x, dy = torch.rand(8, 32, device=device), torch.randn(8, 16, device=device)
    run(layer, x, dy, recipe)
    y, dx = run(layer, x * 1000, dy, recipe)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    plain, _ = run(layer, x * 1000, dy, None)
    assert (y - plain).norm() > 0.5 * plain.norm()
    y, _ = run(layer, x * 1000, dy, recipe)
    close(y, plain, 0.05)


@pytest.mark.parametrize("which", ["x", "weight", "dy", "row"])
def test_zero_operands_give_zeros_and_finite_gradients(which: str, recipe: Recipe, device: torch.device) -> None:
    layer = made(40, 24, device, bias=False)
    x, dy = torch.randn(20, 40, device=device), torch.randn(20, 24, device=device)
    if which == "x":
        x.zero_()
    elif which == "weight":
        nn.init.zeros_(layer.weight)
    elif which == "dy":
        dy.zero_()
    else:
        x[3] = dy[3] = 0
    y, dx = run(layer, x, dy, recipe)
    for value in (y, dx, layer.weight.grad):
        assert value.isfinite().all()
    if which in ("x", "weight"):
        assert not y.any()
    if which == "dy":
        assert not dx.any()
        assert not layer.weight.grad.any()
    if which == "row":
        assert not y[3].any()
        assert not dx[3].any()


def test_tiny_gradients_keep_their_proportions(recipe: Recipe, close: Close, device: torch.device) -> None:
    x, dy = torch.randn(24, 40, device=device), torch.randn(24, 16, device=device)
    layer, other = made(40, 16, device), made(40, 16, device)
    other.load_state_dict(layer.state_dict())
    _, dx = run(layer, x, dy, recipe)
    _, small_dx = run(other, x, dy * 2.0**-30, recipe)
    close(small_dx * 2.0**30, dx)
    close(other.weight.grad * 2.0**30, layer.weight.grad)


def test_the_first_step_does_not_flush_small_weights(close: Close, device: torch.device) -> None:
    layer = Linear(64, 48, device=device, init_method=lambda w: nn.init.normal_(w, std=0.005))
    x = torch.eye(64, device=device)
    y, _ = run(layer, x, torch.ones(64, 48, device=device), DelayedScaling())
    close(y, layer.weight.detach().t(), 0.04)


# Which gradients


@pytest.mark.parametrize("x_needed", [True, False])
@pytest.mark.parametrize("weight_needed", [True, False])
@pytest.mark.parametrize("bias_needed", [True, False])
def test_computes_the_gradients_that_are_needed_and_no_others(
    x_needed: bool, weight_needed: bool, bias_needed: bool, recipe: Recipe, device: torch.device
) -> None:
    layer = made(33, 18, device)
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    _, wanted = run(layer, x, dy, recipe)
    gradients = {"x": wanted, "weight": layer.weight.grad, "bias": layer.bias.grad}
    layer = copy.deepcopy(layer)
    layer.zero_grad()
    layer._reset_fp8()
    layer.weight.requires_grad_(weight_needed)
    layer.bias.requires_grad_(bias_needed)
    x.requires_grad_(x_needed)
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    assert y.requires_grad == (x_needed or weight_needed or bias_needed)
    if y.requires_grad:
        y.backward(dy)
    for name, value, needed in (
        ("x", x.grad, x_needed),
        ("weight", layer.weight.grad, weight_needed),
        ("bias", layer.bias.grad, bias_needed),
    ):
        assert (value is not None) == needed
        if needed:
            torch.testing.assert_close(value, gradients[name], rtol=1e-6, atol=1e-6)


def test_backward_keeps_operands_in_fp8_alone(recipe: Recipe, device: torch.device) -> None:
    layer = made(256, 128, device, torch.bfloat16)
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        y = layer(x * 1.0)
    kept = sum(tensor.nbytes for tensor in y.grad_fn.saved_tensors if tensor is not None)
    operands = 64 * 256 + 128 * 256
    assert operands <= kept <= operands * 1.1


def test_gradients_are_the_same_inside_and_outside_the_region(recipe: Recipe, device: torch.device) -> None:
    layer = made(20, 12, device)
    other = copy.deepcopy(layer)
    x, dy = torch.randn(9, 20, device=device), torch.randn(9, 12, device=device)
    run(layer, x, dy, recipe)
    with fp8_autocast(recipe=recipe):
        other(x).backward(dy)
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_a_second_differentiation_is_refused(device: torch.device) -> None:
    layer = made(8, 8, device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with fp8_autocast():
        y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dx.sum().backward()


def test_a_pass_without_gradients_first_leaves_the_training_pass_all_of_them(device: torch.device) -> None:
    layer = made(8, 8, device)
    x = torch.randn(3, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16), fp8_autocast():
        with torch.no_grad():
            layer(x)
        layer(x).float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


# Inputs


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3, 2)])
def test_leading_dimensions_are_kept(lead: tuple[int, ...], recipe: Recipe, device: torch.device) -> None:
    layer = made(33, 18, device)
    x, dy = torch.randn(*lead, 33, device=device), torch.randn(*lead, 18, device=device)
    y, dx = run(layer, x, dy, recipe)
    dweight = layer.weight.grad
    layer._reset_fp8()
    flat_y, flat_dx = run(layer, x.reshape(-1, 33), dy.reshape(-1, 18), recipe)
    assert torch.equal(y, flat_y.view(y.shape))
    assert torch.equal(dx, flat_dx.view(x.shape))
    assert torch.equal(dweight, layer.weight.grad)
    assert y.is_contiguous()


def test_any_strides_are_read(recipe: Recipe, device: torch.device) -> None:
    layer = made(20, 12, device)
    wide, dy_wide = torch.randn(6, 5, 40, device=device), torch.randn(12, 5, 6, device=device)
    x, dy = wide.transpose(0, 1)[..., ::2], dy_wide.permute(1, 2, 0)
    y, dx = run(layer, x, dy, recipe)
    layer._reset_fp8()
    plain_y, plain_dx = run(layer, x.contiguous(), dy.contiguous(), recipe)
    assert torch.equal(y, plain_y)
    assert torch.equal(dx, plain_dx)
    # As the gradient of a sum is: one value, expanded.
    run(layer, x, torch.ones((), device=device).expand(5, 6, 12), recipe)


def test_no_tokens_give_an_empty_output_and_zero_gradients(recipe: Recipe, device: torch.device) -> None:
    layer = made(20, 12, device, torch.bfloat16)
    x = torch.randn(0, 3, 20, device=device, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 3, 12)
    assert x.grad is not None
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


def test_the_output_can_be_changed_in_place(recipe: Recipe, device: torch.device) -> None:
    layer = made(20, 13, device)
    for shape in ((3, 20), (2, 3, 20)):
        with fp8_autocast(recipe=recipe):
            y = layer(torch.randn(shape, device=device, requires_grad=True))
        nn.functional.relu_(y).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_output(
    dtype: torch.dtype, recipe: Recipe, oracle: Any, close: Close, device: torch.device
) -> None:
    layer = made(33, 18, device)
    x = torch.randn(7, 33, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype), fp8_autocast(recipe=recipe):
        y = layer(x)
    assert y.dtype == dtype
    close(y, oracle.product(x, layer.weight, layer.bias))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    wanted_dx, wanted_dweight, _ = oracle.gradients(dy, x, layer.weight)
    close(x.grad, wanted_dx)
    close(layer.weight.grad, wanted_dweight)


def test_parameters_may_have_another_dtype_than_the_input(oracle: Any, close: Close, device: torch.device) -> None:
    layer = made(33, 18, device)
    x, dy = (torch.randn(7, n, device=device, dtype=torch.bfloat16) for n in (33, 18))
    y, dx = run(layer, x, dy, oracle.recipe)
    close(y, oracle.product(x, layer.weight, layer.bias))
    assert dx.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    close(layer.weight.grad, oracle.gradients(dy, x, layer.weight)[1])


def test_wrong_inputs_are_told_in_one_sentence() -> None:
    layer = Linear(768, 16, name="head")
    told = r"^Linear\(in_features=768, out_features=16, bias=True, name='head'\): .*\.$"
    with fp8_autocast():
        with pytest.raises(UserError, match=told + "(?<=)") as raised:
            layer(torch.randn(3, 767))
        assert "last dimension 767" in str(raised.value)
        assert "768 features" in str(raised.value)
        with pytest.raises(UserError, match="no dimension"):
            layer(torch.randn(()))
        with pytest.raises(UserError, match=r"x has dtype torch\.float64"):
            layer(torch.randn(3, 768, dtype=torch.float64))
        with pytest.raises(UserError, match="x is on meta and the weight on cpu"):
            layer(torch.randn(3, 768, device="meta"))
        with pytest.raises(UserError, match=r"name='head'\): the weight has dtype torch\.float64"):
            copy.deepcopy(layer).double()(torch.randn(3, 768))
        with pytest.raises(UserError, match=r"transforms of torch\.func"):
            torch.func.vmap(layer)(torch.randn(3, 768))
    with pytest.raises(UserError, match=r"x has dtype torch\.bfloat16 and the weight torch\.float32"):
        layer(torch.randn(3, 768, dtype=torch.bfloat16))
    assert layer.fp8_state is None
    for sizes in ((0, 3), (3, -1), (3, 2.5)):
        with pytest.raises(UserError, match="pass an integer of at least 1"):
            Linear(*sizes)


@pytest.mark.gpu
def test_a_training_call_copies_no_matrix() -> None:
    device = torch.device("cuda", 0)
    layer = made(256, 512, device, torch.bfloat16)
    x, dy = (torch.randn(2, 64, n, device=device, dtype=torch.bfloat16) for n in (256, 512))
    for _ in range(2):
        run(layer, x, dy, DelayedScaling())
    layer.zero_grad()
    x.requires_grad_()
    with fp8_autocast():
        layer(x).backward(dy)  # the roll is behind us, and gradients of nothing are stolen, not added
        layer.zero_grad()
        torch.cuda.synchronize()
        # acc_events: without it some versions of torch warn, whether or not there is a second cycle.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)
            torch.cuda.synchronize()
    kernels = [event.key for event in profiler.key_averages() for _ in range(event.count) if "kernel" in event.key]
    # The bias's gradient is rounded from its fp32 sums.
    assert sum("elementwise" in name or "copy" in name.lower() for name in kernels) <= 1, kernels


# Outside a region, and construction


def test_outside_a_region_it_is_torchs_own(device: torch.device) -> None:
    layer, theirs = made(33, 18, device), nn.Linear(33, 18, device=device)
    theirs.load_state_dict(layer.state_dict())
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    y, dx = run(layer, x, dy, None)
    other = x.clone().requires_grad_()
    z = theirs(other)
    z.backward(dy)
    assert torch.equal(y, z)
    assert torch.equal(dx, other.grad)
    assert torch.equal(layer.weight.grad, theirs.weight.grad)
    named = list(inspect.signature(nn.Linear.__init__).parameters)
    assert list(inspect.signature(Linear.__init__).parameters)[: len(named)] == named


def test_initial_weights_are_normal_and_biases_zero() -> None:
    layer = Linear(300, 200)
    assert abs(layer.weight.std().item() - 0.023) < 5e-4
    assert not layer.bias.any()
    assert Linear(3, 2, init_method=nn.init.ones_).weight.eq(1).all()
    assert Linear(3, 2, bias=False).bias is None


def test_deferred_initialisation(device: torch.device) -> None:
    layer = Linear(30, 20, device="meta")
    assert layer.weight.is_meta
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer.weight.std() > 0.01
    run(layer, torch.randn(4, 30, device=device), torch.randn(4, 20, device=device), DelayedScaling())


def test_the_bias_can_be_returned_instead_of_added(recipe: Recipe, device: torch.device) -> None:
    layer = made(20, 12, device)
    returning = made(20, 12, device, return_bias=True)
    returning.load_state_dict(layer.state_dict())
    x = torch.randn(4, 20, device=device)
    for enabled in (False, True):
        with fp8_autocast(enabled=enabled, recipe=recipe):
            y, bias = returning(x)
            torch.testing.assert_close(y + bias, layer(x))
        assert bias is returning.bias


@pytest.mark.parametrize("split", [("query", "key", "value"), {"query_": 10, "key_": 4, "value_": 4}])
def test_a_split_weight_is_one_product(split: Any, recipe: Recipe, device: torch.device) -> None:
    whole, parts = made(33, 18, device), made(33, 18, device, parameters_split=split)
    names = [name for name, _ in parts.named_parameters()]
    assert names == [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("query", "key", "value")]
    with torch.no_grad():
        whole.weight.copy_(torch.cat([getattr(parts, name) for name in names[:3]]))
        whole.bias.copy_(torch.cat([getattr(parts, name) for name in names[3:]]))
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    y, dx = run(parts, x, dy, recipe)
    wanted_y, wanted_dx = run(whole, x, dy, recipe)
    assert torch.equal(y, wanted_y)
    assert torch.equal(dx, wanted_dx)
    assert torch.equal(torch.cat([getattr(parts, name).grad for name in names[:3]]), whole.weight.grad)
    assert torch.equal(torch.cat([getattr(parts, name).grad for name in names[3:]]), whole.bias.grad)
    with fp8_autocast(recipe=recipe):
        kept = parts(x, is_first_microbatch=True)
        assert torch.equal(parts(x, is_first_microbatch=False), kept)


def test_splits_that_do_not_add_up_are_refused() -> None:
    for split in (("a", "b", "c", "d"), {"a": 9, "b": 8}, {}, {"a": 18, "b": 0}):
        with pytest.raises(UserError, match=r"parameters_split|cannot be split evenly"):
            Linear(33, 18, parameters_split=split)


# Micro-batches


def test_micro_batches_share_one_cast_of_the_weight_with_its_scale(device: torch.device) -> None:
    layer, recipe = made(33, 18, device), DelayedScaling(amax_history_len=1)
    x = torch.randn(7, 33, device=device)
    dy = torch.randn(7, 18, device=device)
    run(layer, x, dy, recipe)
    first, _ = run(layer, x, dy, recipe, is_first_microbatch=True)
    for _ in range(4):
        # Each region rolls histories: were the data used with a newer scale, outputs would be off.
        assert torch.equal(run(layer, x, dy, recipe, is_first_microbatch=False)[0], first)


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_keeping_the_weight_changes_no_bit_under_recipes_without_state(recipe: Recipe, device: torch.device) -> None:
    layer = made(33, 18, device)
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    for number in range(4):
        y, dx = run(layer, x, dy, recipe)
        dweight = layer.weight.grad
        kept_y, kept_dx = run(layer, x, dy, recipe, is_first_microbatch=number == 0)
        assert torch.equal(y, kept_y)
        assert torch.equal(dx, kept_dx)
        assert torch.equal(dweight, layer.weight.grad)


def test_a_kept_weight_is_not_used_after_the_weight_changed(recipe: Recipe, device: torch.device) -> None:
    layer = made(33, 18, device, bias=False)
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    run(layer, x, dy, recipe, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(-1)
    y, _ = run(layer, x, dy, recipe, is_first_microbatch=False)
    plain, _ = run(layer, x, dy, None)
    assert (y - plain).norm() < 0.1 * plain.norm()


def test_evaluation_casts_the_weight_afresh(recipe: Recipe, device: torch.device) -> None:
    layer = made(33, 18, device, bias=False)
    x, dy = torch.randn(7, 33, device=device), torch.randn(7, 18, device=device)
    run(layer, x, dy, recipe, is_first_microbatch=True)
    layer.eval()
    # Averaged weights are often swapped in so, which no version tells.
    layer.weight.data.mul_(-1)
    with torch.no_grad(), fp8_autocast(recipe=recipe):
        y = layer(x, is_first_microbatch=False)
    plain = nn.functional.linear(x, layer.weight)
    assert (y - plain).norm() < 0.1 * plain.norm()
