"""Write the tables of docs/planning.md from `fusestep.plan` and the measured results, so that none is typed by hand.

    python tools/plan_page.py

What stands between a pair of the page's marks is replaced. tools/plan_rates.py writes the figures first.
"""

from __future__ import annotations

import dataclasses
import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import figures
import plan_cases
from fusestep.cli.plan_table import show
from fusestep.plan import SHAPES, Estimate, Rates, Work, estimate, measured_rates
from fusestep.plan.long_run import between_failures, interval_seconds, saving_seconds
from speed import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planning.md"
_MARKED = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)

#: The run on paper: 20 tokens a parameter (Hoffmann et al. 2022, arXiv:2203.15556), rounded.
MODEL, GPUS, BATCH, TOKENS = "llama-70b", 1024, 1024, 1.4e12
GIB, DAY = 2**30, 86400.0

#: The meshes that are compared, by what is asked for; the first is the one that is planned in full.
MESHES: dict[str, dict[str, Any]] = {
    "`fsdp`": {"parallel": "fsdp"},
    "`fsdp`, nothing recomputed": {"parallel": "fsdp", "activation_checkpointing": False},
    "`fsdp --shard-over 128` (HSDP)": {"parallel": "fsdp", "shard_over": 128},
    "`fsdp --shard-over 16` (HSDP)": {"parallel": "fsdp", "shard_over": 16},
    "`fsdp,tp=2,sp`": {"parallel": "fsdp,tp=2,sp"},
    "`fsdp,tp=4,sp`": {"parallel": "fsdp,tp=4,sp"},
    "`fsdp,tp=8,sp`": {"parallel": "fsdp,tp=8,sp"},
    "`fsdp,tp=8`": {"parallel": "fsdp,tp=8"},
    "`fsdp,tp=8,sp`, 4 passes a step": {"parallel": "fsdp,tp=8,sp", "batch": BATCH // 4, "accumulate": 4},
    "`fsdp --context-parallel 4`, 32,768 tokens": {
        "parallel": "fsdp",
        "context_parallel": 4,
        "batch": BATCH // 4,
        "shape": SHAPES[MODEL].changed({"context": 32768}),
    },
    "`fsdp`, FP8": {"parallel": "fsdp", "precision": "fp8"},
    "`fsdp --shard-over 128`, FP8": {"parallel": "fsdp", "shard_over": 128, "precision": "fp8"},
}

CHOSEN = next(iter(MESHES))

#: What checkpoints and failures may turn out to be: shares of what is planned with.
LOST: dict[str, dict[str, float]] = {
    "as planned": {},
    "storage a tenth as fast": {"storage": 0.1},
    "failures four times as often": {"failures": 0.25},
    "restarts four times as long": {"restart": 4.0},
    "all three": {"storage": 0.1, "failures": 0.25, "restart": 4.0},
}

#: What a rate may turn out to be, and its share of what is planned with.
WORSE = {
    "network": ("the network between machines", 0.5),
    "link": ("the links within a machine", 0.5),
    "attention": ("attention", 0.7),
    "products": ("products", 0.8),
    "copy": ("copies", 0.8),
    "hop": ("the start of a collective", 5.0),
}


def planned(mesh: str, rates: Rates | None = None, **changes: Any) -> Estimate:
    """The plan of the run on one of the meshes."""
    settings: dict[str, Any] = {
        "shape": SHAPES[MODEL],
        "gpus": GPUS,
        "batch": BATCH,
        "precision": "bf16",
        "activation_checkpointing": True,
    }
    return estimate(Work(**{**settings, **MESHES[mesh], **changes}), rates, tokens=TOKENS)


def chosen() -> Estimate:
    return planned(CHOSEN)


def measured() -> str:
    """Prediction beside measurement, for every step that was measured."""
    header = ["step", "measured, ms", "planned, ms", "off by", "peak, GiB", "planned, GiB", "off by"]
    results, rates = plan_cases.read(figures.RESULTS), measured_rates()
    rows = plan_cases.table_rows(results, rates)
    cases = plan_cases.cases(results)
    busy: list[float] = []
    waiting: list[float] = []
    for case in cases:
        if not case.fitted:
            (waiting if case.predicted(rates).time.waiting else busy).append(case.step_off(rates))
    peaks = [off for case in cases if (off := case.peak_off(rates)) is not None]
    summary = (
        f"Plans of steps that nothing was fitted to are off by {span(busy)} where the device is busy ({len(busy)})"
        + (f", and by {span(waiting)} where it waits for the host ({len(waiting)})" if waiting else "")
        + f"; those of {len(peaks)} peaks by {span(peaks)}."
    )
    reasons = [f"- **{name}**: {why}" for name, why in plan_cases.EXPLAINED.items()]
    return f"{table(header, rows)}\n\n{textwrap.fill(summary, 128)}" + ("\n\n" + "\n".join(reasons) if reasons else "")


def span(offs: list[float]) -> str:
    """From the least to the most."""
    return " to ".join(dict.fromkeys(f"{off:+.1%}" for off in (min(offs), max(offs))))


def whole() -> str:
    """The page that the command prints for the chosen mesh."""
    out = io.StringIO()
    show(chosen(), Console(file=out, highlight=False, width=150))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "```text\n" + "\n".join(lines).strip() + "\n```"


def meshes() -> str:
    """A row for each mesh."""
    rows = []
    for name in MESHES:
        plan = planned(name)
        waits = sum(line.amount for line in plan.time.lines if line.name.startswith("sent"))
        fits = "" if plan.fits else " (does not fit)"
        rows.append(
            [
                name,
                f"{plan.reserved.amount / GIB:,.0f} GiB{fits}",
                f"{plan.sent_bytes / 1e9:,.0f} GB",
                f"{plan.seconds:.2f} s",
                f"{waits / plan.seconds:.0%}",
                f"{plan.flops_per_gpu / 1e12:,.0f}",
                f"{plan.totals()['gpu_hours'] / 1e3:,.0f}" if plan.fits else "",
            ]
        )
    header = ["mesh", "memory of a GPU", "sent by a GPU", "step", "of it waiting for others"]
    return table([*header, "TFLOP/s a GPU", "thousand GPU hours"], rows)


def long() -> str:
    """Checkpoints and failures, and what they cost were a rate worse."""
    rows = []
    base = measured_rates()
    for words, changes in LOST.items():
        plan = planned(CHOSEN, base.with_changes({name: share * base[name] for name, share in changes.items()}))
        work, rates, totals = plan.work, plan.rates, plan.totals()
        run = plan.run[-1].amount
        rows.append(
            [
                words,
                f"{saving_seconds(work, rates):,.0f} s",
                f"{DAY / between_failures(work, rates):.2f}",
                f"{interval_seconds(work, rates) / 60:,.0f} min",
                f"{totals['lost_share']:.1%}",
                f"{run / DAY:,.1f}",
                f"{run / between_failures(work, rates):,.0f}",
                f"{totals['gpu_hours'] / 1e3:,.0f}",
            ]
        )
    header = ["", "writing a checkpoint", "failures a day", "saved every", "time lost", "days", "failures in all"]
    return table([*header, "thousand GPU hours"], rows)


def worse() -> str:
    """The step on two meshes, were a rate worse than planned."""
    names = ("`fsdp`", "`fsdp,tp=8,sp`", "`fsdp`, FP8")
    base = measured_rates()
    rows = [["as planned", *(f"{planned(name).seconds:.2f} s" for name in names)]]
    for key, (words, share) in WORSE.items():
        cells = []
        for name in names:
            before = planned(name)
            plan = planned(name, slowed(base, key, share))
            cells.append(f"{plan.seconds:.2f} s ({plan.seconds / before.seconds - 1:+.0%})")
        rows.append([f"{words}: {share:g} times", *cells])
    return table(["rate", *names], rows)


def slowed(rates: Rates, key: str, share: float) -> Rates:
    """The figures with one of them multiplied."""
    if key != "products":
        return rates.with_changes({key: share * rates[key]}) if key != "attention" else slower_attention(rates, share)
    products = {name: [(side, share * rate) for side, rate in pairs] for name, pairs in rates.products.items()}
    return dataclasses.replace(rates, products=products)


def slower_attention(rates: Rates, share: float) -> Rates:
    """Those with attention at a share of its rate, measured or assumed."""
    if not rates.attention:
        return rates.with_changes({"attention": share * rates["attention"]})
    slower = [(length, size, share * rate) for length, size, rate in rates.attention]
    return dataclasses.replace(rates, attention=slower)


def sentences() -> str:
    """The run in a few sentences, at the width of the page."""
    plan = chosen()
    totals, work = plan.totals(), plan.work
    run = plan.run[-1].amount
    states = sum(line.amount for line in plan.memory if line.name in ("weights", "moments, fp32"))
    text = (
        f"{work.shape.parameters / 1e9:.2f} billion parameters, {work.tokens / 1e6:.1f} million tokens a step, "
        f"{TOKENS / 1e12:g} trillion in all: {run / DAY:.0f} days and {totals['gpu_hours'] / 1e3:,.0f} thousand GPU "
        f"hours, at {plan.seconds:.1f} s a step, {totals['tokens_per_second'] / 1e6:.2f} million tokens/s and "
        f"{plan.flops_per_gpu / 1e12:.0f} TFLOP/s of the model on each GPU. Weights and moments are "
        f"{states * work.layout.shards / GIB:,.0f} GiB, {states / GIB:.2f} GiB on each GPU; with all else a GPU needs "
        f"{plan.reserved.amount / GIB:.0f} of its {plan.rates.memory / GIB:.0f} GiB. It sends "
        f"{plan.sent_bytes / 1e9:,.0f} GB a step, nearly all of it beside computing. A checkpoint is "
        f"{totals['checkpoint_bytes'] / GIB:,.0f} GiB, {totals['checkpoint_bytes'] / GIB / work.gpus:.2f} GiB of each."
    )
    return textwrap.fill(text, 128)


PARTS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "run": sentences,
    "plan": whole,
    "meshes": meshes,
    "long-run": long,
    "worse": worse,
}


def page(text: str) -> str:
    """The page with today's tables between its marks."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{PARTS[mark[2]]()}\n\n{mark[3]}", text)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
