"""What a conversion did to each module, and why or why not; prints as a table, and undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fusestep.convert.agreement import Agreement
from fusestep.convert.classes import check_release, release
from fusestep.grouping import grouped
from fusestep.tables import table

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One module: its path in the model, its class, and what became of it.

    Attributes:
        became: its new class; None if it stayed what it was.
        reason: why, or why not.
        agreement: what the trial found; None where there was none.
    """

    path: str
    kind: str
    became: str | None
    reason: str
    agreement: Agreement | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        tried = self.agreement is not None and self.became is not None
        return {
            "path": self.path,
            "class": self.kind,
            "became": self.became,
            "reason": self.reason,
            "error": self.agreement.error if self.agreement is not None and tried else None,
            "old_error": self.agreement.own if self.agreement is not None and tried else None,
            "other_errors": dict(self.agreement.others) if self.agreement is not None and tried else {},
        }


@dataclass
class Report:
    """What `convert` did.

    Attributes:
        rows: swapped modules, and those that might have been.
        dry_run: whether nothing was changed.
        unmatched: patterns of `skip` and `fp8_skip` that match no module's path.
    """

    rows: tuple[Row, ...]
    dry_run: bool
    _swaps: list[tuple[str, nn.Module]] = field(repr=False)
    unmatched: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is not None)

    @property
    def left(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.became is None)

    def undo(self) -> None:
        """Make each module what it was: the same objects, holding what they hold now. A second call does nothing.

        Raises: UserError, before anything is changed, if a module has become another since.
        """
        for path, module in self._swaps:
            check_release(path, module)
        while self._swaps:
            release(self._swaps.pop()[1])

    def as_dict(self) -> dict[str, Any]:
        """Plain values with a `schema` number, one entry for each module."""
        rows = [row.as_dict() for row in self.rows]
        return {"schema": SCHEMA, "dry_run": self.dry_run, "unmatched": list(self.unmatched), "modules": rows}

    def __str__(self) -> str:
        if not self.rows:
            return f"nothing in this model is known to have a faster form{self._amiss()}"
        lines = [("module", "class", "became", "agreement", "why")]
        for path, members in grouped(self.rows, lambda row: row.path, lambda row: (row.kind, row.became, row.reason)):
            first = members[0]
            agreement = _told([row.agreement for row in members if row.agreement is not None])
            became = "–" if first.became is None else first.became
            lines.append((path or "(the model)", first.kind, became, agreement if first.became else "", first.reason))
        verb = "would be swapped" if self.dry_run else "swapped"
        return f"{table(lines)}\n\n{verb}: {len(self.swapped)}; left as they are: {len(self.left)}.{self._amiss()}"

    def _amiss(self) -> str:
        """A last line about what was asked for in vain."""
        if not self.unmatched:
            return ""
        return f"\nskipped nothing, since no module's path matches: {', '.join(map(repr, self.unmatched))}."


def _told(agreements: Sequence[Agreement]) -> str:
    """The worst of a group, in a few characters."""
    if not agreements:
        return ""
    error = max(one.error for one in agreements)
    owns = [one.own for one in agreements if one.own is not None]
    told = f"{error:.1e}" + (f" (old {max(owns):.1e})" if owns else "")
    fp8 = [error for one in agreements for name, error in one.others if name == "fp8"]
    return told + (f", fp8 {max(fp8):.1e}" if fp8 else "")
