"""A run's folder: config.json, metrics.jsonl, fp8.jsonl and checkpoints/.

`metrics.jsonl` holds one JSON object a line, written whole and at once:

    {"step": 7, "loss": 2.31, "tokens": 4096, "ms": 12.5, "lr": 0.0003, "grad_norm": 0.81, "skipped": 0}
    {"step": 100, "eval_loss": 1.98, "eval_tokens": 16384}

`tokens` and `ms` are of this one step, `grad_norm` is taken before clipping, `skipped` counts the steps so far that the
optimizer left out because gradients were not finite. A number that is not finite is written as null.

`fp8.jsonl` is there where a run was asked for FP8 statistics: a row for each tensor that is cast, at each evaluation
and each checkpoint. Its fractions are of the elements that were cast since the rows before.

    {"step": 100, "module": "blocks.0.self_attention.proj", "tensor": "input", "format": "E4M3", "scale": 98.1,
     "amax": 4.3, "saturated": 0.0, "flushed": 0.0012, "refused": 0}
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusestep import durable
from fusestep.errors import UserError
from fusestep.train import checkpoint

#: Of config.json; raised whenever a reader of the old form would misread the new one.
SCHEMA = 1

CONFIG, METRICS, FP8 = "config.json", "metrics.jsonl", "fp8.jsonl"


class RunFolder:
    """The folder of one run, opened for writing by one process at a time.

    A new folder is made when the first thing is written into it, so that a run which fails before leaves nothing.

    Args:
        path: the folder.
        resume: whether a run in it is gone on with.

    Raises: UserError if a new run's folder is there already, a resumed one's is not, or another process trains in it.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._last_step = 0
        if resume:
            self._open_existing()
        else:
            self._check_new()

    def begin(self, contents: Mapping[str, Any], *, last_step: int) -> None:
        """Make the folder where it is new, write config.json, and drop rows of steps after `last_step`.

        Raises: UserError if that cannot be written; a new folder is then taken away again.
        """
        is_new = self._descriptor is None
        try:
            if is_new:
                self._create()
            else:
                os.ftruncate(self._opened, _length_up_to(self.path / METRICS, last_step))
                if (self.path / FP8).exists():
                    os.truncate(self.path / FP8, _length_up_to(self.path / FP8, last_step))
                checkpoint.remove_leftovers(self.path)
            text = json.dumps({"schema": SCHEMA, **contents}, indent=1)
            durable.write_together({self.path / CONFIG: text + "\n"})
        except OSError as error:
            if is_new and self._descriptor is not None:
                self.close()
                shutil.rmtree(self.path)
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); {durable.mend(error, str(self.path))}, or choose "
                "another --out."
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        plain = {name: _finite(value) for name, value in row.items()}
        line = (json.dumps(plain) + "\n").encode()
        try:
            written = os.write(self._opened, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(
                f"{self.path / METRICS} could not be written ({error.strerror}); "
                f"{durable.mend(error, str(self.path))}, then go on with --resume --out {self.path}."
            ) from error

    def write_fp8(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to fp8.jsonl, durably and at once."""
        text = "".join(json.dumps({name: _finite(value) for name, value in row.items()}) + "\n" for row in rows)
        try:
            with (self.path / FP8).open("a") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path / FP8} could not be written ({error.strerror}); {durable.mend(error, str(self.path))}, "
                f"then go on with --resume --out {self.path}."
            ) from error

    def sync(self) -> None:
        """Make the rows durable; done before each checkpoint, so that none which it covers can be lost."""
        os.fsync(self._opened)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _opened(self) -> int:
        if self._descriptor is None:
            raise RuntimeError("RunFolder.begin comes before anything is written")
        return self._descriptor

    def _check_new(self) -> None:
        if self.path.is_dir():
            if (self.path / CONFIG).exists():
                raise UserError(
                    f"{self.path} holds a run already; go on with it by --resume, or choose another folder with --out."
                )
            if any(not _is_leftover(entry) for entry in self.path.iterdir()):
                raise UserError(f"{self.path} exists and is not empty; choose another folder with --out.")
        elif self.path.exists():
            raise UserError(f"{self.path} is a file; choose a folder with --out.")
        obstacle = durable.obstacle(self.path)
        if obstacle is not None:
            raise UserError(f"{self.path} cannot be made, since {obstacle} cannot be written; choose another --out.")

    def _create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / METRICS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock(descriptor)
        self._descriptor = descriptor
        # Again, with the lock held: another process may have started a run here meanwhile.
        self._check_new()
        durable.sync_folder(self.path.absolute().parent)

    def _open_existing(self) -> None:
        if not (self.path / CONFIG).exists():
            raise UserError(
                f"{self.path} holds no run to go on with; leave --resume out, or name its folder with --out."
            )
        try:
            descriptor = os.open(self.path / METRICS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            file = self.path / METRICS
            raise UserError(
                f"{file} cannot be written ({error.strerror}); {durable.mend(error, str(file))}."
            ) from error
        self._lock(descriptor)
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        """Keep a second process out; the system lets go of the lock when this one ends, however it ends."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise UserError(
                f"another process trains in {self.path}; wait for it, or choose another folder with --out."
            ) from error


class ElsewhereFolder(RunFolder):
    """A run's folder as the ranks see it that do not write: rank 0 does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor = None

    def begin(self, contents: Mapping[str, Any], *, last_step: int) -> None:
        """Nothing: rank 0 makes the folder."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Nothing: rank 0 has the same row."""

    def write_fp8(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: rank 0 writes its own."""

    def sync(self) -> None:
        """Nothing: there are no rows of this rank's."""


def _length_up_to(path: Path, last_step: int) -> int:
    """The bytes of a file of rows that hold the steps up to `last_step`."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError, RecursionError):
            break  # the line that a killed process was writing
        if step > last_step or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


def read_fp8(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's fp8.jsonl, up to a line that a killed process was writing; none where there is no file."""
    file = path / FP8
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not {"step", "module", "tensor"} <= row.keys():
            break
        rows.append(row)
    return rows


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a run's config.json.

    Raises: UserError if it is not there, damaged, or of a newer schema.
    """
    file = path / CONFIG
    if not file.exists():
        raise UserError(f"{path} holds no run to go on with; leave --resume out, or name its folder with --out.")
    try:
        contents = json.loads(file.read_bytes())
        schema = contents["schema"]
        newer = schema > SCHEMA
        if not isinstance(contents["train"], dict):
            raise TypeError("the settings are no table")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {durable.mend(error, str(file))}.") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged; start another run, or put back the file.") from error
    if newer:
        raise UserError(f"{file} has schema {schema} and this version reads up to {SCHEMA}; upgrade fusestep.")
    return dict(contents)


def _is_leftover(path: Path) -> bool:
    """Whether a process that was killed while making the folder left this behind."""
    return durable.is_temporary(path) or (path.name == METRICS and path.stat().st_size == 0)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
