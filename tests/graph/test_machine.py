"""TrainStep's course of warm-up, capture and replay on a CPU, with a stand-in for CUDA's graphs (conftest.py).

What only CUDA can show is in test_train_step.py.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.errors import UserError
from fusestep.graph import segments
from fusestep.optim import FusedAdam


def small() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def data(count: int, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, 5), torch.randn(rows, 3)) for _ in range(count)]


def pair(loss_fn: Callable[..., Tensor] = mean_square, **options: Any) -> tuple[TrainStep, TrainStep]:
    """A step, and its twin that takes its steps one by one."""
    model = small()
    twin = copy.deepcopy(model)
    first = TrainStep(model, loss_fn, FusedAdam(model.parameters(), 1e-2), **options)
    return first, TrainStep(twin, loss_fn, FusedAdam(twin.parameters(), 1e-2), capture=False, **options)


def assert_alike(step: TrainStep, twin: TrainStep) -> None:
    for ours, theirs in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def take(step: TrainStep, twin: TrainStep, batches: list[Any]) -> None:
    for batch in batches:
        assert torch.equal(step(*batch), twin(*batch))
    assert_alike(step, twin)


def test_three_steps_one_by_one_then_replays(stand: Any) -> None:
    step, twin = pair()
    take(step, twin, data(3))
    assert (len(step.captures), stand.replays) == (0, 0)
    take(step, twin, data(4))
    assert (len(step.captures), stand.replays) == (1, 4)
    assert all(p.grad is None for p in step.model.parameters())


def test_before_a_capture_memory_is_given_back_and_the_optimizer_works_apart(stand: Any) -> None:
    """What lasts is made on a stream of its own, whose segments hold nothing else."""

    def told(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def telling(*args: Any) -> Tensor:
            stand.log.append(f"forward on {stand.streams[-1].name}")
            return loss_fn(*args)

        return telling

    step, twin = pair()
    step.loss_fn = told(mean_square)
    step.optimizer.register_step_pre_hook(lambda *_: stand.log.append(f"update on {stand.streams[-1].name}"))
    batches = data(5)
    for number, batch in enumerate(batches):
        stand.log.clear()
        assert torch.equal(step(*batch), twin(*batch))
        if number < 3:
            assert stand.log == [
                "release",
                "step's waits for user's",
                "forward on step's",
                "release",
                "optimizer's waits for step's",
                "update on optimizer's",
                "step's waits for optimizer's",
                "user's waits for step's",
            ]
        else:  # the capture, whose stream the stand-in leaves alone, and replays
            once = ["forward on user's", "update on user's"]
            assert stand.log == (["release", *once, *once] if number == 3 else once)
    assert_alike(step, twin)


def test_nothing_is_released_while_a_graph_is_captured(stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, whose capture that would spoil, or on the stream of the caller."""
    told: list[str | None] = []

    def loss_fn(*args: Any) -> Tensor:
        if stand.is_capturing:
            other = threading.Thread(target=lambda: told.append(segments.release()))
            other.start()
            other.join()
        return mean_square(*args)

    step, _ = pair(loss_fn)
    batches = data(5)
    for number, batch in enumerate(batches):
        stand.log.clear()
        step(*batch)
        assert stand.log.count("release") == (2, 2, 2, 1, 0)[number]
    assert told == ["a step is being captured"]
    stand.log.clear()
    assert segments.release() is None
    here = stand.streams[-1]
    stand.captured_elsewhere.append(here)
    assert segments.release() == "the current stream is captured in a graph"
    stand.captured_elsewhere[:] = [type(here)(stand, "torch's")]
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", stand.captured_elsewhere[0])
    assert segments.release() == "torch.cuda.graph captures in another thread"
    assert stand.log == ["release"]
    stand.captured_elsewhere.clear()
    assert segments.release() is None


@pytest.mark.usefixtures("stand")
def test_after_a_capture_that_failed_memory_is_released() -> None:
    step, _ = pair()
    batches = data(4)
    for batch in batches[:3]:
        step(*batch)
    step.before = {}.popitem
    with pytest.raises(KeyError):
        step(*batches[3])
    assert segments.release() is None


def test_an_optimizer_that_raises_leaves_its_stream(stand: Any) -> None:
    def refuse(*_: Any) -> None:
        raise KeyError("state")

    step, twin = pair()
    batch = data(1)[0]
    handle = step.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(KeyError):
        step(*batch)
    assert stand.log[-2:] == ["step's waits for optimizer's", "user's waits for step's"]
    handle.remove()
    take(step, twin, data(6))
    assert stand.replays == 3


def test_batches_may_be_dicts_and_what_is_in_them_is_told_apart(stand: Any) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any], factors: tuple[Any, ...]) -> Tensor:
        scale = 3.0 if factors[0] is True else float(factors[0])
        return F.mse_loss(model(batch["x"]), batch["more"][0]) * scale

    step, twin = pair(loss_fn)
    given = [({"x": x, "more": [y, None]}, (1, "name")) for x, y in data(6)]
    take(step, twin, given)
    assert stand.replays == 3
    take(step, twin, [(batch, (True, "name")) for batch, _ in given])  # equal to 1, and something else
    assert [capture.batch for capture in step.captures] == [((6, 5), (6, 3))] * 2
    assert stand.replays == 6


@pytest.mark.parametrize("where", ["one by one", "watched", "capture", "replay"])
@pytest.mark.parametrize("error", [KeyError("token"), KeyboardInterrupt()], ids=["an error", "an interrupt"])
def test_a_loss_that_raises_leaves_no_trace(stand: Any, where: str, error: BaseException) -> None:
    calls: list[int] = []
    failing = {"one by one": 2, "watched": 3, "capture": 4, "replay": 0}[where]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        # The second micro-batch: the first has left its gradient.
        if len(calls) == 2 * failing:
            raise error
        return mean_square(model, x, y)

    step, twin = pair(accumulate=2)
    step.loss_fn = loss_fn
    batches = data(9)
    for number, batch in enumerate(batches, 1):
        if number == failing:
            with pytest.raises(type(error)):
                step(*batch)
            assert all(p.grad is None for p in step.model.parameters())
            assert stand.generator_states == []  # the capture was ended in order
        assert torch.equal(step(*batch), twin(*batch))
    assert_alike(step, twin)
    assert step.fallback is None
    assert stand.replays == 6


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_capture_that_fails_falls_back_and_an_error_around_it_is_not_its_reason(stand: Any, ends_badly: bool) -> None:
    stand.ends_badly = ends_badly

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if stand.is_capturing:
            raise RuntimeError("no graph holds this")
        return mean_square(model, x, y)

    step, twin = pair(loss_fn)
    take(step, twin, data(3))
    try:
        raise ValueError("somebody else's")
    except ValueError:
        take(step, twin, data(3))
    assert step.fallback == "the step cannot be captured (no graph holds this)"
    assert stand.generator_states == (["before"] if ends_badly else [])


def _with_a_hook(step: TrainStep) -> None:
    step.model[1].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[index]


CHANGES: dict[str, Callable[[TrainStep], None]] = {
    "loss_fn": lambda step: setattr(step, "loss_fn", lambda model, x, y: F.l1_loss(model(x), y)),
    "accumulate": lambda step: setattr(step, "accumulate", 3),
    "autocast": lambda step: setattr(step, "autocast", torch.bfloat16),
    "before": lambda step: setattr(step, "before", lambda: step.model[0].bias.data.mul_(0.5)),  # type: ignore[index]
    "a hook": _with_a_hook,
    "frozen": lambda step: step.model[0].requires_grad_(False),  # type: ignore[index, operator]
    "evaluation": lambda step: step.model.eval(),
    "an option": lambda step: step.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "a state": lambda step: step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict())),
    "reset": lambda step: step.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_captured_anew(stand: Any, change: str) -> None:
    step, twin = pair()
    take(step, twin, data(6))
    for one in (step, twin):
        CHANGES[change](one)
    again = 3 if change == "reset" else 1
    take(step, twin, data(again))
    assert (len(step.captures), stand.replays) == (1, 3)
    take(step, twin, data(4))
    assert stand.replays > 3
    assert len(step.captures) == 2


def test_what_was_replaced_is_not_kept_alive(stand: Any) -> None:
    step, twin = pair()
    take(step, twin, data(5))
    replaced = weakref.ref(step.model[1])  # type: ignore[index]
    step.model[1] = nn.Tanh()  # type: ignore[index, operator]
    step.reset()
    gc.collect()
    assert replaced() is None


def test_a_step_that_nobody_holds_is_gone_at_once() -> None:
    step, twin = pair()
    take(step, twin, data(2))
    gone = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()


def test_the_kind_of_batch_that_was_not_used_for_longest_makes_room_which_is_told_once(
    stand: Any, caplog: pytest.LogCaptureFixture
) -> None:
    step, twin = pair(max_graphs=2)
    with caplog.at_level(logging.WARNING, "fusestep"):
        take(step, twin, data(4, 6) + data(4, 8) + data(1, 6))
        assert "kinds of batch" not in caplog.text
        take(step, twin, data(4, 10) + data(4, 6) + data(4, 8))
    assert caplog.text.count("more than max_graphs=2 kinds of batch") == 1
    assert [capture.batch[0][0] for capture in step.captures] == [6, 8, 10, 8]


class Counting(torch.optim.Optimizer):
    """Counts its steps in Python, and steps less and less."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + (self.where == "group")
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + (self.where == "state")
                p -= group["lr"] / (1 + state["step"] + group["k"]) * p.grad


@pytest.mark.parametrize(("where", "name"), [("state", "step"), ("group", "k"), ("nowhere", None)])
def test_an_optimizer_that_counts_on_the_host_has_no_graph(stand: Any, where: str, name: str | None) -> None:
    model = small()
    twin = copy.deepcopy(model)
    step = TrainStep(model, mean_square, Counting(model.parameters(), where))
    other = TrainStep(twin, mean_square, Counting(twin.parameters(), where), capture=False)
    take(step, other, data(7))
    if name is None:
        assert stand.replays == 4
    else:
        assert step.fallback is not None
        assert step.fallback.startswith(f"it changes '{name}' of Counting on the host")


def test_gradients_outside_of_the_optimizer_are_dropped_as_its_own_are(stand: Any) -> None:
    model = small()
    step = TrainStep(model, mean_square, FusedAdam(model[2].parameters()))
    for batch in data(6):
        step(*batch)
        assert all(p.grad is None for p in model.parameters())


# Without graphs too


def test_gradients_from_before_are_refused() -> None:
    model = small()
    optimizer = FusedAdam(model.parameters())
    step = TrainStep(model, mean_square, optimizer, capture=False)
    batch = data(1)[0]
    mean_square(model, *batch).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"have gradients from before.*call optimizer\.zero_grad\(\) first"):
        step(*batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    step(*batch)


def test_micro_batches_of_dicts_are_cut() -> None:
    model = small().double()
    twin = copy.deepcopy(model)
    seen: list[tuple[int, ...]] = []

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(tuple(batch["x"].shape))
        return mean_square(model, batch["x"], batch["y"])

    step = TrainStep(model, loss_fn, FusedAdam(model.parameters(), 1e-2), accumulate=3, capture=False)
    optimizer = FusedAdam(twin.parameters(), 1e-2)
    for x, y in data(3):
        step({"x": x.double(), "y": y.double()})
        mean_square(twin, x.double(), y.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [(2, 5)] * 9
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_what_cannot_be_compared_is_refused() -> None:
    from collections import UserDict

    model = small()
    step = TrainStep(model, lambda model, batch: model(batch["x"]).mean(), FusedAdam(model.parameters()), capture=False)
    batch = UserDict(x=torch.randn(2, 5))
    with pytest.raises(UserError, match=r"a batch holds a UserDict, .* \(dict\(batch\) makes one of a mapping\)"):
        step(batch)
    step(dict(batch))
