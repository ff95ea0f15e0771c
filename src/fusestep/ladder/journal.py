"""What a ladder has measured so far, kept in its folder, so that one that was cut off can go on.

The file holds the plan, the environment and every reply of the worker processes by its key. It is replaced whole after
each loss curve of the gate and after each round: a round that was cut off is measured again from its start, since its
times are compared with each other and belong to one stretch of time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusestep import durable
from fusestep.errors import UserError
from fusestep.ladder.processes import Reply

FILE = "ladder.unfinished.json"

#: Of the file; raised whenever a reader of the old form would misread the new one.
SCHEMA = 1

#: What must be the same for two times to be compared.
_SAME = (
    "device",
    "gpu",
    "capability",
    "gpu_memory",
    "driver",
    "cuda",
    "cpu",
    "cpu_count",
    "threads",
    "python",
    "torch",
    "triton",
    "fusestep",
    "commit",
    "variables",
)

#: The options whose names are not those of the plan's fields.
_OPTIONS = {"scaling": "recipe", "factory": "model", "compiled": "compile"}


class Journal:
    """Replies by key, in memory and, where there is a folder, on the disk.

    Args:
        plan, environment: of this ladder, as plain values.
        folder: where the file is, or is to be; None keeps nothing on the disk.
        resume: go on with what the folder holds.

    Attributes:
        sittings: when this ladder was begun and each time gone on with, ISO dates; the last is this one's.

    Raises: UserError with `resume` where the folder holds nothing to go on with, where that was measured with another
        plan or in another environment, or where it cannot be read.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        environment: Mapping[str, Any],
        folder: Path | None = None,
        *,
        resume: bool = False,
    ) -> None:
        self._path = None if folder is None else folder / FILE
        self._plan, self._environment = _plain(plan), _plain(environment)
        self._replies: dict[str, Reply] = {}
        self.sittings = [str(environment["date"])]
        if resume and folder is not None:
            kept = read(folder / FILE, SCHEMA)
            check_plan(folder, kept, self._plan)
            _check_environment(folder, kept, self._environment)
            self._replies = {key: Reply(**reply) for key, reply in kept["replies"].items()}
            self.sittings = [*kept["sittings"], *self.sittings]
            for path in folder.iterdir():
                if durable.is_temporary(path):
                    path.unlink()

    def kept(self, key: str) -> Reply | None:
        """The reply of that key, None if it is not there yet."""
        return self._replies.get(key)

    def keep(self, replies: Mapping[str, Reply]) -> None:
        """Add replies, all at once: on the disk when this returns."""
        self._replies.update(replies)
        if self._path is None or not replies:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "schema": SCHEMA,
            "plan": self._plan,
            "environment": self._environment,
            "sittings": self.sittings,
            "replies": {key: asdict(reply) for key, reply in self._replies.items()},
        }
        with durable.replacing(self._path) as file:
            file.write(json.dumps(content).encode())


def read(path: Path, schema: int) -> dict[str, Any]:
    """A file of this package's own, from JSON.

    Raises: UserError where it is missing, is no such file, or is newer than `schema`.
    """
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        found = kept["schema"]
    except FileNotFoundError as error:
        raise UserError(
            f"--out {path.parent} holds no ladder to go on with; leave --resume out, or name its folder."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a ladder's; name another folder with --out, or remove that file.") from error
    if found > schema:
        raise UserError(f"{path} has schema {found} and this version reads up to {schema}; upgrade fusestep.")
    return kept


def check_plan(folder: Path, kept: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Refuse to go on with what was `kept` of a ladder that was planned otherwise.

    Raises: UserError that names the first difference.
    """
    before, now = kept["plan"], _plain(plan)
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"--out {folder} holds a ladder with --{_OPTIONS.get(name, name).replace('_', '-')} "
                f"{_in_words(before.get(name))} and this one has {_in_words(value)}; "
                "give the options of that ladder, or name another folder."
            )


def _check_environment(folder: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before = kept["environment"]
    for name in _SAME:
        if before.get(name) != now.get(name):
            raise UserError(
                f"--out {folder} holds a ladder that was measured with {name} {_in_words(before.get(name))} and here "
                f"it is {_in_words(now.get(name))}, so times would not compare; go on there, or name another folder."
            )


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _in_words(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
