"""Optimizers, and what belongs to their step."""

from fusestep.optim.accumulate import accumulate_in_fp32
from fusestep.optim.adagrad import FusedAdagrad
from fusestep.optim.adam import FusedAdam
from fusestep.optim.clip import clip_grad_norm_
from fusestep.optim.lamb import FusedLAMB
from fusestep.optim.novograd import FusedNovoGrad
from fusestep.optim.sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
    "accumulate_in_fp32",
    "clip_grad_norm_",
]
