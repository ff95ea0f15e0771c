"""Token files: ids as uint16 or uint32, mapped into memory and never read whole.

Layout, little-endian, 32 bytes before the ids:

    bytes  0–7   magic, b"fusetoks"
    bytes  8–11  version, uint32, now 1
    bytes 12–15  bytes per id, uint32: 2 (uint16) or 4 (uint32)
    bytes 16–23  vocabulary size, uint64; every id is below it
    bytes 24–31  number of ids, uint64
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fusestep import durable
from fusestep.data.vocabulary import Numbers
from fusestep.data.windows import draw_windows
from fusestep.errors import UserError

MAGIC = b"fusetoks"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")

#: What the widest id can tell apart.
MAXIMUM_VOCABULARY = 1 << 32

#: How many ids are checked against the vocabulary when a file is opened; the others are when a batch holds them.
CHECKED_AT_OPEN = 1 << 24

#: Ids handled at a time when a file is checked or written.
_CHUNK = 1 << 20

#: uint16 and uint32 have few operators in torch: ids are mapped as signed and their sign bit is masked away.
_SIGNED = {2: torch.int16, 4: torch.int32}
_WIDTHS = {"uint16": 2, "uint32": 4}


class TokenFile(Numbers):
    """Token ids in a file, mapped; their end is held out (see `windows`).

    Args:
        path: a file that `write_token_file` wrote, or one of bare ids when `raw` is given.
        seed: of the order in which windows are drawn.
        raw: the type of the ids of a file without a header, little-endian.
        vocab_size: of a file without a header.

    Raises: UserError for a file that is not there, foreign, truncated, or holds an id outside its vocabulary.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seed: int = 0,
        raw: Literal["uint16", "uint32"] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if (raw is None) != (vocab_size is None) or (raw is not None and raw not in _WIDTHS):
            raise UserError(
                f"TokenFile: raw is {raw!r} and vocab_size {vocab_size!r}; give raw='uint16' or 'uint32' together with "
                "vocab_size for a file without a header, and neither for one that has it."
            )
        if sys.byteorder != "little":
            raise UserError("TokenFile: token files are little-endian, and this machine is not; use text files.")
        self.seed = seed
        self._path = Path(path)
        if not self._path.is_file():
            raise UserError(f"TokenFile: {path} is not a file; give one that fusestep.data.write_token_file wrote.")
        size = self._path.stat().st_size
        if raw is not None and vocab_size is not None:
            offset, width, count = 0, _WIDTHS[raw], size // _WIDTHS[raw]
        else:
            offset, (width, vocab_size, count) = _HEADER.size, self._read_header()
        super().__init__(vocab_size)
        if size != offset + width * count:
            raise UserError(
                f"TokenFile: {path} has {size:,} bytes where {count:,} ids of {width} bytes after {offset} of header "
                f"need {offset + width * count:,}; it is truncated or damaged, write it again."
            )
        if count == 0:
            raise UserError(f"TokenFile: {path} holds no ids; write some with fusestep.data.write_token_file.")
        mapped = torch.from_file(str(self._path), shared=False, size=size // width, dtype=_SIGNED[width])
        self._tokens = mapped[offset // width :]
        self._mask = (1 << (8 * width)) - 1
        for start in range(0, min(count, CHECKED_AT_OPEN), _CHUNK):
            self._check(start, self._to_ids(self._tokens[start : min(start + _CHUNK, CHECKED_AT_OPEN)]))
        self._fingerprint = self._sample_fingerprint()

    def batch(self, first: int, count: int, context: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Samples first to first + count - 1: two (count, context) int64 tensors, targets one token later.

        Raises: UserError where the part asked for is shorter than context + 1 ids, or an id is outside the vocabulary.
        """
        who = f"TokenFile: {self._path}"
        starts, windows = draw_windows(self._tokens, self.seed, first, count, context, held_out=held_out, who=who)
        windows = self._to_ids(windows)
        if count and int(windows.max()) >= self.vocab_size:
            for start, window in zip(starts.tolist(), windows, strict=True):
                self._check(start, window)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def describe(self) -> dict[str, str | int | float]:
        """What decides the stream; the fingerprint is of the first and the last MiB."""
        return {
            "source": "tokens",
            "vocab_size": self.vocab_size,
            "seed": self.seed,
            "tokens": self._tokens.numel(),
            "fingerprint": self._fingerprint,
        }

    def _read_header(self) -> tuple[int, int, int]:
        """Bytes per id, vocabulary size, number of ids."""
        with self._path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise UserError(
                f"TokenFile: {self._path} does not begin with fusestep's header; write it with "
                "fusestep.data.write_token_file, or open bare ids in Python with raw= and vocab_size=."
            )
        _, version, width, vocab_size, count = _HEADER.unpack(header)
        if version > VERSION:
            raise UserError(
                f"TokenFile: {self._path} has version {version} and this fusestep reads up to {VERSION}; "
                "upgrade fusestep, or write the file again."
            )
        if width not in _SIGNED or not 1 <= vocab_size <= MAXIMUM_VOCABULARY:
            raise UserError(
                f"TokenFile: {self._path} claims ids of {width} bytes and a vocabulary of {vocab_size}; "
                "the header is damaged, write the file again."
            )
        return width, vocab_size, count

    def _to_ids(self, stored: Tensor) -> Tensor:
        return stored.to(torch.int64) & self._mask

    def _check(self, position: int, ids: Tensor) -> None:
        """Refuse the first of these ids that is outside the vocabulary; they begin at this position of the file."""
        if int(ids.max()) < self.vocab_size:
            return
        index = int((ids >= self.vocab_size).nonzero()[0])
        raise UserError(
            f"TokenFile: {self._path} holds id {int(ids[index])} at position {position + index}, outside its "
            f"vocabulary of {self.vocab_size}; write the file again with the right vocabulary size."
        )

    def _sample_fingerprint(self) -> str:
        digest = hashlib.sha256()
        with self._path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(-min(1 << 20, self._path.stat().st_size), os.SEEK_END)
            digest.update(file.read())
        return digest.hexdigest()[:16]


def write_token_file(path: str | os.PathLike[str], ids: Tensor | Iterable[int | Tensor], vocab_size: int) -> None:
    """Write ids to a token file, as uint16 where the vocabulary allows it, else uint32.

    The file appears whole or not at all: it is written under a temporary name beside its own and then renamed.

    Args:
        path: of the file; one that exists is replaced.
        ids: one tensor of ids, or an iterable of ids or of tensors of ids (so that they need not all be in memory).
        vocab_size: every id is below it.

    Raises: UserError for an id outside the vocabulary, naming its position; nothing is written then.
    """
    if not 1 <= vocab_size <= MAXIMUM_VOCABULARY:
        raise UserError(f"write_token_file: vocab_size is {vocab_size}; give 1 to 2^32.")
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"write_token_file: the folder {path.parent} does not exist; make it first.")
    width = 2 if vocab_size <= 1 << 16 else 4
    with durable.replacing(path) as file:
        file.write(bytes(_HEADER.size))
        count = 0
        for chunk in _chunks(ids):
            _check_ids(chunk, count, vocab_size)
            # Narrowing keeps the low bytes, which are those of the unsigned id.
            narrow = chunk.to(_SIGNED[width])
            file.write(ctypes.string_at(narrow.data_ptr(), narrow.numel() * width))
            count += chunk.numel()
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, VERSION, width, vocab_size, count))


def _chunks(ids: Tensor | Iterable[int | Tensor]) -> Iterator[Tensor]:
    """The ids as flat int64 tensors of bounded size."""
    if isinstance(ids, Tensor):
        flat = ids.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            yield flat[start : start + _CHUNK].to("cpu", torch.int64).contiguous()
        return
    numbers: list[int] = []
    for item in ids:
        if isinstance(item, Tensor) or len(numbers) == _CHUNK:
            yield torch.tensor(numbers, dtype=torch.int64)
            numbers = []
        if isinstance(item, Tensor):
            yield from _chunks(item)
        else:
            numbers.append(item)
    yield torch.tensor(numbers, dtype=torch.int64)


def _check_ids(ids: Tensor, position: int, vocab_size: int) -> None:
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        index = int(outside[0])
        raise UserError(
            f"write_token_file: id {int(ids[index])} at position {position + index} is outside the vocabulary of "
            f"{vocab_size}; give ids from 0 to {vocab_size - 1}."
        )
