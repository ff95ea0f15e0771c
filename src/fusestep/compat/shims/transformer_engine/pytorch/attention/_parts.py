"""What attention modules that are made of parts share: the parts' names, and options that the parts are told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusestep import nn
from transformer_engine.pytorch._arguments import accumulate_into_main_grad, advise_on_layout, refuse
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm

#: The names that parts of fusestep's modules take.
NAMED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    nn.Linear: Linear,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.LayerNormLinear: LayerNormLinear,
    nn.LayerNormMLP: LayerNormMLP,
    nn.DotProductAttention: DotProductAttention,
}


def adopt(module: torch.nn.Module, named: dict[type[torch.nn.Module], type[torch.nn.Module]]) -> None:
    """Give the parts of a module, which fusestep's own constructor made, the names of Transformer Engine.

    A class of Transformer Engine adds methods to fusestep's, and what data it adds has a default in the class.
    """
    for child in module.children():
        adopt(child, named)
        name = named.get(type(child))
        if name is not None:
            child.__class__ = name


def configure(
    module: torch.nn.Module, bottom_right: bool | None, tracker: Callable[[], Any] | None, accumulates: bool
) -> None:
    """Tell the parts what fusestep's own constructor has no argument for."""
    for part in module.modules():
        if isinstance(part, DotProductAttention):
            part.bottom_right_diagonal, part._tracker = bottom_right, tracker
        elif accumulates and isinstance(part, (nn.Linear, nn.LayerNormMLP)):
            accumulate_into_main_grad(part)


@contextmanager
def for_this_call(core: Any, bottom_right: bool | None, checkpoints: bool) -> Iterator[None]:
    """Options of one call, which fusestep's modules do not hand on to their attention."""
    before = core.bottom_right_diagonal, core.checkpoints
    if bottom_right is not None:
        core.bottom_right_diagonal = bottom_right
    core.checkpoints = checkpoints
    try:
        yield
    finally:
        core.bottom_right_diagonal, core.checkpoints = before


def refuse_call(
    who: str,
    inference_params: Any,
    pad_between_seqs: bool | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
) -> None:
    """Refuse what no attention here serves."""
    if (
        (inference_params is None and not pad_between_seqs)
        and cu_seqlens_q_padded is None
        and cu_seqlens_kv_padded is None
    ):
        return
    refuse(
        f"{who}.forward",
        inference_params=inference_params,
        pad_between_seqs=pad_between_seqs,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
    )


def advise(module: Any, x: Tensor, mask_type: str) -> None:
    """At the first call of a module whose layout nobody chose, look whether the first dimension may be the batch."""
    if torch.compiler.is_compiling():
        return
    if "causal" in mask_type and x.dim() == 3:
        advise_on_layout(module._unchosen, (x.shape[0], x.shape[1]))
    module._unchosen = None
