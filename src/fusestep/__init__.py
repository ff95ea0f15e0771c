"""fusestep: train transformers as fast as the chip allows, and know what each speed-up bought."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusestep import data, models, nn, optim

    __version__: str

__all__ = ["__version__", "data", "models", "nn", "optim"]


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for, so that `import fusestep` waits for nothing, not even for torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fusestep")
    if name in __all__:
        return importlib.import_module(f"fusestep.{name}")
    raise AttributeError(f"module 'fusestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
