"""Putting the shims on the path of this process and of those that it starts, and taking them off again."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from fusestep.compat import names, settings

#: The folder for sys.path that holds the shims.
SHIMS = Path(__file__).parent / "shims"

#: What was imported under the shims' names before they came, to be put back.
_before: dict[str, ModuleType] = {}

#: What FUSESTEP_TE_LAYOUT was before.
_layout_before: list[str | None] = []


def install_shims(te_layout: str | None = None) -> None:
    """Let `import apex` and `import transformer_engine` mean fusestep, in this process and in those that it starts.

    For notebooks and programs that cannot be started with `fusestep run`. Call it before those imports: a module that
    was imported before keeps the objects that it took. Calling it again only sets the layout.

    Args:
        te_layout: "bshd" lets Transformer Engine's layers read (batch, sequence, width) where a script leaves their
            layout out; "sbhd" is their own default; None leaves what FUSESTEP_TE_LAYOUT says.
    Raises: UserError for another layout.
    """
    if not _layout_before:
        _layout_before.append(os.environ.get(settings.TE_LAYOUT))
    if te_layout is not None:
        os.environ[settings.TE_LAYOUT] = settings.checked_layout(te_layout, "install_shims: te_layout") or "sbhd"
    if str(SHIMS) not in sys.path:
        sys.path.insert(0, str(SHIMS))
    for name in _shimmed(ours=False):
        _before[name] = sys.modules.pop(name)
    inherited = os.environ.get("PYTHONPATH", "")
    if str(SHIMS) not in inherited.split(os.pathsep):
        # Behind it as it was: an empty entry means the working folder.
        os.environ["PYTHONPATH"] = f"{SHIMS}{os.pathsep}{inherited}" if inherited else str(SHIMS)
    importlib.invalidate_caches()


def uninstall_shims() -> None:
    """Undo install_shims: `import apex` and `import transformer_engine` mean again what they did before.

    Objects that were made from the shims keep working. Without shims it does nothing.
    """
    sys.path[:] = [entry for entry in sys.path if entry != str(SHIMS)]
    for name in _shimmed(ours=True):
        del sys.modules[name]
    sys.modules.update(_before)
    _before.clear()
    names.forget()
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SHIMS) in inherited:
        rest = [entry for entry in inherited if entry != str(SHIMS)]
        if rest:
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        else:
            del os.environ["PYTHONPATH"]
    if _layout_before:
        layout = _layout_before.pop()
        if layout is None:
            os.environ.pop(settings.TE_LAYOUT, None)
        else:
            os.environ[settings.TE_LAYOUT] = layout
    importlib.invalidate_caches()


def is_shim(module: ModuleType) -> bool:
    """Whether a module is one of the shims."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(SHIMS)


def who_serves(package: str) -> str:
    """What a shim package says of itself in the report, with the real one that it stands before, if there is one."""
    import fusestep

    ours = f"fusestep {fusestep.__version__}"
    path = [entry for entry in sys.path if entry != str(SHIMS)]
    real = PathFinder.find_spec(package, path)
    if real is None or real.origin is None:  # nowhere, or a folder of that name with no package in it
        return ours
    found = next(iter(importlib.metadata.distributions(name=package, path=path)), None)
    version = "" if found is None else f" {found.version}"
    return f"{ours}; {package}{version} is installed too, in {Path(real.origin).parent}, and not used"


def _shimmed(*, ours: bool) -> list[str]:
    """The imported modules under the shims' names that are shims, or that are not."""
    tops = {path.name.removesuffix(".py") for path in SHIMS.iterdir() if path.suffix in ("", ".py")}
    return [
        name for name, module in list(sys.modules.items()) if name.partition(".")[0] in tops and is_shim(module) == ours
    ]
