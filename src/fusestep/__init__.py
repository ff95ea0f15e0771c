"""fusestep: train transformers as fast as the chip allows, and know what each speed-up bought."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not on demand: each has the name of its module, which would take its place in this namespace.
from fusestep.convert import convert
from fusestep.doctor import doctor
from fusestep.explain import explain

if TYPE_CHECKING:
    from fusestep import data, fp8, models, nn, optim
    from fusestep.compat import install_shims, uninstall_shims
    from fusestep.fp8.copies import refresh
    from fusestep.graph.train_step import TrainStep
    from fusestep.ops.linear_cross_entropy import linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "TrainStep",
    "__version__",
    "convert",
    "data",
    "doctor",
    "explain",
    "fp8",
    "install_shims",
    "linear_cross_entropy",
    "models",
    "nn",
    "optim",
    "refresh",
    "uninstall_shims",
]

#: Functions and classes that are reached from here, and the modules that they are in.
_FUNCTIONS = {
    "TrainStep": "fusestep.graph.train_step",
    "install_shims": "fusestep.compat",
    "linear_cross_entropy": "fusestep.ops.linear_cross_entropy",
    "refresh": "fusestep.fp8.copies",
    "uninstall_shims": "fusestep.compat",
}


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for, so that `import fusestep` waits for nothing, not even for torch."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return importlib.import_module(f"fusestep.{name}")
    raise AttributeError(f"module 'fusestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
