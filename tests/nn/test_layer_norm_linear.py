"""LayerNormLinear: a norm cast as it is computed, its residual, and gradients through both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, fp8_autocast
from fusestep.fp8.recipes import Recipe
from fusestep.nn import LayerNormLinear, LayerNormMLP, fused_norm

Close = Callable[..., None]


def made_of(kind: Any, features: int, out: int, device: Any, **options: Any) -> Any:
    layer = kind(features, out, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    return layer


def made(features: int, out: int, device: Any, dtype: torch.dtype = torch.float32, **options: Any) -> LayerNormLinear:
    layer: LayerNormLinear = made_of(LayerNormLinear, features, out, device, dtype=dtype, **options)
    return layer


def norm64(x: Tensor, layer: Any) -> Tensor:
    """The norm in float64."""
    weight = layer.layer_norm_weight.detach().double() + (1.0 if layer.zero_centered_gamma else 0.0)
    shape = x.shape[-1:]
    if layer.normalization == "RMSNorm":
        return nn.functional.rms_norm(x.double(), shape, weight, layer.eps)
    return nn.functional.layer_norm(x.double(), shape, weight, layer.layer_norm_bias.detach().double(), layer.eps)


def as_cast(normed: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """What is cast of a fused norm: fp32 values, or where scales are of blocks, values rounded to the dtype."""
    is_blocks = isinstance(recipe, (Float8BlockScaling, MXFP8BlockScaling))
    return normed.detach().to(dtype if is_blocks else torch.float32)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_output_and_gradients_equal_the_oracle(
    normalization: Any,
    dtype: torch.dtype,
    with_residual: bool,
    recipe: Recipe,
    oracle: Any,
    close: Close,
    device: torch.device,
) -> None:
    options = {"normalization": normalization, "zero_centered_gamma": with_residual}
    layer = made(45, 37, device, dtype, return_layernorm_output=with_residual, **options)
    x, residual, dtotal, dnormed = (torch.randn(3, 7, 45, device=device, dtype=dtype) for _ in range(4))
    dy = torch.randn(3, 7, 37, device=device, dtype=dtype)
    x.requires_grad_()
    residual.requires_grad_()
    with fp8_autocast(recipe=recipe):
        if with_residual:
            y, normed, total = layer(x, residual=residual)
        else:
            y, normed, total = layer(x), None, None

    stream = ((x + residual) if with_residual else x).detach()
    stream64 = stream.double().requires_grad_()
    normed64 = norm64(stream64, layer)
    operand = as_cast(normed64, recipe, dtype).view(-1, 45)
    close(y, oracle.product(operand, layer.weight, layer.bias).view(y.shape))
    dn, dweight, dbias = oracle.gradients(dy.view(-1, 37), operand, layer.weight)
    dn = dn.view(x.shape)
    if with_residual:
        assert torch.equal(total, stream)
        close(normed, normed64)
        torch.autograd.backward([y, normed, total], [dy, dnormed, dtotal])
        normed64.backward(dn + dnormed.double())
        wanted = stream64.grad + dtotal.double()
        close(residual.grad, wanted, 1e-2 if dtype is torch.bfloat16 else None)
    else:
        y.backward(dy)
        normed64.backward(dn)
        wanted = stream64.grad
    # Gradients are rounded to the dtype on their way through the norm.
    close(x.grad, wanted, 1e-2 if dtype is torch.bfloat16 else None)
    close(layer.weight.grad, dweight)
    close(layer.bias.grad, dbias)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype


def test_gradients_of_the_norm_are_those_of_the_products_gradient(recipe: Recipe, device: torch.device) -> None:
    layer = made(64, 48, device, torch.float32)
    plain = copy.deepcopy(layer)
    x, dy = torch.randn(90, 64, device=device), torch.randn(90, 48, device=device)
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    plain(x).backward(dy)
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() < 0.08 * theirs.grad.norm()


def test_outside_a_region_it_is_a_norm_and_a_product(device: torch.device) -> None:
    layer = made(24, 16, device)
    x, residual = torch.randn(5, 24, device=device), torch.randn(5, 24, device=device)
    y, total = layer(x, residual=residual)
    normed = norm64(x + residual, layer).float()
    torch.testing.assert_close(y, nn.functional.linear(normed, layer.weight, layer.bias))
    assert torch.equal(total, x + residual)


def test_only_the_stream_may_be_used(recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device)
    x = torch.randn(5, 24, device=device, requires_grad=True)
    residual = torch.randn(5, 24, device=device, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        _, total = layer(x, residual=residual)
    dtotal = torch.randn_like(total)
    total.backward(dtotal)
    assert torch.equal(x.grad, dtotal)
    assert torch.equal(residual.grad, dtotal)


@pytest.mark.parametrize("frozen", ["weight", "norm", "all but x", "all"])
def test_frozen_parts_get_no_gradient_and_the_others_theirs(
    frozen: str, recipe: Recipe, close: Close, device: torch.device
) -> None:
    layer = made(24, 16, device)
    other = copy.deepcopy(layer)
    x, dy = torch.randn(5, 24, device=device), torch.randn(5, 16, device=device)
    for name, parameter in layer.named_parameters():
        if frozen.startswith("all") or (frozen == "weight") == (name in ("weight", "bias")):
            parameter.requires_grad_(False)
    gradients = []
    for module, needed in ((layer, frozen != "all"), (other, True)):
        its_x = x.clone().requires_grad_(needed)
        with fp8_autocast(recipe=recipe):
            y = module(its_x)
        assert y.requires_grad == needed
        if needed:
            y.backward(dy)
        gradients.append(its_x.grad)
    if frozen != "all":
        assert torch.equal(*gradients)
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert (ours.grad is not None) == ours.requires_grad
        if ours.requires_grad:
            assert torch.equal(ours.grad, theirs.grad)


def test_the_norm_is_kept_for_backward_in_fp8_once(recipe: Recipe, device: torch.device) -> None:
    layer = made(128, 64, device, torch.bfloat16)
    x = torch.randn(256, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    kept = {id(t): t for t in y.grad_fn.saved_tensors if t is not None}
    new = sum(t.nbytes for t in kept.values() if t.data_ptr() != x.data_ptr())
    one_copy = 256 * 128 + 64 * 128
    # And two statistics for each row, the norm's parameters, scales.
    assert one_copy <= new <= one_copy * 1.2


def test_tuples_hold_what_was_asked_for_in_order(recipe: Recipe, device: torch.device) -> None:
    x = torch.randn(5, 24, device=device)
    layer = made(24, 16, device, return_bias=True, return_layernorm_output=True)
    for enabled in (False, True):
        with fp8_autocast(enabled=enabled, recipe=recipe):
            y, bias, normed, total = layer(x, residual=x)
        assert y.shape == (5, 16)
        assert bias is layer.bias
        assert normed.shape == x.shape
        assert torch.equal(total, 2 * x)


def test_no_tokens(recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device, torch.bfloat16)
    x = torch.randn(2, 0, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        y, total = layer(x, residual=x)
    (y.sum() + total.sum()).backward()
    assert y.shape == (2, 0, 16)
    assert not layer.weight.grad.any()
    assert not layer.layer_norm_weight.grad.any()


def test_a_split_weight_gets_its_gradients_in_parts(recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 18, device, parameters_split=("query", "key", "value"))
    with fp8_autocast(recipe=recipe):
        layer(torch.randn(5, 24, device=device)).square().sum().backward()
    assert layer.key_weight.grad.shape == (6, 24)
    assert layer.value_bias.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_stream_keeps_its_dtype(dtype: torch.dtype, recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device)
    x = torch.randn(5, 24, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype), fp8_autocast(recipe=recipe):
        y, total = layer(x, residual=x)
    assert y.dtype == dtype
    assert total.dtype == torch.float32
    (y.float().sum() + total.sum()).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_under_autocast_the_norm_is_written_as_the_product_takes_it(
    kind: Any, normalization: Any, with_residual: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of a norm in fp32 that is cast, which is what a module does that returns its norm."""
    layer = made_of(kind, 24, 40, device, normalization=normalization)
    seen: list[torch.dtype] = []
    normalise = fused_norm.normalise

    def watched(*args: Any, **options: Any) -> Any:
        result = normalise(*args, **options)
        seen.append((result[0] if isinstance(result, tuple) else result).dtype)
        return result

    monkeypatch.setattr(fused_norm, "normalise", watched)
    x, residual = (torch.randn(7, 24, device=device) * 3 + 1 for _ in range(2))
    found: list[list[Tensor]] = []
    for returns_norm in (True, False):
        layer.return_layernorm_output = returns_norm
        leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
        with torch.autocast(device.type, torch.bfloat16):
            result = layer(leaves[0], residual=leaves[1] if with_residual else None)
        results = list(result) if isinstance(result, tuple) else [result]
        if returns_norm:
            del results[1]
        layer.zero_grad()
        sum((one.float() * torch.linspace(-1, 1, one.shape[-1], device=device)).sum() for one in results).backward()
        gradients = [one.grad for one in (*leaves, *layer.parameters()) if one.grad is not None]
        found.append([one.detach() for one in (*results, *gradients)])
    assert seen == [torch.float32, torch.bfloat16]
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        assert a.dtype is b.dtype
        # On a GPU the kernels of another dtype may add in another order.
        unit = 0.0 if device.type == "cpu" else 2.0**-7 if a.dtype is torch.bfloat16 else 1e-5
        assert float((a.double() - b.double()).abs().max()) <= unit * float(a.abs().max())


@pytest.mark.parametrize("region", [None, Float8CurrentScaling(), DelayedScaling()], ids=str)
@pytest.mark.parametrize("watched", [False, True])
def test_what_reaches_the_returned_input_is_added_in_the_norms_own_backward(
    region: Recipe | None, watched: bool, device: torch.device
) -> None:
    layer = made(24, 37, device)
    twin = copy.deepcopy(layer)
    if watched:
        seen: list[Any] = []
        layer.register_full_backward_hook(lambda _, dx, dy: seen.append((dx, dy)))
    found = []
    x, dy, dsum = (torch.randn(3, 7, size, device=device) for size in (24, 37, 24))
    for each in (layer, twin):
        leaf = x.clone().requires_grad_()
        with fp8_autocast(enabled=region is not None, recipe=region):
            y, stream = each(leaf, returns_input=True) if each is layer else (each(leaf), leaf)
        assert torch.equal(stream, x)
        torch.autograd.backward((y, stream * 1.0), (dy, dsum))
        found.append([leaf.grad, *[parameter.grad for parameter in each.parameters()]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if watched:
        ((dx, *_), (seen_dy, seen_dsum)) = seen[0]
        assert torch.equal(dx, found[0][0])
        assert torch.equal(seen_dy, dy)
        assert torch.equal(seen_dsum, dsum)


def test_the_returned_input_alone_may_be_used_differentiated_twice_and_frozen(device: torch.device) -> None:
    layer = made(24, 37, device)
    x, dsum = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(5, 24, device=device)
    _, stream = layer(x, returns_input=True)
    assert torch.equal(torch.autograd.grad(stream, x, dsum)[0], dsum)
    second = []
    for asks in (True, False):
        y, stream = layer(x, returns_input=True) if asks else (layer(x), x)
        (dx,) = torch.autograd.grad((y * y).sum() + (stream**3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-3)
    y, stream = layer(x.detach(), returns_input=True)
    (y.sum() + stream.sum()).backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        y, stream = layer(x, returns_input=True)
    assert not y.requires_grad
    assert torch.equal(stream, x)


def test_mistakes_are_told_in_one_sentence() -> None:
    with pytest.raises(UserError, match='pass "LayerNorm" or "RMSNorm"'):
        LayerNormLinear(4, 4, normalization="batch")
    layer = LayerNormLinear(4, 4)
    with pytest.raises(UserError, match=r"residual has shape \(2, 4\)"):
        layer(torch.randn(3, 4), residual=torch.randn(2, 4))
    with pytest.raises(UserError, match=r"LayerNormLinear\(in_features=4, .*last dimension 5"):
        layer(torch.randn(3, 5))


def test_a_second_differentiation_is_refused(device: torch.device) -> None:
    layer = made(8, 8, device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with fp8_autocast():
        y, total = layer(x, residual=x)
    (dx,) = torch.autograd.grad(y.sum() + total.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="LayerNormLinear in FP8 cannot be differentiated twice"):
        dx.sum().backward()
