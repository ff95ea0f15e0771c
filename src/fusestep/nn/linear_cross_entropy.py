"""LinearCrossEntropy: a language model's head and its loss as one module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.distributed.collectives import joined
from fusestep.distributed.tensor_parallel import TensorParallel, fill_part, mark_split, tensor_parallel
from fusestep.ops.cross_entropy import Reduction
from fusestep.ops.cross_entropy_rows import explain
from fusestep.ops.linear_cross_entropy import WHO, Gradients, linear_cross_entropy


class LinearCrossEntropy(nn.Linear):
    """torch.nn.Linear whose forward is the cross entropy of its output, without holding all logits.

        head = LinearCrossEntropy(768, 50304, bias=False)
        head.weight = embedding.weight        # a tied head
        loss = head(x, target)

    Args:
        in_features, out_features, bias, device, dtype: as of torch.nn.Linear, whose parameters and state dict it has;
            out_features is the size of the vocabulary.
        ignore_index, label_smoothing, z_loss, softcap, reduction, gradients, accumulate_dtype, chunk_tokens: as of
            fusestep.linear_cross_entropy, which also says what is raised.
        tp_group, sequence_parallel, sequence_dim: the ranks that share the vocabulary, each with its rows of weight and
            bias; as of fusestep.linear_cross_entropy. `out_features`, the attribute, is then this rank's.
    """

    # The ranks that share the vocabulary, if they do.
    _parallel: TensorParallel | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        gradients: Gradients = "auto",
        accumulate_dtype: torch.dtype = torch.float32,
        chunk_tokens: int | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
    ) -> None:
        parallel = tensor_parallel(type(self).__name__, tp_group, sequence_parallel, sequence_dim)
        if parallel is not None:
            out_features = parallel.share("out_features", out_features)
            self.__dict__["_parallel"] = parallel  # which torch's constructor asks for as it initialises
        super().__init__(in_features, out_features, bias, device, dtype)
        self.softcap = softcap
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "reduction": reduction,
            "gradients": gradients,
            "accumulate_dtype": accumulate_dtype,
            "chunk_tokens": chunk_tokens,
        }

    def reset_parameters(self) -> None:
        """Initialise as torch.nn.Linear does; ranks that share the vocabulary, their parts of the same matrix."""
        if self._parallel is None:
            super().reset_parameters()
            return
        bound = 1.0 / math.sqrt(self.in_features)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                fill_part(parameter, lambda full: nn.init.uniform_(full, -bound, bound), self._parallel)
        self._mark_parts()

    def _mark_parts(self) -> None:
        """Say on the parameters that this rank has a part of them."""
        for parameter in (self.weight, self.bias):
            if parameter is not None and self._parallel is not None:
                mark_split(parameter, 0, self._parallel)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parts()  # parameters of a copy have no marks

    def forward(self, input: Tensor, target: Tensor, token_weights: Tensor | None = None) -> Tensor:  # type: ignore[override]  # noqa: A002
        """The loss.

        Args:
            input: (…, in_features).
            target: (…) class numbers, int64 or int32.
            token_weights: (…), or None for 1.
        Returns: fp32 (fp64 for fp64), 0-d, or target's shape for reduction="none".
        """
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            softcap=self.softcap,
            token_weights=token_weights,
            tp_group=self._parallel,
            **self.options,
        )

    def logits(self, input: Tensor) -> Tensor:  # noqa: A002
        """The logits themselves, (…, out_features), capped as the loss caps them; for generation."""
        parallel = self._parallel
        if parallel is None:
            logits = super().forward(input)
        else:
            logits = joined(super().forward(parallel.enter(input)), -1, parallel.group)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def implementation(self) -> Choice:
        """What a call gets on the device of the parameters, and why."""
        return explain(WHO, self.weight.device, self.weight.dtype)

    def extra_repr(self) -> str:
        changed = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean"}
        said = [f"{name}={self.options[name]!r}" for name, usual in changed.items() if self.options[name] != usual]
        said += [] if self.softcap is None else [f"softcap={self.softcap!r}"]
        return ", ".join([super().extra_repr(), *said])
