"""Files that are complete or absent, and on the disk once they are there."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

#: How a file or folder is called while it is being written.
TEMPORARY = ".writing-"

#: What an OSError has for its `errno` where nothing more fits on the disk.
FULL = (errno.ENOSPC, errno.EDQUOT)


def mend(error: OSError, what: str) -> str:
    """What a person does about an error that kept `what`, a file or folder in words, from being written or read."""
    if error.errno in FULL:
        return f"free some space for {what}"
    if error.errno == errno.EFBIG:
        return f"raise the limit of a file's size for {what}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"change the permissions of {what}"
    if error.errno == errno.EROFS:
        return f"make the file system of {what} writable"
    return f"put {what} in order"


def is_temporary(path: Path) -> bool:
    """Whether a file or folder was being written and never got its name."""
    return path.name.startswith(TEMPORARY)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def obstacle(folder: Path) -> Path | None:
    """What stands in the way of making a folder or writing into it: the nearest path that exists; None if nothing.

    It makes a folder there for a moment: /proc and its like promise root everything and keep nothing.

    Raises: OSError where the disk is full.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return existing
    try:
        trial = tempfile.mkdtemp(prefix=TEMPORARY, dir=existing)
    except OSError as error:
        if error.errno in FULL:
            raise
        return existing
    Path(trial).rmdir()
    return None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when it is complete; after an error `path` is as it was."""
    temporary = _temporary(path)
    try:
        with _synced(temporary, path) as file:
            yield file
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_together(texts: Mapping[Path, str | bytes]) -> None:
    """Write small files of one folder: all are complete before the first gets its name, in the order given."""
    temporaries = {path: _temporary(path) for path in texts}
    try:
        for path, temporary in temporaries.items():
            with _synced(temporary, path) as file:
                content = texts[path]
                file.write(content.encode() if isinstance(content, str) else content)
        for path, temporary in temporaries.items():
            temporary.replace(path)
        sync_folder(next(iter(texts)).parent)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    # With the process's number, so that two that write the same file do not meet in one.
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


@contextlib.contextmanager
def _synced(path: Path, name: Path) -> Iterator[BinaryIO]:
    """A file to write, on the disk when the block ends; an error of its own says of `name`, which it gets then, what is
    wrong."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # What names no file may be of something that the block reads, unless nothing but writing meets it.
        if error.filename in (path, str(path)) or (error.filename is None and error.errno in (*FULL, errno.EFBIG)):
            error.filename = str(name)
        raise


class DurableFile:
    """A file to write once: counts and checksums its bytes, and is on the disk when closed.

    An OSError that `torch.save` hides behind an error of its own is raised again on leaving.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._error: OSError | None = None
        self._bytes = 0
        self._crc32 = 0

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self._bytes += written
        self._crc32 = zlib.crc32(data, self._crc32)
        return written

    def flush(self) -> None:
        self._file.flush()

    def fingerprint(self) -> dict[str, int]:
        return {"bytes": self._bytes, "crc32": self._crc32}

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            try:
                self._file.close()
            except OSError:
                # What could not be written is still in the buffer; the first error says all.
                if error is None:
                    raise
        if self._error is not None and error is not self._error:
            raise self._error
