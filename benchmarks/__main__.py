"""`python -m benchmarks [PART…]`: measure on the GPU at hand and write results files; the parts are in PARTS."""

from __future__ import annotations

import argparse
import datetime
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import timing
from fusestep import hardware

PARTS = ("adam", "norms", "fp8", "loss", "learning")
TEXT_COLUMNS = ("norm", "implementation", "recipe")


def load(part: str) -> ModuleType:
    """A part: COLUMNS and `cells(row)` for the terminal, and `run(copy rate)`, which measures the rows."""
    return importlib.import_module(f"benchmarks.{part}")


def show(part: str, rows: list[dict[str, Any]], copy: float) -> None:
    """Print the rows of one part as a table."""
    table = Table(title=f"{part}: the byte floor is at {copy / 1e12:.2f} TB/s (copy, read + written)")
    for heading in load(part).COLUMNS:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*load(part).cells(row))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)}; all without one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}; choose from {', '.join(PARTS)}")
    if not hardware.devices():
        parser.error(f"a CUDA device is needed: {hardware.cuda_support().reason}")
    copy = timing.copy_rate()
    gpu = re.sub(r"[^a-z0-9]+", "-", hardware.devices()[0].name.lower()).strip("-")
    for part in arguments.parts or PARTS:
        rows = load(part).run(copy)
        show(part, rows, copy)
        timing.write_results(arguments.out / f"{datetime.date.today().isoformat()}-{gpu}-{part}.json", part, copy, rows)


if __name__ == "__main__":
    main()
