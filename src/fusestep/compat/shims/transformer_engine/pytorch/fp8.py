"""transformer_engine.pytorch.quantization, by its name up to 2.8."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.quantization import *  # noqa: F403

__all__ = list(quantization.__all__)

NOT_SERVED = quantization.NOT_SERVED
__getattr__ = module_getattr(__name__, NOT_SERVED)
