"""The largest of the ranks' amaxes, in one collective, and the agreement on whose amaxes they are.

Ranks run one program, but not every module runs on every rank: a branch may follow the data. Before ranks reduce, they
agree on a table of all modules that have run on any of them (`agreed_table`), and every rank brings an amax for each, 0
where the module did not run. From then on the collective has one length everywhere, and the hosts exchange nothing.

A module that runs for the first time later is in no table. Its rank raises a flag, one more number in the collective,
which all ranks read `LAG` collectives later, when a GPU has long computed it; then they agree anew, all at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusestep.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Collectives between raising a flag and reading it, so that the host never waits for work that it has just enqueued.
LAG = 2


class Roster(NamedTuple):
    """What one rank brings to an agreement.

    Attributes:
        held: its seat at each place of the table so far, -1 where the module is no more.
        ran: the seats, in order, of modules that are to come in.
        widths: how many amaxes each of these has.
        built: what kind of module has each seat; seats are given in the order in which modules are built.
    """

    held: list[int]
    ran: list[int]
    widths: list[int]
    built: list[str]


class Table(NamedTuple):
    """What ranks agreed on: the same module has the same place on all of them.

    Attributes:
        kept: which places of the table before are kept, in their order; those whose module is on some rank still.
        joined: for each rank, the seats that come after them.
        widths: how many amaxes each of these has.
    """

    kept: list[int]
    joined: list[list[int]]
    widths: list[int]


def agreed_table(rosters: Sequence[Roster]) -> Table:
    """The table that follows from the rosters of all ranks, by rank.

    Ranks that built the same modules in the same order know them by their seats. Where one built others before, its
    seats are shifted by as many, which is told from the modules that ran.

    Raises: UserError, the same on every rank, where ranks built different modules.
    """
    kept = [place for place, seats in enumerate(zip(*[one.held for one in rosters], strict=True)) if max(seats) >= 0]
    shifts = [_shift(rosters[0], roster) for roster in rosters]
    seats = sorted({seat - shift for roster, shift in zip(rosters, shifts, strict=True) for seat in roster.ran})
    joined = [[seat + shift for seat in seats] for shift in shifts]
    _check_same(rosters, joined)
    by_seat = [dict(zip(one.ran, one.widths, strict=True)) for one in rosters]
    known = [[widths.get(seat) for seat in own] for widths, own in zip(by_seat, joined, strict=True)]
    return Table(kept, joined, _widths(known))


def _shift(first: Roster, roster: Roster) -> int:
    """How far a rank's seats are from those of the first rank's."""
    if roster.built == first.built:
        return 0
    candidates = [0, len(roster.built) - len(first.built)]
    if first.ran and roster.ran:
        candidates += [roster.ran[0] - first.ran[0], roster.ran[-1] - first.ran[-1]]
    ran, theirs = set(roster.ran), set(first.ran)

    def agrees(shift: int) -> bool:
        everything = theirs | {seat - shift for seat in ran}
        return all(_kind(first, seat) == _kind(roster, seat + shift) is not None for seat in everything)

    # The one that makes most modules run on both; of equals that which is named first.
    fitting = [shift for shift in candidates if agrees(shift)]
    return max(fitting, key=lambda shift: len(theirs & {seat - shift for seat in ran}), default=0)


def _kind(roster: Roster, seat: int) -> str | None:
    return roster.built[seat] if 0 <= seat < len(roster.built) else None


def _widths(known: Sequence[Sequence[int | None]]) -> list[int]:
    """How many amaxes each place has, which those ranks that know must agree on."""
    agreed = []
    for sizes in zip(*known, strict=True):
        there = sorted({size for size in sizes if size is not None})
        if len(there) != 1:
            raise UserError(
                f"FP8: a module of a group that reduces amaxes casts {' and '.join(map(str, there))} tensors on "
                "different ranks; build the same modules on all."
            )
        agreed += there
    return agreed


def _check_same(rosters: Sequence[Roster], joined: Sequence[Sequence[int]]) -> None:
    """Refuse a table of seats, for each rank, in which ranks have different modules."""
    for seats in zip(*joined, strict=True):
        runner = next(rank for rank, one in enumerate(rosters) if seats[rank] in one.ran)
        kind = _kind(rosters[runner], seats[runner])
        for rank, roster in enumerate(rosters):
            found = _kind(roster, seats[rank])
            if found != kind or seats[rank] in roster.held:
                raise UserError(
                    f"FP8: the ranks of a group that reduces amaxes built different modules, number {seats[runner]} "
                    f"{kind} on rank {runner} and {found or 'nothing'} on rank {rank} of the group; build the same "
                    "modules in the same order on all, pass fp8_autocast the group of those ranks that do, or a "
                    "recipe with reduce_amax=False."
                )


def exchanged(roster: Roster, group: ProcessGroup) -> list[Roster]:
    """The rosters of all ranks of a group. The hosts wait for each other."""
    texts = gather_texts(json.dumps(roster), group)
    return [Roster(*json.loads(text)) for text in texts]


def gather_texts(text: str, group: ProcessGroup) -> list[str]:
    """The texts of all ranks of a group, by rank; plain bytes, so that nothing is unpickled."""
    distributed = torch.distributed
    device = device_of(group)
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    distributed.all_gather(sizes, size, group)
    lengths = [int(one) for one in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    texts = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(texts, padded, group)
    return [bytes(one[:length].cpu().tolist()).decode() for one, length in zip(texts, lengths, strict=True)]


def device_of(group: ProcessGroup) -> torch.device:
    """Where tensors for this group's collectives lie."""
    backend = torch.distributed.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


class Reduction:
    """A fused collective over a table's amaxes on one device, and its flag.

    Args:
        sizes: how many amaxes each place of the table has.

    Attributes:
        parts: (size,) fp32 of each place, views of one buffer: after a call the largest of the ranks'. Written in place
            ever after, so that a CUDA graph may hold the collective and who reads them.
        device: where they lie.
    """

    def __init__(self, group: ProcessGroup, sizes: Sequence[int], device: torch.device) -> None:
        self._group = group
        self.device = device
        total = sum(sizes)
        with torch.inference_mode(False):
            self._buffer = torch.zeros(total + 1, dtype=torch.float32, device=device)
            self._missing = torch.zeros(total, dtype=torch.float32, device=device).split(list(sizes))
            self._flags = torch.tensor([0.0, 1.0], device=device).split(1)
        self.parts: Sequence[Tensor] = self._buffer[:total].split(list(sizes))

    @torch.no_grad()
    def __call__(self, amaxes: Sequence[Tensor | None], flag: bool) -> Tensor:
        """Reduce; returns the flag, (1,) fp32, not 0 where any rank raised it.

        NaN counts as infinity, so that all ranks refuse alike, whatever a collective makes of NaN.

        Args: amaxes: (size,) of each place, None where this rank has no such module.
        """
        found = [
            self._missing[place] if amax is None else amax if amax.device == self.device else amax.to(self.device)
            for place, amax in enumerate(amaxes)
        ]
        torch.cat([*found, self._flags[flag]], out=self._buffer)
        self._buffer.nan_to_num_(nan=float("inf"), posinf=float("inf"))
        torch.distributed.all_reduce(self._buffer, torch.distributed.ReduceOp.MAX, self._group)
        return self._buffer[-1:]


class Flags:
    """Flags of the last collectives, on their way to the host."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    def send(self, flag: Tensor) -> None:
        """Take a flag that was just computed."""
        if flag.device.type != "cuda":
            self._waiting.append((flag.to("cpu", copy=True), None))
            return
        host = torch.empty(1, dtype=torch.float32, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._waiting.append((host, done))

    def is_raised(self) -> bool:
        """Whether the flag of `LAG` collectives ago was raised: the same answer on all ranks."""
        if len(self._waiting) < LAG:
            return False
        host, done = self._waiting.popleft()
        if done is not None:
            done.synchronize()
        return bool(host.item())

    def clear(self) -> None:
        """Forget flags that were raised before ranks agreed anew."""
        self._waiting.clear()
