"""Paths in what a process said, without where on this machine they lie: a ladder's files are shared."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import fusestep

#: Where a path begins, also that of a file's address, but not where it goes on.
_BEGINS = r"(?:(?<=://)|(?<![\w./~-]))"

#: The folder of torch's compiler among temporary ones, which is called after the user.
_OF_INDUCTOR = re.compile(r"(/torchinductor)_[^\s/'\":]+")


def relative(text: str) -> str:
    """The text with each path told from the folder that its module is imported from, else from the working folder, else
    from the home, as `~`.
    """
    for root in sorted(_roots(), key=len, reverse=True):
        text = _below(root).sub("", text)
    for folder in {Path.cwd().absolute(), Path.cwd().resolve()} - {Path(os.sep)}:
        text = _itself(str(folder)).sub(".", text)
    home = str(Path.home())
    # No name of a person's is in the path of a home that is a root of the file system.
    if home != os.sep:
        text = _itself(home).sub("~", _below(home).sub("~/", text))
    return _OF_INDUCTOR.sub(r"\1", text)


def _roots() -> set[str]:
    """Folders that modules come from, and the working folder; as they are named and as they resolve."""
    named = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    found = [path.absolute() for path in (*named, Path(fusestep.__file__).parents[1], Path.cwd())]
    return {str(each) for path in found for each in (path, path.resolve()) if each != Path(each.anchor)}


def _below(root: str) -> re.Pattern[str]:
    """Where a path into a folder begins, but not where that is the middle of another path."""
    return re.compile(rf"{_BEGINS}{re.escape(root)}/")


def _itself(root: str) -> re.Pattern[str]:
    """The path of a folder by itself; a full stop may follow."""
    return re.compile(rf"{_BEGINS}{re.escape(root)}(?![\w/~-]|\.\w)")
