"""Seconds of a step: products, attention, passes over memory, the optimizer, the host, and what is sent.

    pass   = max(device, host) + what is sent and not hidden
    step   = micro-batches · pass + optimizer

Legend: M tokens of one pass on a GPU, L layers, t ranks that share products, T tokens of a sequence, W width, V
vocabulary, P parameters on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusestep.errors import UserError
from fusestep.plan import passes
from fusestep.plan.line import Line, short, total
from fusestep.plan.memory import copied_bytes, held, wire_bytes
from fusestep.plan.rates import Rates, between
from fusestep.plan.traffic import Message, messages
from fusestep.plan.work import Work


@dataclass(frozen=True)
class Duration:
    """The lines of a step, whose sum is its seconds, and what the device computes without pause.

    Attributes:
        device: seconds of a GPU's own work in a step.
        host: seconds that the host needs for a step's launches; 0 with a graph.
    """

    lines: tuple[Line, ...]
    device: float
    host: float

    @property
    def seconds(self) -> float:
        return total(self.lines)


def duration(work: Work, rates: Rates) -> Duration:
    """Of one step."""
    computed = _forward_backward(work, rates)
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
    return Duration((*computed, waiting, *_exposed(work, rates), *optimizer), device + total(optimizer), host)


def flops(work: Work) -> float:
    """Floating point operations of a step that the model asks for, over all GPUs, a multiply-add as two.

    Six a weight and token, and attention where its mask lets it look. Source: Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B, with the causal half of its attention.
    """
    shape = work.shape
    weights = shape.layers * shape.block_matrices + shape.width * shape.vocab_size
    return work.tokens * (6 * weights + 6 * shape.layers * shape.width * (shape.context + 1))


def _forward_backward(work: Work, rates: Rates) -> tuple[Line, ...]:
    shape, A, M, L, t = work.shape, work.accumulate, work.micro_tokens, work.shape.layers, work.layout.tensor
    again = work.activation_checkpointing
    rounds, times = (8, "8 (recomputed)") if again else (6, "6")
    recipe = _recipe(work, rates)
    seconds, shapes = 0.0, []
    for name, rows, columns, by_rows in shape.products:
        n, k = (rows // t, columns) if by_rows else (rows, columns // t)
        rate = rates.product(work.precision, min(n, k))
        seconds += rounds * M * n * k / rate
        shapes.append(f"{name} {n} × {k} at {rate / 1e12:,.0f} T")
    head_rate = rates.product(work.compute, min(shape.width, shape.vocab_size // t))
    head = 6 * M * shape.width * shape.vocab_size / t
    passed = _passes_bytes(work)
    return (
        Line(
            "products of blocks",
            A * L * seconds * recipe,
            f"{times} · tokens · rows · columns / rate, of each of a block's weights · layers · micro-batches"
            + (f" · what {work.recipe} scaling takes over delayed" if recipe != 1 else ""),
            f"A · L{f' · {recipe:.2f}' if recipe != 1 else ''} · Σ {rounds} · M · n · k / rate: A {A}, L {L}, "
            f"M {short(M)}, {', '.join(shapes)}",
            (f"products:{work.precision}", *((work.recipe,) if recipe != 1 else ())),
        ),
        _attention(work, rates),
        Line(
            "product of the head, loss",
            A * (head / head_rate + M * shape.vocab_size / t * _logit_passes(work) / rates["copy"]),
            "6 · tokens · width · vocabulary / rate, and passes over the logits / copy's rate",
            f"A · (6 · M · W · V / t / rate + q · M · V / t / copy): {head_rate / 1e12:,.0f} T, "
            f"q {_logit_passes(work)}",
            (f"products:{work.compute}", "copy"),
        ),
        Line(
            "norms, adds, activations, casts",
            A * L * M * passed.bytes / (rates["copy"] * _share(work, rates)),
            "bytes that passes between products move for a token · tokens · layers · micro-batches / (copy's rate · "
            "the share of it that such passes reach)",
            f"A · L · M · p / (copy · q): p {short(passed.bytes)}, q {_share(work, rates):.2f}",
            ("copy", _share_name(work)),
        ),
        Line(
            "starts and ends of kernels",
            A * L * passed.kernels * rates["kernel"],
            "kernels of a block · layers · micro-batches · time of a kernel beyond its bytes",
            f"A · L · n · e: n {passed.kernels}, e {rates['kernel'] * 1e6:.1f} µs",
            ("kernel",),
        ),
        _casts_of_weights(work, rates),
    )


def _recipe(work: Work, rates: Rates) -> float:
    """How long a layer takes in FP8 by this recipe, over delayed scaling. Raises: UserError for one not measured."""
    if work.precision != "fp8" or work.recipe == "delayed" or rates.is_product_given:
        return 1.0
    if work.recipe not in rates.figures:
        raise UserError(
            f"--recipe is {work.recipe}, which {rates.gpu} has no units for; pass --product-tflops of one with them, "
            "or another recipe."
        )
    return rates[work.recipe]


def _passes_bytes(work: Work) -> passes.Passes:
    """Of a block in both directions, with its recomputation."""
    there, back = passes.forward(work), passes.backward(work)
    times = 2 if work.activation_checkpointing else 1
    return passes.Passes(times * there.bytes + back.bytes, times * there.kernels + back.kernels)


def _attention(work: Work, rates: Rates) -> Line:
    shape, A, M, L, t = work.shape, work.accumulate, work.micro_tokens, work.shape.layers, work.layout.tensor
    # An additive mask hides what it does not spare: the tutorial's form computes the other half too.
    looked = 2 * shape.context if work.form == "seed" else shape.context + 1
    rounds = 8 if work.activation_checkpointing else 6
    if rates.attention and work.element == 2 and work.form != "seed":
        rate, words = between(rates.attention, shape.context), "its rate"
        figures: tuple[str, ...] = ("attention",)
    else:
        rate, words = (
            rates["attention"] * rates.product(work.compute, shape.width),
            "(products' rate · attention's share)",
        )
        figures = ("attention", f"products:{work.compute}")
    return Line(
        "attention",
        A * L * rounds * M * shape.width / t * looked / rate,
        f"{rounds} · tokens · width · tokens looked at on average / {words}",
        f"A · L · {rounds} · M · W / t · {'2 T' if work.form == 'seed' else '(T + 1)'} / rate: T {shape.context}, "
        f"{rate / 1e12:,.0f} T",
        figures,
    )


def _logit_passes(work: Work) -> int:
    """Bytes of an element of the logits that the loss moves beside the products."""
    b = work.element
    return 3 * b if work.loss == "fused" else 4 * b + 20


def _share_name(work: Work) -> str:
    return "norms:" if work.form == "fused" else "separate"


def _share(work: Work, rates: Rates) -> float:
    return rates.norm(work.shape.width) if work.form == "fused" else rates["separate"]


def _casts_of_weights(work: Work, rates: Rates) -> Line:
    """Copies, casts and sums of weights and gradients in the passes of a step, optimizer apart."""
    P, A, w, b = held(work.shape, work.layout.tensor), work.accumulate, work.weight, work.element
    bytes_ = 0.0
    parts = []
    if work.layout.shards > 1:
        c = wire_bytes(work)
        bytes_ += A * 2 * 2 * c * P + (b + 4) * P
        parts.append(f"gathered weights twice in and out (4 · c · P, c {c:g}), gradients to be reduced (({b} + 4) · P)")
    elif w != b:
        if work.form != "fused":
            bytes_ += A * (w + b) * P
            parts.append(f"weights cast ({w} + {b}) · P")
        bytes_ += A * (w + b) * P
        parts.append(f"their gradients cast ({w} + {b}) · P")
    if A > 1:
        bytes_ += (A - 1) * 12 * P
        parts.append("gradients of micro-batches added up 12 · P · (A − 1)")
    return Line(
        "casts and sums of weights' gradients",
        bytes_ / rates["copy"],
        "bytes read and written / copy's rate",
        f"{'; '.join(parts) or 'none'}: P {short(P)}, A {A}",
        ("copy",),
    )


def _optimizer(work: Work, rates: Rates) -> tuple[Line, ...]:
    shape, layout = work.shape, work.layout
    P, s = held(shape, layout.tensor), layout.shards
    blocks, head = copied_bytes(work)
    g = 4 if s > 1 or work.weight == 4 or work.accumulate > 1 else 2
    if work.optimizer == "fused":
        # Gradient read, moments and weight (or master) read and written; a 16-bit weight and copies written. A weight
        # and the remainder of its master are as wide as one.
        each = g + 24 + (2 if work.weight == 2 and not work.remainders else 0)
        what = f"{each} bytes (gradient; moments and weight read and written)"
        copies = blocks * shape.layers * shape.block_matrices / layout.tensor / s
        copies += head * shape.vocab_size * shape.width / layout.tensor / s
        copies = 0.0 if work.form != "fused" else copies
        share = ("adam",)
    else:
        each = 80 if work.optimizer == "torch" else 28
        what = f"{each} bytes ({'an operation at a time' if each == 80 else 'one pass'})"
        copies, share = 0.0, ("adam",)
    moved = each * P / s + copies
    return (
        Line(
            "optimizer",
            moved / (rates["copy"] * rates["adam"]),
            f"{what} · parameters / shards, and copies written / (copy's rate · the share that the step reaches)",
            f"({each} · P / s + {short(copies)}) / (copy · q): P {short(P)}, s {s}, q {rates['adam']:.2f}",
            ("copy", *share),
        ),
    )


def _host_name(work: Work) -> str:
    return f"host_layer:{work.form}/{'bf16' if work.precision == 'fp16' else work.precision}"


def _host_layer(work: Work, rates: Rates) -> float:
    again = 4 / 3 if work.activation_checkpointing else 1.0
    return again * rates.host(work.form, work.precision)


def _exposed(work: Work, rates: Rates) -> tuple[Line, ...]:
    """What is sent and has nothing to hide behind."""
    L, A = work.shape.layers, work.accumulate
    computed = total(_forward_backward(work, rates)) / (A * L)
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
