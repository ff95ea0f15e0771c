"""What the pages about conversion show runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in ("convert.md", "integrations.md") for n in range(len(snippets(page)))]
)
def test_a_snippet_runs_and_swaps_something(page: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippets(page)[number], f"{page}, snippet {number}", "exec"), {"__name__": "snippet"})
    assert re.search(r"^swapped: [1-9]", capsys.readouterr().out, re.MULTILINE)


def test_there_are_snippets() -> None:
    assert len(snippets("convert.md")) == 3
    assert len(snippets("integrations.md")) == 1
