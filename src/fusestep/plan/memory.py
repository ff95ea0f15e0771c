"""Bytes of memory that a GPU needs, at the step's fullest moment.

Legend: P parameters that a rank would hold unsharded, t ranks that share products, s ranks that share weights, L
layers, W width, F features of the MLP, H those that its first layer makes, Q features of queries, keys and values, V
vocabulary, M tokens of one pass, b bytes of a number between products, r of one of the residual stream, w of a weight.
"""

from __future__ import annotations

import math

import torch

from fusestep.ops.linear_cross_entropy_passes import chunk_of
from fusestep.plan.line import Line, short, total
from fusestep.plan.rates import Rates
from fusestep.plan.shape import Shape
from fusestep.plan.work import Work


def held(shape: Shape, tensor: int) -> float:
    """Parameters that a rank of a tensor group holds, before they are sharded."""
    return shape.layers * shape.block_on(tensor) + shape.outside_on(tensor)


def memory(work: Work, rates: Rates) -> tuple[Line, ...]:
    """The lines, whose sum is the peak of what is allocated."""
    states = _states(work) + _copies(work) + _gathered(work)
    workspace = Line(
        "workspace of products", rates["workspace"], "what the library of products takes", "fixed", ("workspace",)
    )
    return (*states, *_peak(work), workspace)


def _states(work: Work) -> tuple[Line, ...]:
    layout, w = work.layout, work.weight
    P, s = held(work.shape, layout.tensor), layout.shards
    of = f"P {short(P)}, s {s}"
    lines = [Line("weights", w * P / s, "bytes of a weight · parameters / shards", f"w · P / s: w {w}, {of}")]
    if work.remainders:
        lines.append(Line("remainders of masters", 2 * P / s, "2 · parameters / shards", f"2 · P / s: {of}"))
    elif w == 2:
        lines.append(Line("master weights, fp32", 4 * P / s, "4 · parameters / shards", f"4 · P / s: {of}"))
    moments = Line("moments, fp32", 8 * P / s, "two of 4 bytes · parameters / shards", f"8 · P / s: {of}")
    return (*lines, moments)


def copied_bytes(work: Work) -> tuple[float, float]:
    """Bytes of the copies that products read, of an element of the blocks' weights and of the head's.

    In 16 bits where weights are fp32; in FP8 a copy and its transpose. Sharded weights are gathered instead.
    """
    head = 2.0 if work.weight == 4 and work.precision != "fp32" else 0.0
    if work.layout.shards > 1:
        return 0.0, head
    return (2.0 if work.precision == "fp8" else head), head


def _copies(work: Work) -> tuple[Line, ...]:
    shape, layout = work.shape, work.layout
    blocks, head = copied_bytes(work)
    B = shape.layers * shape.block_matrices / layout.tensor
    E = shape.vocab_size * shape.width / layout.tensor
    if not blocks and not head:
        return ()
    kind = "FP8 (a copy and its transpose)" if work.precision == "fp8" and blocks else "16 bits"
    return (
        Line(
            f"copies of weights in {kind}, and the head's",
            blocks * B + head * E,
            "bytes of a copy · elements of the blocks' weights + 2 · elements of the head",
            f"c · B + h · E: c {blocks:g}, B {short(B)}, h {head:g}, E {short(E)}",
        ),
    )


def wire_bytes(work: Work) -> float:
    """Bytes of an element of a block's weights while it is gathered."""
    if work.travels_as_fp8:
        return 1.0
    return float(work.element if work.weight == 4 else 2)


def _gathered(work: Work) -> tuple[Line, ...]:
    """What FSDP2 holds of whole weights and gradients."""
    shape, layout = work.shape, work.layout
    if layout.shards == 1:
        return ()
    t = layout.tensor
    block = shape.block_on(t)
    c = 2.0 if work.travels_as_fp8 else wire_bytes(work)
    root = shape.outside_on(t)
    lines = [
        Line(
            "two blocks, gathered",
            2 * c * block,
            "the block at work and the next: bytes of a gathered weight · elements of a block",
            f"2 · c · N: c {c:g}, N {short(block)}",
        ),
        Line(
            "tables and final norm, gathered",
            work.weight * root,
            "what stands in no block stays whole from forward to backward",
            f"w · R: w {work.weight}, R {short(root)}",
        ),
        Line(
            "gradients on their way",
            max(4 * root, (4 + work.element) * block),
            "a whole gradient, and in fp32 what is reduced: of the tables or of a block, the larger",
            f"max(4 · R, (4 + b) · N): R {short(root)}, b {work.element}, N {short(block)}",
        ),
    ]
    if work.accumulate > 1:
        P = held(shape, t)
        lines.append(
            Line(
                "whole gradients of micro-batches, fp32",
                4 * P,
                "gradients are reduced after the last micro-batch alone; until then each rank sums them whole",
                f"4 · P: P {short(P)}",
            )
        )
    return tuple(lines)


def kept_of_layer(work: Work) -> float:
    """Bytes a token that a block keeps for backward, without recomputation."""
    shape, t = work.shape, work.layout.tensor
    W, F, H, Q = shape.width, shape.ffn_width / t, shape.hidden / t, (shape.width + 2 * shape.kv_width) / t
    b, r = work.element, work.residual
    by_sequence = t if work.layout.by_sequence else 1
    stream = 2 * r * W / by_sequence
    if work.precision == "fp8":
        return stream + 2 * W + 2 * Q + 3 * W / t + 2 * H + F
    return stream + b * (2 * W + Q + W / t + H + F)


def checkpointed(work: Work) -> float:
    """Bytes a token of a block's input: the residual stream, and in the fused form the branch beside it."""
    by_sequence = work.layout.tensor if work.layout.by_sequence else 1
    branch = work.element if work.form == "fused" else 0
    return (work.residual + branch) * work.shape.width / by_sequence


def _peak(work: Work) -> tuple[Line, ...]:
    """Activations, and gradients as far as they are there at the fullest moment."""
    shape, layout = work.shape, work.layout
    M, L, W = work.micro_tokens, shape.layers, shape.width
    one, b, r = kept_of_layer(work), work.element, work.residual
    P = held(shape, layout.tensor)
    gradients = (4.0 if work.weight == 4 or work.accumulate > 1 or layout.shards > 1 else 2.0) * P / layout.shards
    words = "bytes that a block keeps for a token · layers · tokens"
    symbols = f"a · L · M: a {short(one)}, L {L}, M {short(M)}"
    if work.activation_checkpointing:
        kept, again = checkpointed(work) * M * L, one * M
        words = "bytes of a block's input for a token · layers · tokens, and one block computed again"
        symbols = f"i · L · M + a · M: i {short(checkpointed(work))}, a {short(one)}, L {L}, M {short(M)}"
    else:
        kept, again = one * M * L, 0.0
    split = layout.tensor
    flowing = M * (b * (shape.ffn_width + shape.hidden) / split + (r + b) * W)
    head = (r + b) * M * W + logits_bytes(work)
    full = kept + again + head
    # Gradients grow as activations go: the fullest moment is at backward's beginning or at its end.
    if work.keeps_gradients or work.accumulate > 1:
        alive, when = gradients, "from the pass before"
    else:
        alive = max(0.0, gradients + one * M + head - full)
        when = "as far as they exceed the activations that are gone by then"
    return (
        Line("activations", kept + again, words, symbols),
        Line(
            "final norm, logits and loss",
            head,
            "input and output of the norm, and the logits that exist at a time",
            f"(r + b) · W · M + logits: r {r}, b {b}, W {W}, logits {short(logits_bytes(work))}",
        ),
        Line(
            "gradients of activations",
            flowing,
            "those of the MLP and of the residual stream in one block",
            f"(b · (F + H) / t + (r + b) · W) · M: F {shape.ffn_width}, H {shape.hidden}, t {split}, M {short(M)}",
        ),
        Line(
            "gradients",
            alive,
            f"bytes of a gradient · parameters / shards, {when}",
            f"g · P / s = {short(gradients)}, here {short(alive)}",
        ),
    )


def logits_bytes(work: Work) -> float:
    """Bytes of logits and of what the loss makes of them, at a time."""
    shape, V = work.shape, work.shape.vocab_size // work.layout.tensor
    if work.loss == "torch":
        # Backward of the softmax: its logarithm, the gradients in front of and behind it, and that of the logits.
        return work.micro_tokens * V * (12 + work.element)
    dtype = torch.float32 if work.precision == "fp32" else torch.bfloat16
    chunk = chunk_of(math.ceil(work.micro_tokens), V, shape.width, dtype)
    # The fused loss makes the head's gradient in the forward pass; of sharded weights it is among those on their way.
    gradient = 4 * V * shape.width if work.layout.shards == 1 else 0
    return float(chunk * V * work.element + gradient)


def reserved(rates: Rates, lines: tuple[Line, ...]) -> Line:
    """What the allocator takes from the GPU for these lines: blocks of other sizes lie between."""
    share = rates["reserved"]
    return Line(
        "reserved by the allocator",
        share * total(lines),
        "allocated · what the allocator took over it where it was measured",
        f"q · allocated: q {share:.3f}",
        ("reserved",),
    )
