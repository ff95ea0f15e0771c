"""docs/speed.md, made from the results files: every target, what was reached, and why where it was not.

Results are the newest of each part in benchmarks/results/. A row that misses its target is explained in
benchmarks/explanations.json, under the row's name; a row that meets it, or was not measured, has none there. So are
rows without a target that are worse than they should be (beside_targets.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import beside_targets
import rank_tables
import targets
from targets import Target

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "speed.md"
EXPLANATIONS = ROOT / "benchmarks" / "explanations.json"
CHART = "scaling.svg"
NOT_EXPLAINED = "not explained yet."
Data = dict[str, Any]

HEAD = """\
# Speed: targets and what was reached

This page is written by `make figures` from the files in `benchmarks/results/`; `make bench` measures them anew on the
GPU at hand. [measuring.md](measuring.md) says how a figure comes about. "In the same run" is another implementation on
the same GPU, seconds apart. Other figures were measured on the same model of GPU on {date}, with other versions and
partly in other ways: they are there for orientation. A row is met where ours reaches the target and, in the same run,
{share:.0%} of the best other implementation.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A target and what came of it: `ours` is None where nothing was measured.

    `rival` is the best of the others in the same run, by name and figure, and `beside_rival` what ours is compared with
    it by; `missed` says what was not reached, `variant` which way of ours it is.
    """

    target: Target
    ours: float | None = None
    floor: float | None = None
    rival: tuple[str, float] | None = None
    beside_rival: float | None = None
    missed: str | None = None
    variant: str | None = None

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.ours is None:
            return "not measured"
        return "met" if self.missed is None else f"missed: {self.missed}"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; every column after the first holds numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def judged(target: Target, results: dict[str, Data]) -> Row:
    """What came of a target."""
    result = results.get(target.part)
    rows = [] if result is None else [row for row in derived(result["rows"]) if "failed" not in row]
    best = min if target.better == "less" else max
    mine = [(value, row) for row in rows if target.mine(row) and (value := target.value(row)) is not None]
    if not mine:
        return Row(target)
    ours, row = best(mine, key=lambda pair: pair[0])
    compared = target.compared or target.value
    others = [
        (str(one.get("implementation", one.get("configuration"))), value)
        for one in [*rows, *([] if result is None else result.get("on_ladder", []))]
        if target.rivals is not None and target.rivals(one) and (value := compared(one)) is not None
    ]
    beside_rival = compared(row)
    rival = best(others, key=lambda pair: pair[1]) if others and beside_rival is not None else None
    floor = None if target.floor is None else target.floor(row)
    missed = _missed(target, ours, rival, beside_rival)
    return Row(
        target, ours, floor, rival, beside_rival, missed, None if target.variant is None else target.variant(row)
    )


def _missed(target: Target, ours: float, rival: tuple[str, float] | None, beside_rival: float | None) -> str | None:
    """What was not reached, or None."""

    def over(figure: float, bound: float) -> float:
        """How many times the bound ours is worse; 1 and less is reached."""
        return figure / bound if target.better == "less" else bound / figure

    behind = 1.0 if rival is None or beside_rival is None else over(beside_rival, rival[1])
    if target.bound_is_rival:
        return f"{behind - 1:.1%} over {rival[0]}" if rival is not None and behind > 1 else None
    if target.goal is not None and over(ours, target.goal) > 1:
        return f"by {over(ours, target.goal) - 1:.1%}"
    if rival is not None and behind * targets.OF_BEST_PEER > 1:
        return f"{behind - 1:.1%} behind {rival[0]}"
    return None


def derived(rows: list[Data]) -> list[Data]:
    """The rows with what follows from several: which configuration is claimed, what growth keeps of the floor."""
    made = [dict(row) for row in rows]
    for precision in (targets.OURS_BF16, targets.OURS_FP8):
        ours = [
            row
            for row in made
            if row.get("configuration") in precision and row.get("model") in targets.STEP_GOALS and "failed" not in row
        ]
        if ours:
            _claimed(ours)["is_claimed"] = True
    for vocabulary, memory in targets.LOSS_MEMORY.items():
        ours = [
            row
            for row in made
            if row.get("vocabulary") == vocabulary
            and str(row["implementation"]).startswith("fusestep")
            and "failed" not in row
        ]
        if ours:
            fitting = [row for row in ours if row["extra_bytes"] <= memory * 1e9]
            min(fitting or ours, key=lambda row: row["device_ms"])["is_claimed"] = True
    for row in made:
        if "axis" not in row:
            continue
        same = [one for one in made if all(one.get(n) == row[n] for n in ("configuration", "axis"))]
        shares = [one["of_floor"] for one in sorted(same, key=lambda one: one["size"])]
        if row["size"] == max(one["size"] for one in same) and len(shares) > 1:
            row["share_kept"] = min(shares[place] / max(shares[:place]) for place in range(1, len(shares)))
    return made


def _claimed(ours: list[Data]) -> Data:
    """Of one precision's configurations of a step the one whose time and memory are claimed.

    Of those that reach the target for the time it is the one that takes least memory; if none does, of those that are
    as fast as the fastest, to 1%.
    """
    enough = max(targets.STEP_GOALS[ours[0]["model"]], 1.01 * min(row["device_ms"] for row in ours))
    return min((row for row in ours if row["device_ms"] <= enough), key=lambda row: row["peak_reserved_bytes"])


def all_rows(results: dict[str, Data]) -> list[Row]:
    """Every target, judged."""
    return [judged(target, results) for target in targets.targets()]


def counted(rows: list[Row]) -> str:
    """How many there are of each verdict."""
    measured = [row for row in rows if row.ours is not None]
    met = sum(row.missed is None for row in measured)
    return f"{len(rows)} rows: {met} met, {len(measured) - met} missed, {len(rows) - len(measured)} not measured."


def cells(row: Row) -> list[str]:
    """A line of a table."""
    target = row.target
    goal = "" if target.goal is None else target.show(target.goal)
    return [
        target.label,
        "" if row.floor is None else target.show(row.floor),
        target.quoted,
        _beside(row),
        "" if row.ours is None else ", ".join(filter(None, (target.show(row.ours), row.variant))),
        "≤ the best other" if target.bound_is_rival else f"{'≤' if target.better == 'less' else '≥'} {goal}",
        row.verdict,
    ]


def of_parts(results: list[Data]) -> dict[str, Data]:
    """The results of each part on the GPU that the targets are for; with those of whole steps, `on_ladder` has the
    memory of libraries that were not installed there, from the ladder of the same model and batch.
    """
    here = [result for result in results if result["environment"]["gpu"] == targets.GPU]
    ladders = [result for result in here if "rungs" in result]
    return {
        r["part"]: r | ({"on_ladder": _on_ladder(r, ladders)} if r["part"].startswith("steps-") else {})
        for r in here
        if "part" in r
    }


def _on_ladder(result: Data, ladders: list[Data]) -> list[Data]:
    """Rows of other libraries on the ladder of a result's model, without those that it has itself. Times, which differ
    more from run to run, are left out.
    """
    step = next((row for row in result["rows"] if "failed" not in row), None)
    known = {row["configuration"] for row in result["rows"]}
    found = []
    for ladder in ladders:
        plan = ladder["plan"]
        if step is None or (plan["parameters"], plan.get("tokens_per_step")) != (step["parameters"], step["tokens"]):
            continue
        for one in ladder.get("contenders", ()):
            if one["kind"] == "peer" and one["peak_bytes"] is not None and one["name"] not in known:
                precision, _, dtypes = one["numbers"].lower().partition(", ")
                row = {"model": step["model"], "configuration": f"{one['name']}, on the ladder", "precision": precision}
                found.append(row | {"moments": dtypes.split()[-1], "peak_reserved_bytes": one["peak_bytes"]})
    return found


def _beside(row: Row) -> str:
    """The best other of the same run, and ours as it is compared with it where that is another figure."""
    if row.rival is None:
        return ""
    words = f"{row.rival[0]} {row.target.show(row.rival[1])}"
    if row.target.compared is None or row.beside_rival is None:
        return words
    return f"{words}, by events; ours {row.target.show(row.beside_rival)}"


def page(results: list[Data], explanations: dict[str, str]) -> str:
    """The whole page."""
    by_part = of_parts(results)
    rows = all_rows(by_part)
    parts = [HEAD.format(date=targets.QUOTED_ON, share=targets.OF_BEST_PEER), counted(rows)]
    for name in dict.fromkeys(row.target.table for row in rows):
        own = [row for row in rows if row.target.table == name]
        header = ["row", "floor", f"others, {targets.QUOTED_ON}", "best other, same run", "ours", "target", ""]
        parts.append(f"## {name}\n\n{table(header, map(cells, own))}")
        parts += [targets.WORDS[name]] if name in targets.WORDS else []
        reasons = [
            f"- **{row.target.label}** ({row.verdict}): {explanations.get(row.target.name, NOT_EXPLAINED)}"
            for row in own
            if row.ours is not None and row.missed is not None
        ]
        if reasons:
            parts.append("Why not:\n\n" + "\n".join(reasons))
        parts += [part for part in (_sources(own, by_part), _more(own[0].target.part, by_part, explanations)) if part]
    parts += _without_targets(by_part, explanations)
    return "\n\n".join(parts) + "\n"


def _sources(rows: list[Row], by_part: dict[str, Data]) -> str:
    """Where a table's figures come from."""
    return "\n\n".join(
        source(by_part[part]) for part in dict.fromkeys(row.target.part for row in rows) if part in by_part
    )


def source(result: Data) -> str:
    """A results file in words: the machine, versions, the commit, the file, and what was not installed."""
    here = result["environment"]
    words = (
        f"{here['gpu'] or here['cpu']}, torch {here['torch']}, Triton {here['triton']}, commit {here['commit']}: "
        f"[{result['file']}](../benchmarks/results/{result['file']})"
    )
    if "part" in result and "peers" not in result:
        return f"{words}; no other library was looked for"
    absent = sorted(name for name, version in result.get("peers", {}).items() if version == "not installed")
    return words + (f"; not installed: {', '.join(absent)}" if absent else "")


def _more(part: str, by_part: dict[str, Data], explanations: dict[str, str]) -> str:
    """What a table's part has beside the rows with targets."""
    if part.startswith("steps-"):
        of_steps = [result["rows"] for name, result in sorted(by_part.items()) if name.startswith("steps-")]
        found = [row for rows in of_steps for row in derived(rows)]
        reasons = _reasons("steps-", by_part, explanations)
        slower = f"Slower than native PyTorch:\n\n{reasons}" if reasons else ""
        return "\n\n".join(filter(None, (_configurations(found), slower, *_kernels(found))))
    if part.startswith(rank_tables.PART):
        return _ranks(by_part, explanations)
    if part == "scaling" and part in by_part:
        rows = by_part[part]["rows"]
        lines = [
            [f"{row['configuration']}, {row['axis']} {row['size']:,}", *map(_plain, _numbers(row))] for row in rows
        ]
        header = ["size", "step, ms", "floor, ms", "of floor"]
        return f"![step time and share of the floor against tokens, width and depth]({CHART})\n\n{table(header, lines)}"
    return ""


def _ranks(by_part: dict[str, Data], explanations: dict[str, str]) -> str:
    """Every case on several GPUs, those that owe a reason, and the file of the model that has no target."""
    lines = rank_tables.lines(by_part)
    if not lines:
        return f"{rank_tables.WORDS}\n\n{rank_tables.NOT_MEASURED}"
    reasons = _reasons(rank_tables.PART, by_part, explanations)
    apart = {row.part for row in targets.targets()}
    files = [
        source(by_part[part]) for part in sorted(by_part) if part.startswith(rank_tables.PART) and part not in apart
    ]
    parts = (rank_tables.WORDS, table(rank_tables.HEADER, lines), f"Why not:\n\n{reasons}" if reasons else "", *files)
    return "\n\n".join(filter(None, parts))


def _numbers(row: Data) -> tuple[float, float, float]:
    return row["device_ms"], row["floor_ms"], row["of_floor"]


def _plain(value: float) -> str:
    return f"{value:.2f}"


def _configurations(rows: list[Data]) -> str:
    """Every configuration of the whole steps, with its dtypes."""
    if not rows:
        return ""
    lines: list[list[str]] = []
    for row in rows:
        name = f"{row['model'].upper()}: {row['configuration']}"
        if row.get("is_claimed"):
            name = f"**{name}**"
        dtypes = f"{row['weights']} / {row['moments']} / {row['masters']}"
        if "failed" in row:
            lines.append([name, dtypes, "failed", "", "", "", ""])
            continue
        over = row["over_native"]
        lines.append(
            [
                name,
                dtypes,
                f"{row['device_ms']:.2f} / {row['wall_ms']:.2f}",
                f"{row['host_ms']:.2f}",
                f"{row['of_floor']:.2f}",
                "" if over is None else f"{over:.2f}×",
                f"{row['peak_reserved_bytes'] / 1e9:.2f} GB",
            ]
        )
    header = ["configuration", "weights / moments / masters", "device / wall, ms", "host, ms", "of floor"]
    words = (
        "In bold: the configuration of each precision whose time and memory are claimed above. Of those that reach\n"
        "the target for the time it is the one that takes least memory; if none does, of the fastest, to 1%."
    )
    return f"{words}\n\n" + table([*header, "over native amp", "reserved"], lines)


def _kernels(rows: list[Data]) -> Iterator[str]:
    """What takes the time of each model's fastest step of ours."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and row.get("kernels")]
        if own:
            fastest = min(own, key=lambda row: row["device_ms"])
            lines = [
                [f"`{one['name']}`", f"{one['calls']:.0f}", f"{one['ms']:.3f}", f"{one['share']:.1%}"]
                for one in fastest["kernels"]
            ]
            table_of_it = table(["kernel", "calls a step", "ms", "share"], lines)
            yield f"What takes the time of {model.upper()}, {fastest['configuration']}:\n\n{table_of_it}"


def _without_targets(by_part: dict[str, Data], explanations: dict[str, str]) -> Iterator[str]:
    """Measurements that no target is set for."""
    for section in beside_targets.sections(by_part):
        words = f"{section.words}\n\n" if section.words else ""
        shown = f"## {section.title}\n\n{words}{table(section.header, section.rows)}\n\n"
        reasons = _reasons(section.part, by_part, explanations)
        yield shown + (f"Why not:\n\n{reasons}\n\n" if reasons else "") + source(by_part[section.part])


def _reasons(part: str, by_part: dict[str, Data], explanations: dict[str, str]) -> str:
    """Why rows of a part that have no target are worse than they should be."""
    return "\n".join(
        f"- **{label}** ({verdict}): {explanations.get(name, NOT_EXPLAINED)}"
        for name, (label, verdict) in owing(by_part).items()
        if name.startswith(part)
    )


def owing(by_part: dict[str, Data]) -> dict[str, tuple[str, str]]:
    """Rows beside the targets that need a reason, by name: what they are called and what is wrong with them."""
    return beside_targets.owing(by_part) | rank_tables.owing(by_part)


def explained() -> dict[str, str]:
    """The explanations of missed rows."""
    found: dict[str, str] = json.loads(EXPLANATIONS.read_text())
    return found


def unexplained(rows: list[Row], explanations: dict[str, str], others: Iterable[str] = ()) -> list[str]:
    """What is wrong with the explanations: missed rows without one, and those that are not of a missed row.

    `others` are names of rows that have no target and owe an explanation all the same.
    """
    missed = {row.target.name for row in rows if row.ours is not None and row.missed is not None} | set(others)
    return [
        *(f"{name} misses its target and has no explanation" for name in sorted(missed - explanations.keys())),
        *(f"{name} has an explanation and is not missed" for name in sorted(explanations.keys() - missed)),
    ]
