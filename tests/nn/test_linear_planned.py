"""Linear layers whose casts and products are planned together compute what casts and products by themselves do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep import dispatch, fp8
from fusestep.fp8.casts import Casts
from fusestep.fp8.casts_tensorwise import TensorwiseCasts
from fusestep.nn import Linear
from fusestep.ops.planned_product import PlannedProduct

RECIPES = (fp8.DelayedScaling(amax_history_len=3), fp8.Float8CurrentScaling())


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own product of FP8 matrices, which a CPU has as well."""
    monkeypatch.setattr(dispatch, "multiplies_fp8", lambda *_: True)


def steps(layer: Linear, recipe: fp8.Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of two steps, of random data that are the same every time."""
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    for step in range(2):
        x = torch.randn(shape, generator=generator).mul_(3**step).to(device, dtype).requires_grad_()
        with fp8.fp8_autocast(recipe=recipe):
            y = layer(x)
        dy = torch.randn(y.shape, generator=generator).to(device, y.dtype)
        wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        found += [y, *torch.autograd.grad(y, wanted, dy)]
    return found


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("shape", "options", "dtype", "is_planned"),
    [
        ((32, 48), {}, torch.bfloat16, True),
        ((2, 16, 48), {"parameters_split": {"a": 20, "b": 12}}, torch.bfloat16, True),
        ((16, 48), {"bias": False}, torch.float32, True),
        ((16, 48), {}, torch.float32, False),  # cuBLASLt adds no bias to fp32
        ((17, 48), {}, torch.bfloat16, False),
    ],
)
def test_outputs_and_gradients_are_those_of_the_unplanned_layer(
    recipe: fp8.Recipe,
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    is_planned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Linear(48, 32, dtype=dtype, **options)
    calls: list[int] = []
    forward = PlannedProduct.forward
    monkeypatch.setattr(PlannedProduct, "forward", lambda *given: (calls.append(1), forward(*given))[1])
    found = steps(layer, recipe, shape, dtype)
    assert len(calls) == (2 if is_planned else 0)
    layer._reset_fp8()
    monkeypatch.setattr(TensorwiseCasts, "planned_product", lambda *_: None)
    for ours, theirs in zip(found, steps(layer, recipe, shape, dtype), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
        assert bool(ours.any())


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_needs_no_gradient_gets_none_and_is_not_kept(frozen: str) -> None:
    layer = Linear(32, 16, dtype=torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_(frozen != "x")
    if frozen != "x":
        getattr(layer, frozen).requires_grad_(False)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        fp8.fp8_autocast(recipe=RECIPES[1]),
    ):
        y = layer(x)
    y.float().square().sum().backward()
    gradients = {"x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    assert [name for name, gradient in gradients.items() if gradient is None] == [frozen]
    assert sum(tensor.dtype is torch.float8_e4m3fn for tensor in kept) == (2 if frozen == "bias" else 1)


@pytest.mark.interpreter
@pytest.mark.usefixtures("native")
def test_what_is_kept_may_come_back_with_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(32, 48, dtype=torch.bfloat16)
    multiply, strides = torch._scaled_mm, []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, *rest: (strides.append(b.stride(0)), multiply(a, b, *rest))[1]
    )
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for pack in (torch.Tensor.contiguous, lambda tensor: tensor):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fp8.fp8_autocast(recipe=RECIPES[1]):
            y = layer(x)
        found.append(torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert strides == [1] * 6  # which cuBLASLt asks for


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(64, 256, 512), (512, 768, 2304), (320, 1600, 4800)])
def test_on_the_device_too(
    recipe: fp8.Recipe, rows: int, columns: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fp8.support()[0]:
        pytest.skip("this GPU does not multiply FP8")
    layer = Linear(columns, outputs, dtype=torch.bfloat16, device="cuda")
    found = steps(layer, recipe, (rows, columns), torch.bfloat16)
    layer._reset_fp8()
    monkeypatch.setattr(TensorwiseCasts, "planned_product", lambda *_: None)
    monkeypatch.setattr(TensorwiseCasts, "operands", Casts.operands)  # and each by itself
    for ours, theirs in zip(found, steps(layer, recipe, (rows, columns), torch.bfloat16), strict=True):
        assert torch.equal(ours, theirs)
