"""Parameters, gradients and states whose sizes do not fit are refused, before a launch walks past an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import fp8
from fusestep.errors import UserError
from fusestep.fp8.copies import attach
from fusestep.fp8.plain_copies import attach_plain
from fusestep.optim import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (FusedAdam, {}),
    (FusedAdam, {"max_grad_norm": 1.0}),
    (FusedSGD, {"momentum": 0.9}),
    (FusedLAMB, {}),
    (FusedAdagrad, {}),
    (FusedNovoGrad, {}),
]
NAMES = [cls.__name__ + "".join(options) for cls, options in OPTIMIZERS]
UNTOUCHED = 7.0


class Stepped:
    """A parameter of 5 × 3 that lies in a buffer, after one step beside another parameter."""

    def __init__(
        self, place: torch.device, cls: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32
    ) -> None:
        self.buffer = torch.full((16, 3), UNTOUCHED, dtype=dtype, device=place)
        self.p, self.other = nn.Parameter(self.buffer[:5]), nn.Parameter(torch.randn(4, device=place))
        self.optimizer = cls([("body", self.p), ("head", self.other)], lr=0.1, **options)
        self.step()

    def step(self) -> None:
        for parameter in (self.p, self.other):
            if parameter.grad is None:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def dense(self) -> str:
        state: dict[str, Tensor] = self.optimizer.state[self.p]
        return next(key for key, value in state.items() if value.dim())

    def refuses(self, match: str) -> None:
        """The step is refused, and has changed nothing."""
        tensors = [self.buffer, self.p, self.other, *self.optimizer.state[self.p].values()]
        before, steps = [tensor.detach().clone() for tensor in tensors], int(self.optimizer.applied_steps)
        with pytest.raises(UserError, match=match):
            self.step()
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor, was)
        assert int(self.optimizer.applied_steps) == steps


def grown(s: Stepped) -> None:
    s.p.grad = None
    s.p.data = torch.randn(7, 3, device=s.p.device)


def widened(s: Stepped) -> None:
    """More of the same memory, at the same address and strides."""
    s.p.grad = None
    s.p.data = s.buffer[:9]


def narrowed(s: Stepped) -> None:
    s.p.grad = None
    s.p.data = s.buffer[:2]


def reshaped(s: Stepped) -> None:
    s.p.grad = None
    s.p.data = torch.randn(3, 5, device=s.p.device)


def state_replaced(s: Stepped) -> None:
    s.optimizer.state[s.p][s.dense()] = torch.ones(4, 3, device=s.p.device)


def state_that_broadcasts(s: Stepped) -> None:
    s.optimizer.state[s.p][s.dense()] = torch.ones(1, 3, device=s.p.device)


def state_narrowed(s: Stepped) -> None:
    """The same object at the same address."""
    state = s.optimizer.state[s.p][s.dense()]
    state.data = state.data[:2]


STATE, GRADIENT = r"\.step: \w+ of parameter 0 \(body\) is \(", r"\.step: the gradient of parameter 0 \(body\) is \("


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize(
    "change", [grown, widened, narrowed, reshaped, state_replaced, state_that_broadcasts, state_narrowed]
)
def test_a_state_of_another_size_is_refused(
    place: torch.device, cls: Any, options: dict[str, Any], change: Callable[[Stepped], None]
) -> None:
    stepped = Stepped(place, cls, options)
    change(stepped)
    stepped.refuses(cls.__name__ + STATE)


def grown_later(s: Stepped) -> None:
    s.p.data = torch.randn(700, 3, device=s.p.device)


def narrowed_later(s: Stepped) -> None:
    s.p.data = s.buffer[:2]


def gradient_cut(s: Stepped) -> None:
    """As the same object, which torch does not look at."""
    assert s.p.grad is not None
    s.p.grad.data = torch.ones(4, 3, device=s.p.device)


@pytest.mark.parametrize(("cls", "options"), [*OPTIMIZERS, (FusedSGD, {})], ids=[*NAMES, "plain SGD"])
@pytest.mark.parametrize("change", [grown_later, narrowed_later, gradient_cut])
def test_a_gradient_of_another_size_is_refused(
    place: torch.device, cls: Any, options: dict[str, Any], change: Callable[[Stepped], None]
) -> None:
    stepped = Stepped(place, cls, options)
    change(stepped)
    stepped.refuses(cls.__name__ + GRADIENT)


@pytest.mark.parametrize(
    ("key", "options"),
    [("master_param", {}), ("master_remainder", {"store_param_remainders": True})],
)
def test_a_master_of_another_size_is_refused(place: torch.device, key: str, options: dict[str, Any]) -> None:
    stepped = Stepped(place, FusedAdam, {"master_weights": True, **options}, torch.bfloat16)
    master: Tensor = stepped.optimizer.state[stepped.p][key]
    stepped.optimizer.state[stepped.p][key] = master[:4].clone()
    stepped.refuses(rf"{key} of parameter 0 \(body\) is \(4, 3\)")


def test_a_number_that_became_a_tensor_is_refused(place: torch.device) -> None:
    stepped = Stepped(place, FusedNovoGrad, {})
    stepped.optimizer.state[stepped.p]["exp_avg_norm"] = torch.ones(0, device=place)
    stepped.refuses(r"exp_avg_norm of parameter 0 \(body\) is \(0,\), which wants \(\)")


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=NAMES)
def test_a_parameter_of_another_size_goes_on_with_a_new_state(
    place: torch.device, cls: Any, options: dict[str, Any]
) -> None:
    """At the same address, so that nothing else tells that it has grown."""
    stepped = Stepped(place, cls, options)
    widened(stepped)
    stepped.optimizer.state.pop(stepped.p)
    fresh = nn.Parameter(stepped.p.detach().clone())
    alone = cls([fresh], lr=0.1, **options)
    stepped.p.grad, stepped.other.grad = torch.randn(9, 3, device=place), None
    fresh.grad = stepped.p.grad.clone()
    stepped.optimizer.step()
    alone.step()
    assert torch.equal(stepped.p, fresh)
    assert bool((stepped.buffer[9:] == UNTOUCHED).all())


@pytest.mark.parametrize("kind", ["16 bits", "FP8"])
@pytest.mark.parametrize("shape", [(24, 48), (16, 32)], ids=["rows", "columns"])
def test_copies_of_a_weight_of_which_a_part_was_resized_are_not_written(
    place: torch.device, kind: str, shape: tuple[int, int]
) -> None:
    """Two parameters share the memory of their copies, which has room for both as they were."""
    weights = [nn.Parameter(torch.randn(16, 48, device=place)) for _ in range(2)]
    if kind == "FP8":
        attach(weights, fp8.Float8CurrentScaling())
    else:
        attach_plain(weights, torch.bfloat16)
    optimizer = FusedAdam(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    weights[1].grad = None
    weights[1].data = torch.randn(shape, device=place)
    optimizer.state.pop(weights[1])
    oracles = [nn.Parameter(weight.detach().clone()) for weight in weights]
    alone = FusedAdam(oracles, lr=0.1)
    alone.load_state_dict(optimizer.state_dict())
    for weight, oracle in zip(weights, oracles, strict=True):
        weight.grad = torch.randn_like(weight)
        oracle.grad = weight.grad.clone()
    optimizer.step()
    alone.step()
    for weight, oracle in zip(weights, oracles, strict=True):
        assert torch.equal(weight, oracle)
    part: Any = weights[0].fusestep_copies  # type: ignore[attr-defined]
    assert not part.copies.is_current(*weights)
