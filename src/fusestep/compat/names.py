"""What a shim module does with the names that it does not serve.

Each shim module declares what it serves in `__all__`, what it does not in `NOT_SERVED`, and takes its `__getattr__`
from here:

    __all__ = ["FusedAdam"]
    NOT_SERVED = {"DistributedFusedAdam": ("use torch's FSDP2 with fusestep.optim.FusedAdam", False)}
    __getattr__ = module_getattr(__name__, NOT_SERVED)

Entries may be classes, functions or submodules. Importing one, by either form of the statement, is an ImportError whose
sentence names it, what to use instead, and whether it is planned; `hasattr` says False.
"""

from __future__ import annotations

import difflib
import dis
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any

from fusestep.compat.report import not_served, sentence

#: For each name: what to use instead, and whether it is planned.
NotServed = Mapping[str, tuple[str, bool]]

#: How many of a module's names are told to those who ask it for one that nobody knows: the most alike.
_TOLD = 8

#: What the modules that were imported do not serve, by their names.
_tables: dict[str, NotServed] = {}


def module_getattr(module: str, table: NotServed, submodules: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a shim module; also makes imports of the submodules in its table raise.

    Args:
        module: the module's name, `__name__`; "" for a table of top-level modules.
        table: its NOT_SERVED.
        submodules: imported when first asked for as attributes.
    """
    _tables[module] = table
    if _Refusal not in sys.meta_path:
        # Last, so that it is asked only about what nobody else has.
        sys.meta_path.append(_Refusal)

    def getattribute(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        full = f"{module}.{name}"
        instead, planned = table.get(name) or _unknown(module, name)
        # A module that is being imported, in a circle, is not an attribute yet; the statement itself looks for it.
        if full not in sys.modules and _is_import(sys._getframe(1)):
            raise not_served(full, instead, planned, ImportError)
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}, or none that fusestep knows of")
        # A question, as hasattr asks it, is not a use.
        raise AttributeError(sentence(full, instead, planned), name=name)

    return getattribute


def forget() -> None:
    """Take the refusal of submodules away, as `uninstall_shims` does."""
    _tables.clear()
    if _Refusal in sys.meta_path:
        sys.meta_path.remove(_Refusal)


def _unknown(module: str, name: str) -> tuple[str, None]:
    """What is said of a name that no table has: what is there instead."""
    there = sorted(getattr(sys.modules.get(module), "__all__", ()))
    told = difflib.get_close_matches(name, there, _TOLD, cutoff=0.0) if len(there) > _TOLD else there
    more = f" and {len(there) - len(told)} more" if len(told) < len(there) else ""
    has = f": {module} has {', '.join(told)}{more}" if told else ""
    known = "it is not among the names that fusestep knows"
    return f"{known}{has}; docs/apex.md and docs/transformer-engine.md list them all", None


def _is_import(frame: FrameType) -> bool:
    """Whether a frame is at `from … import name`, which would replace an AttributeError's words by its own."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _is_question(frame: FrameType | None) -> bool:
    """Whether importlib.util.find_spec asks, which is to be answered, not refused."""
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


class _Refusal:
    """A finder of modules that refuses, in words, those which the shims do not serve."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG003
        parent, _, name = fullname.rpartition(".")
        is_below_ours = parent and parent.partition(".")[0] in _tables
        entry: tuple[str, bool | None] | None = _tables.get(parent, {}).get(name)
        if entry is None and is_below_ours:
            entry = _unknown(parent, name)
        if entry is not None and not _is_question(sys._getframe(1)):
            # Without the module's name in it: with it, `from package import module` would pass over the exception.
            raise not_served(fullname, *entry, ModuleNotFoundError)
        return None
