"""Casts in a captured step leave out the pass that looks for a first amax, where slots hold a scale, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import TrainStep, fp8
from fusestep.fp8.replay import kept_state
from fusestep.fp8.state import Slots
from fusestep.fp8.statistics import states_of
from fusestep.graph import baked
from fusestep.language import interpreted
from fusestep.nn import LayerNormLinear, LayerNormMLP, Linear
from fusestep.ops import norm_quantize, quantize_launch, quantize_pair, quantize_plan, settled_slots
from fusestep.ops.launch import PreparedLaunch
from fusestep.optim import FusedAdam

RECIPE = fp8.DelayedScaling(amax_history_len=3)


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


class Descent(torch.optim.Optimizer):
    """Gradient descent that keeps nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.05)


# What a capture is told, and when it no longer holds: modules in fp32, whose scales are given them


class Stepping:
    """A step of two modules whose slots have these scales, and what its captures were told of them.

    Attributes: told: of each capture, the scales' slots that casts could rely on, as (module, index).
    """

    def __init__(self, *scales: tuple[float, float, float]) -> None:
        self.model = nn.Sequential(*(Linear(5, 5) for _ in scales))
        for layer, given in zip(self.model, scales, strict=True):
            state = Slots(("input", "weight", "grad_output"), RECIPE, torch.device("cpu"))
            state.scale.copy_(torch.tensor(given))
            layer.fp8_state = state
        self.told: list[set[tuple[int, int]]] = []
        self.step = TrainStep(self.model, self.loss, Descent(self.model.parameters()))

    def state(self, number: int) -> Slots:
        state = self.model[number].fp8_state
        assert isinstance(state, Slots)
        return state

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        if settled_slots.captures:
            places = [(m, i) for m in range(len(self.model)) for i in range(3)]
            at = [self.state(m).slots.data_ptr() for m in range(len(self.model))]
            self.told.append({(m, i) for m, i in places if settled_slots.is_settled(at[m], i)})
        return model(x).square().mean()

    def run(self, count: int) -> None:
        for _ in range(count):
            self.step(torch.randn(3, 5))


ALL = {(m, i) for m in range(2) for i in range(3)}


@pytest.mark.usefixtures("stand")
def test_slots_that_hold_a_scale_are_settled_in_the_capture_alone() -> None:
    stepping = Stepping((2.0, 0.0, 3.0), (0.0, 5.0, 2.0**-126))
    stepping.run(8)
    assert stepping.told == [{(0, 0), (0, 2), (1, 1), (1, 2)}]
    assert len(stepping.step.captures) == 1
    assert not settled_slots.captures


def _another_format(stepping: Stepping) -> None:
    stepping.state(1).follow(fp8.DelayedScaling(amax_history_len=3, fp8_format=fp8.Format.E4M3))


def _another_state(stepping: Stepping) -> None:
    state = Slots(stepping.state(1).names, RECIPE, torch.device("cpu"))
    state.scale.copy_(torch.tensor([2.0, 2.0, 0.0]))
    stepping.model[1].fp8_state = state


def _loaded(stepping: Stepping) -> None:
    saved = copy.deepcopy(stepping.model.state_dict())
    saved["1.fp8_slots"][2, 0] = 0.0
    stepping.model.load_state_dict(saved)


LOSSES: dict[str, Callable[[Stepping], object]] = {
    "a state dict": _loaded,
    "another format": _another_format,
    "another state": _another_state,
    "a write in place": lambda stepping: stepping.state(1).scale[2:].zero_(),
}


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_scale_that_is_gone_has_the_step_captured_anew(loss: str) -> None:
    stepping = Stepping((2.0, 4.0, 3.0), (3.0, 5.0, 7.0))
    stepping.run(6)
    LOSSES[loss](stepping)
    stepping.run(1)
    assert len(stepping.step.captures) == 1  # a step by itself
    stepping.run(3)
    assert stepping.told == [ALL, ALL - {(1, 2)}]
    stepping.state(1).scale[2:].fill_(7.0)
    stepping.run(3)
    assert len(stepping.step.captures) == 2  # a scale more does no harm


@pytest.mark.usefixtures("stand")
def test_another_history_has_the_step_captured_anew_with_the_same_scales() -> None:
    stepping = Stepping((2.0, 4.0, 3.0), (3.0, 5.0, 7.0))
    stepping.run(6)
    stepping.state(0).follow(fp8.DelayedScaling(amax_history_len=7))
    stepping.run(4)
    assert stepping.told == [ALL, ALL]


def _kept(stepping: Stepping) -> None:
    with kept_state(stepping.model):
        stepping.state(0).scale.zero_()


WRITES: dict[str, Callable[[Stepping], object]] = {
    "the same state dict": lambda stepping: stepping.model.load_state_dict(copy.deepcopy(stepping.model.state_dict())),
    "other scales": lambda stepping: stepping.state(0).scale.mul_(3.0),
    "a state that was kept": _kept,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_leaves_scales_keeps_the_graph_and_is_read_once(
    stand: Any, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    stepping = Stepping((2.0, 4.0, 0.0), (3.0, 5.0, 7.0))
    stepping.run(6)
    reads: list[int] = []
    real = baked.holding
    monkeypatch.setattr(baked, "holding", lambda tables: reads.append(1) or real(tables))
    WRITES[write](stepping)
    stepping.run(5)
    assert len(reads) == 1
    assert (len(stepping.step.captures), stand.replays) == (1, 8)


@pytest.mark.usefixtures("stand")
def test_a_step_that_writes_in_its_slots_itself_relies_on_none_of_them() -> None:
    stepping = Stepping((2.0, 4.0, 3.0), (3.0, 5.0, 7.0))
    stepping.step.before = lambda: stepping.state(0).scale.mul_(1.0)
    stepping.run(6)
    assert stepping.told == [{(1, 0), (1, 1), (1, 2)}]
    stepping.step.reset()
    stepping.step.before = None
    stepping.run(6)
    assert stepping.told[1:] == [ALL]


@pytest.mark.usefixtures("stand")
def test_each_kind_of_batch_relies_on_the_scales_of_its_own_capture() -> None:
    stepping = Stepping((2.0, 4.0, 0.0))
    stepping.run(5)
    stepping.state(0).scale[2:].fill_(7.0)
    for _ in range(5):
        stepping.step(torch.randn(4, 5))
    assert stepping.told == [{(0, 0), (0, 1)}, {(0, 0), (0, 1), (0, 2)}]
    stepping.state(0).scale[2:].zero_()  # which the second graph relies on
    stepping.run(3)
    assert stepping.told[2:] == [{(0, 0), (0, 1)}]


@pytest.mark.usefixtures("stand")
def test_a_graph_that_relies_on_less_takes_nothing_from_the_one_before() -> None:
    stepping = Stepping((2.0, 4.0, 3.0))
    stepping.run(5)
    for number in range(4):
        if number == 3:
            stepping.state(0).scale.mul_(1.0)  # between the last step by itself and the capture
        stepping.step(torch.randn(4, 5))
    assert stepping.told == [{(0, 0), (0, 1), (0, 2)}, set()]
    stepping.state(0).scale[2:].zero_()
    stepping.run(3)
    assert stepping.told[2:] == [{(0, 0), (0, 1)}]


@pytest.mark.usefixtures("stand")
def test_a_capture_that_fails_leaves_nothing_settled() -> None:
    stepping = Stepping((2.0, 4.0, 3.0))
    real = stepping.loss

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        if settled_slots.captures:
            raise RuntimeError("no graph holds this")
        return real(model, x)

    stepping.step.loss_fn = failing
    stepping.run(6)
    assert stepping.step.fallback == "the step cannot be captured (no graph holds this)"
    assert not settled_slots.captures


# The same training, with kernels


def data(count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(9)
    return [
        ((1.0 + n % 3) * torch.randn(15, 13, device=device), torch.randn(15, 9, device=device)) for n in range(count)
    ]


def twins(model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[TrainStep, TrainStep]:
    """A step, and its twin that takes its steps one by one."""
    other = copy.deepcopy(model)
    step, twin = (
        TrainStep(one, mean_square, optimizer(one.parameters()), fp8_recipe=RECIPE, capture=one is model)
        for one in (model, other)
    )
    return step, twin


def take(step: TrainStep, twin: TrainStep, batches: list[tuple[Tensor, Tensor]]) -> None:
    """The same losses, weights and scaling state, bit for bit."""
    for batch in batches:
        assert torch.equal(step(*batch), twin(*batch))
    for ours, theirs in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for (path, found), (_, wanted) in zip(states_of(step.model), states_of(twin.model), strict=True):
        for name in ("slots", "history", "rolls"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), (path, name)


def without_scales(one: TrainStep) -> None:
    """Load, for the first module, scaling state from before a first step."""
    saved = copy.deepcopy(one.model.state_dict())
    saved["0.fp8_slots"][:, (0, 1)] = 0.0
    for name in ("0.fp8_history", "0.fp8_rolls"):
        saved[name].zero_()
    one.model.load_state_dict(saved)


class Passes:
    """Launches of the pass before a cast, of all and those that a graph has captured."""

    def __init__(self, is_capturing: Callable[[], bool]) -> None:
        self.all = self.captured = 0
        self._is_capturing = is_capturing

    def launched(self, kernel: Any, tensors: Any) -> None:
        name = kernel.fn.__name__
        finds_amax = name in ("_amax_kernel", "_amax_pair_kernel")
        if finds_amax or (name.startswith("_norm_quantize") and not tensors[6]):
            self.all += 1
            self.captured += self._is_capturing()


@pytest.fixture
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Casts of few elements take a pass before them too, and those passes are counted."""
    for module in (quantize_launch, quantize_pair):
        monkeypatch.setattr(module, "SEARCHED_BY_EACH", 0)
        if interpreted():
            monkeypatch.setattr(module, "quantize_launch", lambda *_: quantize_launch.TileLaunch(16, 16, 4))
            monkeypatch.setattr(module, "amax_launch", lambda _: quantize_launch.TileLaunch(16, 16, 4))
    for module in (quantize_plan, quantize_pair):
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(norm_quantize, "_known", {})
    is_real = request.node.get_closest_marker("gpu") is not None
    stand = None if is_real else request.getfixturevalue("stand")
    passes = Passes(torch.cuda.is_current_stream_capturing if stand is None else lambda: stand.is_capturing)
    call, at = PreparedLaunch.__call__, PreparedLaunch.at

    def calling(self: Any, *tensors: Tensor | None) -> None:
        passes.launched(self._kernel, [tensor is not None for tensor in tensors])
        call(self, *tensors)

    def launching(self: Any, addresses: tuple[int, ...]) -> bool:
        is_launched = at(self, addresses)
        if is_launched:
            passes.launched(self._kernel, addresses)
        return is_launched

    monkeypatch.setattr(PreparedLaunch, "__call__", calling)
    monkeypatch.setattr(PreparedLaunch, "at", launching)
    return passes


@pytest.mark.interpreter
def test_captured_casts_without_a_pass_before_train_alike(stand: Any, passes: Passes) -> None:
    torch.manual_seed(8)
    step, twin = twins(nn.Sequential(LayerNormLinear(13, 9)), Descent)
    batches = data(6, torch.device("cpu"))
    take(step, twin, batches[:1])
    assert passes.all == 2 * 3
    take(step, twin, batches[1:4])
    assert (len(step.captures), stand.replays, passes.captured) == (1, 1, 0)
    for one in (step, twin):
        without_scales(one)
    take(step, twin, batches[4:])
    # A step by itself has given all of them scales.
    assert (len(step.captures), stand.replays, passes.captured) == (2, 2, 0)


@pytest.mark.interpreter
def test_a_slot_without_a_scale_keeps_its_pass(stand: Any, passes: Passes) -> None:
    torch.manual_seed(8)
    model = nn.Sequential(Linear(13, 9))
    step, twin = twins(model, Descent)
    batches = data(5, torch.device("cpu"))
    take(step, twin, [(torch.zeros_like(x), y) for x, y in batches[:4]])
    assert (len(step.captures), stand.replays, passes.captured) == (1, 1, 1)  # of the input and the weight, in one
    take(step, twin, batches[4:])
    state: Any = model[0].fp8_state
    assert bool((state.scale > 0).all())
    assert len(step.captures) == 1


@pytest.mark.gpu
class TestGraph:
    """The same in a real graph, with the optimizer's own casts of weights too, and what stays out of it."""

    device = torch.device("cuda", 0)

    def model(self) -> nn.Sequential:
        torch.manual_seed(8)
        layers = Linear(13, 11), LayerNormLinear(11, 9), LayerNormMLP(9, 34)
        return nn.Sequential(*layers).to(self.device)

    @pytest.mark.parametrize("optimizer", [Descent, FusedAdam])
    def test_captured_casts_without_a_pass_before_train_alike(self, passes: Passes, optimizer: Any) -> None:
        step, twin = twins(self.model(), optimizer)
        batches = data(18, self.device)
        take(step, twin, batches[:6])
        assert passes.all
        assert (len(step.captures), passes.captured) == (1, 0)
        for one in (step, twin):
            without_scales(one)
        take(step, twin, batches[6:12])
        assert (len(step.captures), passes.captured) == (2, 0)
        for one in (step, twin):  # the scales stay, and the graph with them
            one.model.load_state_dict(copy.deepcopy(one.model.state_dict()))
        take(step, twin, batches[12:])
        assert step.fallback is None

    def test_a_slot_without_a_scale_keeps_its_pass(self, passes: Passes) -> None:
        model = self.model()
        step, twin = twins(model, Descent)
        batches = data(9, self.device)
        nothing = [(torch.zeros_like(x), y) for x, y in batches[:6]]
        take(step, twin, nothing[:1])
        usual = passes.all // 2
        take(step, twin, nothing[1:])
        assert len(step.captures) == 1
        assert 0 < passes.captured < usual  # of the first module's input alone
        take(step, twin, batches[6:])
        state: Any = model[0].fp8_state
        assert bool((state.scale > 0).all())
        assert len(step.captures) == 1

    def test_a_capture_of_the_users_own_keeps_its_passes(self, passes: Passes) -> None:
        model = self.model()
        step, _ = twins(model, Descent)
        batches = data(6, self.device)
        for batch in batches:
            step(*batch)
        assert passes.captured == 0

        def forward() -> None:
            with fp8.fp8_autocast(recipe=RECIPE):
                model(batches[0][0])

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            forward()
        assert passes.captured >= 3

    def test_a_replay_waits_only_where_somebody_wrote_in_slots(self, no_waiting: Any) -> None:
        model = self.model()
        step, _ = twins(model, Descent)
        batches = data(7, self.device)
        for batch in batches[:5]:
            step(*batch)
        with no_waiting():
            step(*batches[5])
            state: Any = model[0].fp8_state
            state.scale.mul_(1.0)
            step(*batches[6])  # waits, which is allowed it
        assert len(step.captures) == 1
