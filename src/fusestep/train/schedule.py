"""The learning rate as a function of the steps that were applied, computed on their device.

A step that the optimizer skipped (gradients not finite) must not advance the schedule, and only the device knows
which were skipped; asking it would make the host wait, so the whole formula runs there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

#: Where the cosine ends, as a fraction of the peak.
FINAL_FRACTION = 0.1


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then half a cosine down to FINAL_FRACTION of it at step `length`, then constant.

    With t steps applied, the next one uses

        lr(t) = peak · (t + 1) / warmup                                     t < warmup
        lr(t) = peak · (f + (1 − f) · (1 + cos(π·s)) / 2)                   otherwise
        s = min((t − warmup) / (length − warmup), 1),  f = FINAL_FRACTION

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, one period.
    """

    peak: float
    warmup: int
    length: int

    def write(self, lr: Tensor, applied_steps: Tensor) -> None:
        """Put lr(applied_steps) into `lr`, in place, without asking the device for anything.

        Args:
            lr: 0-d fp32, the tensor in the optimizer's groups.
            applied_steps: 0-d int64 on the same device.
        """
        t = applied_steps.double()
        progress = ((t - self.warmup) / max(self.length - self.warmup, 1)).clamp(0.0, 1.0)
        cosine = FINAL_FRACTION + (1.0 - FINAL_FRACTION) * 0.5 * (1.0 + (progress * math.pi).cos())
        warmup = (t + 1.0) / max(self.warmup, 1)
        lr.copy_(self.peak * cosine.where(t >= self.warmup, warmup))
