"""The command `fusestep`.

`app.py` lists the commands; each is a module of its own here, with one function `command`, imported only when it is
called, so that help and `--version` answer at once. `errors.py` turns what a person can mend into one sentence.
`fusestep run` alone is not among them (`fusestep/compat/run.py`): the process becomes the script's.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fusestep.cli.errors import at_interrupt, exit_status, leave


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line on `arguments` (by default the process's own) and leave with its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:
        # With nothing of ours around the script, whose errors, streams and signals are its own.
        from fusestep.compat.run import main as run_script

        run_script(given[1:])
        sys.exit()

    def program() -> None:
        # Inside, because the command line's own packages may be missing.
        from fusestep.cli.app import run

        run(given)

    # Python has no stream where a process was started with it closed (`>&-`); what is written there is for nobody.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no × or …, and a folder whose name is no text, cost a character, never the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with at_interrupt(leave):
        sys.exit(exit_status("fusestep", program))
