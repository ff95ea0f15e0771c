"""`python -m benchmarks [adam] [norms]`: time our kernels on the GPU at hand and write results files."""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import adam, norms, timing
from fusestep import hardware

PARTS = {"adam": adam.run, "norms": norms.run}


def show(part: str, rows: list[dict[str, Any]], copy: float) -> None:
    """Print the rows of one part as a table."""
    table = Table(title=f"{part}: fraction of the byte floor at {copy / 1e12:.2f} TB/s (copy, read + written)")
    if part == "adam":
        for heading in ("parameters", "implementation", "device ms", "floor ms", "of floor", "host ms"):
            table.add_column(heading, justify="left" if heading == "implementation" else "right")
        for row in rows:
            table.add_row(
                row["set"],
                row["implementation"],
                f"{row['device_ms']:.3f}",
                f"{row['floor_ms']:.3f}",
                f"{row['of_floor']:.3f}",
                f"{row['host_ms']:.3f}",
            )
    else:
        for heading in (
            "norm",
            "shape",
            "implementation",
            "forward µs",
            "of floor",
            "backward µs",
            "of floor",
            "host µs",
        ):
            table.add_column(heading, justify="left" if heading in ("norm", "implementation") else "right")
        for row in rows:
            table.add_row(
                row["kind"],
                f"{row['rows']} x {row['width']}",
                row["implementation"],
                f"{row['forward_us']:.1f}",
                f"{row['forward_of_floor']:.3f}",
                f"{row['backward_us']:.1f}",
                f"{row['backward_of_floor']:.3f}",
                f"{row['host_us']:.1f}",
            )
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
        rows = PARTS[part](copy)
        show(part, rows, copy)
        timing.write_results(arguments.out / f"{datetime.date.today().isoformat()}-{gpu}-{part}.json", part, copy, rows)


if __name__ == "__main__":
    main()
