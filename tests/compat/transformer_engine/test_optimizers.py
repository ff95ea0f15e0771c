"""Optimizers under Transformer Engine's names."""

from __future__ import annotations

import copy
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

from fusestep import optim
from fusestep.errors import UserError


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,))]


def backward(params: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def test_adam_steps_as_published(te: ModuleType) -> None:
    """AdamW in float64."""
    params = parameters()
    optimizer = te.optimizers.FusedAdam(params, 0.02, (0.8, 0.97), 1e-6, 0.1)
    exact = [p.detach().double() for p in params]
    m, v = [torch.zeros_like(p) for p in exact], [torch.zeros_like(p) for p in exact]
    for step in range(1, 6):
        backward(params, step)
        for i, p in enumerate(params):
            g = p.grad.double()
            m[i], v[i] = 0.8 * m[i] + 0.2 * g, 0.97 * v[i] + 0.03 * g * g
            update = m[i] / (1 - 0.8**step) / ((v[i] / (1 - 0.97**step)).sqrt() + 1e-6)
            exact[i] = exact[i] * (1 - 0.02 * 0.1) - 0.02 * update
        optimizer.step()
    for p, wanted in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-6)


def test_the_state_dict_counts_steps_in_the_group(te: ModuleType) -> None:
    params = [p.bfloat16() for p in parameters()]
    params = [torch.nn.Parameter(p.detach()) for p in params]
    optimizer = te.optimizers.FusedAdam(params, lr=0.01, master_weights=True)
    for step in range(3):
        backward(params, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["step"] == 3
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq", "master_param"}
    assert {value.dtype for value in saved["state"][0].values()} == {torch.float32}
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = te.optimizers.FusedAdam(others, lr=0.01, master_weights=True)
    other.load_state_dict(saved)
    for step in range(3, 5):
        for members, one in ((params, optimizer), (others, other)):
            backward(members, step)
            one.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
    # A state of fusestep's own, and of torch's, loads too.
    ours = optim.FusedAdam(params, lr=0.01, master_weights=True)
    ours.load_state_dict(saved)
    assert int(ours.state[params[0]]["step"]) == 3


def test_parameters_whose_count_is_their_own_keep_it(te: ModuleType) -> None:
    params = parameters()
    optimizer = te.optimizers.FusedAdam(params, lr=0.01)
    for step in range(3):
        backward(params, step)
        if step == 1:
            params[1].grad = None
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["step"] == 3
    assert "step" not in saved["state"][0]
    assert int(saved["state"][1]["step"]) == 2
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = te.optimizers.FusedAdam(others, lr=0.01)
    other.load_state_dict(saved)
    for members, one in ((params, optimizer), (others, other)):
        backward(members, 9)
        one.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


def test_masters_are_of_16_bit_parameters_alone_and_dtypes_mix(te: ModuleType) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    params = [torch.nn.Parameter(torch.randn(9).to(dtype)) for dtype in dtypes]
    optimizer = te.optimizers.FusedAdam(params, lr=0.1, master_weights=True)
    backward(params, 1)
    optimizer.step()
    assert ["master_param" in optimizer.state[p] for p in params] == [False, True, True]
    for p in params[1:]:
        assert torch.equal(optimizer.state[p]["master_param"].to(p.dtype), p)


def test_remainders_of_bf16_parameters_are_stored_and_masters_saved(te: ModuleType) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    values = [torch.randn(9) for _ in dtypes]
    lists = [[torch.nn.Parameter(v.to(dtype)) for v, dtype in zip(values, dtypes, strict=True)] for _ in range(2)]
    ours, others = (
        te.optimizers.FusedAdam(params, lr=0.1, master_weights=True, store_param_remainders=store)
        for params, store in zip(lists, (True, False), strict=True)
    )
    for number in range(3):
        for params, optimizer in zip(lists, (ours, others), strict=True):
            backward(params, number)
            optimizer.step()
    dtypes_kept = [{value.dtype for value in ours.state[p].values()} for p in lists[0]]
    assert dtypes_kept == [{torch.float32}, {torch.float32}, {torch.float32, torch.int16}]
    saved, expected = ours.state_dict(), others.state_dict()
    assert [set(state) for state in saved["state"].values()] == [set(state) for state in expected["state"].values()]
    for state, wanted in zip(saved["state"].values(), expected["state"].values(), strict=True):
        assert all(torch.equal(value, wanted[key]) for key, value in state.items())
    alone = te.optimizers.FusedAdam(lists[1][:1], store_param_remainders=True)
    assert not alone.store_param_remainders  # no effect without masters


def test_remainders_are_read_and_written_by_name_as_masters_are(te: ModuleType) -> None:
    weight = torch.nn.Parameter(torch.randn(9).bfloat16())
    optimizer = te.optimizers.FusedAdam([weight], lr=0.0, master_weights=True, store_param_remainders=True)
    optimizer.initialize_state(weight, True)
    assert optimizer.get_unscaled_state(weight, "master_param").dtype == torch.int16
    master = torch.randn(9)
    optimizer.set_scaled_state(weight, "master_param", master)
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], master)
    kept = optimizer.get_unscaled_state(weight, "master_param").clone()
    optimizer.set_scaled_state(weight, "master_param", torch.zeros_like(kept))
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], weight.detach().float())
    optimizer.set_scaled_state(weight, "master_param", kept)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], master)


@pytest.mark.parametrize("store", [True, False])
def test_a_state_with_remainders_as_transformer_engine_saves_it_loads(te: ModuleType, store: bool) -> None:
    """There `master_param` is int16 then; read as numbers, weights would be as large as 32767."""
    master = torch.tensor([1.0 + 2**-9, -3.0 - 2**-20, 0.5, 7e-30])
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF) - ((bits & 0x8000) << 1)
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = te.optimizers.FusedAdam([weight], lr=0.0, master_weights=True, store_param_remainders=store)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master_param"] = low.short()
    optimizer.load_state_dict(saved)
    with torch.no_grad():  # the model after the optimizer
        weight.copy_(((bits - low) >> 16).short().view(torch.bfloat16))
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], master)
    half = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(UserError, match="master_param of parameter 0 is int16"):
        te.optimizers.FusedAdam([half], master_weights=True).load_state_dict(saved)


@pytest.mark.parametrize("after", [False, True])
def test_sgd_steps_as_published(te: ModuleType, after: bool) -> None:
    """In float64, with a parameter that joins later and has a first step of its own."""
    params = parameters()
    optimizer = te.optimizers.FusedSGD(params, 0.1, 0.9, 0.2, 0.05, wd_after_momentum=after)
    exact, buffers = [p.detach().double() for p in params], [None, None]
    for step in range(4):
        backward(params, step)
        if step == 0:
            params[1].grad = None
        for i, p in enumerate(params):
            if p.grad is None:
                continue
            decay = 0.05 * exact[i]
            g = p.grad.double() + (0 if after else decay)
            buffers[i] = g if buffers[i] is None else 0.9 * buffers[i] + 0.8 * g
            exact[i] = exact[i] - 0.1 * (buffers[i] + (decay if after else 0))
        optimizer.step()
    for p, wanted in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    assert set(optimizer.state_dict()["state"][0]) == {"momentum_buffer"}


@pytest.mark.parametrize("way", ["scaler.step", "optimizer.step", "unscaled"])
def test_scaled_gradients_are_unscaled_once(te: ModuleType, way: str) -> None:
    plain, scaled = parameters(), parameters()
    reference = te.optimizers.FusedAdam(plain, lr=0.05, eps=1e-3)
    optimizer = te.optimizers.FusedAdam(scaled, lr=0.05, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            backward(plain, step)
            reference.step()
            scaler.scale(torch.zeros(()))
            backward(scaled, step, 1024.0)
            if way == "unscaled":
                scaler.unscale_(optimizer)
            if way == "scaler.step":
                scaler.step(optimizer)
            else:
                optimizer.step(grad_scaler=scaler)
            scaler.update()
    for p, q in zip(plain, scaled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    backward(scaled, 5, 1024.0)
    scaled[0].grad[0, 0] = float("inf")
    before = [p.detach().clone() for p in scaled]
    scaler.scale(torch.zeros(()))
    optimizer.step(None, scaler)
    scaler.update()
    assert all(torch.equal(p, old) for p, old in zip(scaled, before, strict=True))
    assert scaler.get_scale() == 512.0


def test_hooks_run_once_a_step(te: ModuleType) -> None:
    """Also where an optimizer of fusestep's own was built, whose step carries hooks too."""
    params = parameters()
    optim.FusedAdam(params)
    optim.FusedSGD(params, 0.1)
    for optimizer in (te.optimizers.FusedAdam(params), te.optimizers.FusedSGD(params, 0.1)):
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        backward(params, 1)
        optimizer.step(grad_scaler=scaler)
        scaler.update()
        optimizer.step()
        assert len(calls) == 2


def test_gradients_become_none_unless_asked(te: ModuleType) -> None:
    for option, becomes_none in ((None, True), (True, True), (False, False)):
        params = parameters()
        optimizer = te.optimizers.FusedAdam(params, set_grad_none=option)
        backward(params, 1)
        optimizer.zero_grad()
        assert (params[0].grad is None) is becomes_none
        if not becomes_none:
            assert not params[0].grad.any()


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"use_decoupled_grad": True},
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        {"exp_avg_dtype": torch.bfloat16},
        {"master_weight_dtype": torch.float16},
    ],
)
def test_what_is_not_served_says_so(te: ModuleType, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"FusedAdam\(.*not planned"):
        te.optimizers.FusedAdam(parameters(), **options)
    with pytest.raises(TypeError, match="third argument is betas"):
        te.optimizers.FusedAdam(parameters(), 1e-3, True, (0.9, 0.99))  # 1.x's order
    with pytest.raises(TypeError, match="betae"):
        te.optimizers.FusedAdam(parameters()).step(betae=1)


def test_moments_in_bf16(te: ModuleType) -> None:
    params = parameters()
    optimizer = te.optimizers.FusedAdam(params, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    backward(params, 1)
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_operations_on_lists_of_tensors(te: ModuleType) -> None:
    tensors = [torch.randn(5, 3), torch.randn(7)]
    flag, outputs = torch.zeros(1, dtype=torch.int32), [torch.empty_like(t) for t in tensors]
    te.optimizers.multi_tensor_applier(te.optimizers.multi_tensor_scale, flag, [tensors, outputs], 0.25)
    for one, other in zip(tensors, outputs, strict=True):
        assert torch.equal(one * 0.25, other)
    norm, each = te.optimizers.multi_tensor_applier(te.optimizers.multi_tensor_l2norm, flag, [tensors], True)
    exact = torch.cat([t.flatten() for t in tensors]).double().norm()
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)
    assert each.flatten().tolist() == pytest.approx([float(t.double().norm()) for t in tensors], rel=1e-6)


def test_states_are_read_and_written_by_name(te: ModuleType) -> None:
    """As scripts start masters from the values that FP8 weights had."""
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        model = te.Linear(16, 8, bias=False, device="cpu", params_dtype=torch.bfloat16)
    weight = model.weight
    optimizer = te.optimizers.FusedAdam([weight], lr=0.1, master_weights=True)
    optimizer.initialize_state(weight, False)
    assert torch.equal(
        optimizer.get_unscaled_state(weight, "master_param"), weight.get_high_precision_init_val().float()
    )
    wanted = torch.randn(8, 16)
    optimizer.set_scaled_state(weight, "master_param", wanted)
    optimizer.set_scaled_state(weight, "exp_avg_sq", torch.ones(8, 16))
    weight.grad = torch.zeros(8, 16, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.get_unscaled_state(weight, "master_param"), wanted)
    torch.testing.assert_close(optimizer.get_unscaled_state(weight, "exp_avg_sq"), torch.full((8, 16), 0.999))
    with pytest.raises(UserError, match="has no state 'momentum'; it has"):
        optimizer.get_unscaled_state(weight, "momentum")


def test_groups_show_how_many_steps_were_taken(te: ModuleType) -> None:
    params = parameters()
    optimizer = te.optimizers.FusedAdam(params, lr=0.01)
    for step in range(1, 3):
        backward(params, step)
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == optimizer.state_dict()["param_groups"][0]["step"] == step
    sgd = te.optimizers.FusedSGD(params, lr=0.01)
    sgd.step()
    assert "step" not in sgd.param_groups[0]
