"""Write a ladder down: a table to read, ladder.json with every raw sample, ladder.csv with a row a rung."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusestep import durable
from fusestep.errors import UserError
from fusestep.ladder.results import Comparison, Ladder, RungResult
from fusestep.ladder.statistics import CONFIDENCE

if TYPE_CHECKING:
    from rich.console import Console

#: Of ladder.json; raised whenever a reader of the old form would misread the new one.
SCHEMA = 1

JSON, CSV = "ladder.json", "ladder.csv"


def check_folder(folder: Path) -> None:
    """Find out before anything runs whether a ladder can be kept in `folder`.

    Raises: UserError where it already holds one, is no folder, or cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder.")
    for name in (JSON, CSV):
        if (folder / name).exists():
            raise UserError(f"--out {folder} already holds a ladder ({name}); name another folder, or remove that one.")
    obstacle = durable.obstacle(folder)
    if obstacle is not None:
        raise UserError(f"--out {folder} cannot be made: {obstacle} is not a folder that you may write to.")


def save(ladder: Ladder, folder: Path) -> None:
    """Write ladder.json and ladder.csv into `folder`, made where it is missing: both whole, or neither.

    Raises: UserError as `check_folder`; OSError when the disk is full or fails, with nothing left behind.
    """
    check_folder(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # ladder.json comes last, so that where it is the other one is too.
    text = json.dumps(as_dict(ladder), indent=1, allow_nan=False) + "\n"
    try:
        durable.write_together({folder / CSV: as_csv(ladder), folder / JSON: text})
    finally:
        if made and not (folder / JSON).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def as_dict(ladder: Ladder) -> dict[str, Any]:
    """Plain values, fit for JSON: the `schema`, the environment, what was asked, and every rung with its raw rounds.

    Times are in ms, memory in bytes; a number that is not finite is None.
    """
    plain: dict[str, Any] = _finite(
        {
            "schema": SCHEMA,
            "environment": dict(ladder.environment),
            "plan": dict(ladder.plan),
            "notes": list(ladder.notes),
            "rungs": [_rung_as_dict(result) for result in ladder.rungs],
        }
    )
    return plain


def as_csv(ladder: Ladder) -> str:
    """One row a rung, its figures without the raw rounds."""
    rows = [_row(result) for result in ladder.rungs]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show(ladder: Ladder, console: Console) -> None:
    """Print the table, what ran as what, and every remark that a reader needs to believe it."""
    from rich.table import Table

    plan, environment = ladder.plan, ladder.environment
    on_gpu = environment["gpu"] is not None
    place = environment["gpu"] or f"{environment['cpu']}, {_threads(ladder)}"
    model = plan["model"]
    console.print(
        f"Ladder on {place} | torch {environment['torch']}, Triton {environment['triton'] or 'missing'}"
        + (f", driver {environment['driver']}" if on_gpu else ""),
        highlight=False,
    )
    console.print(
        f"preset {plan['preset']}: {plan['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers × "
        f"{model['width']} wide, context {model['context']}, vocabulary {model['vocab_size']}, "
        f"batch {plan['batch']} ({plan['tokens_per_step']} tokens a step) | "
        f"{_counted(plan['rounds'], 'round')} of "
        f"{plan['steps']} steps, data {plan['data']}",
        highlight=False,
    )
    first = ladder.rungs[0].rung.name
    # Two tables, so that each fits a narrow window.
    costs, gains = (Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold") for _ in range(2))
    costs.add_column("rung", no_wrap=True)
    for title in ("step ms", "quartiles", "tokens/s", "peak", "first ms", *(("device ms",) if on_gpu else ())):
        costs.add_column(title, justify="right", no_wrap=True)
    for title in ("rung", f"over {first}", "over previous", "loss off by", "fused part runs as"):
        gains.add_column(title, no_wrap=title == "rung")
    for result in ladder.rungs:
        costs.add_row(result.rung.name, *_costs(result, on_gpu=on_gpu))
        gains.add_row(result.rung.name, *_gains(result))
    for table in (costs, gains):
        console.print()
        console.print(table, highlight=False)
    console.print()
    for line in _remarks(ladder):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def _threads(ladder: Ladder) -> str:
    """How many threads the measured processes computed with."""
    threads = next((r.threads for result in ladder.rungs for r in result.rounds), ladder.environment["threads"])
    return _counted(threads, "thread")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _costs(result: RungResult, *, on_gpu: bool) -> list[str]:
    step, speed, peak, first = result.step, result.tokens_per_second, result.peak, result.first_step
    if step is None or speed is None or peak is None or first is None:
        return ["did not run"]
    return [
        f"{step.median:.2f}",
        f"{step.low:.2f}–{step.high:.2f}",
        f"{speed:,.0f}",
        "" if peak.headline is None else f"{peak.headline / 2**20:,.0f} MiB",
        f"{first:,.0f}",
        *([f"{result.device:.2f}"] if on_gpu and result.device is not None else []),
    ]


def _gains(result: RungResult) -> list[str]:
    if result.failure is not None:
        return ["did not run"]
    verdict = result.verdict
    return [
        _gain_in_words(result.over_first),
        _gain_in_words(result.over_previous),
        "" if verdict is None else f"{verdict.deviation:.4%}" + ("" if verdict.passed else " (too far)"),
        _runs_as(result),
    ]


def _gain_in_words(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    if comparison.gain is None:
        return "no claim"
    gain = comparison.gain
    interval = "" if gain.low is None else f" ({gain.low:.2f}–{gain.high:.2f})"
    return f"{gain.ratio:.2f}×{interval}" + (" no claim" if comparison.claim == "none" else "")


def _runs_as(result: RungResult) -> str:
    if result.rung.fused is None:
        return "torch's own"
    part = result.served_by_reference([result.rung.fused])
    if part is not None:
        return "emulated" if part.implementation == "emulated" else "reference, not fused"
    if result.rung.fused == "train_step":
        return "one CUDA graph"
    return "Triton kernel" if result.recipe.precision != "fp8" else "the device's FP8"


def _remarks(ladder: Ladder) -> list[str]:
    """Everything beside the figures: failures, missing claims, losses and their cause, the method."""
    remarks: dict[str, list[str]] = {}

    def remark(text: str, name: str) -> None:
        names = remarks.setdefault(text, [])
        if name not in names:
            names.append(name)

    for result in ladder.rungs:
        name = result.rung.name
        if result.failure is not None:
            remark(f"did not run: {result.failure}", name)
            continue
        for comparison in (result.over_first, result.over_previous):
            if comparison is None:
                continue
            if comparison.claim == "none":
                remark(f"no speed-up is claimed: {comparison.reason}", name)
            elif comparison.claim == "slower" and comparison.gain is not None:
                remark(
                    f"slower than {comparison.over}, {comparison.gain.ratio:.2f}×; likely because {comparison.reason}",
                    name,
                )
            elif comparison.claim == "no difference":
                why = f"; {comparison.reason}, so raise --rounds on a machine that is otherwise idle"
                remark(
                    f"no difference from {comparison.over} that these rounds can tell"
                    + (why if comparison.reason else ""),
                    name,
                )
        if result.saturation is not None:
            worst = result.saturation
            remark(
                f"of the elements of {worst['module']}'s {worst['tensor']}, the worst of {worst['tensors']} tensors, "
                f"{worst['saturated']:.4%} were saturated and {worst['flushed']:.4%} flushed to zero during the gate",
                name,
            )
        if result.is_launch_bound:
            remark(
                f"launch-bound: the device is busy {result.device:.2f} ms of a step, the host queues it in "
                f"{result.host:.2f} ms",
                name,
            )
        if any(not r.timing.stable for r in result.rounds):
            remark("still drifting when its warm-up had to end", name)
    lines = [f"{', '.join(names)}: {text.rstrip('.')}." for text, names in remarks.items()]
    lines += ladder.notes
    baseline = next((r.optimizer for r in ladder.rungs[0].rounds), None)
    lines.append(
        (f"{ladder.rungs[0].rung.name} is {baseline}; " if baseline else "")
        + "FP32 is full FP32, TF32 is off. × is times faster, with its "
        f"{CONFIDENCE:.0%} interval over the rounds; first ms is the slowest first step."
    )
    return lines


def _rung_as_dict(result: RungResult) -> dict[str, Any]:
    return {
        **_row(result),
        "summary": result.rung.summary,
        "fused": result.rung.fused,
        "recipe": asdict(result.recipe),
        "gate": None if result.verdict is None else asdict(result.verdict),
        "losses": list(result.losses),
        "saturation": None if result.saturation is None else dict(result.saturation),
        "over_first": _comparison_as_dict(result.over_first),
        "over_previous": _comparison_as_dict(result.over_previous),
        "doubling": result.doubling,
        "log": result.log,
        "rounds": [{**asdict(r), "step_ms": r.timing.step} for r in result.rounds],
    }


def _comparison_as_dict(comparison: Comparison | None) -> dict[str, Any] | None:
    return None if comparison is None else asdict(comparison)


def _row(result: RungResult) -> dict[str, Any]:
    """The figures of a rung, flat."""
    step, peak, verdict = result.step, result.peak, result.verdict
    row: dict[str, Any] = {
        "name": result.rung.name,
        "status": "failed" if result.failure is not None else "measured",
        "failure": result.failure,
        "step_ms": step and step.median,
        "step_ms_quartile_1": step and step.low,
        "step_ms_quartile_3": step and step.high,
        "first_step_ms": result.first_step,
        "tokens_per_s": result.tokens_per_second,
        "host_ms": result.host,
        "device_ms": result.device,
        "launch_bound": result.is_launch_bound,
        "peak_bytes": peak and peak.headline,
        "peak_of": peak and ("GPU memory reserved" if peak.reserved is not None else "resident set"),
        "peak_allocated_bytes": peak and peak.allocated,
        "runs_as": _runs_as(result) if result.rounds else None,
        "loss": verdict and verdict.loss,
        "loss_deviation": verdict and verdict.deviation,
        "gate_passed": verdict and verdict.passed,
    }
    for key, comparison in (("over_first", result.over_first), ("over_previous", result.over_previous)):
        gain = comparison and comparison.gain
        row |= {
            f"gain_{key}": gain and gain.ratio,
            f"gain_{key}_low": gain and gain.low,
            f"gain_{key}_high": gain and gain.high,
            f"claim_{key}": comparison and comparison.claim,
        }
    return row


def _finite(value: Any) -> Any:
    """The value with every number that is not finite replaced by None, which JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
