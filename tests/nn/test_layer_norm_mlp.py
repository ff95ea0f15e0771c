"""LayerNormMLP: every activation, cast as it is computed, forward and backward."""

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
from fusestep.nn import LayerNormMLP
from fusestep.ops.activation import ACTIVATIONS, is_gated

Close = Callable[..., None]
NAMES = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def made(hidden: int, ffn: int, device: Any, dtype: torch.dtype = torch.float32, **options: Any) -> LayerNormMLP:
    layer = LayerNormMLP(hidden, ffn, device=device, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.05)
    return layer


def activation64(h: Tensor, name: str) -> Tensor:
    """The activations in float64, from their definitions."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "srelu": lambda x: torch.relu(x).square(),
        "silu": nn.functional.silu,
    }
    if name in functions:
        return functions[name](h)
    a, b = h.chunk(2, dim=-1)
    if name == "glu":
        return torch.sigmoid(a) * b
    if name == "clamped_swiglu":
        return functions["qgelu"](a.clamp(max=7)) * (b.clamp(-7, 7) + 1)
    base = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}[name]
    return functions[base](a) * b


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_output_and_gradients_equal_the_oracle(
    activation: str, recipe: Recipe, oracle: Any, close: Close, device: torch.device
) -> None:
    layer = made(45, 37, device, activation=activation)
    x, dy = torch.randn(3, 7, 45, device=device), torch.randn(3, 7, 45, device=device)
    x.requires_grad_()
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)

    flat = x.detach().view(-1, 45).double().requires_grad_()
    normed64 = nn.functional.layer_norm(
        flat, (45,), layer.layer_norm_weight.detach().double(), layer.layer_norm_bias.detach().double(), layer.eps
    )
    normed = normed64.detach().float()
    h = oracle.product(normed, layer.fc1_weight, layer.fc1_bias).float().double().requires_grad_()
    a64 = activation64(h, activation)
    a = a64.detach().float()
    # Casts of values that lie between two of FP8 may fall either way: a few in a thousand elements would show. On a GPU
    # h has some 13 digits of its sum, so that of the activation's casts about one in a hundred does.
    near = 1e-2 if device.type == "cuda" else 2e-4
    close(y, oracle.product(a, layer.fc2_weight, layer.fc2_bias).view(y.shape), near)
    da, dfc2, dfc2_bias = oracle.gradients(dy.view(-1, 45), a, layer.fc2_weight)
    a64.backward(da.float().double())
    dh = h.grad.float()
    dn, dfc1, dfc1_bias = oracle.gradients(dh, normed, layer.fc1_weight)
    normed64.backward(dn)
    close(x.grad, flat.grad.view(x.shape), near)
    for name, wanted in zip(NAMES, (dfc1, dfc1_bias, dfc2, dfc2_bias), strict=True):
        close(getattr(layer, name).grad, wanted, near)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bf16_stays_near_the_mlp_in_high_precision(activation: str, recipe: Recipe, device: torch.device) -> None:
    layer = made(64, 96, device, torch.bfloat16, activation=activation, normalization="RMSNorm")
    plain = copy.deepcopy(layer).float()
    x, residual, dy = (torch.randn(70, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    results = []
    for module, enabled in ((layer, True), (plain, False)):
        dtype = torch.bfloat16 if enabled else torch.float32
        its_x = x.to(dtype, copy=True).requires_grad_()
        with fp8_autocast(enabled=enabled, recipe=recipe):
            y, total = module(its_x, residual=residual.to(dtype))
        torch.autograd.backward([y, total], [dy.to(dtype), dy.to(dtype)])
        results.append([y, its_x.grad, *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs).norm() < 0.12 * theirs.norm()


def test_outside_a_region_it_is_plain(device: torch.device) -> None:
    for activation in ACTIVATIONS:
        layer = made(20, 12, device, activation=activation)
        x = torch.randn(4, 20, device=device)
        normed = nn.functional.layer_norm(x, (20,), layer.layer_norm_weight, layer.layer_norm_bias)
        h = nn.functional.linear(normed, layer.fc1_weight, layer.fc1_bias)
        wanted = nn.functional.linear(activation64(h, activation), layer.fc2_weight, layer.fc2_bias)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)


def test_parameters_have_transformer_engines_names_and_shapes() -> None:
    for activation in ("gelu", "swiglu"):
        layer = LayerNormMLP(20, 12, activation=activation)
        shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        rows = 24 if is_gated(activation) else 12
        assert shapes == {
            "layer_norm_weight": (20,),
            "layer_norm_bias": (20,),
            "fc1_weight": (rows, 20),
            "fc1_bias": (rows,),
            "fc2_weight": (20, 12),
            "fc2_bias": (20,),
        }
    names = dict(LayerNormMLP(20, 12, bias=False, normalization="RMSNorm").named_parameters())
    assert set(names) == {"layer_norm_weight", "fc1_weight", "fc2_weight"}


@pytest.mark.parametrize("needed", [*NAMES, "layer_norm_weight", "x"])
def test_one_gradient_alone_is_the_one_among_all(needed: str, recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device, activation="swiglu")
    x, dy = torch.randn(5, 24, device=device), torch.randn(5, 24, device=device)
    gradients = []
    for everything in (True, False):
        layer.zero_grad()
        layer._reset_fp8()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(everything or name == needed)
        its_x = x.clone().requires_grad_(everything or needed == "x")
        with fp8_autocast(recipe=recipe):
            layer(its_x).backward(dy)
        gradients.append(its_x.grad if needed == "x" else getattr(layer, needed).grad)
        if not everything:
            assert sum(parameter.grad is not None for parameter in layer.parameters()) == (needed != "x")
    # On a GPU the cast makes this one's sums on the way, unless nothing needs the cast.
    if device.type == "cuda" and needed == "fc2_bias":
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*gradients)


def test_backward_keeps_what_is_said_and_no_more(recipe: Recipe, device: torch.device) -> None:
    layer = made(128, 256, device, torch.bfloat16)
    x = torch.randn(256, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    with fp8_autocast(recipe=recipe):
        y = layer(x)
    kept = {id(t): t for t in y.grad_fn.saved_tensors if t is not None}
    new = sum(t.nbytes for t in kept.values() if t.data_ptr() != x.data_ptr())
    said = 256 * 128 + 2 * 256 * 256 + 256 * 256 + 2 * 256 * 128
    assert said <= new <= said * 1.15


def test_micro_batches_keep_both_weights(recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device)
    x = torch.randn(5, 24, device=device)
    with fp8_autocast(recipe=recipe):
        first = layer(x, is_first_microbatch=True)
        assert torch.equal(layer(x, is_first_microbatch=False), first)
        with torch.no_grad():
            layer.fc2_weight.mul_(-1)
        assert not torch.equal(layer(x, is_first_microbatch=False), first)


def test_no_tokens_and_tuples(recipe: Recipe, device: torch.device) -> None:
    layer = made(24, 16, device, return_bias=True, return_layernorm_output=True)
    for rows in (0, 3):
        x = torch.randn(rows, 24, device=device)
        with fp8_autocast(recipe=recipe):
            y, bias, normed, total = layer(x, residual=x)
        assert y.shape == normed.shape == total.shape == x.shape
        assert bias is layer.fc2_bias
        y.sum().backward()


def test_mistakes_are_told_in_one_sentence() -> None:
    with pytest.raises(UserError, match="tanh"):
        LayerNormMLP(4, 4, activation="tanh")
    with pytest.raises(UserError, match="ffn_hidden_size is 0"):
        LayerNormMLP(4, 0)
    with pytest.raises(UserError, match=r"LayerNormMLP\(hidden_size=4, .*last dimension 5.* takes 4 features"):
        LayerNormMLP(4, 4)(torch.randn(3, 5))


def test_a_second_differentiation_is_refused(device: torch.device) -> None:
    layer = made(8, 8, device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with fp8_autocast():
        y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="LayerNormMLP in FP8 cannot be differentiated twice"):
        dx.sum().backward()
