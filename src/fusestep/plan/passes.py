"""Bytes that a block's passes between its products move on the device, and how many kernels that takes.

    bytes a token = Σ over passes (operands read + results written)

as the forms of the model make them: norms, residual adds, casts of torch.autocast and to FP8, copies of layouts, GELU,
bias gradients. Attention and the products are counted elsewhere, their kernels too: the rates of those were measured
from start to end.

Legend: W width, F features of the MLP, H those that its first layer makes, Q features of queries, keys and values; b
bytes of a number between products, r of one of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusestep.plan.work import Work


@dataclass(frozen=True)
class Passes:
    """Of one block and direction.

    Attributes: bytes, casts: a token, of all passes but casts to FP8, and of these; kernels: of both.
    """

    bytes: float
    casts: float
    kernels: int

    def plus(self, other: Passes, times: int = 1) -> Passes:
        """These and `times` the others."""
        return Passes(
            self.bytes + times * other.bytes, self.casts + times * other.casts, self.kernels + times * other.kernels
        )


def forward(work: Work) -> Passes:
    """Forward of one block on one rank."""
    W, F, H, Q = _widths(work)
    b, r, casts = work.element, work.residual, _casts(work)
    own, t = _by_sequence(work), work.layout.tensor
    if work.precision == "fp8":
        # Norms write their output in FP8; attention's and the activation are cast with their transpose.
        cast = Passes(2 * (b + 2 * r + 1) * W * own, (b + 2) * W / t + b * H + 2 * F, 4)
        return cast.plus(Passes(2 * (b + r) * W * own, b * W / t + b * H, 4), _searches(work))
    if work.form == "fused":
        # A norm adds the branch before it: reads both, writes the sum and its output, as the product takes it.
        norms = 2 * (2 * b + 2 * r) * W * own
        if _casts_norms(work):
            norms += 2 * 2 * r * W * own
        return Passes(norms + b * (H + F), 0.0, 3 + 2 * _casts_norms(work))
    norms = 2 * (2 * r + (r + b if casts else 0)) * W * own
    adds = 2 * (2 * r + b) * W * own
    copies = (2 * 4 * W + 2 * Q) * b if work.form == "seed" else 0.0
    kernels = 8 + 11 * casts if work.form == "seed" else 5 + 10 * casts
    return Passes(norms + adds + b * (H + F) + copies, 0.0, kernels)


def backward(work: Work) -> Passes:
    """Backward of one block on one rank, recomputation apart."""
    W, F, H, Q = _widths(work)
    b, r, casts = work.element, work.residual, _casts(work)
    own, biases = _by_sequence(work), int(work.shape.biases)
    if work.precision == "fp8":
        # Norms take the gradient as products leave it, and write theirs in the dtype of the branch too. What they wrote
        # in FP8 is transposed. Gradients are cast with their transpose, those of queries, keys and values from where
        # attention left them, and the MLP's as its activation's gradient is computed; casts sum up biases' as well.
        norms = 2 * (3 * r + b + b * casts) * W * own
        gradients = 2 * (b + 2) * W + (b + 2) * Q + b * F + (b + 2) * H
        cast = Passes(norms + 2 * 2 * W, gradients, 4 + 2 + 4 + 4 * biases)
        return cast.plus(Passes(0.0, b * (2 * W + Q + F + H), 4), _searches(work))
    # Gradients of branches come in the residual stream's dtype and are cast; the fused form's norms write them in both.
    # That of a norm's output is cast back, but those norms take it as it comes, unless ranks share the product.
    is_fused, is_taken = work.form == "fused", casts and work.form == "fused" and not _casts_norms(work)
    casting = 2 * (b if is_fused else r + b) * W * own if casts else 0.0
    if casts and not is_taken:
        casting += 2 * (r + b) * W * own
    norms = 2 * (3 * r + (b if is_taken else r) if is_fused else 3 * r) * W * own
    adds = 0.0 if is_fused else 2 * 3 * r * W * own
    # The fused form sums up the bias of the MLP's first layer as it computes the activation's gradient.
    sums = b * (Q + 2 * W + (0 if is_fused else H)) * biases
    layouts = {"fused": 2 * Q, "plain": 4 * Q, "seed": 0}[work.form] * b
    if work.form == "seed":
        # Queries, keys and values are parts of one tensor: their gradients are padded to it (12 W) and added up
        # (twice 12 W), and layouts are changed back (14 W).
        layouts = (2 * 12 * W + 12 * W + 14 * W) * b
    # A norm's backward is two kernels.
    kernels = {"fused": 6, "plain": 9, "seed": 20}[work.form] + (3 if is_fused else 4) * biases
    # Gradients of weights and biases are cast as well, which products of the fused form write as they are to be.
    kernels += 2 * _casts_norms(work) if is_fused else 12 * casts
    return Passes(norms + adds + b * (F + 2 * H) + sums + casting + layouts, 0.0, kernels)


def outside(work: Work) -> Passes:
    """Of the embedding and the final norm, both directions, on one rank: what tokens move.

    The embedding reads a row and writes it, and reads its gradient, which is the sum of two. The table's gradient is
    not among them.
    """
    b, r = work.element, work.residual
    norm = (3 * b + 5 * r) * work.shape.width * _by_sequence(work)
    return Passes(norm + 6 * r * work.shape.width, 0.0, 9)


def _searches(work: Work) -> int:
    """Whether each tensor is read once more before its cast, since its scale is that of its own largest number."""
    return int(work.recipe == "current")


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
