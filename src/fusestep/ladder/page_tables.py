"""The tables of ladder.html, from the plain values of ladder.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusestep.ladder.words import bounded

Rung = Mapping[str, Any]


def table(rungs: Sequence[Rung], contenders: Sequence[Rung]) -> dict[str, Any]:
    """Columns and cells; a column of which no rung has a value is left out."""
    peers = list(dict.fromkeys(one["library"] for one in contenders if one["library"]))
    natives = ["native"] if any(one["kind"] == "native" for one in contenders) else []
    titles = {"native": "over it", **{peer: f"over {peer}" for peer in peers}}
    columns: list[tuple[str, bool, list[tuple[Any, str]]]] = [
        ("rung", False, [(rung["name"], rung["name"]) for rung in rungs]),
        ("verdict", False, [(rung["decision"], rung["decision"] or "") for rung in rungs]),
        ("step ms", True, [_figure(rung["step_ms"], "{:.2f}", missing=missing(rung)) for rung in rungs]),
        ("quartiles", True, [(rung["step_ms_quartile_1"], _quartiles(rung)) for rung in rungs]),
        ("over first", True, [(rung["gain_over_first"], _gain(rung, "over_first")) for rung in rungs]),
        ("over previous", True, [(rung["gain_over_previous"], _gain(rung, "over_previous")) for rung in rungs]),
        ("device's time over previous", True, [_device_gain(rung) for rung in rungs]),
        *(("best native PyTorch", False, [(rung[name], rung[name] or "") for rung in rungs]) for name in natives),
        *(
            (titles[name], True, [(rung[f"gain_over_{name}"], _gain(rung, f"over_{name}")) for rung in rungs])
            for name in (*natives, *peers)
        ),
        ("tokens/s", True, [_figure(rung["tokens_per_s"], "{:,.0f}") for rung in rungs]),
        ("peak MiB", True, [_figure(rung["peak_bytes"], "{:,.0f}", 2**20) for rung in rungs]),
        ("first step ms", True, [_figure(rung["first_step_ms"], "{:,.0f}") for rung in rungs]),
        ("host ms", True, [_figure(rung["host_ms"], "{:.2f}") for rung in rungs]),
        ("device ms", True, [(rung["device_ms"], device(rung)) for rung in rungs]),
        ("TFLOP/s", True, [_figure(rung["flops_per_s"], "{:,.3g}", 1e12) for rung in rungs]),
        ("of a product's", True, [_figure(rung["of_product_ceiling"], "{:.0%}") for rung in rungs]),
        ("GB/s", True, [_figure(rung["bytes_per_s"], "{:,.3g}", 1e9) for rung in rungs]),
        ("of a copy's", True, [_figure(rung["of_copy_ceiling"], "{:.0%}") for rung in rungs]),
        ("loss off by", True, [_figure(rung["loss_deviation"], "{:.4%}") for rung in rungs]),
        ("gate", False, [(rung["gate_passed"], _gate(rung)) for rung in rungs]),
        ("fused part runs as", False, [(rung["runs_as"], rung["runs_as"] or "") for rung in rungs]),
    ]
    return _cells(columns, len(rungs))


def _cells(columns: Sequence[tuple[str, bool, list[tuple[Any, str]]]], rows: int) -> dict[str, Any]:
    shown = [column for column in columns if any(text for _, text in column[2])]
    return {
        "columns": [{"title": title, "is_number": is_number} for title, is_number, _ in shown],
        "rows": [
            [
                {"value": "" if value is None else value, "text": text, "is_number": is_number}
                for _, is_number, cells in shown
                for value, text in [cells[place]]
            ]
            for place in range(rows)
        ],
    }


def contenders(measured: Sequence[Rung]) -> dict[str, Any] | None:
    """What stands beside the rungs, with its own figures; None where nothing does."""
    if not measured:
        return None
    columns: list[tuple[str, bool, list[tuple[Any, str]]]] = [
        ("beside", False, [(one["name"], one["name"]) for one in measured]),
        ("version", False, [(one["version"], one["version"] or "") for one in measured]),
        ("numbers", False, [(one["numbers"], one["numbers"]) for one in measured]),
        ("status", False, [(one["status"], one["status"]) for one in measured]),
        ("step ms", True, [_figure(one["step_ms"], "{:.2f}") for one in measured]),
        ("quartiles", True, [(one["step_ms_quartile_1"], _quartiles(one)) for one in measured]),
        ("tokens/s", True, [_figure(one["tokens_per_s"], "{:,.0f}") for one in measured]),
        ("peak MiB", True, [_figure(one["peak_bytes"], "{:,.0f}", 2**20) for one in measured]),
        ("first step ms", True, [_figure(one["first_step_ms"], "{:,.0f}") for one in measured]),
        ("host ms", True, [_figure(one["host_ms"], "{:.2f}") for one in measured]),
        ("device ms", True, [(one["device_ms"], device(one)) for one in measured]),
        ("TFLOP/s", True, [_figure(one["flops_per_s"], "{:,.3g}", 1e12) for one in measured]),
        ("of a product's", True, [_figure(one["of_product_ceiling"], "{:.0%}") for one in measured]),
        ("first losses off by", True, [_figure((one["check"] or {}).get("deviation"), "{:.4%}") for one in measured]),
    ]
    return _cells(columns, len(measured))


def kernels(measured: Sequence[Rung]) -> list[tuple[str, list[dict[str, Any]]]]:
    """What takes the time, of each that was profiled."""
    return [(one["name"], one["kernels"]) for one in measured if one.get("kernels")]


def _figure(value: float | None, form: str, unit: float = 1.0, missing: str = "") -> tuple[float | None, str]:
    return value, missing if value is None else form.format(value / unit)


def missing(rung: Rung) -> str:
    if rung["failure"] is not None:
        return "did not run"
    return "changes nothing" if rung.get("unchanged") is not None else ""


def device(rung: Rung) -> str:
    """The device's time for a step, in ms."""
    ms = rung["device_ms"]
    # A ladder.json of before there were bounds lacks it.
    return "" if ms is None else bounded(f"{ms:.2f}", rung.get("device_is_upper_bound", False))


def _quartiles(rung: Rung) -> str:
    low, high = rung["step_ms_quartile_1"], rung["step_ms_quartile_3"]
    return "" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def _gain(rung: Rung, over: str) -> str:
    ratio, low, high = (rung[f"gain_{over}{end}"] for end in ("", "_low", "_high"))
    claim = rung[f"claim_{over}"]
    if ratio is None:
        return "" if claim is None else "no claim"
    interval = "" if low is None else f" ({low:.2f}–{high:.2f})"
    return f"{ratio:.2f}×{interval}" + (" no claim" if claim == "none" else "")


def _device_gain(rung: Rung) -> tuple[float | None, str]:
    # A ladder.json of before there was one lacks it.
    ratio, low, high = (rung.get(f"device_gain_over_previous{end}") for end in ("", "_low", "_high"))
    if ratio is None:
        return None, ""
    return ratio, f"{ratio:.2f}×" + ("" if low is None else f" ({low:.2f}–{high:.2f})")


def _gate(rung: Rung) -> str:
    return {None: "", True: "passed", False: "failed"}[rung["gate_passed"]]
