"""Where other libraries are, and how they are imported: from where they are installed, and never from fusestep's own
shims, which have the same names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from fusestep.compat.install import SHIMS, is_shim
from fusestep.errors import UserError

#: The package to import of each peer, and the distribution that has its version.
PACKAGES = {
    "apex": ("apex", "apex"),
    "te": ("transformer_engine", "transformer_engine"),
    "liger": ("liger_kernel", "liger-kernel"),
    "torchao": ("torchao", "torchao"),
    "quack": ("quack", "quack-kernels"),
}


def place_of(peer: str) -> str | None:
    """The folder that a peer is installed in, beside fusestep's shims or without them; None where it is not."""
    package, _ = PACKAGES[peer]
    found = PathFinder.find_spec(package, _path())
    # A folder of that name with no package in it is none.
    return None if found is None or found.origin is None else str(Path(found.origin).parent)


def version_of(peer: str) -> str | None:
    """The version of an installed peer, None where it tells none."""
    _, distribution = PACKAGES[peer]
    found = next(iter(importlib.metadata.distributions(name=distribution, path=_path())), None)
    return None if found is None else found.version


def _path() -> list[str]:
    return [entry for entry in sys.path if Path(entry).resolve() != SHIMS.resolve()]


def load(name: str) -> ModuleType:
    """Import a module of a peer's.

    Raises: UserError where it is not installed, or where the import would be of a shim.
    """
    sys.path[:] = _path()
    for known, module in list(sys.modules.items()):
        if is_shim(module):
            del sys.modules[known]
    module = importlib.import_module(name)
    if is_shim(module):
        raise UserError(f"{name} is fusestep's own shim and not the library; start without fusestep's shims.")
    return module
