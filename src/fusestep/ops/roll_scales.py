"""Delayed scaling's step: amaxes that were recorded enter their histories, and scales are renewed.

For each slot, with `length` entries of history in a ring:

    amax = 0            nothing changes
    amax not finite     refused ← refused + 1, amax ← 0
    else                history[rolls mod length] ← amax, rolls ← rolls + 1, amax ← 0,
                        scale ← min(largest / max(history) / 2^margin, 2^126)      (or the newest instead of the max)

The bound keeps 1 / scale a normal number. One launch serves all modules of a model, over a table of addresses.
Source of the rule: Transformer Engine's delayed scaling; what it does with zero and non-finite amaxes is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Columns of a slot, fp32: the scale (0: none yet), the amax since the last roll, the largest value of the slot's
#: format, and how many rolls were refused.
SCALE, AMAX, LARGEST, REFUSED = range(4)
SLOT = 4

#: The largest scale: its inverse is the smallest normal number of fp32.
LARGEST_SCALE = 2.0**126


def scale_reference(amax: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """The scale that an amax calls for; 1 where it is zero or not finite."""
    scale = torch.as_tensor(largest, dtype=torch.float32, device=amax.device) / amax / 2.0**margin
    scale = scale.clamp(max=LARGEST_SCALE)
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


def roll_scales(states: Sequence[tuple[Tensor, Tensor, Tensor]], *, margin: int, most_recent: bool) -> None:
    """Roll the (slots, history, rolls) of many modules of one device, in place."""
    for slots, history, rolls in states:
        roll_scales_reference(slots, history, rolls, margin=margin, most_recent=most_recent)
