"""Bytes that a block's passes between its products move on the device, and how many kernels that takes.

    bytes a token = Σ over passes (operands read + results written)

as the forms of the model make them: norms, residual adds, casts of torch.autocast, copies of layouts, GELU, bias
gradients. Attention and the products are counted elsewhere.

Legend: W width, F features of the MLP, H those that its first layer makes, Q features of queries, keys and values; b
bytes of a number between products, r of one of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusestep.plan.work import Work


@dataclass(frozen=True)
class Passes:
    """Of one block and direction: bytes a token, and kernels, products and attention included."""

    bytes: float
    kernels: int


def forward(work: Work) -> Passes:
    """Forward of one block on one rank."""
    W, F, H, Q = _widths(work)
    b, r, casts = work.element, work.residual, _casts(work)
    own = _by_sequence(work)
    if work.precision == "fp8":
        # Norms, attention's output and the activation are cast in the pass that makes them or in one of their own,
        # each with its transpose.
        norms = 2 * (b + 2 * r + 2) * W * own
        return Passes(norms + 4 * W + (b * H + 2 * F) + 2 * b * Q, 12)
    if work.form == "fused":
        # A norm adds the branch before it: reads both, writes the sum and its output, as the product takes it.
        norms = 2 * (2 * b + 2 * r) * W * own
        if _casts_norms(work):
            norms += 2 * 2 * r * W * own
        return Passes(norms + b * (H + F) + 2 * b * Q, 9 + 2 * _casts_norms(work))
    norms = 2 * (2 * r + (r + b if casts else 0)) * W * own
    adds = 2 * (2 * r + b) * W * own
    copies = (2 * 4 * W + 2 * Q) * b if work.form == "seed" else 0.0
    return Passes(norms + adds + b * (H + F) + copies, (16 if work.form == "seed" else 10) + 10 * casts)


def backward(work: Work) -> Passes:
    """Backward of one block on one rank, recomputation apart."""
    W, F, H, Q = _widths(work)
    b, r, casts = work.element, work.residual, _casts(work)
    own = _by_sequence(work)
    biases = b * (Q + 2 * W + H) if work.shape.biases else 0.0
    activation = b * (F + 2 * H)
    if work.precision == "fp8":
        # Gradients are cast with their transpose; the MLP's as its activation's gradient is computed.
        # Norms take the gradient as products leave it, and write theirs in the dtype of the branch too.
        norms = 2 * (3 * r + b + b * casts) * W * own
        gradients = 2 * (b + 2) * W + (b + 2) * Q + b * F + (b + 2) * H
        return Passes(norms + gradients + biases + 2 * b * Q, 20)
    # Gradients of branches come in the residual stream's dtype and are cast; the fused form's norms write them in both.
    # That of a norm's output is cast back, but those norms take it as it comes, unless ranks share the product.
    is_fused, is_taken = work.form == "fused", casts and work.form == "fused" and not _casts_norms(work)
    casting = 2 * (b if is_fused else r + b) * W * own if casts else 0.0
    if casts and not is_taken:
        casting += 2 * (r + b) * W * own
    norms = 2 * (3 * r + (b if is_taken else r) if is_fused else 3 * r) * W * own
    adds = 0.0 if is_fused else 2 * 3 * r * W * own
    layouts = {"fused": 2 * Q, "plain": 4 * Q, "seed": 0}[work.form] * b
    if work.form == "seed":
        # Queries, keys and values are parts of one tensor: their gradients are padded to it (12 W) and added up
        # (twice 12 W), and layouts are changed back (14 W).
        layouts = (2 * 12 * W + 12 * W + 14 * W) * b
    kernels = {"fused": 17, "plain": 20, "seed": 32}[work.form]
    # Gradients of weights and biases are cast as well, which products of the fused form write as they are to be.
    kernels += 2 * _casts_norms(work) if is_fused else 12 * casts
    return Passes(norms + adds + activation + biases + casting + layouts, kernels)


def _casts(work: Work) -> int:
    """Whether torch.autocast casts between the residual stream and the products."""
    return int(work.element != work.residual)


def _casts_norms(work: Work) -> int:
    """Whether a norm of the fused form is cast apart: where ranks share the product, which takes what all have."""
    return _casts(work) * int(work.layout.tensor > 1)


def _by_sequence(work: Work) -> float:
    return 1 / work.layout.tensor if work.layout.by_sequence else 1.0


def _widths(work: Work) -> tuple[float, float, float, float]:
    """W, and a rank's parts of F, H and Q."""
    shape, t = work.shape, work.layout.tensor
    return shape.width, shape.ffn_width / t, shape.hidden / t, (shape.width + 2 * shape.kv_width) / t
