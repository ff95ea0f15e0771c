"""GroupedLinear: each layer's share of the rows, in high precision and in FP8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fusestep import explain, fp8
from fusestep.errors import UserError
from fusestep.nn import GroupedLinear, Linear

SPLITS = [5, 0, 1, 7]

RECIPES = [
    fp8.DelayedScaling(amax_history_len=3),
    fp8.Float8CurrentScaling(),
    fp8.Float8BlockScaling(),
    fp8.MXFP8BlockScaling(),
]


def test_outputs_and_gradients_are_those_of_float64(device: torch.device) -> None:
    group = GroupedLinear(4, 9, 7, device=device)
    for name, parameter in group.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if name.startswith("weight") else 2.0)
    x = torch.randn(13, 9, device=device, requires_grad=True)
    dy = torch.randn(13, 7, device=device)
    y = group(x, SPLITS)
    y.backward(dy)
    xs, dys, ys, dxs = (t.detach().double().split(SPLITS) for t in (x, dy, y, x.grad))
    for i in range(4):
        weight, bias = getattr(group, f"weight{i}"), getattr(group, f"bias{i}")
        w = weight.detach().double()
        torch.testing.assert_close(ys[i], xs[i] @ w.t() + bias.detach().double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dxs[i], dys[i] @ w, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight.grad.double(), dys[i].t() @ xs[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias.grad.double(), dys[i].sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("first", [None, True])
def test_in_fp8_each_layer_is_a_linear_layer_of_its_own(
    device: torch.device, recipe: fp8.DelayedScaling, first: bool | None
) -> None:
    """Bit for bit, also where later micro-batches take the first one's cast weights, and after a deep copy."""
    group = GroupedLinear(4, 40, 24, device=device)
    singles = [Linear(40, 24, device=device) for _ in range(4)]
    for i, single in enumerate(singles):
        single.load_state_dict({"weight": getattr(group, f"weight{i}"), "bias": getattr(group, f"bias{i}")})
    for step in range(4):
        x, dy = torch.randn(13, 40, device=device), torch.randn(13, 24, device=device)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        flag = None if first is None else step % 2 == 0
        with fp8.fp8_autocast(recipe=recipe):
            y = group(one, torch.tensor(SPLITS), flag)
            parts = other.split(SPLITS)
            wanted = torch.cat([single(part, flag) for single, part in zip(singles, parts, strict=True)])
        y.backward(dy)
        wanted.backward(dy)
        assert torch.equal(y, wanted)
        assert torch.equal(one.grad, other.grad)
        if step == 2:
            group = copy.deepcopy(group)  # without gradients
            for single in singles:
                single.zero_grad()
    for i, single in enumerate(singles):
        assert torch.equal(getattr(group, f"weight{i}").grad, single.weight.grad)
        assert torch.equal(getattr(group, f"bias{i}").grad, single.bias.grad)


def test_biases_are_returned_instead_of_added() -> None:
    group, plain = GroupedLinear(2, 3, 5, return_bias=True), GroupedLinear(2, 3, 5, bias=False)
    plain.load_state_dict({key: value for key, value in group.state_dict().items() if "weight" in key})
    x = torch.randn(2, 3, 3)
    y, biases = group(x, [4, 2])
    assert torch.equal(y, plain(x, [4, 2]))
    assert y.shape == (2, 3, 5)
    assert [bias is getattr(group, f"bias{i}") for i, bias in enumerate(biases)] == [True, True]


def test_weights_that_live_in_fp8_and_calibration() -> None:
    with fp8.fp8_model_init(recipe=fp8.Float8CurrentScaling()):
        group = GroupedLinear(2, 16, 8)
    x = torch.randn(6, 16)
    with fp8.fp8_autocast(recipe=fp8.Float8CurrentScaling()):
        y = group(x, [2, 4])
    plain = torch.cat([part @ getattr(group, f"weight{i}").dequantize().t() for i, part in enumerate(x.split([2, 4]))])
    torch.testing.assert_close(y, plain, rtol=0, atol=0.05 * float(plain.abs().max()))
    other = GroupedLinear(2, 16, 8)
    with fp8.fp8_autocast(enabled=False, calibrating=True):
        other(x, [2, 4]).sum().backward()
    assert other.fp8_state is not None
    amaxes = other.fp8_state.amax
    assert float(amaxes[0]) == float(x[:2].abs().max())
    assert float(amaxes[3]) == float(x[2:].abs().max())
    assert bool((amaxes > 0).all())


@pytest.mark.parametrize("splits", [[6], [3, 4], [7, -1], [2, 2, 2]])
def test_splits_that_do_not_fit_are_one_sentence(splits: Any) -> None:
    with pytest.raises(UserError, match="pass 2 numbers that are not negative and add up to the rows"):
        GroupedLinear(2, 3, 5)(torch.randn(6, 3), splits)


def test_bad_sizes_and_what_it_says_of_itself() -> None:
    for sizes, words in (((0, 3, 5), "num_gemms is 0"), ((2, 3, 2.5), "out_features is 2.5")):
        with pytest.raises(UserError, match=words):
            GroupedLinear(*sizes)
    group = GroupedLinear(2, 3, 5, name="experts")
    assert "num_gemms=2, in_features=3, out_features=5, bias=True, name='experts'" in repr(group)
    (row,) = explain(group).modules
    assert row.is_ours
