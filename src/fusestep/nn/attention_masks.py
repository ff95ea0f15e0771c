"""The kinds of attention mask, and the boolean masks of those that no kernel knows by name.

Masks that people pass follow Transformer Engine: True means masked out. The masks made here are the other way round,
as torch's are: True means that the query sees the key.

Legend: B batch, H heads, Sq and Sk lengths of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fusestep.errors import UserError


@dataclass(frozen=True, slots=True)
class Mask:
    """What a mask type asks for.

    Attributes:
        causal: a query sees no key after it.
        bottom_right: the last query stands beside the last key, not the first beside the first.
        padding: a mask or lengths tell which positions are real.
        arbitrary: a mask tells it for each query and key.
    """

    causal: bool = False
    bottom_right: bool = False
    padding: bool = False
    arbitrary: bool = False


MASKS = {
    "no_mask": Mask(),
    "causal": Mask(causal=True),
    "padding": Mask(padding=True),
    "padding_causal": Mask(causal=True, padding=True),
    "causal_bottom_right": Mask(causal=True, bottom_right=True),
    "padding_causal_bottom_right": Mask(causal=True, bottom_right=True, padding=True),
    "arbitrary": Mask(arbitrary=True),
}


def mask_named(who: str, name: str) -> Mask:
    """The mask of this name. Raises: UserError for another name."""
    if name not in MASKS:
        raise UserError(f"{who}: attn_mask_type is {name!r}; choose one of {', '.join(MASKS)}.")
    return MASKS[name]


def checked_window(who: str, window: tuple[int, int] | None, mask: Mask) -> tuple[int, int]:
    """How many keys to the left and right of its own place a query sees, −1 for all; a causal mask sees none right."""
    if window is None:
        window = (-1, -1)
    if len(window) != 2 or not all(isinstance(side, int) and side >= -1 for side in window):
        raise UserError(
            f"{who}: window_size is {window!r}; pass (left, right) as numbers of keys, each -1 for all of that side."
        )
    return (window[0], 0) if mask.causal else (window[0], window[1])


def is_named(mask: Mask, window: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Whether kernels know the mask by the name "causal" or as none at all, as far as places decide it."""
    return window == ((-1, 0) if mask.causal else (-1, -1)) and (lengths[0] == lengths[1] or not mask.bottom_right)


def within_window(queries: Tensor, keys: Tensor, window: tuple[int, int]) -> Tensor | None:
    """Whether a key's place is within the window of a query's, places broadcast; None for a window without limits."""
    left, right = window
    keep = None
    if right >= 0:
        keep = keys <= queries + right
    if left >= 0:
        near = keys >= queries - left
        keep = near if keep is None else keep & near
    return keep


def keep_mask(
    mask: Mask,
    window: tuple[int, int],
    lengths: tuple[int, int],
    padded_q: Tensor | None,
    padded_k: Tensor | None,
    masked_out: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """The mask of batches (True: attend), broadcastable to (B, H, Sq, Sk); None if every query sees every key.

    Args:
        padded_q, padded_k: (B, S), True where a position is padding, which stands at the end.
        masked_out: broadcastable to (B, H, Sq, Sk), True where masked out.
    """
    sq, sk = lengths
    queries = torch.arange(sq, device=device)[:, None]
    keys = torch.arange(sk, device=device)[None, :]
    if mask.bottom_right:
        if padded_q is not None and padded_k is not None:
            real_q, real_k = (~padded_q).sum(-1), (~padded_k).sum(-1)
            queries = queries + (real_k - real_q)[:, None, None, None]
        else:
            queries = queries + (sk - sq)
    keep = within_window(queries, keys, window)
    if padded_q is not None and padded_k is not None:
        real = ~(padded_q[:, None, :, None] | padded_k[:, None, None, :])
        keep = real if keep is None else real & keep
    if masked_out is not None:
        keep = ~masked_out if keep is None else keep & ~masked_out
    return keep


def packed_keep_mask(
    bottom_right: bool, window: tuple[int, int], starts_q: Tensor, starts_k: Tensor, totals: tuple[int, int]
) -> Tensor:
    """The mask of packed sequences (True: attend): (tokens of q, tokens of k), blocks on the diagonal."""
    sequence_q, place_q = _places(starts_q, totals[0])
    sequence_k, place_k = _places(starts_k, totals[1])
    if bottom_right:
        lengths = torch.diff(starts_k) - torch.diff(starts_q)
        place_q = place_q + lengths[sequence_q.clamp(max=len(lengths) - 1)]
    keep = sequence_q[:, None] == sequence_k[None, :]
    near = within_window(place_q[:, None], place_k[None, :], window)
    return keep if near is None else keep & near


def _places(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each token, the number of its sequence and its place within."""
    tokens = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), tokens.to(starts.dtype), right=True)
    return sequence, tokens - starts[sequence]


def padding_from_lengths(starts: Tensor, length: int) -> Tensor:
    """(B, length), True beyond each sequence's own length, from cumulative lengths (B + 1,)."""
    return torch.arange(length, device=starts.device)[None, :] >= torch.diff(starts)[:, None]


def default_alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """(heads,) fp32: 2^(−8 i / heads) for i from 1, and between those of the next power of two for other numbers.

    Source: Press, Smith and Lewis 2022, arXiv:2108.12409.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, lengths: tuple[int, int], bottom_right: bool) -> Tensor:
    """−slope · |distance of key and query|: (B or 1, H, Sq, Sk) fp32, from slopes (H,) or (B, H)."""
    sq, sk = lengths
    queries = torch.arange(sq, device=slopes.device)[:, None] + (sk - sq if bottom_right else 0)
    distance = (torch.arange(sk, device=slopes.device)[None, :] - queries).abs()
    return -slopes.float().reshape(-1, slopes.shape[-1], 1, 1) * distance
