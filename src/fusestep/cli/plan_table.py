"""The tables of `fusestep plan`."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from fusestep.plan import Estimate
from fusestep.plan.line import Line, gibibytes, short, tokens_in_words
from fusestep.tables import counted

#: Columns of a page that is not a terminal's.
_WIDTH = 150


def show(plan: Estimate, console: Console | None = None) -> None:
    """Print a plan: what it is of, a table for each section, and the figures that it used."""
    console = console or Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH
    work, totals = plan.work, plan.totals()
    console.print(work.shape.describe(), markup=False)
    console.print(where(plan), markup=False)
    memory = [
        *((line, gibibytes(line.amount)) for line in plan.memory),
        (plan.reserved, gibibytes(plan.reserved.amount)),
    ]
    room = "fits" if plan.fits else "does not fit"
    _table(
        console,
        f"Memory of a GPU: {room} {gibibytes(plan.rates.memory)}",
        memory,
        ("allocated", gibibytes(plan.peak_bytes)),
    )
    if not plan.fits:
        largest = sorted(plan.memory, key=lambda line: -line.amount)[:3]
        parts = ", ".join(f"{line.name} {gibibytes(line.amount)}" for line in largest)
        console.print(
            f"It does not fit. The largest parts are {parts}: lower --batch, raise --accumulate or --gpus, shard "
            "(--parallel fsdp), share products (tp=N,sp) or pass --activation-checkpointing.",
            markup=False,
        )
    if plan.sent:
        sent = [(line, f"{(line.sent or 0) / 1e9:,.2f} GB, {_time(line.amount)}") for line in plan.sent]
        alone = sum(line.amount for line in plan.sent)
        _table(
            console, "Sent by a GPU in a step, and the time of it alone", sent,
            ("all", f"{plan.sent_bytes / 1e9:,.2f} GB, {_time(alone)}"),
        )  # fmt: skip
    _table(
        console,
        "Time of a step",
        [(line, _time(line.amount)) for line in plan.time.lines],
        ("step", _time(plan.seconds)),
    )
    _table(console, "A long run", [(line, _time(line.amount)) for line in plan.run], None)
    console.print(
        f"{work.tokens:,} tokens a step, {totals['tokens_per_second']:,.0f} tokens/s, "
        f"{plan.flops_per_gpu / 1e12:,.0f} TFLOP/s a GPU"
        + (f", {totals['gpu_hours']:,.0f} GPU hours for {tokens_in_words(plan.tokens)}" if plan.tokens else ""),
        markup=False,
    )
    _figures(console, plan)


def where(plan: Estimate) -> str:
    """How it is trained, and on what."""
    work, mesh = plan.work, plan.work.layout
    kind = f"{work.precision}" + (f" ({work.recipe})" if work.precision == "fp8" else "")
    gpus = counted(work.gpus, "GPU")
    checkpoints = ", activations of blocks recomputed" if work.activation_checkpointing else ""
    return (
        f"{kind}, {work.weights} weights, form {work.form}, {'one graph' if work.graph else 'eager'}{checkpoints} | "
        f"{counted(work.batch, 'sequence')} × {work.accumulate} a step | {gpus}, --parallel {work.parallel}: "
        f"ranks to a product {mesh.tensor}, to a sequence {mesh.context}, to a weight {mesh.shards}, and such groups "
        f"{mesh.replicas}"
    )


def _table(console: Console, title: str, rows: list[tuple[Line, str]], last: tuple[str, str] | None) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_footer=last is not None)
    name, amount = last or ("", "")
    table.add_column("", footer=name, max_width=38)
    table.add_column("", footer=amount, justify="right", no_wrap=True)
    table.add_column("formula")
    table.add_column("figures", max_width=26)
    for line, value in rows:
        table.add_row(line.name, value, f"{line.words}\n{line.symbols}", ", ".join(line.figures))
    console.print(table, markup=False)


def _figures(console: Console, plan: Estimate) -> None:
    table = Table(
        title=f"Figures: measured on {plan.rates.gpu}, {plan.rates.date}, unless it is said otherwise",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("figure", "value", "unit", "source"):
        table.add_column(column)
    for name in plan.used_figures:
        one = plan.rates.described(name)
        value = one["value"]
        pairs = isinstance(value, list)
        at = (f"({', '.join(f'{one:g}' for one in where)}, {short(rate)})" for *where, rate in value) if pairs else ()
        shown = ", ".join(at) if pairs else short(value)
        table.add_row(name, shown, one["unit"], one["source"])
    console.print(table, markup=False)


def _time(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.2f} ms"
