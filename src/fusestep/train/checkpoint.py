"""The one place that reads and writes checkpoints.

A run's folder has `checkpoints/step-00000100/` and so on; each is a folder of

    checkpoint.json     schema, step, the run's configuration, and the size and CRC-32 of the files below
    model.safetensors   the weights, under plain names, and the state of delayed FP8 scaling beside them
    state.pt            the rest of the trainer: tensors and plain values, for torch.load(weights_only=True)

Where weights are sharded over processes, each process writes what it holds of the weights and of the optimizer's
state, and there are, in the place of model.safetensors,

    shard-00000-of-00004.safetensors, …    the parts that one process wrote
    tensors.json                           of each tensor its dtype, its shape, and where its parts are

Any number of processes reads either form. A checkpoint is complete or absent. It is written under a temporary name
beside its final one, every file and folder is synced to the disk, and a rename gives it its name; only then are the
oldest removed. Whatever kills a process, the last good checkpoint stays.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import safetensors.torch
import torch
from torch import Tensor

from fusestep.distributed import checkpoint as parts_of
from fusestep.distributed import groups
from fusestep.distributed.shards import Shards
from fusestep.durable import DurableFile, sync_folder
from fusestep.errors import UserError
from fusestep.models import GPT
from fusestep.train.checkpoint_folder import (
    FOLDER,
    complete,
    difference,
    discard,
    final_path,
    remove_leftovers,
    temporary_path,
    writing,
)
from fusestep.train.checkpoint_format import (
    INDEX,
    MANIFEST,
    MODEL,
    OWN,
    REST,
    SCHEMA,
    SHARDED_SCHEMA,
    STATE,
    WEIGHTS,
    Checkpoint,
    DamagedCheckpointError,
    NewerSchemaError,
    foreign,
    plain_name,
    plain_names,
    without_fp8_state,
)
from fusestep.train.checkpoint_loading import load_weights, model_of, own_state, restore

__all__ = [
    "FOLDER",
    "KEPT",
    "SCHEMA",
    "SHARDED_SCHEMA",
    "Checkpoint",
    "DamagedCheckpointError",
    "NewerSchemaError",
    "find",
    "load_model",
    "load_weights",
    "model_of",
    "newest",
    "own_state",
    "plain_name",
    "plain_names",
    "read",
    "remove_leftovers",
    "restore",
    "save",
    "without_fp8_state",
]

#: Complete checkpoints that stay in a run's folder.
KEPT = 3

#: What reading a manifest of any other content can raise; a file that nobody may read is not damaged, though.
_UNREADABLE = (OSError, LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

logger = logging.getLogger("fusestep")


def save(
    run: Path,
    step: int,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    together: bool = False,
    own: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint into a run's folder and remove all but the newest KEPT.

    Args:
        weights: the model's state dict; names that torch.compile or DDP prefixed are saved plain.
        state: tensors and plain values that torch.load(weights_only=True) accepts.
        together: all processes of torch.distributed's world call this with the same arguments, and all return or all
            raise. Process 0 writes what is whole and the same everywhere, each process what it holds of DTensors
            (of weights, or anywhere in `state`); the folder must be on a file system that all of them see.
        own: with `together`, what is this process's alone, random generators for one; see `own_state`.

    Returns: the checkpoint's folder.
    Raises: UserError if the disk is full or refuses, on whichever process; earlier checkpoints are untouched and
        nothing half-written stays.
    """
    is_sharded = parts_of.is_sharded(weights) or parts_of.is_sharded(state)
    if is_sharded and not together:
        raise UserError("a checkpoint of sharded tensors is written by all processes together; pass together=True.")
    every: Callable[..., Any] = parts_of.together if together else lambda action, _doing: [action()]
    doing = f"to write the checkpoint of step {step}"
    is_first = not together or groups.rank() == 0
    temporary, final = temporary_path(run, step), final_path(run, step)
    rest = dict(state)

    def begin() -> None:
        if is_first:
            with writing(run, step):
                (run / FOLDER).mkdir(parents=True, exist_ok=True)
                remove_leftovers(run)
                temporary.mkdir()

    def write_shards() -> None:
        from fusestep.distributed.storage import write_shards

        nonlocal rest
        parts_of.together(lambda: _see(temporary), doing)
        rest, sharded = parts_of.taken_apart(rest, REST)
        named = {f"{MODEL}.{name}": tensor.detach() for name, tensor in plain_names(weights).items()}
        with writing(run, step):
            written.append(write_shards(temporary, named | sharded))

    def finish() -> None:
        if not is_first:
            return
        with writing(run, step):
            files = {} if is_sharded else {WEIGHTS: _write_weights(temporary, weights)}
            for shards, fingerprints in filter(None, written):
                files |= {**fingerprints, INDEX: _write_index(temporary, shards)}
            with DurableFile(temporary / STATE) as file:
                torch.save(rest, cast(IO[bytes], file))
            files[STATE] = file.fingerprint()
            manifest: dict[str, Any] = {"schema": SHARDED_SCHEMA if is_sharded else SCHEMA, "step": step}
            manifest["files"] = files
            if together:
                manifest["processes"] = groups.world_size()
            manifest |= {"config": dict(config), "model": dict(model), "data": dict(data)}
            with DurableFile(temporary / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
            _publish(temporary, final)

    def prune() -> None:
        for old in complete(run)[:-KEPT] if is_first else ():
            discard(old)

    written: list[tuple[Shards, dict[str, dict[str, int]]] | None] = []
    try:
        every(begin, doing)
        if is_sharded:
            write_shards()
        if own is not None and together:
            rest[OWN] = groups.gathered(dict(own))
        every(finish, doing)
    except BaseException:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    every(prune, "to remove old checkpoints")
    return final


def _see(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{folder}, which process 0 has made, is not to be seen here; write to a folder that all share."
        )


def _write_weights(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, int]:
    with DurableFile(folder / WEIGHTS) as file:
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in plain_names(weights).items()}
        file.write(safetensors.torch.save(host, {"format": "pt"}))
    return file.fingerprint()


def _write_index(folder: Path, shards: Shards) -> dict[str, int]:
    with DurableFile(folder / INDEX) as file:
        file.write(json.dumps(shards.to_json(), separators=(",", ":")).encode())
    return file.fingerprint()


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name."""
    sync_folder(temporary)
    if final.exists():
        # A damaged one, which resuming passed over.
        discard(final)
    temporary.rename(final)
    sync_folder(final.parent)


def newest(run: Path, *, together: bool = False) -> Checkpoint | None:
    """The newest good checkpoint of a run's folder, or None if it has none at all.

    A damaged one is passed over, and a warning names it.

    Args:
        together: all processes call this, share the reading, and get the same answer.

    Raises: DamagedCheckpointError if there are checkpoints and none of them is good, or the newest has a newer schema.
    """
    damaged: DamagedCheckpointError | None = None
    paths: list[Path] = groups.gathered(complete(run))[0] if together else complete(run)
    for path in reversed(paths):
        try:
            found = read(path, together=together)
        except NewerSchemaError:
            raise
        except DamagedCheckpointError as error:
            if not together or groups.rank() == 0:
                logger.warning("%s Looking at the one before it.", error)
            damaged = damaged or error
        else:
            return found
    if damaged is not None:
        # There is no earlier one to use.
        what, _ = damaged.args
        mend = "put one back from a copy, or start another run"
        raise DamagedCheckpointError(f"{what}, and {run} has no good one", mend) from damaged
    return None


def read(path: Path, *, together: bool = False) -> Checkpoint:
    """Verify the checkpoint in a folder, byte for byte, and return its manifest.

    Args:
        together: all processes call this, each verifies some of the files, and all raise alike.

    Raises: DamagedCheckpointError.
    """
    found: Checkpoint | None = None
    trouble: Exception | None = None
    try:
        found, files = _manifest(path)
        own = sorted(files)[groups.rank() :: groups.world_size()] if together else sorted(files)
        for name in own:
            if how := difference(path / name, *files[name]):
                raise DamagedCheckpointError(f"checkpoint {path} is damaged ({name} {how})")
        if found.schema > SCHEMA:
            found = replace(found, shards=_index(path, files))
    except (DamagedCheckpointError, OSError) as error:
        trouble = error
    troubles = groups.gathered(trouble) if together else [trouble]
    if first := next((one for one in troubles if one is not None), None):
        raise first
    assert found is not None
    return found


def _manifest(path: Path) -> tuple[Checkpoint, dict[str, tuple[int, int]]]:
    """What checkpoint.json says, and the size and checksum of each other file. Raises: DamagedCheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        schema = int(manifest["schema"])
        if schema > SHARDED_SCHEMA:
            what = f"checkpoint {path} has schema {schema} and this version reads up to {SHARDED_SCHEMA}"
            raise NewerSchemaError(what, "upgrade fusestep")
        files = {str(name): (int(of["bytes"]), int(of["crc32"])) for name, of in manifest["files"].items()}
        if any(Path(name).name != name for name in files):
            raise ValueError("a file of a checkpoint is elsewhere")
        config, model, data = (dict(manifest[part]) for part in ("config", "model", "data"))
        processes = int(manifest.get("processes", 1))
        found = Checkpoint(path, int(manifest["step"]), config, model, data, processes, schema)
    except (NewerSchemaError, PermissionError):
        raise
    except _UNREADABLE as error:
        raise DamagedCheckpointError(
            f"checkpoint {path} is no checkpoint of fusestep or is damaged (its {MANIFEST} cannot be read)"
        ) from error
    for name in (INDEX if schema > SCHEMA else WEIGHTS, STATE):
        files.setdefault(name, (-1, 0))
    return found, files


def _index(path: Path, files: Mapping[str, object]) -> Shards:
    """What tensors.json says. Raises: DamagedCheckpointError."""
    try:
        shards = Shards.from_json(path, json.loads((path / INDEX).read_bytes()))
        if strange := shards.files - files.keys():
            raise ValueError(f"{min(strange)} is none of its files")
    except PermissionError:
        raise
    except _UNREADABLE as error:
        raise foreign(path, INDEX) from error
    return shards


def find(path: str | Path) -> Checkpoint:
    """The checkpoint that a person names: a run's folder stands for its newest good one.

    Raises: UserError if there is none.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; name a run's folder or one of its checkpoints.")
    if (path / MANIFEST).exists():
        return read(path)
    found = newest(path) if path.is_dir() else None
    if found is None:
        run = path.absolute().parent
        if path.is_dir() and path.absolute().name == FOLDER and complete(run):
            raise UserError(
                f"{path} holds the checkpoints of a run; name the run's folder, {path.parent}, or one of them."
            )
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
