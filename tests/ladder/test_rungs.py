from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from fusestep.errors import UserError
from fusestep.ladder.rungs import RUNGS, Recipe, default_names, recipe_of, select

NAMES = [rung.name for rung in RUNGS]


def test_the_rungs_have_their_names() -> None:
    assert NAMES == ["adam", "fused-adam", "fused-norm", "amp", "blocks", "loss", "fp8", "graph"]


def test_each_rung_keeps_every_change_of_those_before() -> None:
    plain = before = asdict(Recipe())
    for name in NAMES:
        recipe = asdict(recipe_of(name))
        assert all(recipe[field] != plain[field] for field, value in before.items() if value != plain[field])
        changed = [field for field, value in recipe.items() if value != before[field]]
        assert len(changed) == (0 if name == NAMES[0] else 1), "one change a rung"
        before = recipe
    assert recipe_of("adam") == Recipe("seed", "torch", "torch", "fp32")
    assert recipe_of("amp") == Recipe("seed", "fused", "fused", "bf16")
    assert recipe_of("fp8") == Recipe("fused", "fused", "fused", "fp8", "delayed", "auto", None, "fused")
    assert recipe_of("graph") == replace(recipe_of("fp8"), graph=True)


def test_later_rungs_are_without_fp8_where_it_is_not_measured() -> None:
    assert recipe_of("graph", chosen=["adam", "graph"]) == replace(recipe_of("loss"), graph=True)
    assert recipe_of("graph", chosen=["adam", "fp8", "graph"]) == recipe_of("graph")
    assert recipe_of("fp8", chosen=["adam"]) == recipe_of("fp8")


def test_every_rung_but_the_first_says_when_it_does_not_pay() -> None:
    assert all(rung.slower_when for rung in RUNGS[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-4", NAMES[:4]),
        ("1-8", NAMES),
        ("5,fp8", ["adam", "blocks", "fp8"]),
        ("amp", ["adam", "amp"]),  # every gain is over the first
        ("amp, fused-adam", ["adam", "fused-adam", "amp"]),
        ("2,2,adam", ["adam", "fused-adam"]),
        ("3-4", ["adam", "fused-norm", "amp"]),
    ],
)
def test_rungs_are_named_numbered_or_ranged(text: str, expected: list[str]) -> None:
    assert list(select(text)) == expected


@pytest.mark.parametrize("text", ["", " , ", "apex", "0", "1-9", "4-1", "1-", "-1", "amp-1", "1-2-3", "²"])
def test_what_is_no_rung_is_one_sentence_that_lists_them(text: str) -> None:
    with pytest.raises(UserError, match="1 adam, 2 fused-adam, 3 fused-norm, 4 amp"):
        select(text)


@pytest.mark.parametrize(
    ("text", "base", "expected"),
    [
        ("4-8", "amp", NAMES[3:]),
        ("fp8", "blocks", ["blocks", "fp8"]),
        ("1-8", "loss", NAMES[5:]),  # what is before the base is left out
    ],
)
def test_another_base_is_the_rung_that_all_are_compared_with(text: str, base: str, expected: list[str]) -> None:
    assert list(select(text, base=base)) == expected
    assert list(default_names(torch.device("cpu"), base="amp")) == ["amp", "blocks", "loss"]
    with pytest.raises(UserError, match="--base is 'best', which is no rung; the rungs are 1 adam, 2 fused-adam"):
        select(text, base="best")


def test_by_default_fp8_and_graphs_run_where_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("fusestep.ladder.rungs.support", lambda device: (False, "no FP8 tensor cores"))
    assert list(default_names(cpu)) == NAMES[:6]
    assert list(default_names(gpu)) == [*NAMES[:6], "graph"]
    monkeypatch.setattr("fusestep.ladder.rungs.support", lambda device: (True, "FP8 tensor cores"))
    assert list(default_names(gpu)) == NAMES


def test_a_recipe_of_no_rung_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nothing"):
        recipe_of("nothing")
