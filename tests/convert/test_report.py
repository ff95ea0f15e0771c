"""The report: a table that groups repeated layers, plain values, and the user's own patterns."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert import Pattern, Probe, Stage, Trial, register, unregister
from fusestep.convert.patterns import rows
from fusestep.errors import UserError
from fusestep.fp8 import Float8CurrentScaling
from fusestep.grouping import grouped


def test_the_table_has_one_line_for_repeated_layers_and_the_worst_of_their_errors(models: SimpleNamespace) -> None:
    model = models.Decoder(layers=4)
    model.layers[2].mlp.act_fn = nn.Mish()
    report = convert(model)
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "class", "became", "agreement", "why"]
    norms = next(line for line in lines if line.startswith("layers.0–3.input_layernorm"))
    assert norms.split()[1:3] == ["PlainRMSNorm", "FusedPlainRMSNorm"]
    errors = [row.agreement.error for row in report.swapped if row.path.endswith("input_layernorm")]
    assert len(errors) == 4
    assert f" {max(errors):.1e} " in norms
    assert any(line.startswith("layers.0–1,3.mlp ") for line in lines)
    left = next(line for line in lines if line.startswith("layers.2.mlp "))
    assert "–" in left.split()
    assert " our kernels do not know its activation," in left
    assert lines[-1] == f"swapped: {len(report.swapped)}; left as they are: 1."
    assert [row.path for row in report.left] == ["layers.2.mlp"]


def test_in_16_bits_the_old_modules_own_error_stands_beside(models: SimpleNamespace) -> None:
    norm = models.PlainRMSNorm(16).bfloat16()
    report = convert(norm)
    (row,) = report.rows
    assert row.agreement.own is not None
    assert 0 < row.agreement.error <= 1.1 * row.agreement.own
    assert f"{row.agreement.error:.1e} (old {row.agreement.own:.1e})" in str(report)


def test_plain_values(models: SimpleNamespace) -> None:
    report = convert(models.Decoder(layers=1))
    told = json.loads(json.dumps(report.as_dict()))
    assert told["schema"] == 1
    assert told["dry_run"] is False
    assert {module["path"] for module in told["modules"]} >= {"layers.0", "layers.0.mlp", "norm"}
    norm = next(module for module in told["modules"] if module["path"] == "layers.0.input_layernorm")
    assert norm["class"] == "PlainRMSNorm"
    assert norm["became"] == "FusedPlainRMSNorm"
    assert 0 <= norm["error"] < 1e-5
    assert set(norm["other_errors"]) >= {"other mode", "bfloat16 input", "autocast"}


def test_a_model_without_candidates_says_so() -> None:
    report = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert str(report) == "nothing in this model is known to have a faster form"
    report.undo()


def test_grouping_joins_numbers_at_every_depth() -> None:
    paths = [f"a.{i}.b.{j}.c" for i in range(3) for j in (0, 1, 4)] + ["a.7.b", "d"]
    found = grouped(paths, lambda path: path, lambda path: path.endswith("c"))
    assert [(path, len(members)) for path, members in found] == [("a.0–2.b.0–1,4.c", 9), ("a.7.b", 1), ("d", 1)]
    assert grouped([], str, str) == []


class Doubling(nn.Module):
    """A user's module."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(5)), factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + x * self.weight * (self.factor - 1.0)


class FusedDoubling(nn.Module):
    weight: Tensor
    twice: float

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.twice * self.weight)


def pattern(**options: Any) -> Pattern:
    given: dict[str, Any] = {
        "what": "doubling at once",
        "becomes": FusedDoubling,
        "matches": lambda module: type(module) is Doubling,
        "inputs": lambda module, probe: [((probe.randn(3, 5),), {})],
        "attributes": lambda module: {"twice": 2.0},
    }
    return Pattern(**given | options)


@pytest.fixture
def registered() -> Any:
    """Registers patterns for one test."""
    mine: list[Pattern] = []

    def add(one: Pattern) -> Pattern:
        mine.append(register(one))
        return one

    yield add
    for one in mine:
        unregister(one)


def test_a_pattern_of_the_users_own_is_tried_swapped_and_undone(registered: Any) -> None:
    registered(pattern())
    model = nn.Sequential(Doubling(), Doubling(factor=3.0))
    before = set(model[0].__dict__)
    report = convert(model)
    assert [(row.path, row.became) for row in report.rows] == [("0", "FusedDoubling"), ("1", None)]
    assert report.rows[0].reason == "doubling at once"
    assert report.rows[1].reason.startswith(("disagrees: the gradient of input 0", "disagrees: output"))
    x = torch.randn(2, 5)
    torch.testing.assert_close(model[0](x), 2 * x * model[0].weight)
    report.undo()
    assert type(model[0]) is Doubling
    assert set(model[0].__dict__) == before


def test_patterns_of_the_users_own_go_before_ours(registered: Any) -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (5,), self.weight, self.bias, 1e-5)

    registered(pattern(becomes=Mine, matches=lambda module: type(module) is nn.LayerNorm, attributes=lambda module: {}))
    norm = nn.LayerNorm(5)
    assert convert(norm).rows[0].reason == "doubling at once"
    assert isinstance(norm, Mine)


class Counting(nn.Module):
    """Counts the calls of whatever it becomes a part of."""

    calls: list[int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(1)
        return super().forward(*args, **kwargs)


def test_kinds_stand_on_each_other_and_are_taken_back_in_turn(registered: Any) -> None:
    calls: list[int] = []
    registered(
        pattern(
            becomes=Counting,
            matches=lambda module: isinstance(module, nn.Linear),
            inputs=lambda module, probe: [((probe.randn(32, module.in_features),), {})],
            attributes=lambda module: {"calls": calls},
            stage=Stage.BLOCK,
        )
    )
    model = nn.Sequential(nn.Linear(16, 16))
    before = set(model[0].__dict__)
    report = convert(model, fp8=Float8CurrentScaling())
    assert [row.became for row in report.rows] == ["FP8Forward", "FP8Linear", "FusedFP8Linear"]
    calls.clear()
    x = torch.randn(3, 16)
    wanted = model(x)
    assert len(calls) == 1
    model[0].reset_parameters()
    twice = pickle.loads(pickle.dumps(model))
    assert torch.equal(twice(x), model(x))
    assert not torch.equal(model(x), wanted)
    report.undo()
    assert type(model[0]) is nn.Linear
    assert set(model[0].__dict__) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"matches": lambda module: type(module) is Doubling and "it is too dear to me"}, "it is too dear to me"),
        ({"attributes": lambda module: {"factor": 1.0}}, "it has an attribute named factor already"),
        ({"inputs": lambda module, probe: [((probe.randn(3, 4),), {})]}, "it cannot be tried by itself: RuntimeError"),
        ({"attributes": lambda module: {}}, "disagrees: it raises AttributeError"),
        ({"attributes": lambda module: {"twice": 2.001}}, "disagrees: "),
        ({"attributes": lambda module: {"twice": float("nan")}}, "disagrees: "),
    ],
)
def test_what_goes_wrong_with_a_pattern_is_told_and_nothing_swapped(
    registered: Any, options: dict[str, Any], words: str
) -> None:
    registered(pattern(**options))
    module = Doubling()
    (row,) = convert(module).rows
    assert row.became is None
    assert row.reason.startswith(words)
    assert type(module) is Doubling
    assert "twice" not in module.__dict__


def test_trials_and_tolerance_are_the_users_choice(registered: Any) -> None:
    near = pattern(
        attributes=lambda module: {"twice": 2.001},
        trials=lambda dtype, device: [Trial(tolerance=1e-2)],
    )
    registered(near)
    (row,) = convert(Doubling()).rows
    assert row.became == "FusedDoubling"
    assert 4e-4 < row.agreement.error < 6e-4


def test_the_probe_gives_the_same_numbers_each_time_in_the_modules_dtype(registered: Any) -> None:
    seen: list[Tensor] = []

    def inputs(module: nn.Module, probe: Probe) -> Any:
        x = probe.randn(3, 5)
        seen.append(x)
        return [((x,), {})]

    registered(pattern(inputs=inputs))
    convert(Doubling().double())
    assert len(seen) > 2
    assert all(x.dtype is torch.float64 and torch.equal(x, seen[0]) for x in seen)


def test_the_registry_refuses_what_is_no_pattern() -> None:
    with pytest.raises(UserError, match="3 is no Pattern"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"becomes is 4; pass a subclass of torch\.nn\.Module"):
        register(pattern(becomes=4))
    with pytest.raises(UserError, match="'doubling at once' is not registered"):
        unregister(pattern())


class Scaling(nn.Module):
    """x · weight, and twice that where it doubles; a product that torch.autocast casts where it multiplies."""

    def __init__(self, doubles: bool = False, multiplies: bool = False) -> None:
        super().__init__()
        self.weight, self.doubles, self.multiplies = nn.Parameter(torch.rand(16) + 0.5), doubles, multiplies

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.diag() if self.multiplies else x * self.weight
        return 2 * y if self.doubles else y


class AsIfPlain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight  # type: ignore[no-any-return, operator]


class Rough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).float() * 1.004).to(x.dtype)  # type: ignore[misc, no-any-return]


@pytest.mark.parametrize(
    ("kind", "make", "swapped", "words"),
    [
        (Rough, lambda: [Scaling().bfloat16()], [], "from that of a wider dtype"),
        (AsIfPlain, lambda: [Scaling(multiplies=True)], [], "autocast"),
        (AsIfPlain, lambda: [Scaling().to("meta"), Scaling(doubles=True).to("meta")], ["0"], "disagrees"),
    ],
    ids=["less exact than the old one in 16 bits", "another dtype under autocast", "a setting, on the meta device"],
)
def test_what_differs_in_one_way_alone_is_left(
    registered: Any, kind: type, make: Any, swapped: list[str], words: str
) -> None:
    registered(Pattern("a scale", kind, lambda one: type(one) is Scaling, lambda _, probe: rows(probe, 16)))
    report = convert(nn.ModuleList(make()))
    assert [row.path for row in report.swapped] == swapped, str(report)
    assert words in report.left[-1].reason
