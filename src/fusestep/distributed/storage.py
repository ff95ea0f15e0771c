"""What torch.distributed.checkpoint (DCP) writes to and reads from here: safetensors and an index; see shards.py.

DCP plans who writes what, so that each part of a tensor is written once, and who reads what, whatever the layouts on
both sides. Its own files hold pickles, these do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fusestep.distributed import groups
from fusestep.distributed.shards import NAMES, Chunk, Entry, Files, Shards, slices_of
from fusestep.durable import DurableFile
from fusestep.errors import UserError
from fusestep.fp8.tensor import Float8Tensor

Fingerprint = dict[str, int]


class _Written(NamedTuple):
    """Where a process wrote a chunk, and the fingerprint of the whole file."""

    shape: tuple[int, ...]
    file: str
    key: str
    fingerprint: Fingerprint


class ShardWriter(StorageWriter):
    """Each process writes one file, with what DCP has planned for it, and syncs it to the disk.

    Args:
        folder: exists already; every process sees it.

    Attributes:
        shards, fingerprints: on the coordinator, once all have written: the index, and for each file its size and
            CRC-32.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shards: Shards | None = None
        self.fingerprints: dict[str, Fingerprint] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned, but that parts without elements are not written."""
        kept = [item for item in plan.items if item.tensor_data is not None and _holds_elements(item.tensor_data)]
        return SavePlan(kept, plan.storage_data, plan.planner_data)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file, a tensor at a time."""
        name = f"shard-{groups.rank():05d}-of-{groups.world_size():05d}.safetensors"
        planned = [(item, item.tensor_data) for item in plan.items if item.tensor_data is not None]
        # The widest first, so that each element lies at a multiple of its size.
        planned.sort(key=lambda one: -one[1].properties.dtype.itemsize)
        keys = [f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}" for item, _ in planned]
        shapes = [tuple(data.chunk.sizes) for _, data in planned]
        fingerprint: Fingerprint = {}
        if planned:
            with DurableFile(self._folder / name) as file:
                file.write(_header(keys, [data.properties.dtype for _, data in planned], shapes))
                for item, _ in planned:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    _write_elements(file, tensor)
            fingerprint = file.fingerprint()
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, 0, _Written(shape, name, key, fingerprint))
                for (item, _), key, shape in zip(planned, keys, shapes, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the index together."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_process in results for result in of_process):
            written: _Written = result.storage_data
            offsets = tuple(result.index.offset or ())
            chunks[result.index.fqn].append(Chunk(offsets, written.shape, written.file, written.key))
            self.fingerprints[written.file] = written.fingerprint
        entries = {}
        for name, of in metadata.state_dict_metadata.items():
            assert isinstance(of, TensorStorageMetadata)
            entries[name] = Entry(of.properties.dtype, tuple(of.size), tuple(chunks[name]))
        self.shards = Shards(self._folder, entries)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never chosen by a path."""
        return False


class ShardReader(StorageReader):
    """Reads the parts that a process needs."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The index in DCP's terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
                )
                for name, entry in self._shards.entries.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned part to its place; a part in another dtype is converted."""
        by_index = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, entry in self._shards.entries.items()
            for chunk in entry.chunks
        }
        with Files(self._shards.folder, "cpu") as files:
            for item in plan.items:
                part = files.read(by_index[item.storage_index], slices_of(item.storage_offsets, item.lengths))
                planner.resolve_tensor(item).detach().copy_(part)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never chosen by a path."""
        return False


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[Shards, dict[str, Fingerprint]] | None:
    """Write tensors into files of a folder, every process what it holds; all processes of the world call this together.

    Args:
        folder: exists already, on a file system that all see.
        tensors: DTensors, and plain tensors that are the same on all processes; the same names on all.
    Returns: on process 0 the index and each file's fingerprint, None on the others.
    Raises: OSError or UserError, on every process, where one could not write; the sentence names it.
    """
    writer = ShardWriter(folder)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _alone_on_purpose():
            save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not groups.is_running())
    except CheckpointException as failure:
        rank, (error, _) = next(iter(sorted(failure.failures.items())))
        if isinstance(error, OSError):
            # With the rank in the words that a person reads; whoever calls knows what was being written.
            raise OSError(error.errno, f"on process {rank}: {error.strerror}") from error
        raise UserError(f"process {rank} could not write its part of a checkpoint: {error}") from error
    return None if writer.shards is None else (writer.shards, writer.fingerprints)


def read_into(shards: Shards, targets: Mapping[str, Tensor]) -> None:
    """Copy what an index names into tensors, DTensors and plain ones; each process reads what it holds, by itself.

    Raises: UnreadableFileError.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _alone_on_purpose():
            load(dict(targets), storage_reader=ShardReader(shards), planner=planner, no_dist=True)
    except CheckpointException as failure:
        ((error, _),) = failure.failures.values()
        raise error from failure


@contextlib.contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """DCP warns a process that works by itself that it does so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _holds_elements(data: Any) -> bool:
    return bool(data.chunk.sizes.numel())


def _header(keys: list[str], dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]) -> bytes:
    """The head of a safetensors file: its length (8 bytes), and a JSON object padded to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, dtype, shape in zip(keys, dtypes, shapes, strict=True):
        end = start + torch.Size(shape).numel() * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_elements(file: DurableFile, tensor: Tensor) -> None:
    """Write the elements in order, from where they lie if that is on the CPU and in order."""
    plain = groups.unwrapped(tensor.detach())
    host = (plain.dequantize() if isinstance(plain, Float8Tensor) else plain).cpu().contiguous()
    size = host.numel() * host.element_size()
    file.write((ctypes.c_char * size).from_address(host.data_ptr()))
