"""What Transformer Engine's frameworks share: the recipes."""

from __future__ import annotations

from fusestep.compat.names import module_getattr
from transformer_engine.common import recipe

__all__ = ["recipe"]

NOT_SERVED: dict[str, tuple[str, bool]] = {}
__getattr__ = module_getattr(__name__, NOT_SERVED)
