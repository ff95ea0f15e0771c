"""Repeated modules on one line: blocks.0.norm … blocks.3.norm are blocks.0–3.norm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Entry = TypeVar("Entry")


def grouped(
    entries: Iterable[Entry], path: Callable[[Entry], str], key: Callable[[Entry], Hashable]
) -> list[tuple[str, list[Entry]]]:
    """(path, members) of each group of entries, in the order of their first ones.

    Args:
        entries: what has a path in a model, its parts joined by dots.
        path: that of an entry.
        key: entries share a group if their keys are equal and their paths differ in numbers alone.
    """
    groups = [(tuple(path(entry).split(".")), [entry]) for entry in entries]
    depth = max((len(parts) for parts, _ in groups), default=0)
    for place in range(depth):
        numbers: dict[Hashable, list[int]] = {}
        joined: dict[Hashable, tuple[tuple[str, ...], list[Entry]]] = {}
        for parts, members in groups:
            is_number = place < len(parts) and parts[place].isdecimal()
            rest = (*parts[:place], "", *parts[place + 1 :]) if is_number else parts
            same = (rest, is_number, key(members[0]))
            joined.setdefault(same, (parts, []))[1].extend(members)
            if is_number:
                numbers.setdefault(same, []).append(int(parts[place]))
        groups = [
            ((*parts[:place], _ranges(numbers[same]), *parts[place + 1 :]) if same in numbers else parts, members)
            for same, (parts, members) in joined.items()
        ]
    return [(".".join(parts), members) for parts, members in groups]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '0–2,5'."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ",".join(parts)
