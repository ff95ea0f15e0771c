"""What a checkpoint on the disk is: its files, its names, and how each part of it is read. See checkpoint.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fusestep.distributed import checkpoint as parts_of
from fusestep.distributed.shards import Shards, UnreadableFileError
from fusestep.errors import UserError
from fusestep.fp8.state import KEYS

#: Of checkpoints of whole tensors, and of sharded ones; a reader takes all up to the last.
SCHEMA, SHARDED_SCHEMA = 1, 2

MANIFEST, WEIGHTS, STATE, INDEX = "checkpoint.json", "model.safetensors", "state.pt", "tensors.json"

#: What the names of weights, and those of what is sharded of the state, begin with in tensors.json.
MODEL, REST = "model", "state"

#: The key in a saved state of what each process saved as its own, by rank.
OWN = "processes"


class DamagedCheckpointError(UserError):
    """A checkpoint is truncated, altered, foreign, or of a newer schema.

    Args:
        what: names the checkpoint and says which.
        mend: what to do.
    """

    def __init__(self, what: str, mend: str = "use an earlier one") -> None:
        super().__init__(what, mend)

    def __str__(self) -> str:
        what, mend = self.args
        return f"{what}; {mend}."


class NewerSchemaError(DamagedCheckpointError):
    """Written by a later version of this program."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint on the disk, and what its manifest says.

    `config`, `model` and `data` are the plain forms of TrainConfig, GPTConfig and the data source's `describe()`.
    `processes` is how many wrote it; `shards` where the tensors of a sharded one are, None for one of whole tensors.
    """

    path: Path
    step: int
    config: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    processes: int = 1
    schema: int = SCHEMA
    shards: Shards | None = None

    def weights(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The model's state dict, of whole tensors. Raises: DamagedCheckpointError."""
        if self.shards is not None:
            with self.reading():
                return self.shards.whole(self.names(self.shards), device)
        try:
            return safetensors.torch.load_file(self.path / WEIGHTS, device=str(device))
        except safetensors.SafetensorError as error:
            raise foreign(self.path, WEIGHTS) from error

    def fp8_state(self) -> dict[str, dict[str, Tensor]]:
        """By the path of each module that has some, the state of delayed scaling, as `fusestep.fp8.state` names it.

        On the CPU; the weights are not read. Raises: DamagedCheckpointError.
        """
        shards = self.tensors()
        names = {name: plain for name, plain in self.names(shards).items() if is_fp8_state(plain)}
        found: dict[str, dict[str, Tensor]] = {}
        with self.reading():
            for plain, value in shards.whole(names).items():
                module, _, key = plain.rpartition(".")
                found.setdefault(module, {})[key] = value
        return found

    def state(self) -> dict[str, Any]:
        """What the trainer saved beside the weights, on the CPU, of whole tensors. Raises: DamagedCheckpointError."""
        state = self.small_state()
        if self.shards is None:
            return state
        names = parts_of.stand_ins(state)
        with self.reading():
            tensors = self.shards.whole({name: name for name in names})
        whole: dict[str, Any] = parts_of.put_together(state, tensors)
        return whole

    def small_state(self) -> dict[str, Any]:
        """As `state`, but that stand-ins are in the place of what is sharded. Raises: DamagedCheckpointError."""
        try:
            loaded: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError) as error:
            raise foreign(self.path, STATE) from error
        return loaded

    def names(self, shards: Shards) -> dict[str, str]:
        """The names of the weights among those of all tensors, and what they are called in the model."""
        if self.shards is None:
            return {name: name for name in shards.entries}
        beginning = f"{MODEL}."
        return {name: name.removeprefix(beginning) for name in shards.entries if name.startswith(beginning)}

    def tensors(self) -> Shards:
        """Where each tensor is, the weights' at least. Raises: DamagedCheckpointError."""
        if self.shards is not None:
            return self.shards
        with self.reading():
            return Shards.of_file(self.path / WEIGHTS)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Name a file of tensors that is what the manifest says, and yet none that this program wrote."""
        try:
            yield
        except UnreadableFileError as error:
            raise foreign(self.path, error.args[0]) from error


def without_fp8_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the state of delayed scaling."""
    return {name: value for name, value in weights.items() if not is_fp8_state(name)}


def plain_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the prefixes that torch.compile and DistributedDataParallel add."""
    return {plain_name(name): value for name, value in weights.items()}


def plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def is_fp8_state(name: str) -> bool:
    return name.rpartition(".")[2] in KEYS


def foreign(path: Path, name: str) -> DamagedCheckpointError:
    """For a file that is what its manifest says, and yet none that this program wrote."""
    return DamagedCheckpointError(f"checkpoint {path} is no checkpoint of fusestep ({name} cannot be read)")
