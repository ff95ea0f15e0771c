"""ladder.html as a browser shows it, and ladder.png."""

from __future__ import annotations

import csv
import html
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from fusestep.ladder import Ladder, page, plots, report
from fusestep.ladder.charts import relative_to_first, ticks

Make = Callable[..., Ladder]


@pytest.fixture
def plain(make_ladder: Make, made: Any) -> dict[str, Any]:
    """A GPU's ladder with a rung of each kind, one of them gone, and with text that a page must quote."""
    ladder = make_ladder(
        {
            "adam": made((100.0, 101.0, 99.0)),
            "fused-adam": made((9.0, 9.1, 8.9), reserved=3000 * 2**20),
            "fused-norm": made((20.0, 20.5, 20.1)),
            "amp": made((5.0, 5.1, 4.9), busy=0.4, losses=(5.0, float("nan"), 3.4)),
            "blocks": made(failure="out of memory <b>; lower --batch."),
        }
    )
    ladder.environment["command"] = "fusestep ladder --data 'text:<script>alert(1)</script>'"  # type: ignore[index]
    return report.as_dict(ladder)


@pytest.fixture
def file(plain: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "a folder" / "ladder.html"
    path.parent.mkdir()
    path.write_text(page.draw(plain))
    return path


def order(shown: Any) -> list[str]:
    names: list[str] = shown.evaluate(
        "[...document.querySelectorAll('#figures tbody tr')].map(row => row.cells[0].textContent)"
    )
    return names


def press(shown: Any, title: str) -> str:
    """Press a column's title; how the column then says that it is sorted."""
    script = f"""(() => {{
        const head = [...document.querySelectorAll('thead th')].find(head => head.textContent.trim() === '{title}');
        head.querySelector('button').click();
        return head.getAttribute('aria-sort');
    }})()"""
    sorted_how: str = shown.evaluate(script)
    return sorted_how


def test_it_renders_without_an_error_or_a_request(chromium: Any, file: Path, plain: dict[str, Any]) -> None:
    shown = chromium.open(file)
    assert shown.evaluate("document.querySelector('.headline').textContent") == plain["verdict"]["headline"]
    assert shown.evaluate("document.querySelectorAll('#figures tbody tr').length") == 5
    assert shown.evaluate("document.querySelectorAll('.chart').length") == 6
    assert shown.evaluate("document.querySelectorAll('script').length") == 1
    text = shown.evaluate("document.body.textContent")
    assert "<script>alert(1)</script>" in text
    assert "out of memory <b>; lower --batch" in text
    assert shown.requests == [file.as_uri()]
    assert shown.problems == []
    # The browser does tell what goes wrong: this page may load nothing.
    shown.evaluate(
        "console.error('told'); new Promise(end => { const i = new Image(); i.onerror = end; i.src = 'x.png'; })"
    )
    assert any("told" in problem for problem in shown.problems)
    assert any("Content Security Policy" in problem for problem in shown.problems)


def test_bars_are_as_long_as_their_figures(chromium: Any, file: Path) -> None:
    widths = chromium.open(file).evaluate(
        "[...document.querySelector('.bars').querySelectorAll('.fill')].map(bar => bar.getBoundingClientRect().width)"
    )
    assert len(widths) == 4
    assert widths[0] > 300
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.09, 0.201, 0.05], abs=0.005)


def test_a_column_sorts_both_ways_by_its_numbers_with_gaps_last(chromium: Any, file: Path) -> None:
    shown = chromium.open(file)
    assert order(shown) == ["adam", "fused-adam", "fused-norm", "amp", "blocks"]
    assert press(shown, "step ms") == "ascending"
    # As text, 100 would come before 20.
    assert order(shown) == ["amp", "fused-adam", "fused-norm", "adam", "blocks"]
    assert press(shown, "step ms") == "descending"
    assert order(shown) == ["adam", "fused-norm", "fused-adam", "amp", "blocks"]
    assert press(shown, "rung") == "ascending"
    assert order(shown) == ["adam", "amp", "blocks", "fused-adam", "fused-norm"]
    assert shown.evaluate("document.querySelectorAll('th[aria-sort=ascending], th[aria-sort=descending]').length") == 1
    assert shown.problems == []


def test_the_keyboard_sorts_and_no_title_hides_behind_the_first_column(chromium: Any, file: Path) -> None:
    shown = chromium.open(file, width=390)
    # Which title has the focus, and whether all of it can be seen beside the column that stays.
    script = """(() => {
        const button = document.activeElement, within = button.closest('.wide');
        const box = button.getBoundingClientRect(), first = button.closest('th').cellIndex === 0;
        const left = within.querySelector('th').getBoundingClientRect()[first ? 'left' : 'right'];
        return [button.textContent, left <= box.left && box.right <= within.getBoundingClientRect().right];
    })()"""
    titles = shown.evaluate("[...document.querySelectorAll('#figures thead th')].map(head => head.textContent.trim())")
    shown.press("Tab")  # the table itself, for the arrow keys to scroll
    there, back = [], []
    for _ in titles:
        shown.press("Tab")
        there.append(shown.evaluate(script))
    assert there == [[title, True] for title in titles]
    for _ in titles[1:]:
        shown.press("Shift+Tab")
        back.append(shown.evaluate(script))
    assert back == [[title, True] for title in titles[-2::-1]]
    for _ in titles[: titles.index("step ms")]:
        shown.press("Tab")
    shown.press("Enter")
    assert order(shown) == ["amp", "fused-adam", "fused-norm", "adam", "blocks"]
    shown.press("Space")
    assert order(shown) == ["adam", "fused-norm", "fused-adam", "amp", "blocks"]


def test_a_legend_takes_a_line_away_and_brings_it_back(chromium: Any, file: Path) -> None:
    shown = chromium.open(file)
    script = """(() => {
        const button = document.querySelector('.legend button[data-rung=amp]');
        const line = button.closest('figure').querySelector('.line[data-rung=amp]');
        const seen = () => getComputedStyle(line).display !== 'none';
        return [0, 1, 2].map(press => { if (press) button.click(); return seen(); });
    })()"""
    assert shown.evaluate(script) == [True, False, True]


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_it_follows_the_scheme_and_can_be_read_in_it(chromium: Any, file: Path, scheme: str, is_dark: bool) -> None:
    shown = chromium.open(file, scheme=scheme)
    page_colour = colour(shown, "body", "backgroundColor")
    assert (luminance(page_colour) < 0.1) is is_dark
    # 4.5 is what WCAG 2 asks of text.
    for what in (
        "body",
        ".headline",
        ".hint",
        "dt",
        ".switch-on",
        ".leave-off",
        ".cannot-tell",
        "thead th",
        "td",
        "pre",
    ):
        if shown.evaluate(f"document.querySelector('{what}') === null"):
            continue
        assert contrast(colour(shown, what, "color"), page_colour) > 4.5, what
    # Also of the name whose line was taken away; opacity would show in no colour.
    shown.evaluate("document.querySelector('.legend button').click()")
    assert contrast(colour(shown, ".legend button", "color"), page_colour) > 4.5
    assert shown.evaluate("getComputedStyle(document.querySelector('.legend button')).opacity") == "1"
    shown.evaluate("document.querySelector('.legend button').click()")
    for number in range(2):
        assert contrast(colour(shown, f".line:nth-of-type({number + 1})", "stroke"), page_colour) > 3


def colour(shown: Any, what: str, kind: str) -> tuple[float, ...]:
    text = shown.evaluate(f"getComputedStyle(document.querySelector('{what}')).{kind}")
    return tuple(float(part) / 255 for part in re.findall(r"[\d.]+", text)[:3])


def luminance(rgb: tuple[float, ...]) -> float:
    """Relative luminance of WCAG 2."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [320, 375, 700, 1600])
def test_no_width_scrolls_sideways(chromium: Any, file: Path, width: int) -> None:
    shown = chromium.open(file, width=width)
    assert shown.evaluate("window.innerWidth") == width
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    # The table scrolls within itself, and its first column stays.
    if width < 400:
        wide = "document.querySelector('.wide')"
        assert shown.evaluate(f"{wide}.scrollWidth > {wide}.clientWidth")
        assert shown.evaluate(
            f"{wide}.scrollLeft = 300, document.querySelector('tbody th').getBoundingClientRect().left >= 0"
        )
        assert shown.evaluate("parseFloat(getComputedStyle(document.querySelector('.findings li')).fontSize)") >= 16


def test_a_cpu_has_no_device_and_no_ceilings(chromium: Any, make_ladder: Make, made: Any, tmp_path: Path) -> None:
    (tmp_path / "cpu.html").write_text(page.draw(report.as_dict(make_ladder({"adam": made()}, gpu=False))))
    shown = chromium.open(tmp_path / "cpu.html")
    assert shown.problems == []
    titles = shown.evaluate("[...document.querySelectorAll('figcaption b')].map(title => title.textContent)")
    assert titles == ["Time of a step.", "Peak memory.", "Loss during the gate."]
    heads = shown.evaluate("[...document.querySelectorAll('thead th')].map(head => head.textContent.trim())")
    assert "device ms" not in heads
    assert "of a product's" not in heads


def test_what_stands_beside_the_rungs_has_a_table_that_sorts_and_bars_among_theirs(
    chromium: Any, make_ladder: Make, made: Any, tmp_path: Path
) -> None:
    ladder = make_ladder(
        {"adam": made((40.0, 40.1, 39.9)), "amp": made((10.0, 10.1, 9.9))},
        beside={"native-amp": (12.0, 12.1, 11.9), "te-fp8": (100.0, 99.0, 101.0), "te-fp8-graph": (20.0, 21.0, 19.0)},
    )
    plain = report.as_dict(ladder)
    plain["contenders"][1] |= {"rounds": [], "step_ms": None, "status": "not installed"}
    (tmp_path / "beside.html").write_text(page.draw(plain))
    shown = chromium.open(tmp_path / "beside.html", width=360)
    assert shown.problems == []
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360
    heads = shown.evaluate(
        "[...document.querySelectorAll('thead')].map(head => head.textContent.replace(/\\s+/g, ' '))"
    )
    assert "best native PyTorch over it over te" in heads[0]
    assert "numbers status step ms" in heads[1]
    names = (
        "[...document.querySelectorAll('#figures .wide')[1].querySelectorAll('tbody th')].map(cell => cell.textContent)"
    )
    assert shown.evaluate(names) == ["native-amp", "te-fp8", "te-fp8-graph"]
    press = "[...document.querySelectorAll('#figures .wide')[1].querySelectorAll('thead button')]"
    shown.evaluate(f"{press}.find(button => button.textContent === 'step ms').click()")
    shown.evaluate(f"{press}.find(button => button.textContent === 'step ms').click()")
    assert shown.evaluate(names) == ["te-fp8-graph", "native-amp", "te-fp8"]  # what has no time comes last
    bars = "[...document.querySelector('.bars').querySelectorAll('.name')].map(name => name.textContent)"
    assert shown.evaluate(bars) == ["adam", "amp", "native-amp", "te-fp8-graph"]
    assert shown.evaluate("document.querySelectorAll('#kernels details').length") == 5
    assert plots.draw(plain).startswith(b"\x89PNG")


def test_the_devices_time_is_beside_the_walls_and_an_upper_bound_is_called_that(
    make_ladder: Make, made: Any, drawn: list[Figure]
) -> None:
    rungs = {"adam": made((40.0, 40.1, 39.9)), "amp": made((10.0, 14.0, 9.0), busy=(5.0, 5.01, 4.99))}
    ladder = make_ladder(rungs, beside={"te-fp8": (9.0, 9.1, 8.9)}, within_base=["fused-adam"])
    waiting = ladder.contenders[0]
    rounds = [replace(r, timing=replace(r.timing, is_bound=True), kernels=()) for r in waiting.rounds]
    plain = report.as_dict(replace(ladder, contenders=(replace(waiting, rounds=tuple(rounds)),)))
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page.draw(plain))))
    assert "device's time over previous" in text
    assert "7.84× (7.8" in text
    assert "8.10 / ≤ 8.82 ms" in text
    assert "9.00 / 5.00 ms, launch-bound" in text
    assert re.search(r"adam torch.optim.AdamW, FP32, [^+]*; fused-adam in it", text)
    assert "Every rung on the same text from the same seed" in text
    own = page.draw({**plain, "plan": {**plain["plan"], "factory": "mine:model"}})
    assert "Every rung on the same batches from the same seed" in own
    assert plain["plan"]["steps_timed"] == "3"  # of 36 that were asked for
    (row,) = [row for row in csv.DictReader(report.as_csv(ladder).splitlines()) if row["name"] == "amp"]
    assert float(row["device_gain_over_previous"]) == pytest.approx(39.2 / 5, rel=1e-6)
    assert (row["device_is_upper_bound"], row["decided_by"]) == ("False", "wall time")
    plots.draw(plain)
    (figure,) = drawn
    times, _, apart, *_ = figure.axes
    assert [text.get_text() for text in apart.texts] == ["39.2", "5", "≤ 8.82", "36", "9", "8.1"]
    # A figure stands behind the last of its rounds.
    assert [text.xy[0] for text in times.texts] == pytest.approx([40.1, 14.0, 9.1])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that are drawn, as they are saved."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    return figures


def test_nothing_measured_is_still_a_page_and_a_picture(make_ladder: Make, made: Any) -> None:
    plain = report.as_dict(make_ladder({"adam": made(failure="gone."), "amp": made(failure="gone too.")}, rounds=3))
    assert page.draw(plain).count("did not run") >= 2
    assert plots.draw(plain).startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_each_chart(plain: dict[str, Any], drawn: list[Figure]) -> None:
    picture = imread(io.BytesIO(plots.draw(plain)))
    assert picture.shape[1] > 1000
    (figure,) = drawn
    assert figure.get_suptitle().replace("\n", " ").startswith(plain["verdict"]["headline"])
    times, memory, apart, shares, losses, differences = figure.axes
    assert [bar.get_width() for bar in times.patches] == pytest.approx([100.0, 9.0, 20.1, 5.0, 0.0])
    assert [bar.get_width() for bar in memory.patches] == pytest.approx([4000, 3000, 4000, 4000, 0.0])
    assert [bar.get_width() for bar in apart.patches[:4]] == pytest.approx([98.0, 8.82, 19.698, 2.0])
    assert shares.patches[0].get_width() == pytest.approx(100 * 1e12 / 0.1 / 5e13)
    assert len(losses.lines) == 4
    assert len(differences.lines) == 3


def test_a_difference_from_the_first_is_in_percent_and_a_gap_where_either_is_missing() -> None:
    curves = {"adam": [4.0, None, 2.0, 2.0], "amp": [4.2, 1.0, None, 1.9]}
    assert relative_to_first(curves) == {"amp": [pytest.approx(5.0), None, None, pytest.approx(-5.0)]}


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.73, 5.6), (-0.031, 0.004), (3.0, 3.0), (0.0, 0.0), (-7, -2)])
def test_ticks_are_even_few_and_hold_both_ends(low: float, high: float) -> None:
    marks = ticks(low, high)
    steps = {round(b - a, 12) for a, b in itertools.pairwise(marks)}
    assert len(steps) == 1
    assert steps.pop() > 0
    assert 2 <= len(marks) <= 8
    assert marks[0] <= low
    assert marks[-1] >= high
