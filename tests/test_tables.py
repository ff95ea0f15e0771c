"""Aligned columns in plain text."""

from __future__ import annotations

import pytest

from fusestep.tables import WIDTH, table


def test_columns_are_aligned() -> None:
    assert table([("a", "bb", "c"), ("dddd", "e", "f")], indent="> ") == "> a     bb  c\n> dddd  e   f"


def test_no_rows_give_nothing() -> None:
    assert table([]) == ""


def test_a_long_last_column_is_wrapped_under_itself() -> None:
    lines = table([("name", "word " * 60)]).splitlines()
    assert len(lines) > 2
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.startswith("      word") for line in lines[1:])


def test_long_words_stay_whole() -> None:
    path = "/a-path" * 40
    assert path in table([("name", f"see {path}")])


def test_rows_of_different_length_are_a_mistake() -> None:
    with pytest.raises(ValueError):
        table([("a", "b"), ("c",)])
