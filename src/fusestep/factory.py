"""A user's model from the name of a function that makes it, as command lines take it: `pkg.mod:factory`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusestep.errors import UserError
from fusestep.installed import is_installed_file

if TYPE_CHECKING:
    from torch import nn


def built_model(who: str, name: str) -> nn.Module:
    """Import the module, call the function without arguments, and return the model that it makes.

    Args:
        who: speaks in the error.
        name: as of `built`.
    Raises: UserError as `built` does, and for anything that is no torch.nn.Module and holds none as `model`.
    """
    from torch import nn

    made = built(who, name)
    # What the ladder takes, a model with its batches and its loss, has the model in it.
    model = made if isinstance(made, nn.Module) else getattr(made, "model", None)
    if not isinstance(model, nn.Module):
        raise UserError(f"{who}: {name}() gives {type(made).__name__}; let it return a torch.nn.Module.")
    return model


def built(who: str, name: str, before_call: Callable[[], None] = lambda: None) -> Any:
    """Import the module, call the function without arguments, and return what it gives.

    Modules are found in the working folder too, as `python -m` finds them.

    Args:
        who: speaks in the error.
        name: "pkg.mod:factory"; the factory may be a class, or an attribute of one ("pkg.mod:Class.small"), or a
            torch.nn.Module, which is what is returned then.
        before_call: called once the module is imported, and before the function is.
    Raises: UserError where the name leads to no factory, with the place in the user's code where it failed.
    """
    module_name, colon, attributes = name.partition(":")
    if not (module_name and colon and attributes):
        raise UserError(f"{who}: {name!r} names no factory; pass module:function, as in pkg.mod:factory.")
    path = Path(module_name)
    if path.name != module_name or path.suffix == ".py":
        raise UserError(
            f"{who}: {module_name} is the path of a file; pass the module's name, {path.stem}:{attributes}, from the "
            "folder that it is in."
        )
    if os.getcwd() not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    found: Any = guarded(f"{who}: {module_name} cannot be imported", lambda: importlib.import_module(module_name))
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UserError(
                f"{who}: {module_name} has no {attributes}; pass the name of a function that makes a model."
            )
        found = getattr(found, attribute)
    if not callable(found):
        raise UserError(
            f"{who}: {name} is of type {type(found).__name__}; pass the name of a function that makes a model."
        )
    from torch import nn

    before_call()
    return found if isinstance(found, nn.Module) else guarded(f"{who}: {name}() fails", found)


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """The result of the user's code; its error in one sentence, since it is theirs to mend.

    So is its leaving by sys.exit, as a script does that reads the command line when it is imported. Memory that runs
    out is nobody's fault, and raised as it is.
    """
    from fusestep.memory import ran_out

    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, Exception) and ran_out(error):
            raise
        message = str(error).partition("\n")[0]
        said = type(error).__name__ + (f": {message}" if message else "") + _place_of(error)
        raise UserError(f"{what} ({said}); correct it, or name another.") from error


def _place_of(error: BaseException) -> str:
    """Where the user's code was when an error came; nothing where it was not under way.

    What libraries, Python's own among them, did for it is not theirs to mend.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and not is_installed_file(frame.filename):
            return f", at {frame.filename}:{frame.lineno}"
    return ""
