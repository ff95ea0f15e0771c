"""Tensors in files, in parts: which part of which tensor lies where, and reading any part of any of them.

Files are safetensors. An index says for each tensor its dtype, its whole shape, and its chunks: where each lies in the
whole, how large it is, its file, and its key there. The index of a file of whole tensors is its own header. Nothing
here is a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

#: Names of dtypes in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnreadableFileError(Exception):
    """A file is no safetensors, or lacks what the index says; its one argument is the file's name."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: `offsets` in the whole, its `shape`, its file's name and its key in that."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class Entry:
    """A tensor: dtype, whole shape, and its chunks, which together are all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        whole = torch.Size(self.shape).numel()
        held = sum(torch.Size(chunk.shape).numel() for chunk in self.chunks)
        if whole != held:
            raise ValueError(f"chunks of {held} elements make no tensor of {whole}")
        for chunk in self.chunks:
            ends = (start + size for start, size in zip(chunk.offsets, chunk.shape, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)) or min(chunk.offsets, default=0) < 0:
                raise ValueError(f"a chunk at {chunk.offsets} of {chunk.shape} is outside of {self.shape}")


class Shards:
    """The tensors of a folder.

    Args:
        folder: where the files are.
        entries: what they hold, by name.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self.folder = folder
        self.entries = dict(entries)

    @classmethod
    def of_file(cls, path: Path) -> Shards:
        """The tensors of a file that holds whole ones. Raises: UnreadableFileError if it is none."""
        entries = {}
        try:
            opened = safetensors.safe_open(path, "pt")
        except safetensors.SafetensorError as error:
            raise UnreadableFileError(path.name) from error
        with opened as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                entries[name] = Entry(
                    DTYPES[header.get_dtype()], shape, (Chunk((0,) * len(shape), shape, path.name, name),)
                )
        return cls(path.parent, entries)

    def to_json(self) -> dict[str, Any]:
        """The index as plain values."""
        return {
            name: {
                "dtype": NAMES[entry.dtype],
                "shape": entry.shape,
                "chunks": [[chunk.offsets, chunk.shape, chunk.file, chunk.key] for chunk in entry.chunks],
            }
            for name, entry in self.entries.items()
        }

    @classmethod
    def from_json(cls, folder: Path, index: Mapping[str, Any]) -> Shards:
        """As `to_json` gave it. Raises: LookupError, TypeError or ValueError for anything else."""
        entries = {
            name: Entry(
                DTYPES[of["dtype"]],
                tuple(map(int, of["shape"])),
                tuple(
                    Chunk(tuple(map(int, offsets)), tuple(map(int, shape)), str(file), str(key))
                    for offsets, shape, file, key in of["chunks"]
                ),
            )
            for name, of in index.items()
        }
        return cls(folder, entries)

    @property
    def files(self) -> set[str]:
        """The names of the files in which something lies."""
        return {chunk.file for entry in self.entries.values() for chunk in entry.chunks}

    def whole(self, names: Mapping[str, str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Tensors, put together.

        Args:
            names: names in the index, and what they are called in the result.
        Raises: UnreadableFileError.
        """
        found = {}
        with Files(self.folder, str(device)) as files:
            for name, called in names.items():
                entry = self.entries[name]
                if len(entry.chunks) == 1:
                    found[called] = files.read(entry.chunks[0])
                    continue
                found[called] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                for chunk in entry.chunks:
                    found[called][slices_of(chunk.offsets, chunk.shape)] = files.read(chunk)
        return found


class Files:
    """Opens each file once, and reads chunks or parts of them."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, chunk: Chunk, where: tuple[slice, ...] = ()) -> Tensor:
        """A chunk, or the part of it that slices name. Raises: UnreadableFileError."""
        try:
            file = self._open.get(chunk.file)
            if file is None:
                opened = safetensors.safe_open(self._folder / chunk.file, "pt", device=self._device)
                file = self._open[chunk.file] = self._stack.enter_context(opened)
            read: Tensor = file.get_slice(chunk.key)[where] if where else file.get_tensor(chunk.key)
        except safetensors.SafetensorError as error:
            raise UnreadableFileError(chunk.file) from error
        return read


def slices_of(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The slices of what begins at `offsets` and has this shape."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
