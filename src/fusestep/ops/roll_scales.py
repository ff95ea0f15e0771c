"""Delayed scaling's step: amaxes that were recorded enter their histories, and scales are renewed.

For each slot, with `length` entries of history in a ring:

    amax = 0            nothing changes
    amax not finite     refused ← refused + 1, amax ← 0
    else                history[rolls mod length] ← amax, rolls ← rolls + 1, amax ← 0,
                        scale ← largest / max(history) / 2^margin      (or the newest amax instead of the max)

Scales are kept within 2^-126 and 2^126, so that they and their inverses are normal numbers. One launch serves
all modules of a model, over a table of addresses, one program for each slot.
Source of the rule: Transformer Engine's delayed scaling; what it does with zero and non-finite amaxes is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.language import tl, triton
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation, Op, Proof, catalogue, relative_error
from fusestep.ops.tensor_table import upload

#: (slots, history, rolls) of a module: (n, 4) fp32, (n, length) fp32, (n,) int64, contiguous.
State = tuple[Tensor, Tensor, Tensor]

#: Columns of a slot, fp32: the scale (0: none yet), the amax since the last roll, the largest value of the slot's
#: format, and how many rolls were refused.
SCALE, AMAX, LARGEST, REFUSED = range(4)
SLOT = 4

#: The largest scale, whose inverse is the smallest normal number of fp32; the smallest scale is that number too.
LARGEST_SCALE = 2.0**126


def scale_reference(amax: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """The scale that an amax calls for; 1 where it is zero or not finite."""
    # Filled on the device, which a capture allows; a number would be divided by through its rounded reciprocal.
    largest = largest if isinstance(largest, Tensor) else torch.full_like(amax, largest)
    scale = largest / amax / 2.0**margin
    scale = scale.clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def roll_scales_reference(slots: Tensor, history: Tensor, rolls: Tensor, *, margin: int, most_recent: bool) -> None:
    """The rule above for one module, in place.

    Args: slots (n, 4) fp32, history (n, length) fp32, rolls (n,) int64.
    """
    amax = slots[:, AMAX].clone()
    is_finite = amax.isfinite()
    is_new = is_finite & (amax > 0)
    place = (rolls % history.shape[1])[:, None]
    history.scatter_(1, place, torch.where(is_new[:, None], amax[:, None], history.gather(1, place)))
    chosen = amax if most_recent else history.amax(dim=1)
    scale = scale_reference(chosen, slots[:, LARGEST], margin)
    slots[:, SCALE] = torch.where(is_new, scale, slots[:, SCALE])
    slots[:, REFUSED] += ~is_finite
    slots[:, AMAX] = 0
    rolls += is_new


@triton.jit
def _roll_scales_kernel(
    table,  # (slots, 5) int64: addresses of the slot, history and rolls; the history's length; the amax's address
    divisor,  # fp32, 2^margin
    BLOCK: tl.constexpr,  # entries of the history that are read at once
    MOST_RECENT: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * 5
    slot = tl.load(row).to(tl.pointer_type(tl.float32))
    history = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    rolls_address = tl.load(row + 2).to(tl.pointer_type(tl.int64))
    length = tl.load(row + 3)

    amax = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    is_finite = amax < float("inf")  # false of NaN
    is_new = is_finite & (amax > 0.0)
    rolls = tl.load(rolls_address)
    place = rolls % length
    chosen = tl.where(is_new, amax, 1.0)
    if not MOST_RECENT:
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            entries = tl.load(history + at, mask=(at < length) & (at != place), other=0.0)
            chosen = tl.maximum(chosen, tl.max(entries, axis=0))
    scale = tl.div_rn(tl.div_rn(tl.load(slot + 2), chosen), divisor)
    tl.store(history + place, amax, mask=is_new)
    tl.store(rolls_address, rolls + 1, mask=is_new)
    scale = tl.maximum(tl.minimum(scale, 8.507059173023462e37), 1.1754943508222875e-38)  # 2^126, 2^-126
    tl.store(slot, scale, mask=is_new)
    tl.store(slot + 1, 0.0)
    tl.store(slot + 3, tl.load(slot + 3) + tl.where(is_finite, 0.0, 1.0))


#: A program reads a history of up to this many entries at once. One warp serves short ones, four the others.
LARGEST_BLOCK = 1024
ONE_WARP = 128


class RollTable:
    """The addresses of many modules' scaling state on one device, in its memory, so that one launch rolls them all.

    A row for each slot, int64: the addresses of the slot, of its history and of its rolls, the history's length, and
    where the amax is read. The table holds no tensor alive; it is valid while the tensors that it was made from are.

    Args:
        amaxes: (n,) fp32 of each, contiguous, that are rolled in place of the slots' own; for ranks that reduced them.
        margin, most_recent: as of `roll_scales`.

    Raises: UserError while a CUDA graph is captured, which an upload would spoil.
    """

    def __init__(
        self, states: Sequence[State], amaxes: Sequence[Tensor] | None = None, *, margin: int, most_recent: bool
    ) -> None:
        device = states[0][0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "a CUDA graph is being captured of a step whose FP8 modules are not those of the step before it; run "
                "one whole step before the capture."
            )
        rows = []
        longest = 1
        for place, (slots, history, rolls) in enumerate(states):
            length = history.shape[1]
            longest = max(longest, length)
            for index in range(slots.shape[0]):
                slot, *others = (t.data_ptr() + index * t.stride(0) * t.element_size() for t in (slots, history, rolls))
                amax = slot + 4 * AMAX if amaxes is None else amaxes[place].data_ptr() + 4 * index
                rows.append((slot, *others, length, amax))
        self._table = upload(rows or [(0, 0, 0, 0, 0)], torch.int64, device)
        self._address = (self._table.data_ptr(),)
        self._index = device.index if device.type == "cuda" else None
        block = 1 if most_recent else min(1 << (longest - 1).bit_length(), LARGEST_BLOCK)
        self._launch = PreparedLaunch(
            _roll_scales_kernel,
            (len(rows),),
            device,
            (2.0**margin,),
            BLOCK=block,
            MOST_RECENT=most_recent,
            num_warps=1 if block <= ONE_WARP else 4,
        )

    def roll(self) -> None:
        """Roll all of them, in one launch."""
        index = self._index
        if index is not None and torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        is_current = index is None or index == torch._C._cuda_getDevice()
        if not (is_current and self._launch.at(self._address)):
            self._launch(self._table)


#: Tables that a captured graph reads at every replay, kept for good.
_captured: set[RollTable] = set()


def roll_scales(states: Sequence[State], *, margin: int, most_recent: bool) -> None:
    """Roll the state of many modules of one device, in place.

    Who rolls the same modules again and again keeps a RollTable, so that nothing is uploaded.

    Args:
        states: (slots, history, rolls) of each, contiguous; histories may differ in length.
        margin: scales are smaller by 2^margin.
        most_recent: scales follow the newest amax instead of the largest in the history.
    """
    if not states:
        return
    if dispatch.uses_triton("roll_scales", states[0][0].device):
        RollTable(states, margin=margin, most_recent=most_recent).roll()
        return
    by_length: dict[int, list[State]] = {}
    for state in states:
        by_length.setdefault(state[1].shape[1], []).append(state)
    for members in by_length.values():
        # All of a length at once: a dozen small operations for each module would take longer than copying.
        parts = list(zip(*members, strict=True))
        slots, history, rolls = (torch.cat(part) for part in parts)
        roll_scales_reference(slots, history, rolls, margin=margin, most_recent=most_recent)
        sizes = [part.shape[0] for part in parts[0]]
        for part, rolled in zip(parts, (slots, history, rolls), strict=True):
            torch._foreach_copy_(list(part), list(rolled.split(sizes)))


def _prove(device: torch.device) -> list[Proof]:
    """A few rolls of modules whose histories differ in length, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    states = []
    for count, length in ((3, 1), (2, 5), (6, 16), (3, 1500)):
        slots = torch.zeros(count, SLOT)
        slots[:, LARGEST] = 448.0
        states.append((slots, torch.zeros(count, length), torch.zeros(count, dtype=torch.int64)))
    ours = [(a.to(device, copy=True), b.to(device, copy=True), c.to(device, copy=True)) for a, b, c in states]
    error = 0.0
    for step in range(7):
        for (slots, *_), (our_slots, *_) in zip(states, ours, strict=True):
            amax = torch.rand(slots.shape[0], generator=generator) * 10.0 ** (step - 3)
            amax[0] = (0.0, float("inf"), float("nan"), 1e-45)[step % 4]
            slots[:, AMAX] = amax
            our_slots[:, AMAX] = amax.to(device)
        for state in states:
            roll_scales_reference(*state, margin=step % 2, most_recent=step == 3)
        roll_scales(ours, margin=step % 2, most_recent=step == 3)
        for state, our in zip(states, ours, strict=True):
            error = max(error, *(relative_error(b.cpu(), a) for a, b in zip(state, our, strict=True)))
    return [Proof("scales, histories and counts after seven rolls", error, 0.0)]


def _compilations() -> Iterable[Compilation]:
    signature = {"table": "*i64", "divisor": "fp32", "BLOCK": "constexpr", "MOST_RECENT": "constexpr"}
    for block, warps, most_recent in ((1, 1, True), (16, 1, False), (LARGEST_BLOCK, 4, False)):
        yield Compilation(
            _roll_scales_kernel,
            "most recent" if most_recent else f"largest of {block}",
            signature,
            {"BLOCK": block, "MOST_RECENT": most_recent},
            warps,
            divisible_by_16=frozenset({"table"}),
        )


catalogue(Op("roll_scales", "delayed scaling: amaxes to histories and scales, in one launch", _prove, _compilations))
