"""What `fusestep run` and `install_shims` were asked for.

Kept in environment variables, so that subprocesses, torchrun's workers and multiprocessing know it too; read at each
use, since a notebook may change its mind.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from fusestep.errors import UserError

#: The layout of Transformer Engine's layers in place of their own default, sbhd.
TE_LAYOUT = "FUSESTEP_TE_LAYOUT"

#: The folder where the processes of one `fusestep run` write what they were served.
REPORT_FOLDER = "FUSESTEP_RUN_FOLDER"


def te_layout() -> Literal["bshd"] | None:
    """The layout that stands in for the default of Transformer Engine's layers; None leaves it as it is, sbhd.

    Raises: UserError for a layout that is neither.
    """
    return checked_layout(os.environ.get(TE_LAYOUT, "sbhd"), TE_LAYOUT)


def checked_layout(value: str, who: str) -> Literal["bshd"] | None:
    """The meaning of a layout's name.

    Args:
        who: where the name came from, for the error.
    Raises: UserError for a layout that is neither sbhd nor bshd.
    """
    if value in ("", "sbhd"):
        return None
    if value == "bshd":
        return "bshd"
    raise UserError(
        f"{who} is {value!r}; choose bshd (batch first), or sbhd (sequence first), Transformer Engine's own default."
    )


def report_folder() -> Path | None:
    """Where this process writes what it was served; None outside of `fusestep run`."""
    folder = os.environ.get(REPORT_FOLDER)
    return Path(folder) if folder else None
