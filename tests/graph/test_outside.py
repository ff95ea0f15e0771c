"""What loss_fn reads from outside is a graph's too: a change is told by name and captured anew, or ends the graphs.

The stand-in of conftest.py takes the step again in a replay, so whether a graph was dropped is asserted, not the loss.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.graph.outside import Outside
from fusestep.graph.reach import GONE, MEMBERS, PLACES, Place, Reach, reach
from fusestep.graph.watch import HostState
from fusestep.optim import FusedAdam

BETA = 1.5
TABLE = {"weights": [1.5, 2.5], "name": "kl"}
OTHER = 7.0


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def scaled(value: Tensor) -> Tensor:
    return value * BETA


def steps(loss_fn: Callable[..., Tensor], *, before: Callable[[], object] | None = None) -> Any:
    """A step whose model has a private attribute."""
    torch.manual_seed(11)
    model: Any = nn.Linear(5, 3)
    model._gamma = 2.5
    return TrainStep(model, loss_fn, FusedAdam(model.parameters(), 1e-2), before=before)


class Weighted(nn.Module):
    """A criterion that has everything a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.5
        self.register_buffer("center", torch.ones(3))
        self.inner = nn.Dropout(0.0)
        self.config = SimpleNamespace(weight=1.5)
        self.turn: Any = torch.tanh

    def _turned(self, value: Tensor) -> Tensor:
        turned: Tensor = self.turn(value) * self.config.weight
        return turned

    def forward(self, *given: Any) -> Tensor:
        value = given[0](given[1]) if len(given) == 2 else given[0]
        return (self.inner(self._turned(value)) * self.center).square().mean() * self.beta * BETA


class Trainer:
    """A trainer whose loss reads its attributes, of the class and its own, by way of methods and objects."""

    floor = 0.5

    def __init__(self) -> None:
        self.beta, self.steps = 1.5, 0
        self.config = SimpleNamespace(loss=SimpleNamespace(weight=1.5), seed=3)
        self.tensor = torch.ones(3)
        self.criterion = Weighted()
        self.shown: list[Tensor] = []
        self.last: Tensor | None = None
        self.log: dict[str, Tensor] = {}

    @property
    def factor(self) -> float:
        return self.beta * self.floor

    def _weighted(self, value: Tensor) -> Tensor:
        return self.criterion(value * self.config.loss.weight) * self.factor

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = self._weighted(model(x) * self.tensor)
        if len(self.shown) < 2:
            self.shown.append(loss.detach())
        self.last, self.log["loss"] = loss.detach(), loss.detach()
        return loss + 0 * self.last + 0 * self.log["loss"]


class Callee:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 1.5

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * self.beta


def _cell() -> tuple[Any, Any]:
    beta: Any = 1.5

    def setting(value: Any) -> None:
        nonlocal beta
        beta = value

    return lambda model, x: square(model, x) * beta, setting


def _tuple_cell() -> tuple[Any, Any]:
    betas: Any = (1.5, (True, "mean"))

    def setting(value: Any) -> None:
        nonlocal betas
        betas = value

    return lambda model, x: square(model, x) * betas[0], lambda value: setting((value, (True, "mean")))


def _tensor_cell() -> tuple[Any, Any]:
    weight = torch.ones(())

    def setting(value: Tensor) -> None:
        nonlocal weight
        weight = value

    return lambda model, x: square(model, x) * weight, lambda _: setting(torch.ones(()))


def _moved_tensor() -> tuple[Any, Any]:
    weight = torch.ones(3)
    return lambda model, x: square(model, x) * weight[0], lambda _: setattr(weight, "data", torch.ones(3))


def _keywords() -> tuple[Any, Any]:
    def loss(model: nn.Module, x: Tensor, *, beta: float = 1.5) -> Tensor:
        return square(model, x) * beta

    return loss, lambda value: loss.__kwdefaults__.update(beta=value)


def _defaults() -> tuple[Any, Any]:
    def loss(model: nn.Module, x: Tensor, beta: float = 1.5) -> Tensor:
        return square(model, x) * beta

    return loss, lambda value: setattr(loss, "__defaults__", (value,))


def _partial() -> tuple[Any, Any]:
    def loss(shift: Any, model: nn.Module, x: Tensor, beta: float) -> Tensor:
        return square(model, x) * beta + shift.value

    bound = functools.partial(loss, SimpleNamespace(value=1.5), beta=1.5)
    return bound, lambda value: bound.keywords.update(beta=value)


def _partial_object() -> tuple[Any, Any]:
    shift = SimpleNamespace(value=1.5)
    bound = functools.partial(lambda shift, model, x: square(model, x) + shift.value, shift)
    return bound, lambda value: setattr(shift, "value", value)


def _of_trainer(change: Callable[[Trainer, Any], object]) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        trainer = Trainer()
        return trainer.loss, lambda value: change(trainer, value)

    return made


def _of_module(change: Callable[[Weighted, Any], object]) -> Callable[[], tuple[Any, Any]]:
    def made() -> tuple[Any, Any]:
        module = Weighted()
        return module, lambda value: change(module, value)

    return made


def _criterion() -> tuple[Any, Any]:
    criterion = Weighted()
    return lambda model, x: criterion(model(x)), lambda value: setattr(criterion, "beta", value)


def _global(loss_fn: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (loss_fn, lambda value: globals().update(BETA=value))


def _callee() -> tuple[Any, Any]:
    callee = Callee()
    return callee, lambda value: setattr(callee, "beta", value)


def _wrapped() -> tuple[Any, Any]:
    beta = SimpleNamespace(of=1.5)

    @torch.enable_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * beta.of

    return loss, lambda value: setattr(beta, "of", value)


WENT = "(it went from 1.5 to 4.5)"

CHANGES: dict[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {
    "a cell": (f"loss_fn's `beta` {WENT}", _cell),
    "a tuple": ("loss_fn's `betas` (it went from (1.5, (True, 'mean')) to (4.5, (True, 'mean')))", _tuple_cell),
    "a tensor": ("loss_fn's `weight`", _tensor_cell),
    "a tensor's place": ("where loss_fn's `weight` lies", _moved_tensor),
    "a keyword": (f"loss_fn's `beta` {WENT}", _keywords),
    "a default": ("loss_fn's `__defaults__` (it went from (1.5,) to (4.5,))", _defaults),
    "what partial binds": (f"loss_fn's `beta` {WENT}", _partial),
    "an object that partial binds": (f"loss_fn's `args[0].value` {WENT}", _partial_object),
    "a global": (f"loss_fn's `BETA` {WENT}", _global(lambda model, x: square(model, x) * BETA)),
    "a global of code within": (
        f"loss_fn's `BETA` {WENT}",
        _global(lambda model, x: sum(square(model, x) * BETA for _ in range(1))),
    ),
    "a global of what is called": (
        f"loss_fn's `scaled: BETA` {WENT}",
        _global(lambda model, x: scaled(square(model, x))),
    ),
    "a member of a list in a dict": (
        f"loss_fn's `TABLE['weights'][0]` {WENT}",
        lambda: (
            lambda model, x: square(model, x) * TABLE["weights"][0],  # type: ignore[operator]
            lambda value: TABLE["weights"].__setitem__(0, value),  # type: ignore[attr-defined]
        ),
    ),
    "one more member": (
        "the length of loss_fn's `TABLE['weights']` (it went from 2 to 3)",
        lambda: (
            lambda model, x: square(model, x) * TABLE["weights"][-1],  # type: ignore[operator]
            lambda value: TABLE["weights"].append(value),  # type: ignore[attr-defined]
        ),
    ),
    "a trainer's number": (f"loss_fn's `self.beta` {WENT}", _of_trainer(lambda t, value: setattr(t, "beta", value))),
    "a class's number": (
        "loss_fn's `self.floor` (it went from 0.5 to 4.5)",
        _of_trainer(lambda t, value: setattr(t, "floor", value)),
    ),
    "a number of a trainer's objects": (
        f"loss_fn's `self.config.loss.weight` {WENT}",
        _of_trainer(lambda t, value: setattr(t.config.loss, "weight", value)),
    ),
    "a trainer's tensor": ("loss_fn's `self.tensor`", _of_trainer(lambda t, _: setattr(t, "tensor", torch.ones(3)))),
    "a trainer's criterion": (
        "the attribute 'beta' of Weighted",
        _of_trainer(lambda t, value: setattr(t.criterion, "beta", value)),
    ),
    "another criterion": (
        "loss_fn's `self.criterion`",
        _of_trainer(lambda t, _: setattr(t, "criterion", Weighted())),
    ),
    "a module's number": ("the attribute 'beta' of Weighted", _of_module(lambda m, value: setattr(m, "beta", value))),
    "a module's module": ("the attribute 'p' of Dropout", _of_module(lambda m, _: setattr(m.inner, "p", 1.0))),
    "a module's buffer": (
        "a parameter or a buffer",
        _of_module(lambda m, _: setattr(m, "center", torch.ones(3))),
    ),
    "a number of a module's object": (
        f"loss_fn's `self.config.weight` {WENT}",
        _of_module(lambda m, value: setattr(m.config, "weight", value)),
    ),
    "another function": ("loss_fn's `self.turn`", _of_module(lambda m, _: setattr(m, "turn", torch.sigmoid))),
    "a module's global": (f"loss_fn's `BETA` {WENT}", _of_module(lambda _, value: globals().update(BETA=value))),
    "a criterion": ("the attribute 'beta' of Weighted", _criterion),
    "an object that is called, with slots": (f"loss_fn's `self.beta` {WENT}", _callee),
    "a decorated function": (f"loss_fn's `beta.of` {WENT}", _wrapped),
}


@pytest.fixture(autouse=True)
def _same_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BETA", 1.5)
    monkeypatch.setitem(globals(), "TABLE", {"weights": [1.5, 2.5], "name": "kl"})


def x() -> Tensor:
    return torch.randn(4, 5)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_is_told_and_captured_anew(stand: Any, change: str) -> None:
    what, make = CHANGES[change]
    loss_fn, set_to = make()
    step = steps(loss_fn)
    for _ in range(6):
        step(x())
    assert (len(step.captures), stand.replays, step.fallback) == (1, 3, None)
    set_to(4.5)
    assert step._baked.has_changed() == what
    for _ in range(4):
        step(x())
    assert (len(step.captures), stand.replays, step.fallback) == (2, 6, None)


def test_a_number_of_a_package_without_a_file_is_told(
    stand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spread_over" / "inner").mkdir(parents=True)
    (tmp_path / "spread_over" / "inner" / "numbers_of.py").write_text("beta = 1.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    import spread_over.inner.numbers_of  # type: ignore[import-not-found]

    step = steps(lambda model, x: square(model, x) * spread_over.inner.numbers_of.beta)
    for _ in range(6):
        step(x())
    spread_over.inner.numbers_of.beta = 4.5
    assert "spread_over.inner.numbers_of.beta" in str(step._baked.has_changed())
    for _ in range(4):
        step(x())
    assert (len(step.captures), stand.replays, step.fallback) == (2, 6, None)


def test_what_dies_or_cannot_be_read_any_more_is_a_change() -> None:
    class Raising:
        fails = False

        def __getattr__(self, name: str) -> float:
            if self.fails:
                raise RuntimeError(f"{name} is not there now")
            return 1.5

    class Kept:
        beta = 2.5

    raising, kept = Raising(), Kept()
    places = [
        Place("loss_fn", "beta", attrgetter("beta"), owner, 0.0, False) for owner in (raising, weakref.proxy(kept))
    ]
    assert [place.now() for place in places] == [1.5, 2.5]
    outside = Outside(steps(square))
    outside._hold(Reach(places))
    assert outside.changed() is None
    raising.fails = True
    assert outside.changed() is not None
    outside._hold(Reach(places[1:]))
    del kept
    assert outside.changed() is not None
    assert [place.now() for place in places] == [GONE, GONE]


SAME: dict[str, Callable[[Trainer], object]] = {
    "an equal number": lambda t: setattr(t, "beta", float("1.5")),
    "what no code reads": lambda t: (setattr(t, "steps", 7), setattr(t.config, "seed", 4), globals().update(OTHER=8.0)),
    "what the loss keeps to be shown": lambda t: (t.shown.clear(), t.log.clear(), setattr(t, "last", None)),
    "what is written in tensors": lambda t: (t.tensor.mul_(2), t.criterion.center.mul_(2)),
}


@pytest.mark.parametrize("change", SAME)
def test_what_a_graph_does_not_hold_keeps_it(stand: Any, change: str) -> None:
    trainer = Trainer()
    step = steps(trainer.loss)
    for _ in range(6):
        step(x())
    SAME[change](trainer)
    for _ in range(3):
        step(x())
    assert (len(step.captures), stand.replays) == (1, 6)


@pytest.mark.usefixtures("stand")
def test_before_is_looked_at_as_loss_fn_is() -> None:
    rate = SimpleNamespace(warm=1.5)
    seen: list[float] = []
    step = steps(square, before=lambda: seen.append(rate.warm))
    for _ in range(5):
        step(x())
    rate.warm = 4.5
    assert step._baked.has_changed() == f"before's `rate.warm` {WENT}"


@pytest.mark.usefixtures("stand")
def test_a_private_attribute_of_the_model_that_loss_fn_reads() -> None:
    step = steps(lambda model, x: square(model, x) * model._gamma)
    for _ in range(5):
        step(x())
    step.model._unread = 3
    assert step._baked.has_changed() is None
    step.model._gamma = 3.5
    assert step._baked.has_changed() == "the attribute '_gamma' of Linear"


@pytest.mark.usefixtures("stand")
def test_a_weight_that_changes_before_each_step_gets_no_graph_and_is_told_so() -> None:
    schedule = SimpleNamespace(beta=1.5)
    step = steps(lambda model, x: square(model, x) * schedule.beta)
    for _ in range(12):
        step(x())
        schedule.beta += 0.25
    assert str(step.fallback).startswith("loss_fn's `schedule.beta` (it went from ")
    assert "keeps changing, which a graph would keep as it was" in str(step.fallback)


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("where", ["trainer", "cell"])
def test_a_number_that_loss_fn_counts_itself_gets_no_graph_and_is_told_so(where: str) -> None:
    owner, count = SimpleNamespace(count=0), 0

    def of_owner(model: nn.Module, x: Tensor) -> Tensor:
        owner.count += 1
        return square(model, x) * min(1.0, owner.count / 8)

    def of_cell(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return square(model, x) * min(1.0, count / 8)

    step = steps(of_owner if where == "trainer" else of_cell)
    for _ in range(5):
        step(x())
    name = "owner.count" if where == "trainer" else "count"
    assert str(step.fallback).startswith(f"it changes '{name}' of loss_fn on the host, which a graph would keep")


@pytest.mark.usefixtures("stand")
def test_a_criterion_that_replaces_its_buffer_gets_no_graph_and_keeps_the_buffer() -> None:
    criterion = Weighted()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x)
        criterion.center = 0.5 * criterion.center + value.detach().mean(0)
        return (value - criterion.center).square().mean()

    step = steps(loss_fn)
    for _ in range(5):
        step(x())
    assert str(step.fallback).startswith("it puts a new tensor in the place of 'center' of Weighted in each step")


def test_a_number_in_a_tensor_of_the_host_is_part_of_the_graph() -> None:
    weight = torch.tensor(1.5)
    step = steps(lambda model, x: square(model, x) * weight)
    step._baked._outside._device = torch.device("cuda", 0)
    step(x())
    step._baked.remember()
    assert step._baked.has_changed() is None
    weight.fill_(2.5)
    assert step._baked.has_changed() == "the value of loss_fn's `weight` on another device"
    host = HostState((), step.optimizer, torch.device("cuda", 0), step._baked.numbers_outside)
    assert host.changed() is None
    weight.fill_(3.5)
    assert str(host.changed()).startswith("it changes 'weight' of loss_fn on the host")


def test_a_tensor_that_moves_as_a_number_becomes_an_equal_one_is_seen() -> None:
    trainer = Trainer()
    step = steps(trainer.loss)
    step(x())
    step._baked.remember()
    trainer.beta, trainer.tensor.data = float("1.5"), torch.ones(3)
    assert step._baked.has_changed() == "where loss_fn's `self.tensor` lies"


@pytest.mark.usefixtures("stand")
def test_what_is_made_once_in_a_first_step_is_watched() -> None:
    cache = SimpleNamespace(mask=None)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if cache.mask is None:
            cache.mask = torch.ones(3)
        return (model(x) * cache.mask).square().mean()

    step = steps(loss_fn)
    for _ in range(6):
        step(x())
    assert step.fallback is None
    cache.mask = torch.zeros(3)
    assert step._baked.has_changed() == "loss_fn's `cache.mask`"


@pytest.mark.usefixtures("stand")
def test_equal_numbers_are_looked_at_one_by_one_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusestep.graph import outside

    trainer = Trainer()
    step = steps(trainer.loss)
    for _ in range(5):
        step(x())
    real, looked = outside._change, []
    monkeypatch.setattr(outside, "_change", lambda place: (looked.append(place.path), real(place))[1])
    trainer.beta = float("1.5")
    assert step._baked.has_changed() is None
    assert "self.beta" in looked
    looked.clear()
    assert step._baked.has_changed() is None
    assert not looked


def test_a_step_and_what_its_loss_reads_are_gone_at_once() -> None:
    trainer = Trainer()
    step = steps(trainer.loss)
    step(x())
    step._baked.remember()
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer, step
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_far_away_or_among_many_is_not_looked_at() -> None:
    near = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=1.5, more=SimpleNamespace(e=1.5))))
    many, few = [0.5] * (MEMBERS + 1), [0.5] * MEMBERS
    step = steps(lambda model, x: square(model, x) * near.b.c.d * near.b.c.more.e * many[0] * few[0])
    step(x())
    step._baked.remember()
    near.b.c.more.e, many[0] = 4.5, 1.5
    assert step._baked.has_changed() is None
    near.b.c.d = 4.5
    assert step._baked.has_changed() == f"loss_fn's `near.b.c.d` {WENT}"
    near.b.c.d, few[-1] = 1.5, 1.5
    assert step._baked.has_changed() == f"loss_fn's `few[{MEMBERS - 1}]` (it went from 0.5 to 1.5)"


def test_a_walk_ends_after_so_many_places() -> None:
    table = {name: {other: list(range(MEMBERS)) for other in "abcdefgh"} for name in "abcdefgh"}
    found = reach([("loss_fn", lambda: table)], (), set())
    assert PLACES <= len(found.places) < PLACES + MEMBERS + 2


# Batches


class Slotted:
    __slots__ = ("__weight",)

    def __init__(self, weight: Any) -> None:
        self.__weight = weight

    def weight(self) -> Any:
        return self.__weight


def test_an_object_in_a_batch_is_told_apart_by_its_plain_attributes(stand: Any) -> None:
    config = Callee()
    step = steps(lambda model, x, given: square(model, x) * given.beta)
    for beta in (1.5, 4.5, 1.5):
        config.beta = beta
        for _ in range(4):
            step(x(), config)
    assert (len(step.captures), stand.replays, step.fallback) == (2, 6, None)


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("kind", ["a list", "a slot", "a closure"])
def test_an_object_whose_state_equality_does_not_tell_gets_no_graph(kind: str) -> None:
    holder: Any = type("Holder", (), {})()
    holder.weights = [torch.ones(())]
    given: dict[str, tuple[Any, Callable[[], Any]]] = {
        "a list": (holder, lambda: holder.weights[0]),
        "a slot": (slotted := Slotted(torch.ones(())), slotted.weight),
        "a closure": (lambda: holder.weights, lambda: holder.weights[0]),
    }
    leaf, weight = given[kind]
    step = steps(lambda model, x, _: square(model, x) * weight())
    for _ in range(5):
        step(x(), leaf)
    assert not step.captures
    assert str(step.fallback).startswith(f"a batch has a {type(leaf).__name__}, which is equal to itself whatever")


def test_functions_and_classes_in_a_batch_are_what_they_are(stand: Any) -> None:
    step = steps(lambda model, x, turn, kind: kind(turn(model(x)).square().mean()))
    for _ in range(5):
        step(x(), torch.tanh, torch.Tensor.float)
    for _ in range(5):
        step(x(), nn.functional.gelu, scaled)
    assert (len(step.captures), stand.replays, step.fallback) == (2, 4, None)
