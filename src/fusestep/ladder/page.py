"""ladder.html: one file that a browser shows by itself, from the plain values of ladder.json.

What is drawn is worked out here, in shares of a chart's width; the templates hold no arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from fusestep.ladder import page_tables
from fusestep.ladder.charts import Curves, curves_of, relative_to_first, ticks

#: How many colours the style sheet has; lines beyond them are dashed.
_COLOURS = 8

Rung = Mapping[str, Any]


def draw(plain: Mapping[str, Any]) -> str:
    """The whole page.

    Args: plain: what `fusestep.ladder.report.as_dict` returns, or ladder.json holds.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fusestep.ladder"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    rungs = plain["rungs"]
    ceilings = plain["ceilings"]
    # Ladders of before there were any lack them, and are drawn all the same.
    contenders = plain.get("contenders", [])
    return environment.get_template("ladder.html").render(
        title=plain["title"],
        verdict=plain["verdict"],
        table=page_tables.table(rungs, contenders),
        contenders=page_tables.contenders(contenders),
        charts=[
            chart
            for chart in (
                _times([*rungs, *(one for one in contenders if one["rounds"])]),
                _memory([*rungs, *(one for one in contenders if one["rounds"])]),
                _apart([*rungs, *(one for one in contenders if one["rounds"])]),
                _rates(rungs, ceilings),
            )
            if chart
        ],
        kernels=page_tables.kernels([*rungs, *contenders]),
        plots=_plots(rungs, "text" if plain["plan"].get("factory") is None else "batches"),
        remarks=plain["remarks"],
        logs=[(rung["name"], rung["log"]) for rung in (*rungs, *contenders) if rung["log"]],
        rungs=[(one["name"], one["summary"]) for one in (_with_those_within(rungs[0], plain["plan"]), *rungs[1:])],
        beside=[(one["name"], one["summary"]) for one in contenders],
        environment=_in_words(plain["environment"]),
        plan=_in_words({**plain["plan"], **({} if ceilings is None else {"ceilings": ceilings})}),
    )


def _with_those_within(first: Rung, plan: Mapping[str, Any]) -> Rung:
    """The first rung, its summary with the rungs that are in it and stand below it on the ladder."""
    within = plan.get("within_base")
    return {**first, "summary": f"{first['summary']}; {', '.join(within)} in it"} if within else first


def _times(rungs: Sequence[Rung]) -> dict[str, Any]:
    full = _largest(
        value
        for rung in rungs
        for value in (rung["step_ms"], rung["step_ms_quartile_3"], *(r["step_ms"] for r in rung["rounds"]))
    )
    rows = []
    for rung in rungs:
        ms, low, high = rung["step_ms"], rung["step_ms_quartile_1"], rung["step_ms_quartile_3"]
        if ms is None:
            rows.append(_row(rung["name"], page_tables.missing(rung), []))
            continue
        label = f"{ms:.2f} ms, quartiles {low:.2f}–{high:.2f}"
        bar = _bar(ms, full, label, spread=(low, high), dots=[r["step_ms"] for r in rung["rounds"]])
        rows.append(_row(rung["name"], label.replace(", quartiles", ","), [bar]))
    return {
        "title": "Time of a step.",
        "caption": "Bar: the median; line: the quartiles of all windows; dots: the rounds.",
        "rows": rows,
        "kinds": [],
    }


def _memory(rungs: Sequence[Rung]) -> dict[str, Any]:
    full = _largest(rung["peak_bytes"] for rung in rungs)
    what = next((rung["peak_of"] for rung in rungs if rung["peak_of"]), "memory")
    rows = []
    for rung in rungs:
        peak = rung["peak_bytes"]
        label = page_tables.missing(rung) if peak is None else f"{peak / 2**20:,.0f} MiB"
        rows.append(_row(rung["name"], label, [] if peak is None else [_bar(peak, full, label)]))
    return {"title": "Peak memory.", "caption": f"Of a fresh process: its {what}.", "rows": rows, "kinds": []}


def _apart(rungs: Sequence[Rung]) -> dict[str, Any] | None:
    """Host against device; None on a CPU, where queuing is doing."""
    if all(rung["device_ms"] is None for rung in rungs):
        return None
    full = _largest(rung[key] for rung in rungs for key in ("host_ms", "device_ms"))
    rows = []
    for rung in rungs:
        host, device = rung["host_ms"], rung["device_ms"]
        if host is None or device is None:
            rows.append(_row(rung["name"], page_tables.missing(rung), []))
            continue
        bars = [
            _bar(host, full, f"host {host:.2f} ms", kind="second"),
            _bar(device, full, f"device {page_tables.device(rung)} ms"),
        ]
        text = f"{host:.2f} / {page_tables.device(rung)} ms" + (", launch-bound" if rung["launch_bound"] else "")
        rows.append(_row(rung["name"], text, bars))
    return {
        "title": "Host against device.",
        "caption": "What the host takes to queue a step, and what the device takes for one that is queued whole.",
        "rows": rows,
        "kinds": [("second", "host"), ("", "device")],
    }


def _rates(rungs: Sequence[Rung], ceilings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Shares of what the device reached in the same run; None where that was not measured."""
    if ceilings is None:
        return None
    full = _largest([1.0, *(rung[key] for rung in rungs for key in ("of_product_ceiling", "of_copy_ceiling"))])
    rows = []
    for rung in rungs:
        product, copy = rung["of_product_ceiling"], rung["of_copy_ceiling"]
        bars, texts = [], []
        if product is not None:
            texts.append(f"{product:.0%}")
            bars.append(_bar(product, full, f"{rung['flops_per_s'] / 1e12:,.3g} TFLOP/s, {product:.0%}"))
        if copy is not None:
            texts.append(f"{copy:.0%}")
            bars.append(_bar(copy, full, f"{rung['bytes_per_s'] / 1e9:,.3g} GB/s, {copy:.0%}", kind="second"))
        rows.append(_row(rung["name"], " / ".join(texts) or page_tables.missing(rung), bars))
    return {
        "title": "Share of what this device reached.",
        "caption": "The model's products against large products of the same precision, and the model's bytes against a "
        "large copy, all measured in this run; the formulas are at the end of the page.",
        "rows": rows,
        "kinds": [("", "products"), ("second", "bytes")],
    }


def _row(name: str, figure: str, bars: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "figure": figure, "bars": bars}


def _bar(
    value: float,
    full: float,
    label: str,
    *,
    kind: str = "",
    spread: tuple[float, float] | None = None,
    dots: Sequence[float] = (),
) -> dict[str, Any]:
    def share(x: float) -> float:
        return round(100 * x / full, 3)

    return {
        "width": share(value),
        "label": label,
        "kind": kind,
        "spread": None if spread is None else [share(end) for end in spread],
        "dots": [share(dot) for dot in dots],
    }


def _largest(values: Iterable[float | None]) -> float:
    """What fills a chart's width, with a little room for what ends there."""
    return 1.02 * max((value for value in values if value is not None), default=1.0) or 1.0


def _plots(rungs: Sequence[Rung], on: str) -> list[dict[str, Any]]:
    curves = curves_of(rungs)
    if not curves:
        return []
    first = next(iter(curves))
    plots = [
        _plot(
            "Loss during the gate.",
            f"Every rung on the same {on} from the same seed; press a name to take its line away.",
            curves,
        )
    ]
    if len(curves) > 1:
        caption = f"(loss − loss of {first}) / loss of {first}, step by step, in %."
        plots.append(_plot(f"How far from {first}.", caption, relative_to_first(curves), skipped=1))
    return plots


def _plot(title: str, caption: str, curves: Curves, skipped: int = 0) -> dict[str, Any]:
    """Line charts in a square of 100 × 100, y upwards; `skipped` keeps a rung's colour in every plot."""
    known = [value for curve in curves.values() for value in curve if value is not None]
    marks = ticks(min(known), max(known)) if known else [0.0, 1.0]
    low, high = min(marks), max(marks)
    steps = max(len(curve) for curve in curves.values())

    def up(value: float) -> float:
        return 100 * (value - low) / (high - low)

    def path(curve: Sequence[float | None]) -> str:
        parts, pen = [], "M"
        for step, value in enumerate(curve):
            if value is None:
                pen = "M"
                continue
            parts.append(f"{pen}{100 * step / max(1, steps - 1):.2f} {100 - up(value):.2f}")
            pen = "L"
        return "".join(parts)

    digits = max(0, 1 - math.floor(math.log10(marks[1] - marks[0])))
    return {
        "title": title,
        "caption": caption,
        "steps": steps,
        "y_ticks": [{"at": round(up(mark), 3), "text": f"{mark:.{digits}f}"} for mark in marks],
        "lines": [
            {
                "name": name,
                "path": path(curve),
                "colour": place % _COLOURS,
                "dashes": "" if place < _COLOURS else "6 3",
            }
            for place, (name, curve) in enumerate(curves.items(), start=skipped)
        ],
    }


def _in_words(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values to read; what is not set is left out."""
    return [
        (name.replace("_", " "), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
        if value is not None
    ]
