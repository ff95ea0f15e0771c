"""A line of a plan: an amount, its formula in words and in symbols, and the figures that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_STEPS = ((1e12, " T"), (1e9, " G"), (1e6, " M"))


@dataclass(frozen=True)
class Line:
    """One amount.

    Attributes:
        name: what it is of.
        amount: in bytes (memory, and what is sent a step), seconds, or GPU hours, as its section says.
        words: the formula in words.
        symbols: the formula in symbols, each with its value here.
        figures: names of the rates that it uses, as `Rates.figures` has them.
        sent: of a line of time that stands for something sent, its bytes a GPU and step; None for others.
    """

    name: str
    amount: float
    words: str
    symbols: str
    figures: tuple[str, ...] = ()
    sent: float | None = None

    def as_dict(self, unit: str) -> dict[str, Any]:
        """Plain values."""
        found = {"name": self.name, unit: self.amount, "formula": self.words, "symbols": self.symbols}
        if self.sent is not None:
            found["sent_bytes"] = self.sent
        return {**found, "figures": list(self.figures)}


def total(lines: tuple[Line, ...]) -> float:
    """The sum of the lines' amounts."""
    return sum(line.amount for line in lines)


def short(number: float) -> str:
    """A number with three digits that matter, as in 28.7 M."""
    for step, suffix in _STEPS:
        if abs(number) >= step:
            return f"{number / step:.3g}{suffix}"
    return f"{number:,.0f}" if number == int(number) else f"{number:.3g}"


def tokens_in_words(number: float) -> str:
    """How many tokens: 1 token, 2.5 B tokens."""
    return f"{short(number)} token{'' if number == 1 else 's'}"


def gibibytes(number: float) -> str:
    """Bytes as GiB."""
    return f"{number / 2**30:,.2f} GiB"
