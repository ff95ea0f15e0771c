"""Write what the README, pages in docs/ and the plan's rates say of speed from the results files.

    python tools/figures.py

Reads the newest file of each part in benchmarks/results/ and replaces what stands between the two marks of the README
and of the pages on Apex's and Transformer Engine's names. docs/speed.md and docs/measured.md are made whole,
docs/planning.md by other marks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import drop_in_figures
import measured_page
import scaling_chart
import speed
import summary

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

BEGIN, END = "<!-- figures: written by tools/figures.py -->", "<!-- end of figures -->"


def newest_results(folder: Path) -> list[dict[str, Any]]:
    """The newest file of each name, after the date that it begins with, in the order of the names."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json")):
        newest[re.sub(r"^\d{4}-\d{2}-\d{2}-", "", path.stem)] = path
    return [{"file": path.name, **json.loads(path.read_text())} for _, path in sorted(newest.items())]


def with_figures(text: str, shown: str) -> str:
    """A page with today's figures between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}"


def marked_pages(results: list[dict[str, Any]]) -> dict[Path, str]:
    """What stands between the marks of each page that has them."""
    drop_in = {drop_in_figures.DOCS / page: drop_in_figures.figures(page, results) for page in drop_in_figures.TABLES}
    return {README: summary.summary(results), **drop_in}


def made_pages(results: list[dict[str, Any]]) -> dict[Path, str]:
    """The pages that are made whole."""
    return {speed.PAGE: speed.page(results, speed.explained()), measured_page.PAGE: measured_page.page(results)}


def main() -> None:
    # Both read the results as this module does.
    import plan_page
    import plan_rates

    results = newest_results(RESULTS)
    plan_rates.main()
    plan_page.main()
    for path, shown in marked_pages(results).items():
        path.write_text(with_figures(path.read_text(), shown))
    for path, text in made_pages(results).items():
        path.write_text(text)
    grown = speed.of_parts(results).get("scaling")
    if grown is not None:
        scaling_chart.draw(grown, speed.PAGE.parent / speed.CHART)


if __name__ == "__main__":
    main()
