"""Text files as bytes: a vocabulary of 256, no tokenizer to train and none to lose.

A folder is read in the order of its paths, hidden files left out, with a newline between two files. Files that are not
UTF-8 text are left out and named in the log.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fusestep.data.vocabulary import Bytes
from fusestep.data.windows import draw_windows
from fusestep.errors import UserError

logger = logging.getLogger("fusestep")

#: Text is held in memory; more than this belongs in a token file, which is mapped.
MAXIMUM_BYTES = 1 << 30

#: How much of the standard library is read: enough for a small model, in a fraction of a second.
STANDARD_LIBRARY_BYTES = 16 << 20

#: Folders beside the standard library that are not its own source, and its tests.
NOT_STANDARD_LIBRARY = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


class TextFiles(Bytes):
    """The bytes of a text file, or of the text files under a folder; their end is held out (see `windows`).

    Args:
        path: a file or a folder.
        seed: of the order in which windows are drawn.
        suffix: of the files to read in a folder, such as ".py"; None reads all.
        leave_out: names of folders not to enter.
        first_bytes: stop in a folder before the file that would exceed this; None refuses more than 1 GiB instead.

    Attributes:
        vocab_size: 256.
        files: the files read, in order.
        skipped: the files left out because they are not UTF-8 text.

    Raises: UserError for a path that is not there, cannot be read or holds no text, and for too much of it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seed: int = 0,
        suffix: str | None = None,
        leave_out: Collection[str] = (),
        first_bytes: int | None = None,
    ) -> None:
        path = Path(path)
        if not path.exists():
            raise UserError(f"TextFiles: {path} does not exist; give a text file, or a folder that holds some.")
        if not (path.is_file() or path.is_dir()):
            # A pipe cannot be read again on resume, and a device may never end.
            raise UserError(f"TextFiles: {path} is neither a file nor a folder; write the text to a file first.")
        self.seed = seed
        self.files: list[Path] = []
        self.skipped: list[Path] = []
        self._name = str(path)
        text = bytearray()
        for file in _walk(path, frozenset(leave_out)) if path.is_dir() else [path]:
            if suffix is not None and file.suffix != suffix:
                continue
            size = len(text) + file.stat().st_size
            if first_bytes is not None and size > first_bytes:
                break
            if size > MAXIMUM_BYTES:
                raise UserError(
                    f"TextFiles: {path} holds more than {MAXIMUM_BYTES >> 20:,} MiB, and text is read into memory; "
                    "write it to a token file with fusestep.data.write_token_file and give that as tokens:PATH."
                )
            content = _read(file)
            if not _is_text(content):
                self.skipped.append(file)
                continue
            if text and content:
                text += b"\n"
            text += content
            self.files.append(file)
        if self.skipped:
            logger.warning("TextFiles: left out %d of %d files that are not UTF-8 text: %s", *self._count_skipped())
        if not text:
            found = f"no text in {len(self.files)} text files and {len(self.skipped)} others"
            raise UserError(f"TextFiles: {path} holds {found}; give a text file, or a folder that holds some.")
        self._fingerprint = hashlib.sha256(text).hexdigest()[:16]
        self._tokens = torch.frombuffer(text, dtype=torch.uint8)

    def batch(self, first: int, count: int, context: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Samples first to first + count - 1: two (count, context) int64 tensors, targets one byte later.

        Raises: UserError where the part asked for is shorter than context + 1 bytes.
        """
        who = f"TextFiles: {self._name}"
        _, windows = draw_windows(self._tokens, self.seed, first, count, context, held_out=held_out, who=who)
        windows = windows.to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def describe(self) -> dict[str, str | int | float]:
        """What decides the stream; the fingerprint is of all bytes."""
        return {
            "source": "text",
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "files": len(self.files),
            "bytes": self._tokens.numel(),
            "fingerprint": self._fingerprint,
        }

    def _count_skipped(self) -> tuple[int, int, str]:
        names = ", ".join(map(str, self.skipped[:5])) + (", …" if len(self.skipped) > 5 else "")
        return len(self.skipped), len(self.skipped) + len(self.files), names


def standard_library(*, seed: int = 0) -> TextFiles:
    """The source of Python's standard library without its tests: real text that every machine has."""
    return TextFiles(
        sysconfig.get_path("stdlib"),
        seed=seed,
        suffix=".py",
        leave_out=NOT_STANDARD_LIBRARY,
        first_bytes=STANDARD_LIBRARY_BYTES,
    )


def _walk(folder: Path, leave_out: frozenset[str]) -> Iterator[Path]:
    """The regular files under a folder in the order of their paths, without hidden ones."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error
    for path in entries:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            # A link to a folder could lead back up.
            if path.name not in leave_out and not path.is_symlink():
                yield from _walk(path, leave_out)
        elif path.is_file():
            yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"TextFiles: cannot read {path} ({error.strerror}); make it readable, or move it elsewhere.")


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
