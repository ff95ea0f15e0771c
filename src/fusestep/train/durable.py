"""Files that are complete or absent, and on the disk once they are there."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

#: How a file or folder is called while it is being written.
TEMPORARY = ".writing-"


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


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: complete with the new text, or as it was."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        with DurableFile(temporary) as file:
            file.write(text.encode())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
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
