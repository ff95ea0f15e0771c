"""Each thing that a graph holds is seen when it changes, is told by name, and nothing else is taken for a change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import TrainStep, fp8
from fusestep.fp8.held import Copies, give
from fusestep.fp8.state import Slots
from fusestep.graph.attributes import Attributes
from fusestep.nn import Linear
from fusestep.optim import FusedAdam


class Model(nn.Module):
    """Modules of ours and of torch's, with a buffer, hooks of each kind, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = Linear(5, 7), nn.Linear(7, 3)
        self.rest = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))
        self.register_buffer("mean", torch.zeros(7))
        self.scale = 1000.0
        self.hook = self.last.register_forward_hook(lambda *_: None)
        self.tensor_hook = self.last.weight.register_hook(lambda gradient: gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rest(self.first(x))) * self.scale


class Holding:
    """A step whose graphs would hold all of that now."""

    def __init__(self) -> None:
        self.model: Any = Model()
        self.optimizer: Any = FusedAdam(self.model.parameters(), 1e-2, capturable=True)
        self.optimizer_hook = self.optimizer.register_step_pre_hook(lambda *_: None)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.step: Any = TrainStep(
            self.model,
            lambda model, x, y: F.mse_loss(model(x), y),
            self.optimizer,
            scaler=self.scaler,
            fp8_recipe=fp8.DelayedScaling(),
        )
        self.step(torch.randn(6, 5), torch.randn(6, 3))
        baked = self.step._baked
        baked.watch_slots()
        baked.remember()
        baked.rely_on(baked.current_copies(), baked.settled_slots(), is_first=True)
        assert self.told() is None

    def told(self) -> str | None:
        found: str | None = self.step._baked.has_changed()
        return found

    @property
    def weight(self) -> Any:
        return self.model.last.weight

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.weight]
        return state

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    def new_state(self) -> None:
        state = self.model.first.fp8_state
        self.model.first.fp8_state = Slots(state.names, state.recipe, state.slots.device)


def _nothing(*_: Any) -> None:
    return None


def _instead(owner: Any, name: str, value: Any) -> None:
    owner.__dict__[name] = value


BUILT, MODULES, TENSORS, HOOK = "what the step was built from", "the modules", "a parameter or a buffer", "a hook"
STATE, MEMBERS, PLACES = "the optimizer's state", "the optimizer's parameters", "where a parameter or a buffer lies"

CHANGES: dict[str, tuple[str, Callable[[Holding], object]]] = {
    "model": (BUILT, lambda h: setattr(h.step, "model", Model())),
    "loss_fn": (BUILT, lambda h: setattr(h.step, "loss_fn", _nothing)),
    "optimizer": (BUILT, lambda h: setattr(h.step, "optimizer", FusedAdam(h.model.parameters(), 1e-2))),
    "scaler": (BUILT, lambda h: setattr(h.step, "scaler", torch.amp.GradScaler("cpu", init_scale=8.0))),
    "before": (BUILT, lambda h: setattr(h.step, "before", _nothing)),
    "recipe": (BUILT, lambda h: setattr(h.step, "fp8_recipe", fp8.DelayedScaling())),
    "autocast": (BUILT, lambda h: setattr(h.step, "autocast", torch.bfloat16)),
    "accumulate": (BUILT, lambda h: setattr(h.step, "accumulate", 2)),
    "backoff": (BUILT, lambda h: h.scaler.set_backoff_factor(0.25)),
    "interval": (BUILT, lambda h: h.scaler.set_growth_interval(3)),
    "another module": (MODULES, lambda h: setattr(h.model.rest, "1", nn.Dropout(0.0))),
    "one more module": (MODULES, lambda h: h.model.rest.append(nn.Tanh())),
    "one module less": (MODULES, lambda h: h.model.rest.pop(1)),
    "the last module, gone": (MODULES, lambda h: delattr(h.model, "rest")),
    "modules in another order": (MODULES, lambda h: h.model._modules.update(last=h.model._modules.pop("last"))),
    "a table of modules": (
        MODULES,
        lambda h: _instead(h.model.rest, "_modules", {"0": nn.Tanh(), "1": nn.Dropout(0.0)}),
    ),
    "another parameter": (TENSORS, lambda h: setattr(h.model.last, "weight", nn.Parameter(h.weight.detach()))),
    "one more parameter": (TENSORS, lambda h: h.model.register_parameter("more", nn.Parameter(torch.ones(2)))),
    "a parameter less": (TENSORS, lambda h: setattr(h.model.last, "bias", None)),
    "another buffer": (TENSORS, lambda h: setattr(h.model, "mean", torch.zeros(7))),
    "one more buffer": (TENSORS, lambda h: h.model.rest.register_buffer("more", torch.ones(2))),
    "a table of buffers": (TENSORS, lambda h: _instead(h.model, "_buffers", {"mean": torch.zeros(7)})),
    "forward hook": (HOOK, lambda h: h.model.rest.register_forward_hook(_nothing)),
    "forward pre-hook": (HOOK, lambda h: h.model.first.register_forward_pre_hook(_nothing)),
    "backward hook": (HOOK, lambda h: h.model.last.register_full_backward_hook(_nothing)),
    "backward pre-hook": (HOOK, lambda h: h.model.rest.register_full_backward_pre_hook(_nothing)),
    "a hook before the others": (HOOK, lambda h: h.model.last.register_forward_hook(_nothing, prepend=True)),
    "a table of hooks": (HOOK, lambda h: _instead(h.model.rest, "_forward_hooks", OrderedDict({0: _nothing}))),
    "hook, gone": (HOOK, lambda h: h.model.hook.remove()),
    "hook on a gradient": (HOOK, lambda h: h.model.first.weight.register_hook(_nothing)),
    "hook on a gradient, gone": (HOOK, lambda h: h.model.tensor_hook.remove()),
    "hook after accumulation": (HOOK, lambda h: h.weight.register_post_accumulate_grad_hook(_nothing)),
    "hook after steps": (HOOK, lambda h: h.optimizer.register_step_post_hook(_nothing)),
    "hook before steps, gone": (HOOK, lambda h: h.optimizer_hook.remove()),
    "another tensor of state": (STATE, lambda h: h.state.update(exp_avg=h.state["exp_avg"].clone())),
    "more state": (STATE, lambda h: h.state.update(more=torch.zeros(1))),
    "state, gone": (STATE, lambda h: h.optimizer.state.pop(h.weight)),
    "state that is no table": (STATE, lambda h: h.optimizer.state.update({h.weight: torch.zeros(1)})),
    "the scaler's tensor": (STATE, lambda h: setattr(h.scaler, "_scale", torch.tensor(8.0))),
    "a member": (MEMBERS, lambda h: h.group["params"].append(nn.Parameter(torch.ones(2)))),
    "a member, gone": (MEMBERS, lambda h: h.group["params"].pop()),
    "members in another order": (MEMBERS, lambda h: h.group["params"].reverse()),
    "training": ("the attribute 'training' of Dropout", lambda h: h.model.rest[1].eval()),
    "an attribute": ("the attribute 'scale' of Model", lambda h: setattr(h.model, "scale", 3.0)),
    "an attribute of ours": ("the attribute 'name' of Linear", lambda h: setattr(h.model.first, "name", "q")),
    "an attribute's kind": ("the attribute 'scale' of Model", lambda h: setattr(h.model, "scale", torch.tensor(1e3))),
    "a new attribute": ("the attribute 'more' of Tanh", lambda h: setattr(h.model.rest[0], "more", 1)),
    "an attribute, gone": ("the attribute 'scale' of Model", lambda h: delattr(h.model, "scale")),
    "an attribute for another": (
        "the attribute 'scale' of Model",
        lambda h: (setattr(h.model, "factor", h.model.scale), delattr(h.model, "scale")),
    ),
    "trained": ("which parameters are trained", lambda h: h.weight.requires_grad_(False)),
    "a parameter's place": (PLACES, lambda h: setattr(h.weight, "data", h.weight.detach().clone())),
    "a buffer's place": (PLACES, lambda h: setattr(h.model.mean, "data", torch.zeros(7))),
    "scaling state": ("the state of FP8", Holding.new_state),
    "no scaling state": ("the state of FP8", lambda h: setattr(h.model.first, "fp8_state", None)),
    "another group": (
        MEMBERS,
        lambda h: h.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ),
    "an empty group": ("the optimizer's groups", lambda h: h.optimizer.param_groups.append({"params": []})),
    "an option": ("the option 'eps' in group 0 of FusedAdam", lambda h: h.group.update(eps=1e-4)),
    "a new option": ("the option 'more' in group 0 of FusedAdam", lambda h: h.group.update(more=torch.ones(3))),
    "copies": ("what the optimizer has to copy of the weights", lambda h: give([h.weight], Copies())),
    "a scale": ("a scale of FP8, which is gone", lambda h: h.model.first.fp8_state.slots.zero_()),
}

SAME: dict[str, Callable[[Holding], object]] = {
    "an equal number": lambda h: setattr(h.model, "scale", float("1e3")),
    "an attribute that is not plain": lambda h: setattr(h.model, "notes", [1]),
    "a private attribute": lambda h: setattr(h.model, "_seen", 1),
    "a hook that came and went": lambda h: (
        h.model.first.weight.register_hook(_nothing).remove(),
        h.model.rest.register_forward_hook(_nothing).remove(),
    ),
    "equal tables": lambda h: (
        _instead(h.model, "_modules", dict(h.model._modules)),
        _instead(h.model, "_forward_hooks", OrderedDict()),
        h.optimizer.state.update({h.weight: dict(h.state)}),
    ),
    "another list of members": lambda h: h.group.update(params=list(h.group["params"])),
    "values of tensors": lambda h: (h.weight.data.add_(1), h.model.mean.add_(1), h.state["exp_avg"].zero_()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told(change: str) -> None:
    what, make = CHANGES[change]
    holding = Holding()
    make(holding)
    assert holding.told() == what


@pytest.mark.parametrize("change", SAME)
def test_what_a_graph_does_not_hold_is_no_change(change: str) -> None:
    holding = Holding()
    SAME[change](holding)
    assert holding.told() is None
    holding.model.scale = 2.0
    assert holding.told() == "the attribute 'scale' of Model"


def test_a_module_whose_every_plain_attribute_is_its_own_is_compared_for_new_ones() -> None:
    holding = Holding()
    baked = holding.step._baked
    with baked.running():
        holding.model.rest[0].training = False  # the only plain one of a Tanh
    holding.model.rest[0].training = True
    assert holding.told() is None
    holding.model.rest[0].more = 1
    assert holding.told() == "the attribute 'more' of Tanh"


def test_state_that_is_no_table_is_compared_as_it_is() -> None:
    holding = Holding()
    baked = holding.step._baked
    holding.optimizer.state[holding.weight] = torch.zeros(1)
    assert holding.told() == STATE
    baked.forget()
    baked.remember()
    assert holding.told() is None
    holding.optimizer.state[holding.weight] = torch.zeros(1)
    assert holding.told() == STATE


def test_what_is_equal_is_looked_at_one_by_one_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding()
    looked: list[nn.Module] = []
    real = Attributes._changed_in

    def looking(self: Any, module: nn.Module, *known: Any) -> str | None:
        looked.append(module)
        return real(self, module, *known)

    monkeypatch.setattr(Attributes, "_changed_in", looking)
    holding.model.scale = float("1e3")
    assert [holding.told() for _ in range(3)] == [None] * 3
    assert looked == list(holding.model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_traced_module_which_keeps_its_parameters_elsewhere_is_compared_too() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(5, 7), torch.randn(2, 5)), nn.Linear(7, 3))
    step: Any = TrainStep(model, lambda model, x: model(x).sum(), FusedAdam(model.parameters(), 1e-2))
    step(torch.randn(6, 5))
    step._baked.remember()
    assert step._baked.has_changed() is None
    next(model[0].parameters()).requires_grad_(False)
    assert step._baked.has_changed() == "which parameters are trained"
