"""Linear under the recipes with a scale for each block: what blocks change, beside what every recipe must do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusestep import dispatch, explain
from fusestep.fp8 import Float8BlockScaling, Format, MXFP8BlockScaling, fp8_autocast
from fusestep.fp8.recipes import Recipe
from fusestep.nn import Linear
from fusestep.ops.block_scaling import quantize_blocks

Close = Callable[..., None]

RECIPES: dict[str, Recipe] = {
    "blocks": Float8BlockScaling(),
    "blocks, fp32 scales": Float8BlockScaling(use_f32_scales=True),
    "blocks, hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8, hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
}


@pytest.fixture(params=list(RECIPES))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


def run(layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(y, dx), gradients of parameters in .grad."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def read(recipe: Recipe, x: Tensor, gradient: bool = False, weight: bool = False) -> Tensor:
    """What a product that sums over the columns of x reads, in float64."""
    formats = recipe.fp8_format
    is_mx = isinstance(recipe, MXFP8BlockScaling)
    q, _ = quantize_blocks(
        x.detach().contiguous(),
        formats.backward if gradient else formats.forward,
        (1, 32) if is_mx else (128, 128) if weight else (1, 128),
        power_of_two=not getattr(recipe, "use_f32_scales", False),
    )
    return q.dequantize().double()


@pytest.mark.parametrize(("rows", "features", "out"), [(3, 127, 129), (128, 128, 128), (129, 300, 31), (260, 130, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_product_reads_blocks_along_its_own_sum(
    rows: int, features: int, out: int, dtype: torch.dtype, recipe: Recipe, close: Close, device: torch.device
) -> None:
    layer = Linear(features, out, device=device, dtype=dtype)
    # Rows and columns of very different sizes, which one scale could not serve.
    x = (torch.randn(rows, features) * torch.randn(rows, 1).exp() * torch.randn(features).mul(2).exp()).to(
        device, dtype
    )
    dy = (torch.randn(rows, out) * torch.randn(rows, 1).mul(2).exp()).to(device, dtype)
    y, dx = run(layer, x, dy, recipe)
    weight, bias = layer.weight, layer.bias
    assert bias is not None
    assert weight.grad is not None
    assert bias.grad is not None
    close(y, read(recipe, x) @ read(recipe, weight, weight=True).t() + bias.detach().double())
    close(dx, read(recipe, dy, gradient=True) @ read(recipe, weight.t(), weight=True).t())
    close(weight.grad, read(recipe, dy.t(), gradient=True) @ read(recipe, x.t()).t())
    close(bias.grad, dy.double().sum(0))


def test_an_outlier_spoils_no_other_row(recipe: Recipe, device: torch.device) -> None:
    layer = Linear(200, 40, device=device)
    x = torch.randn(150, 200, device=device)
    dy = torch.randn(150, 40, device=device)
    y, dx = run(layer, x, dy, recipe)
    loud = x.clone()
    loud[7, 3] = 1e20
    loud_dy = dy.clone()
    loud_dy[9, 1] = 1e20
    loud_y, loud_dx = run(layer, loud, loud_dy, recipe)
    others = torch.arange(150, device=device) != 7
    assert torch.equal(loud_y[others], y[others])
    others = torch.arange(150, device=device) != 9
    assert torch.equal(loud_dx[others], dx[others])
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


def test_blocks_of_zeros_in_every_operand_give_zeros(recipe: Recipe, device: torch.device) -> None:
    layer = Linear(260, 270, bias=False, device=device)
    with torch.no_grad():
        layer.weight[128:256] = 0
    x = torch.randn(140, 260, device=device)
    dy = torch.randn(140, 270, device=device)
    x[:, 128:256] = 0
    x[5] = 0
    dy[6] = 0
    y, dx = run(layer, x, dy, recipe)
    assert layer.weight.grad is not None
    for zeros in (y[5], y[:, 128:256], dx[6], layer.weight.grad[:, 128:256]):
        assert not zeros.any()
    for gradient in (y, dx, layer.weight.grad):
        assert bool(gradient.isfinite().all())


def test_gradients_that_are_not_finite_stay_so(recipe: Recipe, device: torch.device) -> None:
    # A gradient scaler has to see them.
    layer = Linear(40, 50, device=device)
    x, dy = torch.randn(20, 40, device=device), torch.randn(20, 50, device=device)
    dy[3, 4] = math.nan
    _, dx = run(layer, x, dy, recipe)
    assert layer.weight.grad is not None
    assert bool(dx[3].isnan().all())
    assert bool(layer.weight.grad[4].isnan().all())


def test_the_error_is_that_of_the_format(recipe: Recipe, device: torch.device) -> None:
    layer = Linear(512, 256, device=device)
    x, dy = torch.randn(300, 512, device=device), torch.randn(300, 256, device=device)
    y, dx = run(layer, x, dy, recipe)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    true = x.double() @ weight.t() + bias
    assert float((y - true).norm() / true.norm()) < 0.04
    true = dy.double() @ weight
    bound = 0.07 if recipe.fp8_format is Format.HYBRID else 0.04
    assert float((dx - true).norm() / true.norm()) < bound


def test_no_state_is_kept(recipe: Recipe, device: torch.device) -> None:
    layer = Linear(40, 50, device=device)
    x, dy = torch.randn(20, 40, device=device), torch.randn(20, 50, device=device)
    first, _ = run(layer, x, dy, recipe)
    run(layer, x * 1e5, dy, recipe)
    again, _ = run(layer, x, dy, recipe)
    assert torch.equal(first, again)
    assert layer.fp8_state is None
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_explanation_tells_that_the_product_is_emulated_and_why() -> None:
    layer = Linear(40, 50)
    for recipe, native_somewhere in ((Float8BlockScaling(), True), (MXFP8BlockScaling(), False)):
        with fp8_autocast(recipe=recipe):
            text = str(explain(layer))
            choice = layer.implementation()
        assert choice.implementation == "emulated"
        assert choice.reason in text
        assert dispatch.explain_product("cpu", None, "block" if native_somewhere else "mx") == choice
