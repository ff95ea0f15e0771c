"""Seconds of a GPU's own work in forward and backward: products, attention, and passes over memory.

Legend: M tokens of one pass on a GPU, A passes a step, L layers, t ranks that share products, T tokens of a sequence, W
width, V vocabulary, P parameters on a rank.
"""

from __future__ import annotations

from fusestep.errors import UserError
from fusestep.plan import passes
from fusestep.plan.line import Line, short
from fusestep.plan.memory import held, wire_bytes
from fusestep.plan.rates import Rates
from fusestep.plan.work import Work


def forward_backward(work: Work, rates: Rates) -> tuple[Line, ...]:
    """The lines, whose sum is that of all passes of a step, the optimizer apart."""
    A, L = work.accumulate, work.shape.layers
    block, outside = _passes(work), passes.outside(work)
    kernels = L * block.kernels + outside.kernels
    return (
        _products(work, rates),
        _attention(work, rates),
        _head(work, rates),
        *_between_products(work, rates, block),
        _embedding(work, rates, outside),
        Line(
            "starts and ends of kernels",
            A * kernels * rates["kernel"],
            "kernels of such passes · micro-batches · time of a kernel beyond its bytes",
            f"A · (L · n + {outside.kernels}) · e: n {block.kernels}, e {rates['kernel'] * 1e6:.1f} µs",
            ("kernel",),
        ),
        _casts_of_weights(work, rates),
    )


def _products(work: Work, rates: Rates) -> Line:
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
    return Line(
        "products of blocks",
        A * L * seconds * recipe,
        f"{times} · tokens · rows · columns / rate, of each of a block's weights · layers · micro-batches"
        + (f" · what products take with {work.recipe} scaling over one scale a tensor" if recipe != 1 else ""),
        f"A · L{f' · {recipe:.2f}' if recipe != 1 else ''} · Σ {rounds} · M · n · k / rate: A {A}, L {L}, "
        f"M {short(M)}, {', '.join(shapes)}",
        (f"products:{work.precision}", *((work.recipe,) if recipe != 1 else ())),
    )


def _head(work: Work, rates: Rates) -> Line:
    shape, A, M, V = work.shape, work.accumulate, work.micro_tokens, work.shape.vocab_size / work.layout.tensor
    name = rates.head(work.compute)
    rate = rates.product(name, min(shape.width, V))
    return Line(
        "product of the head, loss",
        A * (6 * M * shape.width * V / rate + M * V * _logit_passes(work) / rates["copy"]),
        "6 · tokens · width · vocabulary / rate, and passes over the logits / copy's rate",
        f"A · (6 · M · W · V / t / rate + q · M · V / t / copy): {rate / 1e12:,.0f} T, q {_logit_passes(work)}",
        (f"products:{name}", "copy"),
    )


def _between_products(work: Work, rates: Rates, block: passes.Passes) -> tuple[Line, ...]:
    """Passes of blocks but for their starts and ends."""
    A, M, L = work.accumulate, work.micro_tokens, work.shape.layers
    line = Line(
        "norms, adds, activations" if block.casts else "norms, adds, activations, casts",
        A * L * M * block.bytes / (rates["copy"] * _share(work, rates)),
        "bytes that passes between products move for a token · tokens · layers · micro-batches / (copy's rate · "
        "the share of it that such passes reach)",
        f"A · L · M · p / (copy · q): p {short(block.bytes)}, q {_share(work, rates):.2f}",
        ("copy", _share_name(work)),
    )
    if not block.casts:
        return (line,)
    casts = Line(
        "casts to FP8",
        A * L * M * block.casts / (rates["copy"] * rates["casts"]),
        "bytes that casts of activations and gradients move for a token · tokens · layers · micro-batches / (copy's "
        "rate · the share of it that casts reach)",
        f"A · L · M · p / (copy · q): p {short(block.casts)}, q {rates['casts']:.2f}",
        ("copy", "casts"),
    )
    return line, casts


def _embedding(work: Work, rates: Rates, outside: passes.Passes) -> Line:
    shape, A, M = work.shape, work.accumulate, work.micro_tokens
    table = work.weight * shape.vocab_size * shape.width / work.layout.tensor
    return Line(
        "embedding and final norm",
        A * (M * outside.bytes + table) / (rates["copy"] * _share(work, rates)),
        "(bytes that they move for a token · tokens + the gradient of the embedding's table) · micro-batches / (copy's "
        "rate · the share of it that norms reach)",
        f"A · (M · p + w · V · W / t) / (copy · q): p {short(outside.bytes)}, q {_share(work, rates):.2f}",
        ("copy", _share_name(work)),
    )


def _recipe(work: Work, rates: Rates) -> float:
    """How long products in FP8 take by this recipe, over one scale a tensor. Raises: UserError for one not measured."""
    if work.precision != "fp8" or work.recipe in ("delayed", "current") or rates.is_product_given:
        return 1.0
    if work.recipe not in rates.figures:
        raise UserError(
            f"--recipe is {work.recipe}, which {rates.gpu} has no units for; pass --product-tflops of one with them, "
            "or another recipe."
        )
    return rates[work.recipe]


def _passes(work: Work) -> passes.Passes:
    """Of a block in both directions, with its recomputation."""
    return passes.backward(work).plus(passes.forward(work), 2 if work.activation_checkpointing else 1)


def _attention(work: Work, rates: Rates) -> Line:
    shape, A, M, L, t = work.shape, work.accumulate, work.micro_tokens, work.shape.layers, work.layout.tensor
    # An additive mask hides what it does not spare: the tutorial's form computes the other half too.
    looked = 2 * shape.context if work.form == "seed" else shape.context + 1
    rounds = 8 if work.activation_checkpointing else 6
    if rates.attention and work.element == 2 and work.form != "seed":
        rate, words = rates.attend(shape.context, shape.width // shape.heads), "its rate"
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
    elif w != b and work.form != "fused":
        # Products of the fused form read copies that the optimizer wrote, and write their gradients as they are to be.
        bytes_ += A * 2 * (w + b) * P
        parts.append(f"weights and their gradients cast 2 · ({w} + {b}) · P")
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
