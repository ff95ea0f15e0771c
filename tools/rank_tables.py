"""What docs/speed.md shows of steps on several GPUs beside the targets: every case, and which of them owe a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusestep.ladder.last_words import last_words

Data = dict[str, Any]

PART = "ranks-"
WORDS = """\
Whole steps on two GPUs of one machine, NVLink multicast off (`NCCL_NVLS_ENABLE=0`), with FP32 weights and the norm
clipped. Weak: a batch on each rank, "of one" is t(1) / t(n); strong: one batch for all, t(1) / (n · t(n)). t(1) is
the step of one rank by itself in the same mode, in turns with the other. "Sent" is the time of NCCL's kernels in a
profile, waiting for each other included; "exposed" what the step takes longer than a rank's own part with nothing
sent. "Compiled" is plain PyTorch in bf16: DDP under autocast, or FSDP2, with torch.compile and its fused AdamW; "over
native" compares with it. "Plan" is what `fusestep plan` says. Losses and the first gradient's norm are those of one
rank on the same sequences, within 0.2 % (bf16) or 1 % (FP8) and 5 % or 10 %; else a case has failed, as it has where
it took too long."""
NOT_MEASURED = "No results are there yet: `python -m benchmarks ranks` on a machine with two GPUs writes them."
HEADER = ["model, precision, way, mode, scaling", "step, ms (quartiles)", "of one", "sent", "exposed, ms",
          "reserved / plan, GB", "plan, ms", "over native", "loss off by"]  # fmt: skip


def owing(by_part: Mapping[str, Data]) -> dict[str, tuple[str, str]]:
    """Cases of ours that failed, or should have been captured and were not, by name: in words, and what happened."""
    found = {}
    for row in _rows(by_part):
        if row["mode"] == "compiled":
            continue
        name = "/".join((f"{PART}{row['configuration'].lower()}", *_words(row)[1:]))
        if "failed" in row:
            found[name] = (", ".join(_words(row)), f"failed: {last_words(row['failed'])}")
        elif row["fallback"] is not None:
            found[name] = (", ".join(_words(row)), f"not captured: {row['fallback']}")
    return found


def lines(by_part: Mapping[str, Data]) -> list[list[str]]:
    """A line of the table for each case."""
    return [_line(row) for row in _rows(by_part)]


def _rows(by_part: Mapping[str, Data]) -> Iterator[Data]:
    for part, result in sorted(by_part.items()):
        if part.startswith(PART):
            yield from result["rows"]


def _words(row: Data) -> list[str]:
    return [row[name] for name in ("configuration", "precision", "path", "mode", "kind")]


def _line(row: Data) -> list[str]:
    name = ", ".join(_words(row))
    if "failed" in row:
        return [name, "failed", *[""] * (len(HEADER) - 2)]

    def shown(field: str, form: str, unit: float = 1.0) -> str:
        value = row[field]
        return "" if value is None else form.format(value / unit)

    low, high = row["step_ms_quartiles"]
    reserved, planned = shown("peak_reserved_bytes", "{:.2f}", 1e9), shown("plan_reserved_bytes", "{:.2f}", 1e9)
    return [
        name,
        f"{row['step_ms']:.2f} ({low:.2f}–{high:.2f})",
        shown("efficiency", "{:.3f}"),
        shown("sent_share", "{:.1%}"),
        shown("exposed_ms", "{:.2f}"),
        f"{reserved} / {planned}" if planned else reserved,
        shown("plan_ms", "{:.2f}"),
        shown("over_native", "{:.2f}×"),
        f"{row['loss_deviation']:.3%}",
    ]
