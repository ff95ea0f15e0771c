"""What cannot look into FP8 is refused in words: transforms of torch.func, batched and forward-mode gradients, a second
differentiation. Outside of FP8 the same modules give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusestep.errors import UserError
from fusestep.fp8 import fp8_autocast
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear
from fusestep.nn.multihead_attention import MultiheadAttention

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Linear(8, 8),
    "LayerNormLinear": lambda: LayerNormLinear(8, 8),
    "LayerNormMLP": lambda: LayerNormMLP(8, 16),
    # Its product hands out q, k and v, whose gradients come one by one.
    "MultiheadAttention": lambda: MultiheadAttention(8, 2, attention_dropout=0.0),
}
every = pytest.mark.parametrize("name", MODULES)
WORDS = r"cannot look into FP8; .*call the module outside of fp8_autocast there\."


def made(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    x = torch.randn((3, 4, 8), device=device, requires_grad=True)
    return MODULES[name]().to(device), x


def first(result: Any) -> Tensor:
    y: Tensor = result[0] if isinstance(result, tuple) else result
    return y


@every
def test_fp8_refuses_gradients_in_a_batch(name: str, device: torch.device) -> None:
    module, x = made(name, device)
    for _ in range(2):  # the second call goes by what the first has kept
        with fp8_autocast():
            y = first(module(x))
        dys = torch.randn((2, *y.shape), device=device)
        with pytest.raises(UserError, match=WORDS):
            torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
        with pytest.raises(UserError, match=WORDS):
            torch.func.vmap(lambda dy, y=y: torch.autograd.grad(y, x, dy, retain_graph=True))(dys)
        (found,) = torch.autograd.grad(y, x, dys[0])
        assert found.isfinite().all()


@every
def test_fp8_refuses_transforms_and_forward_mode(name: str, device: torch.device) -> None:
    module, x = made(name, device)
    with fp8_autocast():
        module(x)
        with pytest.raises(UserError, match=WORDS):
            torch.func.grad(lambda x: first(module(x)).sum())(x.detach())
        with forward_ad.dual_level(), pytest.raises(UserError, match=WORDS):
            module(forward_ad.make_dual(x.detach(), torch.ones_like(x)))


@every
def test_fp8_refuses_a_second_differentiation_whichever_way_it_is_asked_for(name: str, device: torch.device) -> None:
    module, x = made(name, device)
    for _ in range(2):
        with fp8_autocast():
            y = first(module(x))
        gradients = torch.autograd.grad(y.square().sum(), (x, *module.parameters()), create_graph=True)
        total = sum(gradient.square().sum() for gradient in gradients)
        with pytest.raises(RuntimeError, match="in FP8 cannot be differentiated twice"):
            torch.autograd.grad(total, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="in FP8 cannot be differentiated twice"):
            total.backward()


@every
def test_outside_of_fp8_they_work(name: str, device: torch.device) -> None:
    module, x = made(name, device)
    y = first(module(x))
    dys = torch.randn((2, *y.shape), device=device)
    (batched,) = torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
    for found, dy in zip(batched, dys, strict=True):
        (one,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(x)
    # torch's fused attention has no forward mode.
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        tangent = forward_ad.unpack_dual(first(module(forward_ad.make_dual(x.detach(), direction)))).tangent
    # ⟨dy, J·v⟩ = ⟨Jᵀ·dy, v⟩
    torch.testing.assert_close((tangent * dys[0]).sum(), (batched[0] * direction).sum(), rtol=1e-3, atol=1e-3)
