"""What the README shows of speed: whole steps, one ladder, a kernel of each kind, and how many targets are met.

All of it stands on docs/measured.md and docs/speed.md too; here are the rows that say most in least space. The sizes
are fixed, so that none is chosen for its outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import measured_page
import speed
import targets
from speed import table

LADDER = "mini"
#: The sizes of the kernels' rows: the second of the five sets of parameters, and the middle or last of five shapes.
PARAMETERS, NORM, LINEAR, LOSS = "124M", (16384, 4096), (8192, 8192, 8192), (8192, 768, 50304)
Data = dict[str, Any]


def whole_steps(by_part: dict[str, Data]) -> str:
    """A row for each model: native PyTorch's two, the best other library, ours in both precisions, memory."""
    rows = []
    for model in targets.STEP_GOALS:
        result = by_part.get(f"steps-{model}")
        if result is None:
            continue
        made = [row for row in speed.derived(result["rows"]) if "failed" not in row]
        by_name = {row["configuration"]: row for row in made}
        native, bf16 = by_name["native, amp"], by_name["native, all bf16"]
        own = {row["precision"]: row for row in made if row.get("is_claimed")}
        others = [row for name, row in by_name.items() if not name.startswith(("native", "fusestep"))]
        rows.append(
            [
                f"{model.upper()}: {native['parameters'] / 1e6:,.0f} M, {native['tokens']:,} tokens",
                *(_milliseconds(row) for row in (native, bf16)),
                _best(others),
                *(_milliseconds(own[precision]) for precision in ("bf16", "fp8")),
                f"{native['device_ms'] / own['fp8']['device_ms']:.2f}×",
                " / ".join(f"{row['peak_reserved_bytes'] / 1e9:.1f}" for row in (own["fp8"], native)),
            ]
        )
    header = ["whole step in one graph", "native, amp", "native, all bf16", "best other library", "ours, bf16"]
    return table([*header, "ours, FP8", "FP8 over native amp", "GB: FP8 / native amp"], rows)


def kernels(by_part: dict[str, Data]) -> str:
    """A row for each kind of kernel at one size: ours, torch's, torch.compile's, and the best other library's."""
    header = ["kernels", "ours", "torch", "torch.compile", "best other library"]
    return table(header, (cells for show in (_adam, _norms, _fp8, _loss) for cells in show(by_part)))


def _adam(by_part: dict[str, Data]) -> Iterator[list[str]]:
    rows = {one["implementation"]: one for one in _of(by_part, "adam", set=PARAMETERS)}
    if rows:
        ours, native = rows["fusestep+clip"], rows["torch fused+clip"]
        words = f"AdamW in fp32 with clipping, {ours['parameters'] / 1e6:,.0f} M parameters"
        yield [words, *(_milliseconds(one) for one in (ours, native)), "", ""]


def _norms(by_part: dict[str, Data]) -> Iterator[list[str]]:
    count, width = NORM
    for kind, words in (("layer_norm", "LayerNorm"), ("rms_norm", "RMSNorm")):
        rows = {one["implementation"]: one for one in _of(by_part, "norms", kind=kind, rows=count, width=width)}
        both = {name: {"device_ms": (one["forward_us"] + one["backward_us"]) / 1e3} for name, one in rows.items()}
        if rows:
            yield _line(f"{words} {count} × {width}, bf16, forward and backward", "fusestep", both)


def _fp8(by_part: dict[str, Data]) -> Iterator[list[str]]:
    tokens, inputs, outputs = LINEAR
    found = _of(by_part, "fp8", tokens=tokens, inputs=inputs, outputs=outputs)
    rows = {one["implementation"].replace("torch bf16", "torch"): one for one in found}
    if rows:
        for recipe in ("current", "block"):
            del rows[recipe]
        yield _line(f"Linear in FP8 (torch's in bf16), {' × '.join(map(str, LINEAR))}", "delayed", rows)


def _loss(by_part: dict[str, Data]) -> Iterator[list[str]]:
    result = by_part.get("loss")
    tokens, width, vocabulary = LOSS
    if result is None:
        return
    wanted = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    found = [row for row in speed.derived(result["rows"]) if "failed" not in row and _is(row, wanted)]
    claimed = next(row["implementation"] for row in found if row.get("is_claimed"))
    # Other libraries cannot be captured in a graph; by events all are timed alike.
    rows = {
        row["implementation"]: {"device_ms": row["event_ms"], "extra_bytes": row["extra_bytes"]}
        for row in found
        if row["implementation"] == claimed or not row["implementation"].startswith("fusestep")
    }
    yield _line(f"Linear + cross entropy, {' × '.join(map(str, LOSS))}, by events", claimed, rows)


def _line(words: str, ours: str, rows: dict[str, Data]) -> list[str]:
    others = [{"configuration": name, **one} for name, one in rows.items() if name not in (ours, *_NATIVE)]
    return [words, *(_milliseconds(rows[name]) if name in rows else "" for name in (ours, *_NATIVE)), _best(others)]


_NATIVE = ("torch", "torch.compile")


def _best(others: list[Data]) -> str:
    """The fastest of other libraries, by name."""
    if not others:
        return "not measured"
    best = min(others, key=lambda one: one["device_ms"])
    return f"{best['configuration']} {_milliseconds(best)}"


def _milliseconds(row: Data) -> str:
    figure = f"{row['device_ms']:.3f} ms" if row["device_ms"] < 1 else f"{row['device_ms']:.2f} ms"
    return figure + (f", {row['extra_bytes'] / 1e9:.2f} GB" if "extra_bytes" in row else "")


def _of(by_part: dict[str, Data], part: str, **wanted: Any) -> list[Data]:
    """Rows of a part with these values."""
    rows = by_part[part]["rows"] if part in by_part else []
    return [row for row in rows if "failed" not in row and _is(row, wanted)]


def _is(row: Data, wanted: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def summary(results: list[Data]) -> str:
    """The text between the README's marks."""
    by_part = speed.of_parts(results)
    parts = []
    if any(part.startswith("steps-") for part in by_part):
        parts += [whole_steps(by_part)]
    for one in results:
        if "rungs" in one and one["plan"]["preset"] == LADDER:
            parts += [f"{measured_page.ladder(one)}\n\n{one['verdict']['headline']}"]
    parts += [kernels(by_part), f"Of the targets, {speed.counted(speed.all_rows(by_part))}"]
    return "\n\n".join(parts)
