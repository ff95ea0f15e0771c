"""Write a ladder down: ladder.json with every raw sample, ladder.csv with a row a rung, a page and pictures of it."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusestep import durable
from fusestep.errors import UserError
from fusestep.ladder import journal, verdict
from fusestep.ladder.plan import Plan
from fusestep.ladder.results import Comparison, ContenderResult, Ladder, RungResult
from fusestep.ladder.words import (
    model,
    native_of,
    numbers_of,
    over_peer,
    peers_of,
    place,
    remarks_of,
    runs_as,
    status_of,
    steps_in_words,
    summary_of,
)

#: Of ladder.json; raised whenever a reader of the old form would misread the new one.
SCHEMA = 1

JSON, CSV, HTML, PNG = "ladder.json", "ladder.csv", "ladder.html", "ladder.png"

#: What the extra `report` brings: the file, the package that it is made with, the module that makes it.
_DRAWN = ((HTML, "jinja2", "fusestep.ladder.page"), (PNG, "matplotlib", "fusestep.ladder.plots"))


def check_place(folder: Path) -> None:
    """Find out whether files can be kept in `folder`, whatever it holds.

    Raises: UserError where it is no folder, or can neither be made nor written to.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder.")
    obstacle = durable.obstacle(folder)
    if obstacle is not None:
        raise UserError(
            f"--out {folder} cannot be used: {obstacle} is not a folder that you may write to; name another."
        )


def check_folder(folder: Path, *, resume: bool = False) -> None:
    """Find out before anything runs whether a ladder can be kept in `folder`.

    Raises: UserError where it already holds one and is not to go on, is no folder, or cannot be written to.
    """
    check_place(folder)
    if resume:
        return
    for name in (JSON, CSV, HTML, PNG):
        if (folder / name).exists():
            raise UserError(f"--out {folder} already holds a ladder ({name}); name another folder, or remove that one.")
    if (folder / journal.FILE).exists():
        raise UserError(
            f"--out {folder} holds a ladder that was cut off; go on with it by --resume, name another folder, or "
            f"remove {folder / journal.FILE}."
        )


def save(ladder: Ladder, folder: Path) -> list[str]:
    """Write the files into `folder`, made where it is missing: all of them whole, or none.

    Returns: a sentence for each file that is left out, since the package that draws it is not installed.
    Raises: UserError as `check_folder`; OSError when the disk is full or fails, with nothing left behind.
    """
    check_folder(folder, resume=True)
    plain = as_dict(ladder)
    drawn, left_out = _drawn(plain, (HTML, PNG))
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    try:
        # ladder.json comes last, so that where it is the others are too.
        durable.write_together(
            {folder / CSV: as_csv(ladder), **{folder / name: file for name, file in drawn.items()}, folder / JSON: text}
        )
    finally:
        if made and not (folder / JSON).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    (folder / journal.FILE).unlink(missing_ok=True)
    return left_out


def finished(folder: Path, plan: Plan) -> dict[str, Any] | None:
    """The ladder.json of a folder whose ladder is finished; None where it is not.

    Raises: UserError where that ladder was planned otherwise, or where the file is none of ours.
    """
    if not (folder / JSON).exists():
        return None
    kept = journal.read(folder / JSON, SCHEMA)
    journal.check_plan(folder, kept, plan.as_dict())
    if "verdict" not in kept:
        raise UserError(f"--out {folder} holds a finished ladder of an older fusestep; name another folder.")
    return kept


def complete(kept: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what a finished ladder's folder lacks, as after an installation of the extra; returns as `save`."""
    drawn, left_out = _drawn(kept, [name for name in (HTML, PNG) if not (folder / name).exists()])
    if drawn:
        durable.write_together({folder / name: file for name, file in drawn.items()})
    (folder / journal.FILE).unlink(missing_ok=True)
    return left_out


def _drawn(plain: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, str | bytes], list[str]]:
    """The files that the extra brings, and a sentence for those that cannot be made."""
    drawn: dict[str, str | bytes] = {}
    missing: dict[str, str] = {}
    for name, package, module in _DRAWN:
        if name not in names:
            continue
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != package:
                raise
            missing[name] = package
            continue
        draw: Callable[[Mapping[str, Any]], str | bytes] = importlib.import_module(module).draw
        drawn[name] = draw(plain)
    if not missing:
        return drawn, []
    files, packages = (" and ".join(words) for words in (missing, missing.values()))
    verb = "is" if len(missing) == 1 else "are"
    return drawn, [
        f"{files} {verb} left out, since {packages} {verb} not installed; run pip install 'fusestep[report]', then "
        "this command again with --resume, which measures nothing anew."
    ]


def as_dict(ladder: Ladder) -> dict[str, Any]:
    """Plain values, fit for JSON: the `schema`, the verdict, the environment, the plan, every rung with its rounds.

    Times are in ms, memory in bytes; a number that is not finite is None.
    """
    conclusion = verdict.conclude(ladder)
    rows = _rows(ladder, conclusion)
    plain: dict[str, Any] = _finite(
        {
            "schema": SCHEMA,
            "verdict": {
                **asdict(conclusion),
                **{name.replace(" ", "_"): conclusion.named(name) for name in verdict.DECISIONS},
            },
            "title": {"place": place(ladder), "model": model(ladder)},
            "environment": dict(ladder.environment),
            "plan": {**ladder.plan, "steps_timed": steps_in_words(ladder)},
            "ceilings": None if ladder.ceilings is None else asdict(ladder.ceilings),
            "notes": list(ladder.notes),
            "remarks": remarks_of(ladder),
            "rungs": [_rung_as_dict(result, row) for result, row in zip(ladder.rungs, rows, strict=True)],
            "contenders": [_contender_as_dict(result, ladder) for result in ladder.contenders],
        }
    )
    return plain


def as_csv(ladder: Ladder) -> str:
    """One row a rung, with what the verdict says of it and its figures without the raw rounds."""
    rows = _rows(ladder, verdict.conclude(ladder))
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(ladder: Ladder, conclusion: verdict.Conclusion) -> list[dict[str, Any]]:
    findings = {finding.rung: finding for finding in conclusion.findings}
    rows = []
    for result in ladder.rungs:
        finding = findings.get(result.rung.name)
        said = {"decision": finding and finding.decision, "why": finding and finding.why}
        said |= {"decided_by": finding and finding.by}
        rows.append({"name": result.rung.name, **said, **_row(result, ladder)})
    return rows


def _rung_as_dict(result: RungResult, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "summary": result.rung.summary,
        "fused": result.rung.fused,
        "recipe": asdict(result.recipe),
        "gate": None if result.verdict is None else asdict(result.verdict),
        "losses": list(result.losses),
        "saturation": None if result.saturation is None else dict(result.saturation),
        "over_first": _comparison_as_dict(result.over_first),
        "over_previous": _comparison_as_dict(result.over_previous),
        "beside": {name: asdict(comparison) for name, comparison in result.beside.items()},
        "kernels": [asdict(kernel) | {"short": kernel.short} for kernel in result.kernels],
        "doubling": result.doubling,
        "log": result.log,
        "rounds": [{**asdict(r), "step_ms": r.timing.step} for r in result.rounds],
    }


def _comparison_as_dict(comparison: Comparison | None) -> dict[str, Any] | None:
    return None if comparison is None else asdict(comparison)


def _contender_as_dict(result: ContenderResult, ladder: Ladder) -> dict[str, Any]:
    return {
        "name": result.contender.name,
        "kind": result.contender.kind,
        "library": result.contender.library or None,
        "version": result.version,
        "summary": summary_of(result),
        "status": status_of(result),
        "failure": result.failure,
        "absent": result.absent,
        "setbacks": list(result.setbacks),
        "check": None if result.check is None else asdict(result.check),
        **_figures(result, ladder),
        "recipe": asdict(result.recipe),
        "kernels": [asdict(kernel) | {"short": kernel.short} for kernel in result.kernels],
        "log": result.log,
        "rounds": [{**asdict(r), "step_ms": r.timing.step} for r in result.rounds],
    }


def _row(result: RungResult, ladder: Ladder) -> dict[str, Any]:
    """The figures of a rung, flat."""
    verdict = result.verdict
    failed = "failed" if result.failure is not None else "measured"
    row: dict[str, Any] = {
        "status": failed if result.unchanged is None else "changes nothing",
        "failure": result.failure,
        "unchanged": result.unchanged,
        **_figures(result, ladder),
        "runs_as": runs_as(result) if result.rounds else None,
        "loss": verdict and verdict.loss,
        "loss_deviation": verdict and verdict.deviation,
        "gate_passed": verdict and verdict.passed,
    }
    for key, comparison in (("over_first", result.over_first), ("over_previous", result.over_previous)):
        row |= _gain(key, comparison)
        device = comparison and comparison.device
        ends = {"": device and device.ratio, "_low": device and device.low, "_high": device and device.high}
        row |= {f"device_gain_{key}{end}": value for end, value in ends.items()}
    if any(one.contender.kind == "native" for one in ladder.contenders):
        native = native_of(result)
        row |= {"native": native and native.over, **_gain("over_native", native)}
    for peer in peers_of(ladder):
        fastest = ladder.fastest(peer)
        row |= {f"{peer}": fastest and fastest.contender.name, **_gain(f"over_{peer}", over_peer(result, ladder, peer))}
    row |= {f"top_kernel_{number}": None for number in (1, 2, 3)}
    for number, kernel in enumerate(result.kernels[:3], start=1):
        row[f"top_kernel_{number}"] = f"{kernel.share:.1%} {kernel.short}"
    return row


def _gain(key: str, comparison: Comparison | None) -> dict[str, Any]:
    gain = comparison and comparison.gain
    return {
        f"gain_{key}": gain and gain.ratio,
        f"gain_{key}_low": gain and gain.low,
        f"gain_{key}_high": gain and gain.high,
        f"claim_{key}": comparison and comparison.claim,
    }


def _figures(result: RungResult | ContenderResult, ladder: Ladder) -> dict[str, Any]:
    """Times, memory and rates, flat."""
    step, peak = result.step, result.peak
    flops, moved, ceilings = result.flops_per_second, result.bytes_per_second, ladder.ceilings
    product = None if ceilings is None else ceilings.products.get(result.recipe.precision)
    return {
        "numbers": numbers_of(result.recipe),
        "step_ms": step and step.median,
        "step_ms_quartile_1": step and step.low,
        "step_ms_quartile_3": step and step.high,
        "first_step_ms": result.first_step,
        "tokens_per_s": result.tokens_per_second,
        "host_ms": result.host,
        "device_ms": result.device,
        "device_is_upper_bound": result.is_device_bound,
        "launch_bound": result.is_launch_bound,
        "peak_bytes": peak and peak.headline,
        "peak_of": peak and ("GPU memory reserved" if peak.reserved is not None else "resident set"),
        "peak_allocated_bytes": peak and peak.allocated,
        "flops_per_step": result.flops,
        "flops_per_s": flops,
        "of_product_ceiling": flops and product and flops / product,
        "bytes_per_step": result.moved,
        "bytes_per_s": moved,
        "of_copy_ceiling": moved and ceilings and moved / ceilings.copy,
    }


def _finite(value: Any) -> Any:
    """The value with every number that is not finite replaced by None, which JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
