"""Parameters, gradients and states that do not fit, or changed in place, are seen before a launch goes by what was."""

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
from fusestep.optim import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD, clip_grad_norm_

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


def other_view_of_a_parameter(p: Tensor, wide: Tensor) -> None:
    """At the same address and strides, of as many elements."""
    p.grad = None
    p.data = wide[:3, :2]


def other_view_of_a_gradient(p: Tensor, wide: Tensor) -> None:
    assert p.grad is not None
    p.grad.data = torch.ones_like(wide)[:3, :2]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("change", [other_view_of_a_parameter, other_view_of_a_gradient])
def test_another_view_of_as_many_elements_is_refused(
    place: torch.device, cls: Any, options: dict[str, Any], change: Callable[[Tensor, Tensor], None]
) -> None:
    wide = torch.randn(6, 6, device=place)
    p = nn.Parameter(wide[:2, :3])
    optimizer = cls([p], lr=0.1, **options)
    p.grad = torch.ones_like(wide)[:2, :3]
    optimizer.step()
    before = wide.clone()
    change(p, wide)
    if p.grad is None:
        p.grad = torch.ones_like(wide)[:3, :2]
    with pytest.raises(UserError, match=r"parameter 0 is \((2, 3|3, 2)\)"):
        optimizer.step()
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=NAMES)
def test_a_state_that_was_transposed_in_place_is_paired_by_its_elements(
    place: torch.device, cls: Any, options: dict[str, Any]
) -> None:
    p, q = (nn.Parameter(torch.arange(16.0, device=place).view(4, 4)) for _ in range(2))
    ours, theirs = (cls([one], lr=0.1, **options) for one in (p, q))
    generator = torch.Generator().manual_seed(3)
    for optimizer, one in ((ours, p), (theirs, q)):
        one.grad = torch.randn(4, 4, generator=generator.manual_seed(3)).to(place)
        optimizer.step()
    for optimizer, one, in_place in ((ours, p, True), (theirs, q, False)):
        for key, value in optimizer.state[one].items():
            if value.dim() == 2 and in_place:
                value.data = value.data.t()
            elif value.dim() == 2:
                optimizer.state[one][key] = value.t().contiguous()
        optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=NAMES)
def test_gradients_whose_signs_are_a_mark_on_the_tensor_are_stepped_by_their_values(
    place: torch.device, cls: Any, options: dict[str, Any]
) -> None:
    """Autograd gives these of a conjugate: to a complex parameter, and of one element to a real parameter."""
    weights, phases = (
        [torch.full(shape, value, dtype=dtype, device=place) for _ in range(2)]
        for shape, value, dtype in (((4, 3), 0.5 + 1j, torch.complex64), ((), 0.5, torch.float32))
    )
    (w, w_of_values), (phase, phase_of_values) = (list(map(nn.Parameter, both)) for both in (weights, phases))
    marked, of_values = cls([w, phase], lr=0.1, **options), cls([w_of_values, phase_of_values], lr=0.1, **options)
    for is_marked in (False, True, False):
        factor = torch.full((4, 3), 1.5 - 2j, device=place)
        if is_marked:
            z = torch.complex(torch.ones_like(phase), phase)
            ((w.conj() * factor).real.sum() + (z.conj() * (2 + 1j)).imag).backward()
            assert w.grad is not None
            assert phase.grad is not None
            assert w.grad.is_conj()
            assert phase.grad.is_neg()
        else:
            w.grad, phase.grad = factor.clone(), torch.ones_like(phase)
        w_of_values.grad, phase_of_values.grad = w.grad.resolve_conj(), phase.grad.resolve_neg()
        w_of_values.grad, phase_of_values.grad = w_of_values.grad / 2, phase_of_values.grad / 2
        norm = float(torch.stack([w.grad.abs().norm(), phase.grad.abs()]).norm())
        assert float(clip_grad_norm_([w, phase], norm / 2)) == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(w.grad.resolve_conj(), w_of_values.grad)
        torch.testing.assert_close(phase.grad.resolve_neg(), phase_of_values.grad)
        marked.step()
        of_values.step()
        marked.zero_grad()
    torch.testing.assert_close(w, w_of_values)
    torch.testing.assert_close(phase, phase_of_values)


def test_a_parameter_whose_data_cannot_be_stepped_is_refused_whenever_it_came(place: torch.device) -> None:
    conjugate = torch.randn(4, dtype=torch.complex64, device=place).conj()
    with pytest.raises(UserError, match="FusedAdam: parameter 0 is a view that changes signs as it is read"):
        FusedAdam([nn.Parameter(conjugate)])
    p = nn.Parameter(torch.randn(4, dtype=torch.complex64, device=place))
    optimizer = FusedAdam([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    held = p.data
    for data, match in (
        (held.conj(), "a view that changes signs"),  # at the same address
        (torch.ones(4, device=place).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
        (held[:1].expand(4), "share one place in memory"),
    ):
        p.data = data
        with pytest.raises(UserError, match=match):
            optimizer.step()
    p.data = held
    before = p.detach().clone()
    optimizer.step()
    assert not torch.equal(p, before)


def test_settings_that_change_between_steps_are_followed(place: torch.device) -> None:
    """TrainStep makes an optimizer capturable that was built without."""
    lr = torch.full((), 0.1, device=place)
    p = nn.Parameter(torch.randn(5, 3, device=place))
    optimizer = FusedAdam([p], lr=lr)
    p.grad = torch.randn_like(p)
    optimizer.step()
    plan = optimizer._plan
    assert plan is not None
    assert not plan.capturable
    optimizer.step()
    assert optimizer._plan is plan
    optimizer.capturable = True
    optimizer.step()
    assert optimizer._plan.capturable
    optimizer.moment_dtype = torch.bfloat16
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
