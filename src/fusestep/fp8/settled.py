"""Settled slots: those that are known on the host to hold a scale, and by what that may come to an end.

A slot has no scale until its first tensor that is not zero. From then on no cast and no roll takes the scale away; only
who writes in the table of slots does: loading a state, another format, a user. They write by operations of torch's,
which a tensor counts in its version; kernels of ours and replays of a graph leave the version as it is. So who has read
a table once knows of its scales while the version is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from fusestep import hardware
from fusestep.fp8.state import Slots
from fusestep.ops.roll_scales import SCALE
from fusestep.ops.settled_slots import address

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
