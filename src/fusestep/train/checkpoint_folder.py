"""The folders of checkpoints: their names, which are complete, how one is removed, and what is said of a full disk."""

from __future__ import annotations

import errno
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusestep.durable import TEMPORARY, mend
from fusestep.errors import UserError

FOLDER = "checkpoints"
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")

_DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
_DISK_TROUBLE |= {errno.EEXIST, errno.ENOTDIR}


def final_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is when it is complete."""
    return run / FOLDER / f"{_PREFIX}{step:08d}"


def temporary_path(run: Path, step: int) -> Path:
    """Where it is while it is being written."""
    return run / FOLDER / f"{TEMPORARY}{step:08d}"


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process was writing or discarding."""
    for path in run.glob(f"{TEMPORARY}*"):
        path.unlink()
    for path in (run / FOLDER).glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def complete(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run / FOLDER).glob(f"{_PREFIX}*") if path.is_dir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def discard(path: Path) -> None:
    """Remove a checkpoint such that a kill meanwhile leaves no part of it under its name."""
    doomed = path.with_name(f"{TEMPORARY}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def difference(path: Path, size: int, crc32: int) -> str | None:
    """How a file differs from what its manifest says, or None."""
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes instead of {size}"
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return None if found == crc32 else "has other bytes than were written"


@contextmanager
def writing(run: Path, step: int) -> Iterator[None]:
    """Turn what the disk refuses into a sentence that says what of the run is safe."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        found = complete(run)
        last = f"the last good one, {found[-1]}, is untouched" if found else "there is none before it"
        raise UserError(
            f"the checkpoint of step {step} could not be written ({error.strerror or error}); {last}; "
            f"{mend(error, str(run))}, then go on with --resume --out {run}."
        ) from error
