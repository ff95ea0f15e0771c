"""Which of torch's attention kernels serves a call, and the calls of them.

    out = softmax(scale · q · kᵀ + mask) · v        over the keys, for each head and query

q is (B, H, Sq, D), k and v are (B, G, Sk, D) with H a multiple of G: each key head serves H / G query heads. Any of
them may be a strided view, of one fused product for instance; only the last dimension must be dense. The result has q's
order in memory, so that what is (B, Sq, H, D) there comes back as such.

On a GPU the kernel is chosen once for each layout and kept. cuDNN's is the fastest on Hopper (huggingface/transformers
#48163: 1.7–2.3 times flash attention; slower than it on Ampere and on some Blackwells), needs cuDNN 9.15.1 for lengths
that are no multiple of 128 (pytorch#169849), builds a plan for each new shape, and is not deterministic. So it serves
training; flash attention serves the rest, and all of it under torch.use_deterministic_algorithms. cuDNN never gets a
mask: its backward gives NaN for some lengths then (pytorch#196678).

The choice must not depend on whether gradients are enabled: a forward that is computed again for backward has to draw
the dropout of the first.

Legend: B batch, H heads, G key heads, S sequence length, D head size.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusestep import dispatch

#: cuDNN 9.15.1, as torch.backends.cudnn.version() writes it.
CUDNN_FOR_ANY_LENGTH = 91501

#: What flash attention's kernels are built for.
LARGEST_HEAD = 256

HALVES = frozenset((torch.bfloat16, torch.float16))

#: How the choices read in words.
NAMES = {"cudnn": "cuDNN", "flash": "flash attention", "torch": "what torch chooses itself", "masked": "a mask"}


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str, *, causal: bool, scale: float, dropout: float) -> Tensor:
    """Attention to all keys, or causally to those not after the query, counted from the first: (B, H, Sq, D)."""
    if backend == "cudnn":
        keeps_sums = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, keeps_sums, dropout, causal, False, scale=scale
        )
        return results[0]  # type: ignore[no-any-return]
    if backend == "flash":
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
        return results[0]  # type: ignore[no-any-return]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped)


def choose(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, training: bool) -> str:
    """`cudnn` or `flash` where we call the kernel ourselves, else `torch`, for torch's own choice; worth keeping."""
    if not q.is_cuda or not q.numel() or torch.compiler.is_compiling() or type(q) is not Tensor:
        return "torch"
    # torch pads other head sizes, and knows what ROCm has.
    if q.shape[-1] % 8 or q.dtype not in HALVES or torch.version.hip is not None or dispatch.asked_for_torch():
        return "torch"
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, dropout, causal, q.shape[1] != k.shape[1])
    if training and prefers_cudnn(q.device) and torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(parameters) else "torch"


def prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's kernel is the first choice for training on this device now."""
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return (torch.backends.cudnn.version() or 0) >= CUDNN_FOR_ANY_LENGTH


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, *, scale: float, dropout: float
) -> Tensor:
    """Attention to the keys that `keep` names, with `bias` added to the scores.

    keep (True: attend) and bias (float) are broadcast to (B, H, Sq, Sk). A query without any key gets zeros, and gives
    no gradient to anything: kernels differ in what they make of one, so it attends to all keys and is cut out after.
    """
    alive = None
    mask: Tensor | None = keep
    if keep is not None:
        alive = keep.any(-1, keepdim=True)
        mask = keep | ~alive
    if bias is not None:
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    grouped = q.shape[1] != k.shape[1]
    if q.is_cuda:
        if grouped:  # the kernel that takes masks wants as many key heads
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    return out if alive is None else torch.where(alive, out, 0.0)


def serves_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether flash attention's packed kernel takes these: (tokens, heads, D)."""
    return (
        q.is_cuda
        and q.dtype in HALVES
        and q.shape[-1] == v.shape[-1] <= LARGEST_HEAD
        and q.numel() > 0
        and k.numel() > 0
        and torch.version.hip is None
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(q.device)[0] >= 8
    )


def attend_window(q: Tensor, k: Tensor, v: Tensor, *, window: tuple[int, int], scale: float, dropout: float) -> Tensor:
    """Flash attention within a window that is counted from the last query and key: (B, H, Sq, D)."""
    arguments = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2])
    return _flash(*arguments, window, scale, dropout).transpose(1, 2)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    window: tuple[int, int],
    scale: float,
    dropout: float,
) -> Tensor:
    """Flash attention over packed sequences: q (tokens, H, D), k and v (tokens, G, D), out (tokens, H, D).

    Args:
        starts: of queries and keys, (sequences + 1,) int32 on the device.
        longest: sequence of queries and of keys, or more.
        window: key j of a sequence is seen by its query i if −left ≤ j − i − (keys − queries) ≤ right, where −1 means
            without limit.
    """
    size = q.shape[-1]
    if size % 8:
        q, k, v = (F.pad(tensor, (0, -size % 8)) for tensor in (q, k, v))
    return _flash(q, k, v, *starts, *longest, window, scale, dropout)[..., :size]


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    window: tuple[int, int],
    scale: float,
    dropout: float,
) -> Tensor:
    """The kernel behind both; without starts q, k and v are (B, S, heads, D)."""
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    is_causal = window == (-1, 0)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, is_causal, False, scale=scale, **sides
    )[0]
    return out


_checked: tuple[weakref.ref[Tensor], int, int] | None = None


def check_total(starts: Tensor, total: int) -> None:
    """Have the device stop if the last sequence does not end with the last token, without making the host wait.

    Flash attention leaves rows beyond the last sequence as they were in memory. All layers of a model share one
    `starts`, so it is checked once.
    """
    global _checked
    message = "DotProductAttention: cu_seqlens does not end with the number of packed tokens"
    if torch.compiler.is_compiling():
        torch._assert_async(starts[-1] == total, message)
        return
    if _checked is not None and (_checked[0]() is starts and _checked[1:] == (starts._version, total)):
        return
    torch._assert_async(starts[-1] == total, message)
    _checked = (weakref.ref(starts), starts._version, total)
