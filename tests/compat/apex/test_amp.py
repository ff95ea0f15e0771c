"""apex.amp: levels, loss scaling, skipped steps, accumulation, states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from apex import amp
from apex.optimizers import FusedAdam
from torch import nn

from fusestep.errors import UserError


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    amp._amp_state.opt_properties = None
    amp._amp_state.loss_scalers = []


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def copy_of(net: nn.Module) -> nn.Module:
    twin = model()
    twin.load_state_dict(net.state_dict())
    return twin


@pytest.mark.parametrize(
    ("level", "weights", "norm", "scale", "masters"),
    [
        ("O0", torch.float32, torch.float32, 1.0, False),
        ("O1", torch.float32, torch.float32, 2.0**16, False),
        ("O2", torch.float16, torch.float32, 2.0**16, True),
        ("O3", torch.float16, torch.float16, 1.0, False),
    ],
)
def test_levels(level: str, weights: torch.dtype, norm: torch.dtype, scale: float, masters: bool) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert result == (net, optimizer)
    assert net[0].weight.dtype is weights
    assert net[1].weight.dtype is net[1].running_mean.dtype is norm
    seen = []
    net[2].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    y = net(batch(0))
    assert seen == [torch.float32 if level == "O0" else torch.float16]
    assert y.dtype is torch.float32
    assert amp._amp_state.loss_scalers[0].loss_scale() == scale
    own = list(amp.master_params(optimizer))
    assert len(own) == 6
    assert all(p.dtype is torch.float32 for p in own) == (level != "O3")
    assert any(p is net[0].weight for p in own) == (not masters)


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedAdam])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_training_follows_fp32(level: str, kind: Any, device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    twin = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    twin.load_state_dict(net.state_dict())
    net, optimizer = amp.initialize(net, kind(net.parameters(), lr=0.01), opt_level=level, loss_scale="dynamic")
    plain = kind(twin.parameters(), lr=0.01)
    for step in range(5):
        x = batch(step).to(device)
        loss = net(x).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.item() == loss.item() * 2.0**16
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    tolerance = 1e-6 if level == "O0" else 3e-3
    for p, wanted in zip(amp.master_params(optimizer), twin.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=tolerance, atol=tolerance)
    if level == "O2":
        for p, master in zip(net.parameters(), amp.master_params(optimizer), strict=True):
            assert torch.equal(p, master.half())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_next_step_and_halves_the_scale(level: str) -> None:
    net = model()
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    with amp.scale_loss(net(batch(0)).sum() * math.inf, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 0}}
    with amp.scale_loss(net(batch(0)).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_of_several_passes_add_up(level: str, delayed: bool) -> None:
    net = nn.Linear(6, 3)
    wanted = nn.Linear(6, 3)
    wanted.load_state_dict(net.state_dict())
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, loss_scale=128.0)
    for seed in range(3):
        with amp.scale_loss(net(batch(seed)).square().sum(), optimizer, delay_unscale=delayed and seed < 2) as scaled:
            scaled.backward()
        wanted(batch(seed)).square().sum().backward()
    for p, q in zip(amp.master_params(optimizer), wanted.parameters(), strict=True):
        assert p.dtype is torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=2e-2)


def test_an_overflow_that_was_not_looked_at_is_seen_later() -> None:
    net = nn.Linear(6, 3)
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O1")
    before = net.weight.detach().clone()
    with amp.scale_loss(net(batch(0)).sum() * math.inf, optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16
    with amp.scale_loss(net(batch(0)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(net.weight, before)


def test_a_dynamic_scale_grows_after_its_window_up_to_its_limit() -> None:
    scaler = amp.frontend.LossScaler("dynamic", init_scale=4.0, scale_window=3, max_loss_scale=16.0, min_loss_scale=2.0)
    seen = []
    for overflow in (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1):
        scaler.update(bool(overflow))
        seen.append(scaler.loss_scale())
    assert seen == [4, 4, 8, 8, 8, 16, 16, 16, 16, 8, 4, 2, 2]
    scaler = amp.frontend.LossScaler("dynamic", init_scale=8.0)
    scaler._overflow_buf = torch.ones(1, dtype=torch.int32)  # as scripts that unscale by themselves do
    assert (scaler.update_scale(), scaler.loss_scale()) == (True, 4.0)
    scaler.clear_overflow_state()
    assert (scaler.update_scale(), scaler.loss_scale(), scaler._unskipped) == (False, 4.0, 1)


def test_weights_that_are_loaded_after_initialize_reach_the_masters() -> None:
    net = nn.Linear(6, 3)
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), opt_level="O2")
    net.load_state_dict({name: torch.full_like(value, 0.5) for name, value in net.state_dict().items()})
    with amp.scale_loss(net(batch(0)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert bool((net.weight == 0.5).all())
    assert bool((next(amp.master_params(optimizer)) == 0.5).all())


def test_several_losses_have_scalers_of_their_own_and_states_load() -> None:
    net = model()
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), num_losses=2)
    with amp.scale_loss(net(batch(0)).sum() * math.inf, optimizer, loss_id=1) as scaled:
        scaled.backward()
    saved = amp.state_dict()
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    assert [one["loss_scale"] for one in saved.values()] == [2.0**16, 2.0**15]
    other = model()
    amp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), num_losses=2)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    with pytest.warns(UserWarning, match="1 loss scalers and there are 2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    with pytest.raises(RuntimeError, match="is no loss scaler"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}, "model": {}})


def test_disabled_it_does_nothing() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert amp.initialize([net], [optimizer], enabled=False) == ([net], [optimizer])
    loss = net(batch(0)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.initialize(net, enabled=False) is net


def test_disable_casts_leaves_o1_out() -> None:
    seen = []
    with torch.autocast("cpu", dtype=torch.float16), amp.disable_casts():
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    assert seen == [torch.float32]


def test_what_cannot_be_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"call amp\.initialize first"), amp.scale_loss(torch.ones(()), optimizer):
        pass
    with pytest.raises(UserError, match="with the letter O"):
        amp.initialize(net, optimizer, opt_level="01")
    with pytest.raises(UserError, match="master_weights with O1"):
        amp.initialize(net, optimizer, opt_level="O1", master_weights=True)
    with pytest.raises(UserError, match="patch_torch_functions=True is not served with O2"):
        amp.initialize(net, optimizer, opt_level="O2", patch_torch_functions=True)
    with pytest.raises(RuntimeError, match="wrapped in DataParallel"):
        amp.initialize(nn.DataParallel(model()), opt_level="O1")
    amp.initialize(net, optimizer, opt_level="O2", keep_batchnorm_fp32="False")
    assert net[1].weight.dtype is torch.float16
    with pytest.raises(RuntimeError, match="pass each one once"):
        amp.initialize(model(), optimizer)
    with pytest.raises(RuntimeError, match="does not go with master weights"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_scale": "high"}, "loss_scale is 'high'; pass a finite number above 0"),
        ({"loss_scale": 0}, "loss_scale is 0"),
        ({"loss_scale": math.inf}, "loss_scale is inf"),
        ({"num_losses": 0}, "num_losses is 0"),
        ({"models": {"net": model()}}, "a model is of type dict"),
        ({"models": [model(), None]}, "a model is of type NoneType"),
        ({"optimizers": model()}, "an optimizer is of type Sequential"),
        ({"optimizers": torch.optim.SGD}, "an optimizer is of type type"),
    ],
)
def test_other_things_than_models_optimizers_and_scales_are_refused(options: dict[str, Any], said: str) -> None:
    net = model()
    with pytest.raises(UserError, match=said):
        amp.initialize(**{"models": net, "opt_level": "O2", **options})
    assert net[0].weight.dtype is torch.float32
    assert amp.state_dict() == {}


def test_what_is_wrong_with_one_of_several_leaves_all_as_they_were() -> None:
    net = model()
    with pytest.raises(RuntimeError, match="wrapped in DataParallel"):
        amp.initialize([net, nn.DataParallel(model())], opt_level="O3")
    assert net[0].weight.dtype is torch.float32


def test_a_loss_without_a_scaler_is_refused() -> None:
    net = model()
    net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_scale="128.0", num_losses=2)
    for number in (2, -1):
        with (
            pytest.raises(UserError, match=rf"loss_id is {number} and initialize's num_losses was 2"),
            amp.scale_loss(torch.ones(()), optimizer, loss_id=number),
        ):
            pass


def test_state_dicts_of_o2_are_fp32() -> None:
    """Of the model, of a part of it, and of what holds it; they load back."""
    net = amp.initialize(model(), opt_level="O2", verbosity=0)
    holder = nn.ModuleDict({"net": net, "other": nn.Linear(2, 2).half()})
    assert {value.dtype for value in net.state_dict().values()} == {torch.float32, torch.int64}
    assert net[0].state_dict()["weight"].dtype is torch.float32
    assert holder.state_dict()["net.0.weight"].dtype is torch.float32
    assert holder.state_dict()["other.weight"].dtype is torch.float16
    assert torch.equal(net.state_dict()["0.weight"], net[0].weight.float())
    net.load_state_dict(net.state_dict())
    assert net[0].weight.dtype is torch.float16
