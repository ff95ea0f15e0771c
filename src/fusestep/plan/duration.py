"""Seconds of a step: products, attention, passes over memory, the optimizer, the host, and what is sent.

    pass   = max(device, host) + what is sent and not hidden
    step   = micro-batches · pass + optimizer

Legend: A passes a step, L layers, P parameters on a rank, B of them weights of blocks, s ranks that share each.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusestep.plan.computing import forward_backward
from fusestep.plan.line import Line, short, total
from fusestep.plan.memory import copied_bytes, held
from fusestep.plan.rates import Rates
from fusestep.plan.traffic import Message, messages
from fusestep.plan.work import Work


@dataclass(frozen=True)
class Duration:
    """The lines of a step, whose sum is its seconds, and what the device computes without pause.

    Attributes:
        device: seconds of a GPU's own work in a step.
        host: seconds that the host needs for a step's launches; 0 with a graph.
        waiting: of them, seconds that the device waits.
    """

    lines: tuple[Line, ...]
    device: float
    host: float
    waiting: float

    @property
    def seconds(self) -> float:
        return total(self.lines)


def duration(work: Work, rates: Rates) -> Duration:
    """Of one step."""
    computed = forward_backward(work, rates)
    optimizer = _optimizer(work, rates)
    device = total(computed)
    host = 0.0 if work.graph else work.accumulate * work.shape.layers * _host_layer(work, rates)
    waiting = Line(
        "waiting for the host",
        max(0.0, host - device),
        "launches of a block on the host · layers · micro-batches, as far as they exceed the device's work",
        f"max(0, h · L · A − device): h · L · A {host * 1e3:.2f} ms",
        () if work.graph else (_host_name(work),),
    )
    lines = (*computed, waiting, *_exposed(work, rates), *optimizer)
    return Duration(lines, device + total(optimizer), host, waiting.amount)


def flops(work: Work) -> float:
    """Floating point operations of a step that the model asks for, over all GPUs, a multiply-add as two.

    Six a weight and token, and attention where its mask lets it look. Source: Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B, with the causal half of its attention.
    """
    shape = work.shape
    weights = shape.layers * shape.block_matrices + shape.width * shape.vocab_size
    return work.tokens * (6 * weights + 6 * shape.layers * shape.width * (shape.context + 1))


def _optimizer(work: Work, rates: Rates) -> tuple[Line, ...]:
    shape, layout = work.shape, work.layout
    P, s = held(shape, layout.tensor), layout.shards
    of = f"P {short(P)}, s {s}"
    if work.optimizer != "fused":
        each = 80 if work.optimizer == "torch" else 28
        what = f"{each} bytes ({'an operation at a time' if each == 80 else 'one pass'}) · parameters / shards"
        return (_stepped(rates, "optimizer", "adam", each * P / s, what, f"{each} · P / s", of),)
    g = 4 if s > 1 or work.weight == 4 or work.accumulate > 1 else 2
    # Gradient read, moments and weight (or master) read and written; a 16-bit weight and copies written. A weight
    # and the remainder of its master are as wide as one.
    each = g + 24 + (2 if work.weight == 2 and not work.remainders else 0)
    what = f"{each} bytes (gradient; moments and weight read and written)"
    blocks, head = copied_bytes(work) if work.form == "fused" else (0.0, 0.0)
    B = shape.layers * shape.block_matrices / layout.tensor / s
    copies = head * shape.vocab_size * shape.width / layout.tensor / s
    if work.precision != "fp8" or not blocks:
        copies += blocks * B
        words = f"{what} · parameters / shards + copies written"
        formula = f"{each} · P / s + {short(copies)}"
        return (_stepped(rates, "optimizer", "adam", each * P / s + copies, words, formula, of),)
    # Current scaling knows a weight's largest number after the step alone, and casts it then.
    is_late = work.recipe == "current"
    at_once = each + (0.0 if is_late else blocks)
    within = f"B {short(B)}"
    lines = [
        _stepped(
            rates,
            "optimizer, outside of blocks",
            "adam",
            each * (P / s - B) + copies,
            f"{what} · parameters / shards that are no weights of blocks + copies written",
            f"{each} · (P / s - B) + {short(copies)}",
            f"{of}, {within}",
        ),
        _stepped(
            rates,
            f"optimizer, weights of blocks{'' if is_late else ' with FP8 copies'}",
            "adam_copies",
            at_once * B,
            f"{what}{'' if is_late else ', and copies written'} · weights of blocks",
            f"{at_once:g} · B",
            within,
        ),
    ]
    if is_late:
        bytes_ = work.weight + blocks
        words = "bytes of a weight and its copies · weights of blocks"
        lines.append(
            _stepped(rates, "weights cast to FP8", "casts", bytes_ * B, words, f"{bytes_:g} · B", within),
        )
    return tuple(lines)


def _stepped(rates: Rates, name: str, share: str, moved: float, words: str, formula: str, values: str) -> Line:
    """Bytes that are moved at a share of a copy's rate."""
    return Line(
        name,
        moved / (rates["copy"] * rates[share]),
        f"({words}) / (copy's rate · the share of it that is reached)",
        f"({formula}) / (copy · q): {values}, q {rates[share]:.2f}",
        ("copy", share),
    )


def _host_name(work: Work) -> str:
    return f"host_layer:{work.form}/{'bf16' if work.precision == 'fp16' else work.precision}"


def _host_layer(work: Work, rates: Rates) -> float:
    again = 4 / 3 if work.activation_checkpointing else 1.0
    return again * rates.host(work.form, work.precision)


def _exposed(work: Work, rates: Rates) -> tuple[Line, ...]:
    """What is sent and has nothing to hide behind."""
    L, A = work.shape.layers, work.accumulate
    computed = total(forward_backward(work, rates)) / (A * L)
    share = 1 / 4 if work.activation_checkpointing else 1 / 3
    beside = {"forward": share * computed, "backward": (1 - share) * computed}
    found: dict[str, list[Message]] = {"": [], "forward": [], "backward": [], "last backward": []}
    for one in messages(work):
        found[one.hides].append(one)
    lines = []
    alone = sum(one.calls * one.seconds(rates) for one in found[""])
    if found[""]:
        names = ", ".join(one.name for one in found[""])
        lines.append(
            Line(
                "sent with nothing beside it",
                alone,
                "time of each collective · calls",
                names,
                _figures(found[""], rates),
            )
        )
    hidden = found["forward"] + found["backward"] + found["last backward"]
    if hidden:
        there, back, last = (
            sum(one.seconds(rates) for one in found[key]) for key in ("forward", "backward", "last backward")
        )
        over = A * L * max(0.0, there - beside["forward"])
        over += (A - 1) * L * max(0.0, back - beside["backward"]) + L * max(0.0, back + last - beside["backward"])
        ends = A * there + last
        lines.append(
            Line(
                "sent beside computing, and longer",
                over + ends,
                "what a block's collectives exceed the computing beside them by; and the first and the last one",
                f"forward {there * 1e3:.2f} beside {beside['forward'] * 1e3:.2f} ms a block, backward "
                f"{back * 1e3:.2f} (in the last micro-batch {(back + last) * 1e3:.2f}) beside "
                f"{beside['backward'] * 1e3:.2f} ms",
                _figures(hidden, rates),
            )
        )
    return tuple(lines)


def _figures(those: list[Message], rates: Rates) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in those for name in one.line(rates).figures))
