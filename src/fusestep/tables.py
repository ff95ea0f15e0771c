"""Plain text for the pages that the core prints without any library: aligned columns, and how many of what."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

#: Characters a line; the last column is wrapped to it.
WIDTH = 110


def counted(number: int, what: str) -> str:
    """How many of what: 1 step, 1,024 tokens; `what` is a singular that takes an s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """The rows under each other, columns aligned, the last one wrapped under itself.

    Raises: ValueError where rows differ in length.
    """
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for row in rows:
        start = indent + "".join(f"{cell:{width}}  " for cell, width in zip(row, widths, strict=False))
        # Paths and versions stay whole, so that they can be copied.
        lines += textwrap.wrap(
            row[-1],
            max(WIDTH, len(start) + 40),
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [start.rstrip()]
    return "\n".join(lines)
