"""What a script was served in place of Apex and Transformer Engine.

Shims call `served` when one of their names is constructed or called, `hint` for advice that is printed at the end, and
raise `not_served(…)` for what is not there. Under `fusestep run` every first event is also written to a file of its
process in the run's folder, at once, so that workers that are killed have told what they knew; `merged` reads them all.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusestep.compat import settings

SCHEMA = 1

#: A fork may come while another thread holds it, so that it is made anew in the child.
_lock = threading.RLock()
_seen: set[tuple[str, str, str]] = set()

#: What callers need not work out again, since they told of it.
told: set[object] = set()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass
class Report:
    """What one or several processes were served.

    Attributes:
        served: for each name of Apex or Transformer Engine what stood in for it, sorted.
        refused: for each name that was asked for and is not served, what to use instead.
        hints: advice, a line each.
        packages: for `apex` and `transformer_engine`, where imported, who served them, sorted.
    """

    served: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    packages: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with a `schema` number."""
        return {
            "schema": SCHEMA,
            "served": self.served,
            "refused": self.refused,
            "hints": self.hints,
            "packages": self.packages,
        }

    def lines(self) -> list[str]:
        """For a person: one line with the names and what served them, one for each package not ours, and the hints."""
        parts = [f"{name} by {' and '.join(by)}" for name, by in self.served.items()]
        parts += [f"{name} NOT served" for name in self.refused]
        first = "; ".join(parts) or "no name of Apex or Transformer Engine was used"
        # That fusestep serves a package is the rule, and the names above say it.
        others = [f"{name}: {who}" for name, by in self.packages.items() for who in by if not _is_rule(who)]
        return [first, *others, *self.hints]


def _is_rule(who: str) -> bool:
    return who.startswith("fusestep ") and ";" not in who


def served(name: str, implementation: str = "") -> None:
    """Note that a name was constructed or called. Costs one look-up after the first time.

    Args:
        name: as the script knows it, with its module: `apex.optimizers.FusedAdam`.
        implementation: what serves it and as what, with a comma: `fusestep.optim.FusedAdam, triton`. An entry without
            the second part gives way to one with it.
    """
    _note("served", name, implementation)


def hint(text: str) -> None:
    """Have a line printed at the end, once however often it is given."""
    _note("hint", text, "")


def package(name: str, who: str) -> None:
    """Note who served an import of `apex` or `transformer_engine`."""
    _note("package", name, who)


def not_served(
    name: str, instead: str, planned: bool | None = False, kind: type[Exception] = NotImplementedError
) -> Exception:
    """The exception for a name, or a value of an argument, that is not served, noted for the report.

    Args:
        name: with its module, and the argument where it is one: `apex.optimizers.FusedAdam(amsgrad=True)`.
        instead: what to use, as a clause: `use torch.optim.Adam(amsgrad=True)`.
        planned: whether fusestep will serve it; None where it is no name of the library's.
        kind: ImportError for modules and imported names, AttributeError for names, NotImplementedError on use.
    """
    _note("refused", name, instead)
    return kind(sentence(name, instead, planned))


def sentence(name: str, instead: str, planned: bool | None) -> str:
    """The one sentence that says what is not served, what to use instead, and whether it will be."""
    when = "" if planned is None else " (it is planned)" if planned else " (it is not planned)"
    return f"fusestep does not serve {name}; {instead}{when}."


def snapshot() -> Report:
    """What this process was served so far."""
    with _lock:
        return _gathered(sorted(_seen))


def merged(folder: Path) -> Report:
    """What all processes of a run were served so far, from their files in its folder.

    A last line that a killed process left half-written is passed over.
    """
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                kind, first, second = json.loads(line)
                events.append((kind, first, second))
    return _gathered(events)


def reset() -> None:
    """Forget all of this process's events."""
    with _lock:
        _seen.clear()
        told.clear()


def _note(kind: str, first: str, second: str) -> None:
    event = (kind, first, second)
    if event in _seen:
        return
    with _lock:
        if event in _seen:
            return
        _seen.add(event)
        folder = settings.report_folder()
        if folder is not None and folder.is_dir():
            with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def _gathered(events: Iterable[tuple[str, str, str]]) -> Report:
    by_kind: Mapping[str, dict[str, set[str]]] = {kind: {} for kind in ("served", "refused", "hint", "package")}
    for kind, first, second in events:
        by_kind[kind].setdefault(first, set()).add(second)
    return Report(
        served={name: _specific(by) for name, by in sorted(by_kind["served"].items())},
        refused={name: min(instead) for name, instead in sorted(by_kind["refused"].items())},
        hints=list(by_kind["hint"]),
        packages={name: sorted(who) for name, who in sorted(by_kind["package"].items())},
    )


def _specific(implementations: set[str]) -> list[str]:
    """Without those that another one says more exactly."""
    return sorted(
        one for one in implementations if one and not any(other.startswith(f"{one},") for other in implementations)
    )
