"""Paths in what a process said, without where on this machine they lie: a ladder's files are shared."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import fusestep


def relative(text: str) -> str:
    """The text with each path told from the folder that its module is imported from, else from the working folder, else
    from the home, as `~`.
    """
    for root in sorted(_roots(), key=len, reverse=True):
        text = _below(root).sub("", text)
    home = str(Path.home())
    # No name of a person's is in the path of a home that is a root of the file system.
    return text if home == os.sep else _below(home).sub("~/", text)


def _roots() -> set[str]:
    """Folders that modules come from, and the working folder; as they are named and as they resolve."""
    named = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    found = [path.absolute() for path in (*named, Path(fusestep.__file__).parents[1], Path.cwd())]
    return {str(each) for path in found for each in (path, path.resolve()) if each != Path(each.anchor)}


def _below(root: str) -> re.Pattern[str]:
    """Where a path into a folder begins, but not where that is the middle of another path."""
    return re.compile(rf"(?<![\w./~-]){re.escape(root)}/")
