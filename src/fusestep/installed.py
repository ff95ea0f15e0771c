"""Whether code is an installed package's: Python's own, torch's and ours among them. The rest is the user's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

_FOLDERS = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _beginnings(folders: Iterable[str]) -> tuple[str, ...]:
    """What the names of files in these folders begin with."""
    return tuple(folder + os.sep for folder in dict.fromkeys(folders))


_BEGINNINGS = ("<frozen ", *_beginnings(_FOLDERS))


def is_installed_file(file: str) -> bool:
    """Whether a file of code, as tracebacks name it, is an installed package's."""
    return file.startswith(_BEGINNINGS)


def is_installed(what: ModuleType | type) -> bool:
    """Whether a module, or that in which a class is, is an installed package's."""
    module = what if isinstance(what, ModuleType) else sys.modules.get(what.__module__)
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    if file is not None:
        return is_installed_file(file)
    if folders := list(getattr(module, "__path__", ())):  # a package without a file of its own
        return is_installed_file(folders[0] + os.sep)
    # What has no file either is compiled into Python, or made by a program.
    return getattr(getattr(module, "__spec__", None), "origin", None) in ("built-in", "frozen")
