"""The parts of the benchmarks: what each has, and one of them run in this process.

    python -m benchmarks.parts PART FILE --seconds N [--rehearse]

A part is a module of this folder. `steps-a` is the module `steps`, told "a". A module has

- `COLUMNS` and `cells(row)`: how the terminal shows a row;
- `run(copy)`, or `run(copy, what)` for parts that are told: gives the rows one after another, each a dict of plain
  values. `copy` is the device's copy rate in bytes a second, the unit of byte floors. It refuses to time what is wrong;
- `IDENTITY`: the fields that say which row a row is;
- `RATIOS`: the fields that compare ours with something of the same run, and whether "more" or "less" is better. Times
  by themselves differ from one machine of a model to the next, and with its temperature; ratios much less;
- optionally `ours(row)`: whether a row is of our code, which is what may become slower. All are, without it;
- optionally `GPUS`: how many it needs, one without it. A rehearsal needs none;
- optionally `TINY`: attributes of the module and their values in a rehearsal on a CPU.

`FILE` is written anew after each row, so a part that is cut off keeps what it has. After `--seconds` no further row is
begun, and the file says that it is unfinished.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from benchmarks import peers, timing
from fusestep import durable, hardware
from fusestep.ladder import environment
from fusestep.ladder.paths import relative

#: The parts in the order in which they run, and about how many seconds each takes on an H200.
PARTS: dict[str, int] = {
    "adam": 25,
    "norms": 110,
    "fp8": 90,
    "loss": 60,
    "mlp": 60,
    "pieces": 45,
    "rates": 25,
    "steps-a": 70,
    "steps-b": 110,
    "steps-c": 110,
    "steps-d": 220,
    "startup": 90,
    "scaling": 90,
    "world": 95,
    "ranks-a": 150,
    "ranks-b": 250,
    "ranks-d": 420,
    "convert": 75,
    "drop_in": 80,
    "learning": 600,
}
SCHEMA = 2


class Parser(argparse.ArgumentParser):
    """Arguments; what is wrong with them is one sentence, and the exit status is 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


@dataclasses.dataclass(frozen=True)
class Part:
    """A part's module and what it is told."""

    name: str
    module: ModuleType
    told: str

    def rows(self, copy: float) -> Iterable[dict[str, Any]]:
        """Measure."""
        made: Iterable[dict[str, Any]] = self.module.run(copy, self.told) if self.told else self.module.run(copy)
        return made

    def lacks(self, gpus: int) -> str | None:
        """Why it cannot be measured with so many GPUs, or None."""
        needed = getattr(self.module, "GPUS", 1)
        if gpus >= needed:
            return None
        return f"{self.name} needs {needed} GPU{'s' * (needed > 1)} and there {'is' if gpus == 1 else 'are'} {gpus}"

    def ours(self, row: dict[str, Any]) -> bool:
        """Whether a row is of our code."""
        return bool(getattr(self.module, "ours", lambda _: True)(row))

    def identity(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Which row it is."""
        return tuple(row.get(name) for name in getattr(self.module, "IDENTITY", ()))

    @property
    def ratios(self) -> dict[str, str]:
        """The fields that are compared with results of before, and what is better."""
        return dict(getattr(self.module, "RATIOS", {}))


def load(name: str) -> Part:
    """The part of that name."""
    module, _, told = name.partition("-")
    return Part(name, importlib.import_module(f"benchmarks.{module}"), told)


def named(words: Iterable[str]) -> list[str]:
    """The parts of these names; a module's name is all of its parts. A name that is neither stays as it is."""
    found: list[str] = []
    for word in words:
        of_module = [name for name in PARTS if name.partition("-")[0] == word]
        found += [name for name in of_module or [word] if name not in found]
    return found


def rehearse(part: Part) -> None:
    """Make a part as small as a CPU can do."""
    for name, value in getattr(part.module, "TINY", {}).items():
        setattr(part.module, name, value)


def measure(part: Part, file: Path, seconds: float) -> dict[str, Any]:
    """Run a part and keep its rows in `file`; returns what the file holds."""
    began = time.monotonic()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "part": part.name,
        "environment": environment.describe(timing.DEVICE) | {"command": f"python -m benchmarks {part.name}"},
        "copy_bytes_per_second": timing.copy_rate(),
        "peers": peers.versions(),
        "unfinished": True,
        "rows": [],
    }

    def keep() -> None:
        document["seconds"] = round(time.monotonic() - began, 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.write_together({file: json.dumps(document, indent=1) + "\n"})

    timing.free()
    keep()
    rows = iter(part.rows(document["copy_bytes_per_second"]))
    while time.monotonic() - began < seconds:
        row = next(rows, None)
        if row is None:
            document["unfinished"] = False
            break
        # What failed is told with a traceback, and results are shared.
        document["rows"].append({key: relative(one) if isinstance(one, str) else one for key, one in row.items()})
        keep()
    keep()
    return document


def main() -> None:
    parser = Parser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=positive, default=1e6)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    part = load(arguments.part)
    if arguments.rehearse:
        rehearse(part)
    elif (lacking := part.lacks(len(hardware.devices()))) is not None:
        parser.error(f"{lacking}; --rehearse runs tiny shapes on a CPU")
    measure(part, arguments.file, arguments.seconds)


if __name__ == "__main__":
    main()
