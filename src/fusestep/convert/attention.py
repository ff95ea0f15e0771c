"""nn.MultiheadAttention without copies of q, k and v, through the fastest of torch's kernels for the shape.

What is computed is torch's: the same packed product, the same masks, the same dropout of attention weights while
training. Taken are self-attention calls that ask for no weights and train, or run with gradients; all others, torch's
fast path for inference among them, go to torch's own forward.

A mask that is causal, which most are, costs a mask's kernel as any other does. So it is looked at once: while the same
tensor is passed, unwritten, the causal kernel serves it. Looking makes the host wait for the device; a program that
makes a new mask for every call is not looked at any more after a while.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import dispatch
from fusestep.convert.agreement import Call, Probe
from fusestep.convert.classes import Kind
from fusestep.convert.patterns import Pattern, is_a
from fusestep.dispatch import Choice
from fusestep.fp8 import context
from fusestep.nn.attention_backends import NAMES, attend, choose

#: Masks that are looked at in vain, or for a single call, before no more are.
MOST_LOOKS = 64


class CausalMasks:
    """Which masks are causal: found out once for each tensor, as long as it is not written."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
        self._looks_left = MOST_LOOKS

    def is_causal(self, mask: Tensor) -> bool:
        """Whether a (S, S) mask, boolean or added, hides from each query exactly the keys after it."""
        if torch.compiler.is_compiling() or type(mask) is not Tensor or mask.requires_grad or mask.is_inference():
            return False  # what was made in inference mode does not tell whether it was written
        known = self._known.get(id(mask))
        if known is not None and known[0]() is mask and known[1] == mask._version:
            self._looks_left = MOST_LOOKS
            return known[2]
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if not dispatch.is_examining():  # a trial's masks are no sign of what the program does
            if self._looks_left <= 0:
                return False
            self._looks_left -= 1
        size = mask.shape[-1]
        hidden = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
        wanted = hidden if mask.dtype is torch.bool else torch.zeros_like(mask).masked_fill_(hidden, -math.inf)
        answer = bool(torch.equal(mask, wanted))
        for key, (reference, _, _) in list(self._known.items()):  # a list: other threads may look as well
            if reference() is None:
                self._known.pop(key, None)
        self._known[id(mask)] = (weakref.ref(mask), mask._version, answer)
        return answer


_masks = CausalMasks()


class FusedMultiheadAttention(Kind):
    """nn.MultiheadAttention, where it attends to itself and nobody asks for its weights."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        old = nn.MultiheadAttention.forward
        if need_weights or key_padding_mask is not None or query is not key or key is not value:
            return old(self, query, key, value, *options)  # type: ignore[arg-type]
        is_inference = not (self.training or torch.is_grad_enabled() or context.is_enabled())
        if query.dim() != 3 or query.is_nested or is_inference or not self._knows(query, attn_mask, is_causal):
            return old(self, query, key, value, *options)  # type: ignore[arg-type]
        return self._attended(query, attn_mask, is_causal), None

    def _knows(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether the mask is one that torch takes; it has its own words for others."""
        if mask is None:
            return not is_causal
        batch, length = (x.shape[0], x.shape[1]) if self.batch_first else (x.shape[1], x.shape[0])
        is_shaped = mask.shape in ((length, length), (batch * self.num_heads, length, length))
        return is_shaped and (mask.dtype is torch.bool or mask.is_floating_point())

    def _attended(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        mixed = self._in_proj(x)
        # (B, H, S, D) views of the product, whichever of batch and sequence is first
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        heads = mixed.unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = (part.permute(order) for part in heads.unbind(-3))
        dropout = self.dropout if self.training else 0.0
        scale = 1.0 / math.sqrt(self.head_dim)
        length = q.shape[2]
        is_square = mask is not None and mask.shape == (length, length)
        causal = is_causal or (mask is not None and is_square and _masks.is_causal(mask))
        if mask is None or causal:
            backend = choose(q, k, v, causal, dropout, self.training)
            out = attend(q, k, v, backend, causal=causal, scale=scale, dropout=dropout)
        else:
            out = F.scaled_dot_product_attention(q, k, v, self._added(mask, q), dropout, scale=scale)
        out = out.permute(order if self.batch_first else (2, 0, 1, 3)).flatten(-2)
        return self._out_proj(out)

    def _in_proj(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj_weight, self.in_proj_bias)

    def _out_proj(self, x: Tensor) -> Tensor:
        # Its forward is not called, nor are its hooks: torch's module does not either.
        return F.linear(x, self.out_proj.weight, self.out_proj.bias)

    def _added(self, mask: Tensor, q: Tensor) -> Tensor:
        """What torch adds to the scores: (S, S), or (B, H, S, S) of (B · H, S, S)."""
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
        elif mask.dtype is not q.dtype:
            mask = mask.to(q.dtype)
        return mask if mask.dim() == 2 else mask.unflatten(0, (q.shape[0], self.num_heads))

    def implementation(self) -> Choice:
        """What attention runs as, and why."""
        return Choice("torch", f"torch's attention kernels; for each shape {NAMES['cudnn']}, flash or torch's choice")


def is_attention(module: nn.Module) -> bool | str:
    """Whether a module is nn.MultiheadAttention of a form that is swapped, or why it is not."""
    if not isinstance(module, nn.MultiheadAttention) or is_a(module, FusedMultiheadAttention):
        return False
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} overrides the forward of nn.MultiheadAttention"
    if not module._qkv_same_embed_dim:
        return "keys or values of another width have weights of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    if module._parameters.get("in_proj_weight") is None or "weight" not in module.out_proj._parameters:
        return "its weight is computed from others"
    return True


def attention_inputs(module: nn.Module, probe: Probe) -> Sequence[Call]:
    """Without a mask, with a causal one, and with others: added, boolean, and one for each head."""
    attention: Any = module
    width, heads = attention.embed_dim, attention.num_heads
    batch, length = 3, 21
    calls: list[Call] = []
    hidden = torch.ones(length, length, dtype=torch.bool, device=probe.device).triu(1)
    causal = torch.zeros(length, length, device=probe.device, dtype=probe.dtype).masked_fill_(hidden, -math.inf)
    ragged = hidden.logical_not().roll(1, 1)
    ragged[:, 0] = False  # no query without a key
    masks: list[Any] = [
        None,
        causal,
        hidden,
        probe.randn(length, length),
        ragged,
        probe.randn(batch * heads, length, length).requires_grad_(),
    ]
    for mask in masks:
        shape = (batch, length, width) if module.batch_first else (length, batch, width)
        x = probe.randn(*shape)
        options = {"need_weights": False, "attn_mask": mask}
        calls.append(((x, x, x), options))
    calls.append(((x, x, x), {"need_weights": False, "attn_mask": causal, "is_causal": True}))
    return calls


def _library_attention(module: nn.Module) -> bool | str:
    """Attention of Hugging Face's, which picks a kernel by a setting."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(chosen, str) or not type(module).__name__.endswith("Attention"):
        return False
    if chosen == "eager":
        return "it writes its scores to memory: load the model with attn_implementation='sdpa'"
    return f"its attention is one kernel already ({chosen}), and what is around it is not known"


PATTERNS = (
    Pattern(
        "self-attention without copies, causal kernel for causal masks",
        FusedMultiheadAttention,
        is_attention,
        attention_inputs,
        quiet=("dropout",),
    ),
    # Told, never swapped: what happens between its products differs from version to version.
    Pattern("attention", FusedMultiheadAttention, _library_attention, attention_inputs),
)
