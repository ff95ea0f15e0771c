"""apex.contrib.xentropy.softmax_xentropy over fusestep.nn.functional.cross_entropy.

    loss = (1 − s) · (lse − x[label]) + s · (lse − mean(x)),    lse = log Σ exp(x),    0 where label is padding_idx

Source of the formula: Szegedy et al. 2016, arXiv:1512.00567, section 7.
"""

from __future__ import annotations

from torch import Tensor

from fusestep.compat.implementation import Applied, ran
from fusestep.errors import UserError
from fusestep.nn import functional

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss(Applied):
    """Cross entropy with label smoothing, one loss a row; call its `apply`.

    Right where Apex is not: every dtype has a gradient, rounded once from fp32; what flows in from above stays as it
    is; a label that is padding_idx may lie out of range, and any other out of range is read from nowhere.
    """

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,  # noqa: ARG004
    ) -> Tensor:
        """One loss a row, fp32 (fp64 for fp64).

        Args:
            logits: (rows, classes), any floating dtype; may share memory with nothing that changes before backward.
            labels: (rows,) int64 or int32. Rows whose label is padding_idx, **class 0 unless told otherwise**, have
                loss 0.
            smoothing: the share of the uniform distribution in the target.
            half_to_float: without effect: losses are always fp32, as Apex needs it for a gradient at all.
        Raises: UserError for shapes that do not fit, and on a CPU for a label that is no class; on a GPU such a label's
            loss is NaN.
        """
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise UserError(
                f"SoftmaxCrossEntropyLoss: logits has shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
                "pass (rows, classes) and (rows,)."
            )
        name, ours = "apex.contrib.xentropy.SoftmaxCrossEntropyLoss", "fusestep.nn.functional.cross_entropy"
        ran(name, ours, "cross_entropy", logits)
        return functional.cross_entropy(
            logits, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
        )
