"""The GPT: token and position embeddings, blocks, a final norm and a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusestep import nn as fused
from fusestep.distributed.collectives import joined
from fusestep.distributed.tensor_parallel import TensorParallel
from fusestep.errors import UserError
from fusestep.models.blocks import EPSILON, PlainBlock, fused_block
from fusestep.models.config import GPTConfig
from fusestep.models.seed import SeedBlock, causal_mask
from fusestep.nn.fused_norm import product_dtype
from fusestep.ops.cross_entropy import Reduction
from fusestep.ops.linear_cross_entropy import linear_cross_entropy
from fusestep.ops.norm import normalise
from fusestep.tables import counted

_BLOCKS: dict[str, Callable[[GPTConfig], nn.Module]] = {
    "seed": SeedBlock,
    "plain": PlainBlock,
    "fused": fused_block,
}

#: Standard deviation of every initial matrix, embeddings included; Transformer Engine's.
INITIAL_STD = 0.023


class GPT(nn.Module):
    """A causal language model in one of three forms that share state dicts (see GPTConfig).

    Inside fusestep.fp8.fp8_autocast the blocks of the fused form multiply in FP8; embeddings, the final norm and the
    head never do.

    Every matrix starts as N(0, 0.023²), embeddings and head too, every norm at weight 1 and bias 0, every other bias
    at 0. One seed gives the same weights in every form, on every device and, rounded, in every dtype.

    Args:
        config: the sizes and the form.
        device, dtype: of the parameters; with device "meta" nothing is allocated until `to_empty` and
            `reset_parameters`.

    Attributes:
        checkpoint_blocks: keep only each block's input for the backward pass and compute the block again there.
    """

    # The ranks that share the model, if they do (fusestep.distributed.plans).
    _parallel: TensorParallel | None = None

    def __init__(
        self, config: GPTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False
        target = torch.get_default_device() if device is None else torch.device(device)
        # Built without storage: torch's own initial values would be drawn for nothing, in an order that differs
        # between the forms.
        with torch.device("meta"):
            table = fused.Embedding if config.form == "fused" else nn.Embedding
            self.embedding = table(config.vocab_size, config.width)
            self.position = table(config.context, config.width)
            self.blocks = nn.ModuleList(_BLOCKS[config.form](config) for _ in range(config.layers))
            norm = fused.FusedLayerNorm if config.has_fused_norm else nn.LayerNorm
            self.final_norm = norm(config.width, eps=EPSILON)
            # A tied head has no weight of its own, so that the state dict holds the shared one once.
            self.head = None if config.tied_head else nn.Linear(config.width, config.vocab_size, bias=False)
        if dtype is not None:
            self.to(dtype)
        if target.type != "meta":
            self.to_empty(device=target)
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial values from the default generator of the CPU, in the order that all forms share."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.empty(parameter.shape, device="cpu", dtype=torch.float32).normal_(0.0, INITIAL_STD)
                )
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args: tokens: (B, T) int64 or int32, 1 ≤ T ≤ context, ids below vocab_size.
        Returns: (B, T, vocab_size), in the dtype of the parameters, or of autocast.
        Raises: UserError for a wrong shape, and on the CPU for an id outside the vocabulary (on a GPU that check would
            make the host wait at every step; the data sources check ids on the host).
        """
        hidden, parallel = self._hidden(tokens), self._parallel
        if parallel is None:
            return F.linear(hidden, self._head())
        return joined(F.linear(parallel.enter(hidden), self._head()), -1, parallel.group)

    def loss(
        self, tokens: Tensor, targets: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100
    ) -> Tensor:
        """Cross entropy of the next token at every position, without holding all logits.

        Args:
            tokens: as of forward.
            targets: (B, T) int64 or int32, the next token of each; ignore_index counts for nothing.
            reduction: "mean" over the targets that count, "sum", or "none" for (B, T).
        Returns: the loss in fp32 (fp64 for parameters in fp64).
        Raises: UserError as forward does, and for targets that do not fit.
        """
        return linear_cross_entropy(
            self._hidden(tokens),
            self._head(),
            targets,
            reduction=reduction,
            ignore_index=ignore_index,
            tp_group=self._parallel,
        )

    def _head(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _hidden(self, tokens: Tensor) -> Tensor:
        """What the head multiplies: (B, T) to (B, T, W)."""
        self._check(tokens)
        if self._parallel is None and self.config.form == "fused":
            x = self.embedding(tokens, positions=self.position.weight)
            return self._trunk(F.dropout(x, self.config.dropout, self.training))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self._parallel is None:
            x = self.embedding(tokens) + self.position(places)
            return self._trunk(F.dropout(x, self.config.dropout, self.training))
        return self._trunk(self._shared_embedding(self._parallel, tokens, places))

    def _shared_embedding(self, parallel: TensorParallel, tokens: Tensor, places: Tensor) -> Tensor:
        """What the blocks take, where each rank has rows of the table: (B, T, W), or this rank's slice of T."""
        parallel.check_sequence(tokens[..., None])
        x = parallel.embedded(tokens, self.embedding.weight)
        if parallel.sequence_dim is not None:
            places = places.chunk(parallel.size)[parallel.rank or 0]
        (table,) = parallel.shared(self.position.weight)
        return parallel.dropped(x + F.embedding(places, table), self.config.dropout, self.training)

    def _trunk(self, x: Tensor) -> Tensor:
        """The blocks and the final norm: (B, T, W) to (B, T, W); fused, in the dtype that the head multiplies in."""
        norm, parallel = self.final_norm, self._parallel
        weight, bias = (norm.weight, norm.bias) if parallel is None else parallel.shared(norm.weight, norm.bias)
        if self.config.form == "fused":
            residual = None
            for block in self.blocks:
                x, residual = self._run(block, x, residual=residual, return_residual=True)
            dtype = None if parallel is not None else product_dtype(x, weight)
            shape, who = norm.normalized_shape, "layer_norm"
            out: Tensor = normalise(True, who, x, shape, weight, bias, EPSILON, residual, False, dtype)[0]
            return out
        mask = (causal_mask(x.shape[1], like=x),) if self.config.form == "seed" else ()
        for block in self.blocks:
            x = self._run(block, x, *mask)
        if parallel is None:
            normed: Tensor = norm(x)
            return normed
        layer_norm = fused.functional.layer_norm if self.config.has_fused_norm else F.layer_norm
        return layer_norm(x, norm.normalized_shape, weight, bias, EPSILON)

    def _run(self, block: nn.Module, *inputs: Tensor, **options: Any) -> Any:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, **options)
        return block(*inputs, **options)

    def _check(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"GPT: tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; give int64 ids of shape (batch, T)."
            )
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise UserError(
                f"GPT: a sequence of {tokens.shape[1]} tokens does not fit the context of {self.config.context}; "
                f"give 1 to {self.config.context} tokens, or build the model with a longer context."
            )
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = (int(bound) for bound in torch.aminmax(tokens))
            if low < 0 or high >= self.config.vocab_size:
                raise UserError(
                    f"GPT: token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size}; "
                    "ids run from 0 to one less than that."
                )

    def parameter_count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> str:
        """The form, the parameter count and the dimensions in one line."""
        c = self.config
        return (
            f"{c.form} GPT: {self.parameter_count() / 1e6:.1f} M parameters | {counted(c.layers, 'layer')} × "
            f"{c.width} wide, {counted(c.heads, 'head')}, feed-forward {c.ffn_width}, "
            f"context {c.context}, vocabulary {c.symbols}"
            + (f" (padded to {c.vocab_size})" if c.symbols != c.vocab_size else "")
            + (", head tied" if c.tied_head else "")
        )
