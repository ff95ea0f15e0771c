"""The ladder as a terminal shows it: the verdict, the tables, and every remark that a reader needs to believe them."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from fusestep.ladder import verdict, work
from fusestep.ladder.results import Ladder, RungResult
from fusestep.ladder.words import claim_in_words, counted, model, place, remarks_of, runs_as


def show(ladder: Ladder, console: Console) -> None:
    """Print all of it."""
    plan, environment = ladder.plan, ladder.environment
    on_gpu = environment["gpu"] is not None
    soft = not console.is_terminal
    console.print(
        f"Ladder on {place(ladder)} | torch {environment['torch']}, Triton {environment['triton'] or 'missing'}"
        + (f", driver {environment['driver']}" if on_gpu else ""),
        highlight=False,
    )
    console.print(
        f"{model(ladder)} | {counted(plan['rounds'], 'round')} of {plan['steps']} steps, data {plan['data']}",
        highlight=False,
    )
    console.print()
    _show_verdict(verdict.conclude(ladder), console)
    first = ladder.rungs[0].rung.name
    # Several tables, so that each fits a narrow window.
    costs, gains = _table(), _table()
    costs.add_column("rung", no_wrap=True)
    for title in ("step ms", "quartiles", "tokens/s", "peak", "first ms", *(("device ms",) if on_gpu else ())):
        costs.add_column(title, justify="right", no_wrap=True)
    for title in ("rung", f"over {first}", "over previous", "loss off by", "fused part runs as"):
        gains.add_column(title, no_wrap=title == "rung")
    for result in ladder.rungs:
        costs.add_row(result.rung.name, *_costs(result, on_gpu=on_gpu))
        gains.add_row(result.rung.name, *_gains(result))
    for table in (costs, gains, *([_rates(ladder)] if ladder.ceilings is not None else [])):
        console.print()
        console.print(table, highlight=False)
    console.print()
    for line in remarks_of(ladder):
        console.print(line, highlight=False, soft_wrap=soft)
    if ladder.ceilings is not None:
        for line in (f"TFLOP/s: {work.FLOPS_FORMULA}.", f"GB/s: {work.BYTES_FORMULA}."):
            console.print(line, highlight=False, soft_wrap=soft)


def _show_verdict(conclusion: verdict.Conclusion, console: Console) -> None:
    soft = not console.is_terminal
    console.print(conclusion.headline, style="bold", highlight=False, soft_wrap=soft)
    for finding in conclusion.findings:
        line = f"{finding.decision}: {finding.rung}, {finding.why}."
        console.print(line if soft else Padding(line, (0, 0, 0, 2)), highlight=False, soft_wrap=soft)
    for remark in conclusion.remarks:
        console.print(remark, highlight=False, soft_wrap=soft)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _rates(ladder: Ladder) -> Table:
    """What each rung achieves, beside what the device reached in the same run."""
    table = _table()
    table.add_column("rung", no_wrap=True)
    for title in ("TFLOP/s", "of a product's", "GB/s", "of a copy's"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in ladder.rungs:
        flops, moved, ceilings = result.flops_per_second, result.bytes_per_second, ladder.ceilings
        if flops is None or moved is None or ceilings is None:
            table.add_row(result.rung.name, "did not run" if result.failure is not None else "")
            continue
        product = ceilings.products.get(result.recipe.precision)
        table.add_row(
            result.rung.name,
            f"{flops / 1e12:,.1f}",
            "" if product is None else f"{flops / product:.0%} of {product / 1e12:,.0f}",
            f"{moved / 1e9:,.0f}",
            f"{moved / ceilings.copy:.0%} of {ceilings.copy / 1e9:,.0f}",
        )
    return table


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
        claim_in_words(result.over_first),
        claim_in_words(result.over_previous),
        "" if verdict is None else f"{verdict.deviation:.4%}" + ("" if verdict.passed else " (too far)"),
        runs_as(result),
    ]
