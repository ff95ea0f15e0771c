"""The ladder as a terminal shows it: the verdict, the tables, and every remark that a reader needs to believe them."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from fusestep.ladder import verdict
from fusestep.ladder.results import ContenderResult, Ladder, RungResult
from fusestep.ladder.words import (
    claim_in_words,
    device_in_words,
    model,
    native_of,
    numbers_of,
    peer_in_words,
    peers_of,
    place,
    remarks_of,
    runs_as,
    status_of,
    steps_in_words,
)
from fusestep.tables import counted

#: Kernels of a rung that a terminal has room for; the files hold more.
_KERNELS = 3


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
        f"{model(ladder)} | {counted(plan['rounds'], 'round')} of {steps_in_words(ladder)} steps, data {plan['data']}",
        highlight=False,
    )
    console.print()
    _show_verdict(verdict.conclude(ladder), console)
    first = ladder.rungs[0].rung.name
    # Several tables, so that each fits a narrow window.
    costs, gains = _table(), _table()
    costs.add_column("rung", no_wrap=True)
    for title in ("step ms", "quartiles", "tokens/s", "peak", "first ms", *(("host", "device") if on_gpu else ())):
        costs.add_column(title, justify="right", no_wrap=True)
    for title in ("rung", f"over {first}", "over previous", "loss off by", "fused part runs as"):
        gains.add_column(title, no_wrap=title == "rung")
    for result in ladder.rungs:
        costs.add_row(result.rung.name, *_costs(result, on_gpu=on_gpu))
        gains.add_row(result.rung.name, *_gains(result))
    others = [_contenders(ladder, on_gpu=on_gpu), _beside(ladder)] if ladder.contenders else []
    rates = [_rates(ladder)] if ladder.ceilings is not None else []
    for table in (costs, gains, *others, *rates, _kernels(ladder)):
        if table.row_count:
            console.print()
            console.print(table, highlight=False)
    console.print()
    for line in remarks_of(ladder):
        console.print(line, highlight=False, soft_wrap=soft)
    if ladder.ceilings is not None:
        for line in (f"TFLOP/s: {plan['flops_formula']}.", f"GB/s: {plan['bytes_formula']}."):
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
            table.add_row(result.rung.name, _why_empty(result))
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


def _contenders(ladder: Ladder, *, on_gpu: bool) -> Table:
    """What stands beside the rungs, with its own figures."""
    table = _table()
    table.add_column("beside", no_wrap=True)
    for title in ("step ms", "quartiles", "tokens/s", "peak", "first ms", *(("host", "device") if on_gpu else ())):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("numbers")
    for one in ladder.contenders:
        cells = _costs(one, on_gpu=on_gpu)
        cells += [""] * (5 + 2 * on_gpu - len(cells))
        table.add_row(one.contender.name, *cells, numbers_of(one.recipe) if one.rounds else status_of(one))
    return table


def _beside(ladder: Ladder) -> Table:
    """How many times faster each rung is than what stands beside it."""
    table = _table()
    table.add_column("rung", no_wrap=True)
    peers = peers_of(ladder)
    has_natives = any(one.contender.kind == "native" for one in ladder.contenders)
    for title in (*(["best native PyTorch", "over it"] if has_natives else []), *(f"over {peer}" for peer in peers)):
        table.add_column(title)
    for result in ladder.rungs:
        if not result.rounds:
            table.add_row(result.rung.name, _why_empty(result))
            continue
        native = native_of(result)
        known = ["" if native is None else native.over, claim_in_words(native)] if has_natives else []
        table.add_row(result.rung.name, *known, *(peer_in_words(result, ladder, peer) for peer in peers))
    return table


def _kernels(ladder: Ladder) -> Table:
    """Which kernels take the time."""
    table = _table()
    for title in ("rung", "kernels that take the most of its step"):
        table.add_column(title, no_wrap=title == "rung")
    for result in ladder.rungs:
        if result.kernels:
            said = (f"{kernel.share:.0%} {kernel.short}" for kernel in result.kernels[:_KERNELS])
            table.add_row(result.rung.name, ", ".join(said))
    return table


def _why_empty(result: RungResult | ContenderResult) -> str:
    if isinstance(result, RungResult) and result.unchanged is not None:
        return "changes nothing"
    return "did not run" if result.failure is not None else ""


def _costs(result: RungResult | ContenderResult, *, on_gpu: bool) -> list[str]:
    step, speed, peak, first = result.step, result.tokens_per_second, result.peak, result.first_step
    if step is None or speed is None or peak is None or first is None:
        return [_why_empty(result)]
    return [
        f"{step.median:.2f}",
        f"{step.low:.2f}–{step.high:.2f}",
        f"{speed:,.0f}",
        "" if peak.headline is None else f"{peak.headline / 2**20:,.0f} MiB",
        f"{first:,.0f}",
        *(["" if result.host is None else f"{result.host:.2f}", device_in_words(result)] if on_gpu else []),
    ]


def _gains(result: RungResult) -> list[str]:
    if result.failure is not None or result.unchanged is not None:
        return [_why_empty(result)]
    verdict = result.verdict
    return [
        claim_in_words(result.over_first),
        claim_in_words(result.over_previous),
        "" if verdict is None else f"{verdict.deviation:.4%}" + ("" if verdict.passed else " (too far)"),
        runs_as(result),
    ]
