from __future__ import annotations

from dataclasses import asdict

import pytest

from fusestep.errors import UserError
from fusestep.ladder.rungs import RUNGS, Recipe, recipe_of, select

NAMES = [rung.name for rung in RUNGS]


def test_the_first_four_rungs_have_their_names() -> None:
    assert NAMES[:4] == ["adam", "fused-adam", "fused-norm", "amp"]


def test_each_rung_keeps_every_change_of_those_before() -> None:
    plain = asdict(Recipe())
    changed: set[str] = set()
    for name in NAMES:
        recipe = asdict(recipe_of(name))
        now = {field for field, value in recipe.items() if value != plain[field]}
        assert changed <= now
        assert len(now - changed) == (0 if name == NAMES[0] else 1), "one change a rung"
        changed = now
    assert recipe_of("adam") == Recipe("seed", "torch", "torch", "fp32")
    assert recipe_of("amp") == Recipe("seed", "fused", "fused", "bf16")


def test_every_rung_but_the_first_says_when_it_does_not_pay() -> None:
    assert all(rung.slower_when for rung in RUNGS[1:])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-4", NAMES[:4]),
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


def test_a_recipe_of_no_rung_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nothing"):
        recipe_of("nothing")
