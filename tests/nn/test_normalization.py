"""FusedLayerNorm and FusedRMSNorm as modules: drop-in for torch's own."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

from fusestep import nn as fused
from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.nn import FusedLayerNorm, FusedRMSNorm

PAIRS = [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_is_a_torch_norm_with_its_arguments(ours: type, theirs: type) -> None:
    assert isinstance(ours(8), theirs)
    named = list(inspect.signature(theirs.__init__).parameters)
    assert list(inspect.signature(ours.__init__).parameters)[: len(named)] == named


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [12, (3, 4), [3, 4]])
@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}, {"eps": 1e-3}])
def test_state_goes_to_and_from_torch(
    ours: type, theirs: type, shape: object, options: dict[str, object], device: torch.device
) -> None:
    if theirs is nn.RMSNorm and "bias" in options:
        pytest.skip("RMSNorm has no bias")
    mine, other = ours(shape, device=device, **options), theirs(shape, device=device, **options)
    randomise(other)
    mine.load_state_dict(other.state_dict())
    assert list(mine.state_dict()) == list(other.state_dict())
    other.load_state_dict(mine.state_dict())
    x = torch.randn(5, 3, 4, device=device) if isinstance(shape, (tuple, list)) else torch.randn(5, 12, device=device)
    x.requires_grad_()
    answers = []
    for module in (mine, other):
        y = module(x)
        answers.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
    for one, two in zip(*answers, strict=True):
        assert torch.allclose(one, two, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_copies_pickles_and_moves(ours: type, theirs: type) -> None:
    module = ours(6, dtype=torch.bfloat16, memory_efficient=True)
    randomise(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert twin.memory_efficient
        assert torch.equal(twin.weight, module.weight)
        assert twin.weight is not module.weight
    assert module.float().weight.dtype == torch.float32


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_on_the_meta_device(ours: type, theirs: type) -> None:
    module = ours(6, device="meta")
    y = module(torch.empty(4, 6, device="meta", requires_grad=True))
    assert (y.shape, y.device.type) == ((4, 6), "meta")
    y.sum().backward()
    assert module.weight.grad.shape == (6,)
    real = module.to_empty(device="cpu")
    real.reset_parameters()
    assert torch.equal(real.weight, torch.ones(6))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_extra_repr_names_what_differs_from_torch(ours: type, theirs: type) -> None:
    assert ours(6).extra_repr() == theirs(6).extra_repr()
    assert ours(6, memory_efficient=True).extra_repr() == theirs(6).extra_repr() + ", memory_efficient=True"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_implementation_tells_which_and_why(ours: type, theirs: type, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ours(6).implementation()
    assert isinstance(choice, Choice)
    assert choice.implementation == "torch"
    assert "cpu" in choice.reason
    assert ours(6, elementwise_affine=False).implementation().implementation == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_implementation_on_a_gpu(ours: type, theirs: type) -> None:
    assert ours(6, device="cuda").implementation().implementation == "triton"
    choice = ours(6, device="cuda", dtype=torch.float64).implementation()
    assert (choice.implementation, choice.is_fallback) == ("torch", True)
    assert "fp64" in choice.reason


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_wrong_width_names_both_shapes(ours: type, theirs: type) -> None:
    message = (
        rf"^{ours.__name__}: x has last dimension 766 but normalized_shape is \(768,\); pass x of shape \(..., 768\)"
    )
    with pytest.raises(UserError, match=message):
        ours(768)(torch.randn(2, 766))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_no_grad_first_then_training_in_one_autocast_region(
    ours: type, theirs: type, memory_efficient: bool, device: torch.device
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), ours(16, memory_efficient=memory_efficient), nn.Linear(16, 4)).to(device)
    x = torch.randn(5, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        with torch.no_grad():
            model(x)
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.any())


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_under_activation_checkpointing(ours: type, theirs: type, device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), ours(8), nn.GELU()).to(device)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), [x, *model.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(plain, again, strict=True))


def test_the_package_lists_its_names() -> None:
    assert {"FusedLayerNorm", "FusedRMSNorm", "functional"} <= set(fused.__all__)
    assert fused.__all__ == sorted(fused.__all__)
