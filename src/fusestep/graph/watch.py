"""What of a step no graph can hold, though its capture would not fail: found in the step before, or after the capture.

- The host waits for the device. That would fail the capture, with less to say and after more trouble.
- Something on the host changes in each step and has a part in it: a count, a buffer, random numbers. A graph would
  keep what it was at the capture.
- A step that puts a new tensor in the place of an old one which the next step reads: a graph would read the old one.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_WAITS = ".*synchronizing CUDA operation"
#: Seconds for other threads to say what they waited for, once the device is idle.
SETTLING = 0.005


@contextmanager
def waits() -> Iterator[list[str]]:
    """Within, what makes the host wait for the device is listed: "train.py, line 40"; other warnings pass.

    What threads do that somebody started beside this one, such as a loader's, is no part of the step. Backward's own
    threads are none of those: Python did not start them.
    """
    found: list[str] = []
    here = threading.get_ident()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def showing(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == here or isinstance(threading.current_thread(), threading._DummyThread):
                found.append(f"{Path(filename).name}, line {lineno}")

        warnings.filterwarnings("always", _WAITS)
        warnings.filterwarnings("ignore", ".*debug mode is a prototype")
        warnings.showwarning = showing
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            if threading.active_count() > 1:
                # Another thread that waits now was counted as it began and is told when it ends, by a warning that
                # must find the filters above: else it is printed, or raises there where warnings are errors.
                torch.cuda.synchronize()
                time.sleep(SETTLING)


class HostState:
    """What modules and an optimizer keep elsewhere than on the device, and the generators of the host, as they are.

    Args: outside: gives the numbers that loss_fn reads from elsewhere, by (who reads it, its expression).
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        outside: Callable[[], dict[tuple[str, str], Any]] = dict,
    ) -> None:
        self._modules, self._optimizer, self._device, self._outside = list(modules), optimizer, device, outside
        self._values = self._found_values()
        self._generators = _generators()

    def changed(self) -> str | None:
        """What changed since, in words."""
        found = self._found_values()
        kept = sorted({key[1:] for key in found.keys() & self._values.keys() if found[key] != self._values[key]})
        if kept:
            names = ", ".join(f"{name!r} of {owner}" for name, owner in kept)
            return (
                f"it changes {names} on the host, which a graph would keep as it is today; write to tensors on the "
                "device, as the optimizers of fusestep.optim do and torch's with capturable=True, and count outside of "
                "loss_fn"
            )
        drawn = [name for name, state in _generators().items() if self._generators.get(name, state) != state]
        if drawn:
            return (
                f"it draws random numbers on the host ({', '.join(drawn)}), which a graph would draw once for all "
                "steps; draw them on the device, or before the step and pass them in the batch"
            )
        return None

    def _found_values(self) -> dict[tuple[Any, str, str], Any]:
        found: dict[tuple[Any, str, str], Any] = {}
        optimizer = type(self._optimizer).__name__
        owners: list[tuple[Any, str, dict[str, Any]]] = []
        owners += [(number, optimizer, group) for number, group in enumerate(self._optimizer.param_groups)]
        owners += [(id(p), optimizer, one) for p, one in self._optimizer.state.items() if isinstance(one, dict)]
        owners += [(id(one), type(one).__name__, one._buffers) for one in self._modules if one._buffers]
        for owner, kind, values in owners:
            for name, value in values.items():
                if isinstance(value, Tensor) and value.device != self._device:
                    here = value.item() if value.numel() == 1 and value.device.type == "cpu" else None
                    found[owner, name, kind] = (id(value), value._version) if here is None else here
                elif isinstance(value, (int, float)):
                    found[owner, name, kind] = value
        return found | {(None, path, who): value for (who, path), value in self._outside().items()}


def _generators() -> dict[str, Any]:
    """The state of each generator of the host that code draws from without naming it."""
    found: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (name, keys.tobytes(), *rest)
    return found


class Places:
    """Which tensors are modules' buffers and an optimizer's state, to see which were replaced and put them back."""

    def __init__(self, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        tables: list[tuple[str, dict[Any, Any]]] = []
        tables += [(type(one).__name__, one._buffers) for one in modules if one._buffers]
        tables += [(type(optimizer).__name__, one) for one in optimizer.state.values() if isinstance(one, dict)]
        self._known = [(owner, table, dict(table)) for owner, table in tables]

    def replaced(self) -> str | None:
        """Tensors in whose places are others now, in words."""
        found = sorted(
            {
                f"{name!r} of {owner}"
                for owner, table, before in self._known
                for name, value in before.items()
                if isinstance(value, Tensor) and name in table and table[name] is not value
            }
        )
        if not found:
            return None
        return (
            f"it puts a new tensor in the place of {', '.join(found)} in each step, where a graph would read the old "
            "one for ever; write into the one that is there, by copy_ and the like"
        )

    def put_back(self) -> None:
        """Everything is again where it was."""
        for _, table, before in self._known:
            table.clear()
            table.update(before)
