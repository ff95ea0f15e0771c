"""What a graph cannot hold, and what changes that it does hold: followed, or a step at a time with the reason.

With a stand-in for CUDA's graphs (conftest.py): a replay takes the step again, so that losses cannot tell a graph that
should have been dropped; whether it was is asserted.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.errors import UserError
from fusestep.fp8.held import Copies, give
from fusestep.graph import watch
from fusestep.graph.rates import Rates
from fusestep.optim import FusedAdam, accumulate_in_fp32


class Model(nn.Module):
    """A small one, with a dropout that does nothing, a buffer, and a count of its own."""

    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(7))
        self.calls = 0
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.drop(self.first(x).tanh())) * self.scale + self.shift


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def data(count: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, 5), torch.randn(rows, 3)) for _ in range(count)]


def pair(loss_fn: Callable[..., Tensor] = mean_square, **options: Any) -> tuple[TrainStep, TrainStep]:
    """A step, and its twin that takes its steps one by one."""
    steps = []
    for capture in (True, False):
        model = Model()
        steps.append(TrainStep(model, loss_fn, FusedAdam(model.parameters(), 1e-2), capture=capture, **options))
    return steps[0], steps[1]


def take(step: TrainStep, twin: TrainStep, batches: list[Any]) -> None:
    for batch in batches:
        assert torch.equal(step(*batch), twin(*batch))
    for ours, theirs in zip(step.model.state_dict().values(), twin.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


# What changes between steps


def _with_a_hook_on_a_parameter(step: TrainStep) -> None:
    step.model.first.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr, operator]


def _with_a_hook_after_accumulation(step: TrainStep) -> None:
    weight: Any = step.model.first.weight  # type: ignore[union-attr]
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))


def _with_another_group(step: TrainStep) -> None:
    step.model.extra = nn.Parameter(torch.ones(3))
    step.optimizer.add_param_group({"params": [step.model.extra], "lr": 0.1})
    step.loss_fn = lambda model, x, y: F.mse_loss(model(x) + model.extra, y)


CHANGES: dict[str, Callable[[TrainStep], object]] = {
    "a dropout's p": lambda step: setattr(step.model.drop, "p", 1.0),
    "an attribute": lambda step: setattr(step.model, "scale", 3.0),
    "an attribute that is a tensor now": lambda step: setattr(step.model, "scale", torch.tensor([1.0, 2.0, 3.0])),
    "an attribute that hides the class's": lambda step: setattr(step.model, "shift", 2.0),
    "an attribute that is gone": lambda step: step.model.first.__dict__.pop("in_features"),  # type: ignore[union-attr]
    "a hook on a parameter": _with_a_hook_on_a_parameter,
    "a hook after accumulation": _with_a_hook_after_accumulation,
    "a hook on the optimizer": lambda step: step.optimizer.register_step_post_hook(lambda *_: None),
    "another group": _with_another_group,
    "an option in a tensor": lambda step: step.optimizer.param_groups[0].update(more=torch.ones(3)),
    "growth": lambda step: step.scaler.set_growth_factor(4.0),  # type: ignore[union-attr]
    "copies": lambda step: give([step.model.first.weight], Copies()),  # type: ignore[list-item, union-attr]
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_captured_anew(stand: Any, change: str) -> None:
    scaled = change == "growth"
    step, _ = pair(scaler=torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None)
    batches = data(1) * 6
    for batch in batches:
        step(*batch)
    assert (len(step.captures), stand.replays) == (1, 3)
    CHANGES[change](step)
    for batch in batches:
        step(*batch)
    assert (len(step.captures), stand.replays) == (2, 8)


def test_what_modules_count_themselves_drops_no_graph(stand: Any) -> None:
    step, twin = pair()
    take(step, twin, data(6) + data(4, rows=4) + data(3))
    assert len(step.captures) == 2
    step.model.calls = 0  # type: ignore[assignment]
    take(step, twin, data(3))
    assert (len(step.captures), stand.replays) == (2, 10)


def test_a_schedule_that_moves_betas_gets_no_graph_and_is_told_so(stand: Any) -> None:
    step, twin = pair()
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one.optimizer, 0.1, total_steps=40) for one in (step, twin)]
    for batch in data(20):
        take(step, twin, [batch])
        for schedule in schedules:
            schedule.step()
    assert not step.captures
    assert str(step.fallback).startswith("the option 'betas' in group 0 of FusedAdam keeps changing")
    assert "cycle_momentum=False" in str(step.fallback)
    take(step, twin, data(60))  # the schedule has come to its end
    assert step.fallback is None
    assert len(step.captures) == 1


def test_what_changes_between_the_last_step_and_the_capture_is_seen(stand: Any) -> None:
    step, twin = pair()
    take(step, twin, data(3))
    for one in (step, twin):
        one.model.first.requires_grad_(False)
    take(step, twin, data(1))
    assert not step.captures
    take(step, twin, data(4))
    assert (len(step.captures), step.fallback) == (1, None)


def test_rates_are_kept_in_the_tensors_that_graphs_read() -> None:
    first, last = nn.Linear(2, 3), nn.Linear(3, 2)
    shared = torch.tensor(0.5)
    groups = [{"params": first.parameters()}, {"params": last.parameters()}]
    optimizer = FusedAdam(groups, shared, capturable=True)
    rates = Rates(torch.device("cpu"))
    found = optimizer.param_groups

    def told() -> list[float]:
        rates.keep(optimizer)
        assert all(isinstance(group["lr"], Tensor) for group in found)
        return [float(group["lr"]) for group in found]

    assert told() == [0.5, 0.5]
    found[0]["lr"], found[1]["lr"] = 0.25, 0.125  # of their own from now on
    assert told() == [0.25, 0.125]
    kept = [group["lr"] for group in found]
    found[0]["lr"], found[1]["lr"] = 0.0625, torch.tensor([2.0])
    assert told() == [0.0625, 2.0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 4.0})
    assert told() == [0.0625, 2.0, 4.0]
    assert [group["lr"] for group in found[:2]] == kept
    assert all(a is b for a, b in zip(kept, (group["lr"] for group in found), strict=False))
    plain = torch.optim.SGD(first.parameters(), lr=0.5)
    Rates(torch.device("cpu")).keep(plain)
    assert plain.param_groups[0]["lr"] == 0.5
    assert not isinstance(plain.param_groups[0]["lr"], Tensor)


def test_changes_that_are_far_apart_drop_graphs_as_often_as_they_come(stand: Any) -> None:
    step, twin = pair()
    take(step, twin, data(3))
    for number in range(6):
        for one in (step, twin):
            one.optimizer.param_groups[0]["weight_decay"] = 0.01 * number
        take(step, twin, data(4))
    assert step.fallback is None
    assert len(step.captures) == 6


def test_groups_that_share_a_rate_may_be_given_two(stand: Any) -> None:
    steps = []
    for capture in (True, False):
        model = Model()
        rate = torch.tensor(0.01, dtype=torch.float64)
        groups = [{"params": model.first.parameters()}, {"params": model.last.parameters()}]
        steps.append(TrainStep(model, mean_square, FusedAdam(groups, rate), capture=capture))
    take(steps[0], steps[1], data(6))
    for one in steps:
        one.optimizer.param_groups[0]["lr"], one.optimizer.param_groups[1]["lr"] = 0.25, 0.125
    take(steps[0], steps[1], data(6))
    assert [group["lr"] for group in steps[0].optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.usefixtures("stand")
def test_two_steps_of_one_optimizer_each_capture_after_a_step_outside_of_graphs() -> None:
    model, twin = Model(), Model()
    optimizers = [FusedAdam(one.parameters(), 1e-2) for one in (model, twin)]

    def other(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(model(x), y)

    first, second = TrainStep(model, mean_square, optimizers[0]), TrainStep(model, other, optimizers[0])
    plain = [TrainStep(twin, one, optimizers[1], capture=False) for one in (mean_square, other)]
    counts = []
    for batch in data(7):
        take(first, plain[0], [batch])
        take(second, plain[1], [batch])
        counts.append((len(first.captures), len(second.captures)))
    assert counts == [(0, 0)] * 3 + [(1, 0)] + [(1, 1)] * 3


# What no graph can hold


class Replacing(torch.optim.Optimizer):
    """Descends with a momentum whose tensor is another one after each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
            p -= 0.1 * state["momentum"]


def _replaces_a_buffer(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.mean = 0.5 * model.mean + model.first(x).detach().mean(0)
    return F.mse_loss(model.last(model.first(x).tanh() - model.mean), y)


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("what", ["'mean' of Model", "'momentum' of Replacing"])
def test_a_tensor_that_is_replaced_in_each_step(what: str) -> None:
    loss_fn = _replaces_a_buffer if "mean" in what else mean_square
    step, twin = pair(loss_fn)
    if "momentum" in what:
        step, twin = (
            TrainStep(one.model, loss_fn, Replacing(one.model.parameters()), capture=one is step)
            for one in (step, twin)
        )
    take(step, twin, data(7))
    assert str(step.fallback).startswith(f"it puts a new tensor in the place of {what} in each step")


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("no")])
@pytest.mark.usefixtures("stand")
def test_a_capture_that_fails_leaves_buffers_where_they_were(stand: Any, error: Exception) -> None:
    def loss_fn(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if stand.is_capturing:
            model.mean = model.mean * torch.nan
            raise error
        return mean_square(model, x, y)

    step, _ = pair(loss_fn)
    mean = step.model.mean
    for number, batch in enumerate(data(4)):
        if number == 3 and isinstance(error, KeyError):
            with pytest.raises(KeyError):
                step(*batch)
        else:
            step(*batch)
    assert step.model.mean is mean


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("drawing", ["torch", "random", "numpy"])
def test_random_numbers_of_the_host(drawing: str) -> None:
    if drawing == "numpy":
        numpy = pytest.importorskip("numpy")
    draw: dict[str, Callable[[], float]] = {
        "torch": lambda: float(torch.rand(())),
        "random": random.random,
        "numpy": lambda: float(numpy.random.rand()),
    }
    step, _ = pair(lambda model, x, y: mean_square(model, x, y) * (1.0 if draw[drawing]() < 0.5 else 2.0))
    for batch in data(4):
        step(*batch)
    assert str(step.fallback).startswith(f"it draws random numbers on the host ({drawing})")


def test_a_buffer_on_the_host_that_changes() -> None:
    model = Model()
    model.register_buffer("count", torch.zeros((), device="cpu"))
    host = watch.HostState(model.modules(), FusedAdam(model.parameters()), torch.device("cuda", 0))
    assert host.changed() is None
    model.get_buffer("count").add_(1)
    assert str(host.changed()).startswith("it changes 'count' of Model on the host")


@pytest.mark.usefixtures("stand")
def test_who_waits_beside_the_step_is_no_part_of_it() -> None:
    def wait(number: int) -> None:
        message = "called a synchronizing CUDA operation (Triggered internally)"
        warnings.warn_explicit(message, UserWarning, "/a/b/train.py", number)

    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with watch.waits() as found:
            thread = threading.Thread(target=wait, args=(7,))
            thread.start()
            thread.join()
            warnings.warn("something else", stacklevel=1)
            wait(9)
            wait(9)
    assert found == ["train.py, line 9"] * 2
    assert [str(one.message) for one in others] == ["something else"]


@pytest.mark.usefixtures("stand")
def test_who_still_waits_as_the_look_ends_is_told_of_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    is_idle = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", is_idle.set)
    monkeypatch.setattr(watch, "SETTLING", 0.2)

    def wait() -> None:
        assert is_idle.wait(10)
        warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "/a/b/train.py", 7)

    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with watch.waits() as found:
            thread = threading.Thread(target=wait)
            thread.start()
        thread.join()
    assert (found, others) == ([], [])


# Batches


def test_tensors_of_a_batch_may_be_made_to_require_gradients(stand: Any) -> None:
    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return mean_square(model, x, y) + slope.square().mean()

    step, twin = pair(penalised)
    batches = data(6)
    take(step, twin, batches)
    assert stand.replays == 3
    assert not any(x.requires_grad or x.grad is not None for x, _ in batches)
    asking = [(x.requires_grad_(), y) for x, y in data(4)]
    take(step, twin, asking)
    assert all(x.grad is None for x, _ in asking)


def test_a_history_that_would_end_at_the_batch_is_refused() -> None:
    step, _ = pair()
    x, y = data(1)[0]
    with pytest.raises(UserError, match=r"of shape \(6, 5\) that was computed from others .* use it in loss_fn"):
        step(x.requires_grad_() * 2, y)
    with pytest.raises(UserError, match=r"of shape \(6, 5\) that is a parameter"):
        step(nn.Parameter(x.detach()), y)


@pytest.mark.usefixtures("stand")
def test_sparse_batches_have_no_graph() -> None:
    step, twin = pair()
    take(step, twin, [(x.to_sparse(), y) for x, y in data(6)])
    assert str(step.fallback).startswith("a batch has a sparse_coo tensor")
    assert not step.captures


def test_objects_that_hide_tensors_are_refused() -> None:
    step, _ = pair(lambda model, batch: mean_square(model, batch.x, batch.y))

    class Given:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

    with pytest.raises(UserError, match="a batch holds a Given, which is neither a tensor nor a plain value"):
        step(Given(*data(1)[0]))
    with pytest.raises(UserError, match="a batch holds a SimpleNamespace"):
        step(SimpleNamespace(x=1))


def test_numbers_in_tensors_go_to_each_micro_batch() -> None:
    """With which micro-batches of unequal weight make the mean over all."""

    def by_count(model: nn.Module, x: Tensor, y: Tensor, is_counted: Tensor, count: Tensor) -> Tensor:
        return ((model(x) - y).square().mean(1) * is_counted).sum() / count

    whole, _ = pair(by_count)
    parts, _ = pair(lambda *given: 3 * by_count(*given), accumulate=3)
    for x, y in data(3):
        batch = (x, y, (torch.arange(6) % 5 == 1).float(), torch.tensor(2.0))
        torch.testing.assert_close(parts(*batch), whole(*batch))
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_casts_of_weights_are_not_kept_from_step_to_step() -> None:
    """Within a region of autocast around the whole loop, which keeps them till its end."""
    step, twin = pair(autocast=torch.bfloat16)
    batches = data(4)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [step(*batch) for batch in batches]
    assert all(torch.equal(loss, twin(*batch)) for loss, batch in zip(losses, batches, strict=True))


def test_a_loss_without_a_gradient_is_refused_and_the_callers_grad_mode_does_not_matter(stand: Any) -> None:
    step, twin = pair()
    for batch in data(6):
        with torch.no_grad():
            loss = step(*batch)
        assert torch.equal(loss, twin(*batch))
    assert stand.replays == 3
    step.model.requires_grad_(False)
    with pytest.raises(UserError, match="a loss without a gradient"):
        step(*data(1)[0])


def test_main_gradients_from_before_are_refused() -> None:
    step, _ = pair()
    accumulate_in_fp32(step.model.parameters())
    mean_square(step.model, *data(1)[0]).backward()
    with pytest.raises(UserError, match="have gradients from before"):
        step(*data(1)[0])
