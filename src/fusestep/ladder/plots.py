"""ladder.png: the charts of a ladder as one picture, from the plain values of ladder.json."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fusestep.ladder.charts import Curves, curves_of, relative_to_first
from fusestep.ladder.words import bounded

Rung = Mapping[str, Any]

_FIRST, _SECOND = "#3f6fb5", "#c2772b"


def draw(plain: Mapping[str, Any]) -> bytes:
    """The picture, a PNG: the verdict above, then times, memory, host and device, rates, and losses.

    Args: plain: what `fusestep.ladder.report.as_dict` returns, or ladder.json holds.
    """
    rungs = plain["rungs"]
    beside = [one for one in plain.get("contenders", []) if one["rounds"]]
    on_gpu = any(rung["device_ms"] is not None for rung in rungs)
    has_rates = plain["ceilings"] is not None
    curves = curves_of(rungs)
    panels = 2 + on_gpu + has_rates + bool(curves) + (len(curves) > 1)
    rows = -(-panels // 2)
    # A figure of its own, without pyplot: no window, no state that outlives it.
    figure = Figure(
        figsize=(13, 1.5 + (1.2 + 0.35 * (len(rungs) + len(beside))) * rows + 1.2 * rows), layout="constrained"
    )
    title = plain["title"]
    heading = "\n".join(
        line
        for text in (plain["verdict"]["headline"], f"{title['place']} | {title['model']}")
        for line in textwrap.wrap(text, 130)
    )
    # A dollar sign would begin a formula.
    figure.suptitle(heading.replace("$", r"\$"), fontsize=11)
    axes = iter(figure.subplots(rows, 2, squeeze=False).flat)
    _times(next(axes), [*rungs, *beside])
    what = next((rung["peak_of"] for rung in rungs if rung["peak_of"]), "memory")
    peaks = [_scaled(rung["peak_bytes"], 2**20) for rung in (*rungs, *beside)]
    _bars(next(axes), [*rungs, *beside], f"Peak memory, MiB ({what})", {"": peaks})
    if on_gpu:
        apart = {name: [rung[f"{name}_ms"] for rung in (*rungs, *beside)] for name in ("device", "host")}
        _bars(next(axes), [*rungs, *beside], "Device and host, ms a step", apart)
    if has_rates:
        shares = {
            "model's products of a large product": [_scaled(rung["of_product_ceiling"], 0.01) for rung in rungs],
            "model's bytes of a large copy": [_scaled(rung["of_copy_ceiling"], 0.01) for rung in rungs],
        }
        _bars(next(axes), rungs, "Share of what this device reached, %", shares)
    if curves:
        _lines(next(axes), "Loss during the gate", curves)
    if len(curves) > 1:
        first = next(iter(curves))
        _lines(next(axes), f"How far from {first}, % of its loss", relative_to_first(curves), skipped=1)
    for unused in axes:
        unused.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _times(axes: Axes, rungs: Sequence[Rung]) -> None:
    # A figure stands behind all that is drawn of its rung.
    ends = [max((r["step_ms"] for r in rung["rounds"]), default=0.0) for rung in rungs]
    ends = [max(end, rung["step_ms_quartile_3"] or 0.0) for end, rung in zip(ends, rungs, strict=True)]
    title = "Time of a step, ms: median, quartiles, rounds"
    _bars(axes, rungs, title, {"": [rung["step_ms"] for rung in rungs]}, ends)
    for place, rung in enumerate(rungs):
        if rung["step_ms"] is None:
            continue
        axes.hlines(place, rung["step_ms_quartile_1"], rung["step_ms_quartile_3"], color="black", linewidth=2)
        rounds = [r["step_ms"] for r in rung["rounds"]]
        axes.plot(rounds, [place] * len(rounds), "o", color="white", markeredgecolor="black", markersize=4)


def _bars(
    axes: Axes,
    rungs: Sequence[Rung],
    title: str,
    series: Mapping[str, Sequence[float | None]],
    ends: Sequence[float] | None = None,
) -> None:
    """Horizontal bars, a group for each rung, the first rung above; a figure stands behind its bar and its end."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * height
        axes.barh(
            [place + offset for place in range(len(rungs))],
            [value or 0.0 for value in values],
            height,
            color=(_FIRST, _SECOND)[number],
            label=name,
        )
        for place, (rung, value) in enumerate(zip(rungs, values, strict=True)):
            is_bound = name == "device" and rung.get("device_is_upper_bound", False)
            axes.annotate(
                "did not run" if rung["failure"] else bounded(_short(value), is_bound),
                (max(value or 0.0, 0.0 if ends is None else ends[place]), place + offset),
                xytext=(6, 0),
                textcoords="offset points",
                verticalalignment="center",
                fontsize=8,
            )
    axes.set_yticks(range(len(rungs)), [rung["name"].replace("$", r"\$") for rung in rungs])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10)
    if len(series) > 1:
        axes.legend(fontsize=8)


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _lines(axes: Axes, title: str, curves: Curves, skipped: int = 0) -> None:
    """A line for each rung; `skipped` keeps a rung's colour in every panel."""
    for place, (name, curve) in enumerate(curves.items(), start=skipped):
        # A name that begins with an underscore would not be in the legend.
        label = name.replace("$", r"\$").lstrip("_")
        values = [float("nan") if value is None else value for value in curve]
        axes.plot(range(1, len(curve) + 1), values, color=f"C{place % 10}", linewidth=1.2, label=label)
    axes.set_title(title.replace("$", r"\$"), fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
