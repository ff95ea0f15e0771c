"""State dicts of FusedAdam: exchange with torch, dtypes, masters, resume, copies."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.optim import FusedAdam, base

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(3, 5), (1030,), (), (0, 4), (4, 6)]


def parameters(place: torch.device, dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(1)
    made = [nn.Parameter(torch.randn(shape).to(place, dtype)) for shape in SHAPES]
    made[-1].data = made[-1].data.t().contiguous().t()
    return made


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose gradients depend on their number alone."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=False, fused=False, **OPTIONS)


def weights(params: list[Any]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def assert_close(params: list[Any], others: list[Any]) -> None:
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ways", [(0, 1), (1, 0), (0, 1, 0, 1), (1, 0, 1)], ids=str)
def test_state_goes_back_and_forth_between_torch_and_us(
    place: torch.device, ways: tuple[int, ...], through_disk: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """0 is torch, 1 is ours; each trains 3 steps and hands on."""
    makers = (adamw, lambda params: FusedAdam(params, **OPTIONS))
    reference = parameters(place)
    train(adamw(reference), range(3 * len(ways)))
    params, state = parameters(place), None
    for turn, way in enumerate(ways):
        fresh = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = makers[way](fresh)
        if state is not None:
            optimizer.load_state_dict(through_disk(state))
        train(optimizer, range(3 * turn, 3 * turn + 3))
        params, state = fresh, optimizer.state_dict()
    assert_close(params, reference)
    assert state is not None
    assert all(entry["step"] == 3.0 * len(ways) for entry in state["state"].values())


def test_loading_torchs_fp32_state_is_exact(place: torch.device) -> None:
    params = parameters(place)
    theirs = adamw(params)
    train(theirs, range(3))
    ours = FusedAdam(params, **OPTIONS)
    ours.load_state_dict(theirs.state_dict())
    for p in params:
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][key], theirs.state[p][key])
            assert ours.state[p][key] is not theirs.state[p][key]
    back = adamw(params)
    back.load_state_dict(ours.state_dict())
    for p in params:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(back.state[p][key].cpu(), theirs.state[p][key].cpu())


def test_step_is_saved_as_torch_saves_it(place: torch.device) -> None:
    optimizer = FusedAdam(parameters(place), **OPTIONS)
    train(optimizer, range(2))
    for state in optimizer.state_dict()["state"].values():
        step = state["step"]
        assert (step.shape, step.dtype, step.device.type, float(step)) == ((), torch.float32, "cpu", 2.0)
        assert step.untyped_storage().nbytes() == 4
        assert list(state)[:3] == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_resume_continues_bit_for_bit(
    place: torch.device,
    dtype: torch.dtype,
    moment_dtype: torch.dtype,
    through_disk: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    options = {**OPTIONS, "master_weights": True, "moment_dtype": moment_dtype, "max_grad_norm": 1.0}
    straight = parameters(place, dtype)
    train(FusedAdam(straight, **options), range(4))
    params = parameters(place, dtype)
    optimizer = FusedAdam(params, **options)
    for number in range(4):  # saved and loaded at every step
        train(optimizer, range(number, number + 1))
        saved = optimizer.state_dict()
        loaded = through_disk(saved)
        params = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = FusedAdam(params, **options)
        optimizer.load_state_dict(loaded)
        for key, entry in optimizer.state_dict()["state"].items():
            assert set(entry) == set(saved["state"][key])
            for name, value in entry.items():
                assert value.dtype == saved["state"][key][name].dtype
                assert torch.equal(value, saved["state"][key][name])
    assert all(torch.equal(a, b) for a, b in zip(weights(params), weights(straight), strict=True))
    assert int(optimizer.applied_steps) == 4


def test_masters_are_saved_in_fp32(place: torch.device) -> None:
    optimizer = FusedAdam(parameters(place, torch.bfloat16), master_weights=True, **OPTIONS)
    train(optimizer, range(1))
    for state in optimizer.state_dict()["state"].values():
        assert state["master_param"].dtype == torch.float32
        assert state["exp_avg"].dtype == torch.float32


def test_a_state_without_masters_gets_them_from_the_parameters(place: torch.device) -> None:
    params = parameters(place, torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, **OPTIONS)
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["master_param"]
    optimizer.load_state_dict(saved)
    before = weights(params)
    train(optimizer, range(2, 3))
    for p, old in zip(params, before, strict=True):
        assert optimizer.state[p]["master_param"].dtype == torch.float32
        assert p.numel() == 0 or not torch.equal(p, old)


def test_torchs_bf16_moments_are_widened(place: torch.device) -> None:
    params = parameters(place, torch.bfloat16)
    theirs = adamw(params)
    train(theirs, range(2))
    ours = FusedAdam(params, master_weights=True, **OPTIONS)
    ours.load_state_dict(theirs.state_dict())
    for p in params:
        assert ours.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(ours.state[p]["exp_avg"], theirs.state[p]["exp_avg"].float())


def test_options_that_a_state_lacks_keep_the_constructors_and_others_follow_the_state(place: torch.device) -> None:
    params = parameters(place)
    theirs = torch.optim.AdamW(params, **{**OPTIONS, "lr": 0.5, "weight_decay": 0.25})
    train(theirs, range(1))
    ours = FusedAdam(params, lr=9.0, adam_w_mode=False, bias_correction=False, max_grad_norm=3.0)
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.5, 0.25, 1e-6)
    assert (group["adam_w_mode"], group["bias_correction"], group["max_grad_norm"]) == (False, False, 3.0)


def test_learning_rate_tensors_survive_loading(
    place: torch.device, through_disk: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    params = parameters(place)
    lr = torch.tensor(0.5, device=place)
    optimizer = FusedAdam(params, lr=lr)
    train(optimizer, range(1))
    saved = through_disk(optimizer.state_dict())
    lr.fill_(0.125)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


def test_apex_states_with_a_step_per_group_load(place: torch.device) -> None:
    params = parameters(place)
    theirs = adamw(params)
    train(theirs, range(3))
    saved = copy.deepcopy(theirs.state_dict())
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 3
    ours = FusedAdam(params, **OPTIONS)
    ours.load_state_dict(saved)
    assert "step" not in ours.param_groups[0]
    twin = [nn.Parameter(p.detach().clone()) for p in params]
    other = adamw(twin)
    other.load_state_dict(theirs.state_dict())
    train(ours, range(3, 5))
    train(other, range(3, 5))
    assert_close(params, twin)


@pytest.mark.parametrize("form", [torch.tensor([4.0]), torch.tensor(4), 4, 4.0], ids=str)
def test_steps_in_any_form_load(place: torch.device, form: Any) -> None:
    params = parameters(place)
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, range(1))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = form
    optimizer.load_state_dict(saved)
    train(optimizer, range(1, 2))
    assert all(optimizer.state_dict()["state"][i]["step"] == 5.0 for i in range(len(SHAPES)))


def test_groups_that_were_empty_load_with_their_options(
    place: torch.device, through_disk: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    params = parameters(place)
    optimizer = FusedAdam([{"params": params}, {"params": [], "lr": 0.7}], **OPTIONS)
    train(optimizer, range(5))
    fresh = FusedAdam([{"params": params}, {"params": []}], lr=1.0)
    fresh.load_state_dict(through_disk(optimizer.state_dict()))
    assert [group["lr"] for group in fresh.param_groups] == [0.05, 0.7]


def test_counts_of_steps_are_restored_or_taken_from_the_state(
    place: torch.device, through_disk: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    params = parameters(place)
    optimizer = FusedAdam(params, max_grad_norm=1.0, **OPTIONS)
    train(optimizer, range(3))
    params[0].grad.fill_(float("nan"))
    optimizer.step()
    saved = through_disk(optimizer.state_dict())
    fresh = FusedAdam(params)
    fresh.load_state_dict(saved)
    assert (int(fresh.applied_steps), int(fresh.skipped_steps)) == (3, 1)
    del saved["step_counts"]
    fresh.load_state_dict(saved)
    assert (int(fresh.applied_steps), int(fresh.skipped_steps)) == (3, 0)


def broken(change: str, saved: dict[str, Any]) -> dict[str, Any]:
    if change == "shape":
        saved["state"][1]["exp_avg"] = torch.zeros(7)
    elif change == "kind":
        saved["state"][1] = {"momentum_buffer": torch.zeros(1030)}
    elif change == "groups":
        saved["param_groups"][0]["params"].pop()
    elif change == "amsgrad":
        saved["param_groups"][0]["amsgrad"] = True
    elif change == "lr":
        saved["param_groups"][0]["lr"] = -1.0
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"exp_avg of parameter 1 is \(7,\), the parameter is \(1030,\)"),
        ("kind", "parameter 1 has momentum_buffer"),
        ("groups", r"groups of \[4\] parameters, the optimizer of \[5\]"),
        ("amsgrad", "amsgrad=True"),
        ("lr", "lr is -1"),
    ],
)
def test_states_that_do_not_fit_change_nothing(place: torch.device, change: str, message: str) -> None:
    params = parameters(place)
    lr = torch.tensor(0.25, device=place)
    optimizer = FusedAdam(params, **{**OPTIONS, "lr": lr})
    train(optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    bad = broken(change, copy.deepcopy(before))
    bad["param_groups"][0].setdefault("eps", 1.0)
    with pytest.raises(UserError, match=message):
        optimizer.load_state_dict(bad)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert float(lr) == 0.25
    for key, state in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in state.items())


def test_hooks_of_loading_run(place: torch.device) -> None:
    params = parameters(place)
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, range(1))
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(("before", len(state["state"]))))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("after", len(o.state))))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [("before", len(SHAPES)), ("after", len(SHAPES))]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alone(place: torch.device, how: str) -> None:
    params = parameters(place)
    optimizer = FusedAdam(params, max_grad_norm=1.0, master_weights=True, **OPTIONS)
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    copied = [p for group in twin.param_groups for p in group["params"]]
    train(twin, range(2, 4))
    assert [float(s["step"]) for s in optimizer.state.values()] == [2.0] * len(SHAPES)
    train(optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(params, copied, strict=True))
    assert int(twin.applied_steps) == int(optimizer.applied_steps) == 4
    assert twin.master_weights


@pytest.mark.gpu
def test_a_model_moved_to_the_gpu_after_the_optimizer_was_built_takes_its_state_along() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(30, 20), nn.Linear(30, 20)
    twin.load_state_dict(model.state_dict())
    optimizer, reference = FusedAdam(model.parameters(), **OPTIONS), adamw(list(twin.parameters()))
    train(optimizer, range(2))
    train(reference, range(2))
    model.cuda()
    train(optimizer, range(2, 4))
    train(reference, range(2, 4))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-5, atol=1e-6)
        assert {value.device.type for value in optimizer.state[p].values()} == {"cuda"}
    assert optimizer.applied_steps.device.type == "cuda"
    assert int(optimizer.applied_steps) == 4


@pytest.mark.gpu
def test_state_that_user_code_moved_to_either_side_is_accepted() -> None:
    params, reference = parameters(torch.device("cuda", 0)), parameters(torch.device("cuda", 0))
    optimizer = FusedAdam(params, **OPTIONS)
    straight = FusedAdam(reference, **OPTIONS)
    train(straight, range(6))
    train(optimizer, range(2))
    for where in ("cpu", "cuda"):
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to(where)
        first = 2 if where == "cpu" else 4
        train(optimizer, range(first, first + 2))
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))


def test_a_process_that_got_its_optimizer_by_a_pickle_looks_at_other_optimizers_too(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose kernels may change parameters and not their versions, by which copies are known to be stale."""
    saved = pickle.dumps(FusedAdam([torch.nn.Parameter(torch.ones(3, device=place))]))
    known = OrderedDict[int, Any]()
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", known)
    base._watch_others.cache_clear()
    pickle.loads(saved)
    assert list(known.values()) == [base._drop_after]
