"""What got slower: the ratios of new results against those of before, on the same model of GPU."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.parts import Part

#: A ratio may be worse by this much, or by three times the spread of either measurement where that is more.
ALLOWED, SPREADS = 0.05, 3.0
DATE = re.compile(r"^\d{4}-\d{2}-\d{2}-")


@dataclasses.dataclass(frozen=True)
class Change:
    """A ratio of a row that is worse than before; `new` is None where the row was not measured any more."""

    part: str
    row: str
    ratio: str
    old: float
    new: float | None
    allowed: float

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.part}: {self.row}: {self.ratio} was {self.old:.3f}, and was not measured now"
        by = abs(self.new - self.old) / self.old
        return (
            f"{self.part}: {self.row}: {self.ratio} was {self.old:.3f}, is {self.new:.3f}: "
            f"worse by {by:.1%}, more than {self.allowed:.1%}"
        )


def slug(gpu: str) -> str:
    """A GPU's name as it stands in the names of files."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def newest(folder: Path, gpu: str, part: str) -> Path | None:
    """The newest results of a part on a model of GPU, by the date in the name."""
    wanted = f"{slug(gpu)}-{part}"
    found = [path for path in folder.glob("*.json") if DATE.sub("", path.stem) == wanted and DATE.match(path.stem)]
    return max(found, key=lambda path: path.name, default=None)


def slower(part: Part, old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Every ratio of ours that is worse than noise explains, and every row that was there and is not."""
    rows = {part.identity(row): row for row in new["rows"]}
    changes: list[Change] = []
    for before in old["rows"]:
        if not part.ours(before):
            continue
        now = rows.get(part.identity(before))
        name = ", ".join(str(one) for one in part.identity(before) if one is not None)
        for ratio, better in part.ratios.items():
            was = before.get(ratio)
            if not was:
                continue
            value = None if now is None else now.get(ratio)
            allowed = max(ALLOWED, SPREADS * max(_spread(before), 0.0 if now is None else _spread(now)))
            if value is None or not _is_within(was, value, better, allowed):
                changes.append(Change(part.name, name, ratio, was, value, allowed))
    return changes


def _is_within(was: float, value: float, better: str, allowed: float) -> bool:
    return value >= was * (1 - allowed) if better == "more" else value <= was * (1 + allowed)


def _spread(row: dict[str, Any]) -> float:
    """The widest half distance of a row's quartiles, over the median."""
    widest = 0.0
    for name, quartiles in row.items():
        if name.endswith("_quartiles"):
            middle = row[name.removesuffix("_quartiles")]
            widest = max(widest, (quartiles[1] - quartiles[0]) / 2 / middle)
    return widest


def with_results(part: Part, folder: Path, new: dict[str, Any]) -> tuple[Path | None, list[Change]]:
    """The results of before that `new` was compared with (None where there are none), and what got slower."""
    path = newest(folder, new["environment"]["gpu"], part.name)
    return path, [] if path is None else slower(part, json.loads(path.read_text()), new)
