"""Norms of torch and of other libraries: which are swapped, and that they then agree in every dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert.norms import FusedNorm
from fusestep.nn import FusedLayerNorm, FusedRMSNorm
from fusestep.ops.norm import normalise

FORMS = ["PlainRMSNorm", "RoundingRMSNorm", "T5StyleLayerNorm", "OffsetRMSNorm", "CodedLayerNorm"]
WIDTH = 37
HALF = torch.bfloat16


def exact(form: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The norm in float64, from its definition."""
    x, weight = x.double(), weight.double()
    if form == "CodedLayerNorm":
        x = x - x.mean(-1, keepdim=True)
    eps = 1e-5 if form == "CodedLayerNorm" else 1e-6
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = x * (1 + weight) if form == "OffsetRMSNorm" else x * weight
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("form", FORMS)
def test_other_libraries_norms_agree_with_float64_and_undo(models: SimpleNamespace, form: str, device: Any) -> None:
    norm = getattr(models, form)(WIDTH).to(device)
    old_class, weight = type(norm), norm.weight
    report = convert(norm)
    assert [row.became for row in report.rows] == [f"Fused{form}"]
    assert isinstance(norm, FusedNorm)
    assert isinstance(norm, old_class)
    x = torch.randn(3, 5, WIDTH, device=device, requires_grad=True)
    dy = torch.randn(3, 5, WIDTH, device=device)
    found = torch.autograd.grad(norm(x), (x, weight), dy)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    bias = getattr(norm, "bias", None)
    truth = exact(form, *wide, bias)
    wanted = torch.autograd.grad(truth, wide, dy.double())
    for ours, true in zip((norm(x).detach(), *found), (truth.detach(), *wanted), strict=True):
        assert float((ours.double() - true).norm() / true.norm()) < 2e-6
    report.undo()
    assert type(norm) is old_class
    assert norm.weight is weight


@pytest.mark.parametrize(
    ("form", "x_dtype", "w_dtype"),
    [
        (form, x_dtype, w_dtype)
        for form in FORMS
        for x_dtype in (torch.float32, HALF)
        for w_dtype in (torch.float32, HALF)
        # torch's own layer_norm takes mixed dtypes on some devices only.
        if form != "CodedLayerNorm" or x_dtype is w_dtype
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_the_old_ones_also_after_a_cast_of_the_model(
    models: SimpleNamespace, form: str, x_dtype: torch.dtype, w_dtype: torch.dtype, autocast: bool, device: Any
) -> None:
    norm = getattr(models, form)(WIDTH).to(device)
    old = getattr(models, form)(WIDTH).to(device)
    old.load_state_dict(norm.state_dict())
    assert convert(norm).swapped
    norm, old = norm.to(w_dtype), old.to(w_dtype)  # after the conversion
    x = torch.randn(4, WIDTH, device=device).to(x_dtype)
    with torch.autocast(device.type, dtype=HALF, enabled=autocast):
        ours, theirs = norm(x), old(x)
    assert ours.dtype is theirs.dtype
    truth = exact(form, x, norm.weight.detach(), None if getattr(norm, "bias", None) is None else norm.bias.detach())
    error, own = ((y.detach().double() - truth).norm() for y in (ours, theirs))
    assert float(error) <= max(1.02 * float(own), 1e-6 * float(truth.norm()))


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_an_eps_that_only_the_code_knows_is_found(eps: float) -> None:
    class LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (WIDTH,), self.weight, None, eps)

    norm = LayerNorm()
    assert convert(norm).swapped
    x = torch.randn(4, WIDTH, dtype=torch.float64) * eps**0.5  # so small that eps decides
    wanted = nn.functional.layer_norm(x, (WIDTH,), norm.weight.detach().double(), None, eps)
    assert float((norm(x.float()).detach().double() - wanted).norm() / wanted.norm()) < 1e-5


def _other(formula: Any) -> nn.Module:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.eps = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return formula(x, self.weight, self.eps)

    return OddRMSNorm()


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, w, eps: w * x / (x.square().mean(-1, keepdim=True).sqrt() + eps**0.5),
        lambda x, w, eps: w * x / (x.square().sum(-1, keepdim=True) + eps).sqrt(),
        lambda x, w, eps: w * x / (x.abs().mean(-1, keepdim=True) + eps),
        lambda x, w, eps: w.detach() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt(),
    ],
    ids=["eps outside", "sum", "mean of absolutes", "no gradient of the weight"],
)
def test_what_computes_something_else_is_left_and_says_how_far_it_is(formula: Any) -> None:
    norm = _other(formula)
    (row,) = convert(norm).rows
    assert row.became is None
    assert row.reason.startswith("disagrees")
    assert type(norm).__name__ == "OddRMSNorm"


def test_a_norm_that_drops_out_while_training_is_left_in_either_mode() -> None:
    class DroppingRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(WIDTH)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            y = self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
            return nn.functional.dropout(y, 0.5, self.training)

    for training in (False, True):
        (row,) = convert(DroppingRMSNorm().train(training)).rows
        assert row.became is None
        assert row.reason.startswith("disagrees")


def test_a_norm_that_can_be_given_more_is_no_candidate(models: SimpleNamespace) -> None:
    norm, x = models.GatedRMSNorm(WIDTH), torch.randn(4, WIDTH)
    assert convert(nn.Sequential(norm)).rows == ()
    norm(x, x)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
def test_torchs_own(dtype: torch.dtype, device: Any) -> None:
    model = nn.Sequential(
        nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm((3, WIDTH), 1e-3, bias=False), nn.RMSNorm(WIDTH, 1e-4)
    ).to(device, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    x = torch.randn(5, 3, WIDTH, device=device, dtype=dtype)
    before = model(x)
    report = convert(model)
    assert [row.became for row in report.rows] == ["FusedLayerNorm", "FusedRMSNorm"] * 2
    assert all(isinstance(norm, (FusedLayerNorm, FusedRMSNorm)) for norm in model)
    torch.testing.assert_close(
        model(x), before, rtol=3e-2 if dtype is HALF else 1e-5, atol=3e-2 if dtype is HALF else 1e-5
    )
    report.undo()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtypes", [(HALF, torch.float32), (torch.float32, HALF), (HALF, HALF)], ids=str)
def test_with_a_residual_it_is_the_norm_of_the_sum_in_its_dtype(
    models: SimpleNamespace, form: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    norm = getattr(models, form)(WIDTH)
    convert(nn.Sequential(norm))
    x, residual = (torch.randn(5, WIDTH).to(dtype) for dtype in dtypes)
    y, total = norm.with_residual(x, residual)
    wanted = norm(x + residual)
    assert torch.equal(total, x + residual)
    assert y.dtype is wanted.dtype
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)


def test_without_weights_there_is_still_a_norm() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert [row.became for row in convert(model).rows] == ["FusedLayerNorm"]


@pytest.mark.interpreter
@pytest.mark.parametrize("centred", [False, True])
def test_the_kernel_writes_the_dtype_that_it_is_told(centred: bool) -> None:
    """bf16 in, fp32 out, as Llama's norm with fp32 weights has it, and the other way, as T5's."""
    for x_dtype, y_dtype in ((HALF, torch.float32), (torch.float32, HALF)):
        x = torch.randn(6, WIDTH).to(x_dtype).requires_grad_()
        weight = torch.randn(WIDTH, requires_grad=True)
        y = normalise(centred, "a norm", x, (WIDTH,), weight, None, 1e-6, None, False, y_dtype)
        assert y.dtype is y_dtype
        dy = torch.randn(6, WIDTH).to(y_dtype)
        dx, dweight = torch.autograd.grad(y, (x, weight), dy)
        wide, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
        rows = wide - wide.mean(-1, keepdim=True) if centred else wide
        true = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide_weight
        true_dx, true_dweight = torch.autograd.grad(true, (wide, wide_weight), dy.double())
        for ours, wanted in ((y, true), (dx, true_dx), (dweight, true_dweight)):
            assert float((ours.detach().double() - wanted.detach()).norm() / wanted.detach().norm()) < 6e-3
        assert dx.dtype is x_dtype
