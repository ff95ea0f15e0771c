"""Settled slots: those that are known on the host to hold a scale, and by what that may come to an end.

A slot has no scale until its first tensor that is not zero. From then on no cast and no roll takes the scale away; only
who writes in the table of slots does: loading a state, another format, a user. They write by operations of torch's,
which a tensor counts in its version; kernels of ours and replays of a graph leave the version as it is. So who has read
a table once knows of its scales while the version is the same.

Who captures reads when it has to, and waits. For steps that nothing captures a `Watch` reads without a wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.fp8.state import Slots
from fusestep.ops.roll_scales import SCALE
from fusestep.ops.settled_slots import address, note

#: The tables of slots of some states, and the version in which each was seen.
Versions = dict[Tensor, int]


def versions(states: Iterable[Slots]) -> Versions:
    """The tables of slots of some states as they are now; without those of inference mode, which count no version."""
    return {state.slots: state.slots._version for state in states if not state.slots.is_inference()}


def unwritten(known: Versions) -> Versions:
    """Those of some tables in which nobody has written since they were seen."""
    return {table: version for table, version in known.items() if table._version == version}


def holding(tables: Iterable[Tensor]) -> frozenset[int]:
    """The addresses of the slots that hold a scale now, in tables of one device, for which the host waits."""
    known = list(tables)
    if not known:
        return frozenset()
    device = known[0].device
    with hardware.probing(device.index or 0) if device.type == "cuda" else nullcontext():
        scales = torch.cat([table[:, SCALE] for table in known]).tolist()
    places = [address(table.data_ptr(), index) for table in known for index in range(table.shape[0])]
    return frozenset(place for place, scale in zip(places, scales, strict=True) if scale != 0.0)


#: Rolls from one reading of a watch to the next: ever more, since scales come early, but never none for good, since a
#: slot's first tensor may come late, and whoever writes in a table makes what was known of it void.
LONGEST_REST = 1024


class Watch:
    """Tells casts which slots of some states hold a scale, by readings for which the host does not wait."""

    def __init__(self) -> None:
        self._rest = self._left = 1
        self._reading: _Reading | None = None

    def is_due(self) -> bool:
        """Whether to `look` after this roll."""
        self._left -= 1
        return self._left <= 0

    def look(self, states: Sequence[Slots]) -> None:
        """Begin a reading of states on one device, the same ones in every call, or take what one has found."""
        if torch._C._len_torch_dispatch_stack() or (
            states[0].slots.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return
        if self._reading is None:
            self._reading = _Reading(versions(states))
        elif self._reading.is_done():
            self._reading.tell()
            self._reading = None
            self._left = self._rest = min(2 * self._rest, LONGEST_REST)


class _Reading:
    """The scales of some tables of one device on their way to the host."""

    def __init__(self, tables: Versions) -> None:
        self._tables = tables
        self._event: torch.cuda.Event | None = None
        self._scales: Tensor | None = None
        if not tables:
            return
        device = next(iter(tables)).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            scales = torch.cat([table[:, SCALE] for table in tables])
            self._scales = torch.empty(scales.shape, dtype=scales.dtype, device="cpu", pin_memory=scales.is_cuda)
            self._scales.copy_(scales, non_blocking=True)
            if scales.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def tell(self) -> None:
        """Let casts know, of the tables that nobody wrote in meanwhile."""
        if self._scales is None:
            return
        known = unwritten(self._tables)
        parts = self._scales.split([table.shape[0] for table in self._tables])
        for (table, version), scales in zip(self._tables.items(), parts, strict=True):
            if table in known:
                note(table, version, frozenset(i for i, scale in enumerate(scales.tolist()) if scale != 0.0))
