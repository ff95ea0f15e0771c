"""What a training run would need, before it is started: memory of a GPU, what is sent, how long a step takes."""

from __future__ import annotations

from fusestep.plan.estimate import Estimate, estimate
from fusestep.plan.rates import Rates, measured_rates
from fusestep.plan.shape import SHAPES, Shape
from fusestep.plan.work import Work

__all__ = ["SHAPES", "Estimate", "Rates", "Shape", "Work", "estimate", "measured_rates"]
