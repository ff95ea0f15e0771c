"""Optimizers, and what belongs to their step."""

from fusestep.optim.accumulate import accumulate_in_fp32
from fusestep.optim.adam import FusedAdam
from fusestep.optim.clip import clip_grad_norm_

__all__ = ["FusedAdam", "accumulate_in_fp32", "clip_grad_norm_"]
