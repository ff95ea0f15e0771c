"""Activations and gated MLPs: which are recognised, by what they compute; that their parts stay what they are."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert import gated_mlp
from fusestep.convert.activations import recognised
from fusestep.convert.gated_mlp import FusedGatedMLP
from fusestep.convert.twins import twin
from fusestep.nn import Linear

W, N = 16, 24


class T5GatedMLP(nn.Module):
    """wo may be kept in fp32."""

    def __init__(self, act: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(W, N, bias=False), nn.Linear(W, N, bias=False)
        self.wo, self.dropout, self.act = nn.Linear(N, W, bias=False), nn.Dropout(dropout), act

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = self.dropout(self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states))
        return self.wo(hidden.to(self.wo.weight.dtype))


class FirstLlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(W, N), nn.Linear(N, W), nn.Linear(W, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class JoinedMLP(nn.Module):
    """Gate and value from one product."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(W, 2 * N), nn.Linear(N, W)
        self.activation_fn, self.swapped = nn.SiLU(), swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        if self.swapped:
            gate, up = up, gate
        return self.down_proj(up * self.activation_fn(gate))


class ScaledMLP(FirstLlamaMLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    given = x.clone().requires_grad_()
    torch.manual_seed(9)
    y = module(given)
    y.square().sum().backward()
    return [y.detach(), given.grad, *(parameter.grad.clone() for parameter in module.parameters())]


@pytest.mark.parametrize("form", ["llama, silu", "llama, gelu", "llama, quick", "llama, relu", "t5", "first", "joined"])
def test_gated_mlps_agree_forward_and_backward_and_undo(models: SimpleNamespace, form: str, device: Any) -> None:
    made = {
        "llama, silu": lambda: models.GatedMLP(W, N),
        "llama, gelu": lambda: models.GatedMLP(W, N, nn.GELU(approximate="tanh")),
        "llama, quick": lambda: models.GatedMLP(W, N, models.QuickGELUActivation()),
        "llama, relu": lambda: models.GatedMLP(W, N, F.relu),
        "t5": lambda: T5GatedMLP(models.NewGELUActivation(), dropout=0.3),
        "first": FirstLlamaMLP,
        "joined": JoinedMLP,
    }[form]
    mlp = made().to(device)
    old, x = type(mlp), torch.randn(3, 5, W, device=device)
    before = results(mlp, x)
    report = convert(mlp)
    assert [row.became for row in report.rows] == [f"Fused{old.__name__}"], str(report)
    for ours, theirs in zip(results(mlp, x), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report.undo()
    assert type(mlp) is old
    assert all(torch.equal(a, b) for a, b in zip(results(mlp, x), before, strict=True))


def test_under_autocast_the_output_has_the_old_dtype(models: SimpleNamespace, device: Any) -> None:
    mlp = models.GatedMLP(W, N).to(device)
    x = torch.randn(5, W, device=device)
    truth = mlp(x).detach()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        theirs = mlp(x)
        convert(mlp)
        ours = mlp(x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    error, own = (float((y.detach().float() - truth).norm()) for y in (ours, theirs))
    assert error < 1.3 * own


def test_a_second_layer_in_fp32_gets_fp32() -> None:
    mlp = T5GatedMLP(nn.SiLU()).bfloat16()
    mlp.wo.float()
    x = torch.randn(5, W).bfloat16()
    before = mlp(x)
    assert convert(mlp).swapped
    assert mlp(x).dtype is before.dtype is torch.float32
    torch.testing.assert_close(mlp(x), before, rtol=3e-2, atol=3e-2)


class Widening(nn.Linear):
    """Gives fp32 whatever its weight's dtype, and counts its calls in a buffer."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.widens = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        return y.float() if self.widens else y


def test_gate_and_value_of_two_dtypes_go_to_the_old_forward_and_trials_write_no_buffer() -> None:
    mlp = T5GatedMLP(nn.SiLU())
    mlp.wi_1 = Widening(W, N)
    mlp.bfloat16()
    assert convert(mlp).swapped
    assert int(mlp.wi_1.calls) == 0  # type: ignore[arg-type]
    mlp.wi_1.widens = True  # type: ignore[assignment]
    x = torch.randn(5, W).bfloat16()
    assert torch.equal(mlp(x), T5GatedMLP.forward(mlp, x))


def test_layers_inside_may_be_anything(models: SimpleNamespace) -> None:
    mlp = models.GatedMLP(W, N)
    mlp.up_proj = Linear(W, N, bias=False)
    seen: list[str] = []
    mlp.gate_proj.register_forward_hook(lambda *_: seen.append("gate"))
    x = torch.randn(4, W)
    before = mlp(x)
    convert(mlp)
    seen.clear()
    torch.testing.assert_close(mlp(x), before, rtol=1e-5, atol=1e-6)
    assert seen == ["gate"]


def test_hooks_on_the_activation_are_called(models: SimpleNamespace) -> None:
    hooked, later = models.GatedMLP(W, N), models.GatedMLP(W, N)
    hooked.act_fn.register_forward_hook(lambda *_: None)
    report = convert(nn.ModuleList([hooked, later]))
    assert {row.path: row.reason for row in report.left} == {"0": "hooks on act_fn want to be called"}
    assert isinstance(later, FusedGatedMLP)
    seen: list[Tensor] = []
    later.act_fn.register_forward_hook(lambda module, args, y: seen.append(y))
    later(torch.randn(4, W))
    assert len(seen) == 1


def test_another_activation_afterwards_is_the_one_that_is_computed(models: SimpleNamespace) -> None:
    mlp = models.GatedMLP(W, N)
    convert(mlp)
    x = torch.randn(4, W)
    fused = copy.deepcopy(mlp)
    assert fused.fused_known is fused.act_fn  # a copy stays fused
    mlp.act_fn = nn.Tanh()
    assert torch.equal(mlp(x), mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_a_trial_of_what_is_around_it_runs_the_fused_form(models: SimpleNamespace) -> None:
    mlp = models.GatedMLP(W, N)
    convert(mlp)
    tried = twin(mlp)
    assert tried.act_fn is not mlp.act_fn
    tried.act_fn.forward = None  # the fused form calls it no more
    x = torch.randn(4, W)
    assert torch.equal(tried(x), mlp(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda models: models.GatedMLP(W, N, nn.GELU()), "do not know its activation, GELU"),
        (lambda models: models.GatedMLP(W, N, nn.PReLU()), "do not know its activation, PReLU"),
        (lambda models: models.GatedMLP(W, N, nn.Softplus()), "do not know its activation, Softplus"),
        (lambda models: JoinedMLP(swapped=True), "disagrees"),
        (lambda models: ScaledMLP(), "its forward takes more than one argument"),
    ],
)
def test_what_is_not_known_stays_and_says_why(models: SimpleNamespace, make: Any, words: str) -> None:
    mlp = make(models)
    (row,) = convert(mlp).rows
    assert row.became is None
    assert words in row.reason


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.SiLU(), "silu"),
        (F.silu, "silu"),
        (nn.ReLU(), "relu"),
        (nn.GELU(approximate="tanh"), "gelu"),
        (nn.Sigmoid(), "sigmoid"),
        (lambda x: F.relu(x).square(), "srelu"),
        (nn.GELU(), None),
        (nn.Mish(), None),
        (nn.PReLU(), None),
        (nn.Identity(), None),
        (nn.Softmax(-1), None),
        (lambda x, y: x, None),
        (lambda x: 3, None),
        (None, None),
    ],
)
def test_activations_are_known_by_what_they_compute(act: Any, name: str | None) -> None:
    assert recognised(act) == name


def test_activations_of_many_kernels_are_swapped_and_others_left(models: SimpleNamespace, device: Any) -> None:
    class GELUTanh(nn.Module):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return F.gelu(input, approximate="tanh")

    class MishActivation(nn.Module):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return F.mish(input)

    model = nn.Sequential(
        nn.Linear(W, W),
        models.NewGELUActivation(),
        models.QuickGELUActivation(),
        GELUTanh(),
        MishActivation(),
        nn.GELU(),
    ).to(device)
    x = torch.randn(4, W, device=device)
    before = results(model, x)
    report = convert(model)
    assert {row.path: row.became for row in report.rows} == {
        "1": "FusedNewGELUActivation",
        "2": "FusedQuickGELUActivation",
        "3": None,
        "4": None,
    }
    assert [row.reason for row in report.left] == [
        "it is one kernel in torch already",
        "our kernels do not know its function",
    ]
    for ours, theirs in zip(results(model, x), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), before, strict=True))


def test_an_activation_that_is_a_method_is_part_of_the_code(
    models: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Method(models.GatedMLP):  # type: ignore[misc, name-defined]
        def __init__(self, function: Any) -> None:
            super().__init__(8, 12)
            del self.act_fn
            self.function = function

        def act_fn(self, x: Tensor) -> Tensor:
            return self.function(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Method(F.silu), Method(F.relu))
    x = torch.randn(3, 8)
    wanted = model(x)
    report = convert(model)
    assert [row.path for row in report.swapped] == ["0"]
    assert report.left[0].reason.startswith("disagrees")
    calls: list[str] = []
    real = gated_mlp.gated_activation
    monkeypatch.setattr(gated_mlp, "gated_activation", lambda *args: (calls.append(args[2]), real(*args))[1])
    torch.testing.assert_close(model(x), wanted)
    assert calls == ["swiglu"]  # what the report says does run
