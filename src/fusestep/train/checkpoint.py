"""The one place that reads and writes checkpoints.

A run's folder has `checkpoints/step-00000100/` and so on; each is a folder of

    checkpoint.json     schema, step, the run's configuration, and the size and CRC-32 of the two files below
    model.safetensors   the weights, under plain names, and the state of delayed FP8 scaling beside them
    state.pt            the rest of the trainer: tensors and plain values, for torch.load(weights_only=True)

A checkpoint is complete or absent. It is written under a temporary name beside its final one, every file and folder
is synced to the disk, and a rename gives it its name; only then are the oldest removed. Whatever kills the process,
the last good checkpoint stays.
"""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fusestep.durable import TEMPORARY, DurableFile, sync_folder
from fusestep.errors import UserError
from fusestep.fp8.state import KEYS
from fusestep.models import GPT, GPTConfig
from fusestep.models.config import Form

#: Raised by one whenever a reader of the old form would misread the new one.
SCHEMA = 1

#: Complete checkpoints that stay in a run's folder.
KEPT = 3

FOLDER = "checkpoints"
_MANIFEST, _WEIGHTS, _STATE = "checkpoint.json", "model.safetensors", "state.pt"
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")

_DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
_DISK_TROUBLE |= {errno.EEXIST, errno.ENOTDIR}

#: What reading a manifest of any other content can raise.
_UNREADABLE = (OSError, LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

logger = logging.getLogger("fusestep")


class DamagedCheckpointError(UserError):
    """A checkpoint is truncated, altered, foreign, or of a newer schema; the sentence says which and names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint on the disk, and what its manifest says.

    `config`, `model` and `data` are the plain forms of TrainConfig, GPTConfig and the data source's `describe()`.
    """

    path: Path
    step: int
    config: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]

    def weights(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The model's state dict. Raises: DamagedCheckpointError."""
        try:
            return safetensors.torch.load_file(self.path / _WEIGHTS, device=str(device))
        except safetensors.SafetensorError as error:
            raise _foreign(self.path, _WEIGHTS) from error

    def fp8_state(self) -> dict[str, dict[str, Tensor]]:
        """By the path of each module that has some, the state of delayed scaling, as `fusestep.fp8.state` names it.

        On the CPU; the weights are not read. Raises: DamagedCheckpointError.
        """
        found: dict[str, dict[str, Tensor]] = {}
        try:
            with safetensors.safe_open(self.path / _WEIGHTS, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                    module, _, key = name.rpartition(".")
                    if key in KEYS:
                        found.setdefault(module, {})[key] = file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise _foreign(self.path, _WEIGHTS) from error
        return found

    def state(self) -> dict[str, Any]:
        """What the trainer saved beside the weights, on the CPU. Raises: DamagedCheckpointError."""
        try:
            loaded: dict[str, Any] = torch.load(self.path / _STATE, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError) as error:
            raise _foreign(self.path, _STATE) from error
        return loaded


def save(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    data: Mapping[str, Any],
) -> Path:
    """Write a checkpoint into a run's folder and remove all but the newest KEPT.

    Args:
        weights: the model's state dict; names that torch.compile or DDP prefixed are saved plain.
        state: tensors and plain values that torch.load(weights_only=True) accepts.

    Returns: the checkpoint's folder.
    Raises: UserError if the disk is full or refuses; earlier checkpoints are untouched and nothing half-written stays.
    """
    folder = run / FOLDER
    final = folder / f"{_PREFIX}{step:08d}"
    temporary = folder / f"{TEMPORARY}{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(run)
        temporary.mkdir()
        files = {}
        with DurableFile(temporary / _WEIGHTS) as file:
            host = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_names(weights).items()}
            file.write(safetensors.torch.save(host, {"format": "pt"}))
            del host
        files[_WEIGHTS] = file.fingerprint()
        with DurableFile(temporary / _STATE) as file:
            torch.save(dict(state), cast(IO[bytes], file))
        files[_STATE] = file.fingerprint()
        manifest = {"schema": SCHEMA, "step": step, "files": files}
        manifest |= {"config": dict(config), "model": dict(model), "data": dict(data)}
        with DurableFile(temporary / _MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        sync_folder(temporary)
        if final.exists():
            # A damaged one, which resuming passed over.
            _discard(final)
        temporary.rename(final)
        sync_folder(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
            raise UserError(_disk_sentence(run, step, error)) from error
        raise
    for old in _complete(run)[:-KEPT]:
        _discard(old)
    return final


def newest(run: Path) -> Checkpoint | None:
    """The newest good checkpoint of a run's folder, or None if it has none at all.

    A damaged one is passed over, and a warning names it.

    Raises: DamagedCheckpointError if there are checkpoints and none of them is good, or the newest has a newer schema.
    """
    damaged: DamagedCheckpointError | None = None
    for path in reversed(_complete(run)):
        try:
            found = read(path)
        except NewerSchemaError:
            raise
        except DamagedCheckpointError as error:
            logger.warning("%s Looking at the one before it.", error)
            damaged = damaged or error
        else:
            return found
    if damaged is not None:
        raise damaged
    return None


class NewerSchemaError(DamagedCheckpointError):
    """Written by a later version of this program."""


def read(path: Path) -> Checkpoint:
    """Verify the checkpoint in a folder, byte for byte, and return its manifest.

    Raises: DamagedCheckpointError.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        schema = manifest["schema"]
        if schema > SCHEMA:
            raise NewerSchemaError(
                f"checkpoint {path} has schema {schema} and this version reads up to {SCHEMA}; upgrade fusestep."
            )
        files = {name: (int(of["bytes"]), int(of["crc32"])) for name, of in manifest["files"].items()}
        parts = [dict(manifest[part]) for part in ("config", "model", "data")]
        found = Checkpoint(path, int(manifest["step"]), *parts)
    except NewerSchemaError:
        raise
    except _UNREADABLE as error:
        raise DamagedCheckpointError(
            f"checkpoint {path} is no checkpoint of fusestep or is damaged (its {_MANIFEST} cannot be read); "
            f"use an earlier one."
        ) from error
    for name in (_WEIGHTS, _STATE):
        trouble = _difference(path / name, *files.get(name, (-1, 0)))
        if trouble:
            raise DamagedCheckpointError(f"checkpoint {path} is damaged ({name} {trouble}); use an earlier one.")
    return found


def find(path: str | Path) -> Checkpoint:
    """The checkpoint that a person names: a run's folder stands for its newest good one.

    Raises: UserError if there is none.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; name a run's folder or one of its checkpoints.")
    if (path / _MANIFEST).exists():
        return read(path)
    found = newest(path) if path.is_dir() else None
    if found is None:
        raise UserError(f"{path} holds no checkpoint; name a run's folder or one of its checkpoints.")
    return found


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[GPT, Checkpoint]:
    """The model of a run's folder or of one checkpoint, in evaluation mode, and what the checkpoint says of it.

    The model is in fp32, whatever the dtype of the saved weights.

    Args:
        device: where the model goes.

    Raises: UserError if there is no checkpoint, or a damaged or foreign one.
    """
    found = find(path)
    return model_of(found, device), found


def model_of(
    found: Checkpoint,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype = torch.float32,
    form: Form | None = None,
) -> GPT:
    """The model of a checkpoint, in evaluation mode.

    Args:
        device: where the model goes.
        dtype: of the model, whatever that of the saved weights.
        form: whose code the blocks are (see GPTConfig), if not the one that was trained.

    Raises: DamagedCheckpointError.
    """
    config = GPTConfig.from_dict(found.model)
    if form is not None:
        config = replace(config, form=form, norm=None)
    model = GPT(config, device=device, dtype=dtype)
    load_weights(model, found.weights(device), found.path)
    return model.eval()


def load_weights(
    model: torch.nn.Module, weights: Mapping[str, Tensor], origin: Path, *, with_fp8_state: bool = True
) -> None:
    """Copy saved weights into a model, whatever wraps it.

    State of delayed scaling may be missing, and goes to the modules that can have some; all else must fit.

    Args:
        with_fp8_state: False leaves the modules without any, for a run that would not keep it up to date.

    Raises: UserError, before anything is copied, if names or shapes are another model's.
    """
    scaled = {plain_name(path): path for path, module in model.named_modules() if hasattr(module, "fp8_state")}
    fp8_state = {
        f"{scaled[path]}.{key}": value
        for path, _, key, value in ((*name.rpartition("."), value) for name, value in weights.items())
        if with_fp8_state and key in KEYS and path in scaled
    }
    weights = without_fp8_state(weights)
    own = without_fp8_state(model.state_dict())
    names = {plain_name(name): name for name in own}
    if odd := sorted(names.keys() ^ weights.keys()):
        raise UserError(f"checkpoint {origin} is of another model: {odd[0]} is in one of them alone.")
    for plain, name in names.items():
        if weights[plain].shape != own[name].shape:
            raise UserError(
                f"checkpoint {origin} is of another model: {plain} is {tuple(weights[plain].shape)} there and "
                f"{tuple(own[name].shape)} here."
            )
    model.load_state_dict({names[plain]: value for plain, value in weights.items()} | fp8_state)


def without_fp8_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the state of delayed scaling."""
    return {name: value for name, value in weights.items() if name.rpartition(".")[2] not in KEYS}


def plain_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without the prefixes that torch.compile and DistributedDataParallel add."""
    return {plain_name(name): value for name, value in weights.items()}


def plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process was writing or discarding."""
    for path in run.glob(f"{TEMPORARY}*"):
        path.unlink()
    for path in (run / FOLDER).glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def _complete(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run / FOLDER).glob(f"{_PREFIX}*") if path.is_dir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def _discard(path: Path) -> None:
    """Remove a checkpoint such that a kill meanwhile leaves no part of it under its name."""
    doomed = path.with_name(f"{TEMPORARY}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _difference(path: Path, size: int, crc32: int) -> str | None:
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


def _foreign(path: Path, name: str) -> DamagedCheckpointError:
    """For a file that is what its manifest says, and yet none that this program wrote."""
    return DamagedCheckpointError(
        f"checkpoint {path} is no checkpoint of fusestep ({name} cannot be read); use an earlier one."
    )


def _disk_sentence(run: Path, step: int, error: OSError) -> str:
    complete = _complete(run)
    last = f"the last good one, {complete[-1]}, is untouched" if complete else "there is none before it"
    return (
        f"the checkpoint of step {step} could not be written ({error.strerror or error}); {last}; "
        f"free some space in {run}, then go on with --resume --out {run}."
    )
