"""Linear: torch.nn.Linear that multiplies in FP8 inside an fp8_autocast region.

    y = x · Wᵀ + b        x (…, in_features), W (out_features, in_features), b (out_features,)

What it computes in FP8 is in linear_function.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.distributed.tensor_parallel import (
    Mode,
    TensorParallel,
    checked_mode,
    fill_part,
    mark_split,
    tensor_parallel,
)
from fusestep.errors import UserError
from fusestep.fp8.casts import Casts
from fusestep.fp8.context import Region
from fusestep.fp8.model_init import prepare_weights
from fusestep.fp8.tensor import Float8Tensor
from fusestep.nn.biased_linear import linear_by_copies
from fusestep.nn.fp8_module import FP8Module, Initialiser, activation_dtype, initialise
from fusestep.nn.head_split import HeadSplit
from fusestep.nn.linear_function import GRADIENT, INPUT, OPERANDS, WEIGHT, apply_linear
from fusestep.nn.operands import autocast_operands, in_place_of_bias, put_together, stand_ins
from fusestep.nn.planned_linear import apply_planned, call_key, plan_linear
from fusestep.nn.products import plain_linear
from fusestep.transforms import is_transformed

#: Tensors that hide nothing from kernels.
_PLAIN = frozenset((Tensor, nn.Parameter))


class Linear(FP8Module):
    """torch.nn.Linear, in FP8 where the region says so; outside of one it is torch's own product.

    Args:
        in_features, out_features, bias, device, dtype: as of torch.nn.Linear. On device="meta" nothing is initialised:
            `to_empty` and `reset_parameters` do it later.
        init_method: fills the weight in place; None: N(0, 0.023). Biases are 0.
        return_bias: do not add the bias but return it too, as (y, bias).
        parameters_split: the weight and bias as several parameters, `{name}_weight` and `{name}_bias` of so many rows
            each, in this order; a sequence of names splits evenly. Still one product.
        name: of the layer, for error messages.
        tp_group, parallel_mode: the ranks that share the layer, and how: "column" for each its part of out_features,
            "row" for each its part of in_features, which products of all ranks then add up over; see docs/parallelism.
            in_features and out_features are of the whole layer, its attributes of this rank's part.
        sequence_parallel, sequence_dim: ranks hold slices of the sequence, along that dimension, where activations are
            not split by features: before a column-parallel layer and behind a row-parallel one.
        column_blocks: rows of which each rank gets its part, such as those of q, k and v in one weight.

    Outputs have the dtype of torch.autocast where it is enabled, else x's. Parameters may have another dtype.
    """

    SLOTS = ("input", "weight", "grad_output")

    weight: nn.Parameter
    bias: nn.Parameter | None

    # Where ranks share the layer: who they are, and how.
    _parallel: TensorParallel | None = None
    parallel_mode: Mode | None = None
    column_blocks: tuple[int, ...] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Initialiser | None = None,
        return_bias: bool = False,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        name: str | None = None,
        parallel_mode: Mode | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        column_blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(name)
        self.init_method, self.return_bias, self.has_bias = init_method, return_bias, bias
        for what, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or size < 1:
                raise UserError(f"{type(self).__name__}: {what} is {size!r}; pass an integer of at least 1.")
        self.parts = split_sizes(type(self).__name__, out_features, parameters_split)
        if checked_mode(type(self).__name__, parallel_mode) is not None:
            self._parallel = tensor_parallel(type(self).__name__, tp_group, sequence_parallel, sequence_dim)
        if self._parallel is not None:
            self.parallel_mode = parallel_mode
            if parallel_mode == "row":
                in_features = self._parallel.share("in_features", in_features)
            else:
                self.column_blocks = None if column_blocks is None else tuple(column_blocks)
                self.parts = {part: self._parallel.share("out_features", rows) for part, rows in self.parts.items()}
                out_features = sum(self.parts.values())
                for block in self.column_blocks or ():
                    self._parallel.share("a block of out_features,", block)
        self.in_features, self.out_features = in_features, out_features
        for part, rows in self.parts.items():
            weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
            self.register_parameter(part + "weight", weight)
        for part, rows in self.parts.items():
            values = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
            self.register_parameter(part + "bias", values)
        self._reset_linear()

    def reset_parameters(self) -> None:
        """Initialise the parameters, and forget all scales."""
        self._reset_linear()

    def _reset_linear(self) -> None:
        for part in self.parts:
            weight = getattr(self, part + "weight")
            dim = 1 if self.parallel_mode == "row" else 0
            fill_part(weight, lambda full: initialise(full, self.init_method), self._parallel, self.column_blocks, dim)
            if self.has_bias:
                nn.init.zeros_(getattr(self, part + "bias"))
        self._reset_fp8()
        prepare_weights(self, [part + "weight" for part in self.parts])
        self._mark_parts()

    def _mark_parts(self) -> None:
        """Say on the parameters of which this rank has a part that it is one."""
        if self._parallel is None:
            return
        is_row = self.parallel_mode == "row"
        for part in self.parts:
            mark_split(getattr(self, part + "weight"), 1 if is_row else 0, self._parallel)
            if self.has_bias and not is_row:
                mark_split(getattr(self, part + "bias"), 0, self._parallel)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parts()  # parameters of a copy have no marks

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, split: HeadSplit | None = None) -> Any:
        """Multiply.

        Args:
            x: (…, in_features); any strides, zero rows too.
            is_first_microbatch: with several micro-batches between two steps of the optimizer, True in the first,
                which keeps the weight in FP8, and False in the others, which use it.
            split: return the queries, keys and values that y consists of, (q, k, v), in the place of y.
        Returns: (…, out_features), or with return_bias (y, bias).
        Raises: UserError for features, dtypes or devices that do not fit.
        """
        region = self._region_of_call()
        casts: Casts | None = None
        y: Any = None
        is_planned = is_first_microbatch is None
        if torch.compiler.is_compiling():
            is_planned = False
            if self._leaves_graph(region):
                return self._outside_of_a_graph(x, is_first_microbatch, *(() if split is None else (split,)))
        elif is_planned and region is not None and region.enabled and self._parallel is None and not self.return_bias:
            # The usual call, as short as can be: what _weight_and_bias gives where both are parameters of these names.
            parameters = self._parameters
            weight: Any = parameters.get("weight")
            if weight is not None and "bias" in parameters:
                only = parameters["bias"]
                y, casts = self._by_plan(x, weight, (weight,), only, self._in_place_of((only,), x), region, split)
                if y is not None:
                    return y
        self._check_input(x, self.in_features, region)
        parallel = self._parallel
        adds_bias = not self.return_bias
        if parallel is not None:
            if self.parallel_mode == "column":
                x = parallel.enter(x)
            else:
                parallel.check_sequence(x)
                adds_bias = False  # once, to the sum of the products
        if region is not None and region.enabled and x.numel():
            grad = torch.is_grad_enabled()
            records = grad and self.training
            if self._is_split_in_fp8():
                casts = self._casts_of(region, records)
                y, bias = self._by_parts(x, casts, grad, is_first_microbatch, adds_bias)
            else:
                weight, sources, added, biases = self._weight_and_bias(adds_bias)
                other = self._in_place_of(biases, x)
                if is_planned and casts is None:
                    y, casts = self._by_plan(x, weight, sources, added, other, region, split)
                if y is None:
                    casts = self._casts_of(region, records) if casts is None else casts
                    y = apply_linear(x, weight, added, (self, casts, sources, other, grad, is_first_microbatch, split))
                bias = None if adds_bias else self._bias()
        else:
            y = self._in_high_precision(x, region, adds_bias)
            bias = None if adds_bias else self._bias()
        if parallel is not None and self.parallel_mode == "row":
            (bias,) = parallel.shared(bias)
            y = parallel.leave(y, None if self.return_bias else bias)
        if split is not None and isinstance(y, Tensor):
            y = split.views(y)
        return (y, bias) if self.return_bias else y

    def _by_plan(
        self,
        x: Tensor,
        weight: Tensor,
        sources: tuple[Tensor, ...],
        bias: Tensor | None,
        other: Tensor | None,
        region: Region,
        split: HeadSplit | None,
    ) -> tuple[Any, Casts | None]:
        """y in FP8 by a plan (planned_linear.py), None where there is none for the call; and its casts, if looked for.

        Args:
            weight, sources, bias: as `_weight_and_bias` gives them.
            other: what is added in the place of the bias, or None.
        """
        if (
            type(x) not in _PLAIN
            or type(weight) not in _PLAIN
            or torch._C._len_torch_dispatch_stack()
            or is_transformed()
        ):
            return None, None
        grad = torch.is_grad_enabled()
        added = bias if other is None else other
        key = call_key(x, weight, added, (grad and x.requires_grad, grad and weight.requires_grad))
        before = self._casts
        plans = None if before is None else before.products.get(key)
        if plans is None:
            # What was met before has passed this, which comes before anything is recorded.
            self._check_input(x, self.in_features, region)
            if not x.numel():
                return None, None
        casts = self._casts_of(region, records=grad and self.training)
        if casts is not before:
            plans = casts.products.get(key)
        known = None
        if grad and self.training:
            copies = self._current_copies(sources, WEIGHT, casts, x.requires_grad)
            known = None if copies is None else copies.right_operands(self._in_by_out)
        is_known = known is not None
        planned = None if plans is None else plans.get(is_known)
        if planned is None:
            if plans is None or is_known not in plans:
                planned = plan_linear(casts, key, x, weight, sources, added, OPERANDS, is_known, self._in_by_out)
            if planned is None:
                return None, casts
        return apply_planned(x, weight, bias, (planned, casts, sources, known, added, GRADIENT, grad, split)), casts

    def _in_high_precision(self, x: Tensor, region: Region | None, adds_bias: bool) -> Tensor:
        """y, with the bias where it is to be added here."""
        weights = self._parameters_of("weight")
        biases = self._parameters_of("bias") if self.has_bias and adds_bias else None
        copies = autocast_operands(self, x, region, weights, biases)
        if copies is not None:
            return linear_by_copies(x, *copies, weights, biases)
        weight, bias = put_together(weights), None if biases is None else put_together(biases)
        self._calibrate(region, INPUT, x)
        self._calibrate(region, WEIGHT, weight)
        y = plain_linear(self, x, weight, bias, region)
        self._calibrate_gradient(region, GRADIENT, y)
        return y

    def _is_split_in_fp8(self) -> bool:
        """Whether the weight is several that live in FP8, each with its own scale."""
        return len(self.parts) > 1 and isinstance(self._first_weight(), Float8Tensor)

    def _by_parts(
        self, x: Tensor, casts: Casts, grad: bool, first: bool | None, adds_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(y, bias) from one product for each part: weights that live in FP8 cannot share one without casting again."""
        outputs: list[Tensor] = []
        biases: list[Any] = []
        for part in self.parts:
            weight, bias = self._parameter(part + "weight"), self._parameter(part + "bias")
            added = bias if adds_bias else None
            other = self._in_place_of((added,), x)
            outputs.append(apply_linear(x, weight, added, (self, casts, (weight,), other, grad, first, None)))
            biases.append(bias)
        return torch.cat(outputs, dim=-1), torch.cat(biases) if self.has_bias else None

    def _weight_and_bias(
        self, adds_bias: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None, tuple[Tensor | None, ...]]:
        """The weight as it lies for a product in FP8, and the parameters it is made of; the same of a bias to be added.

        Those of several parameters are put together where they have to be cast, and not before.
        """
        sources = self._parameters_of("weight")
        biases = self._parameters_of("bias") if self.has_bias and adds_bias else ()
        if len(sources) == 1:
            return sources[0], sources, biases[0] if biases else None, biases
        if torch.compiler.is_compiling():
            return torch.cat(sources), sources, torch.cat(biases) if biases else None, ()
        weight, *bias = stand_ins(sources, biases) if biases else stand_ins(sources)
        return weight, sources, bias[0] if bias else None, biases

    def _in_place_of(self, biases: tuple[Any, ...], x: Tensor) -> Tensor | None:
        """What is added to a product of x in FP8 in the place of a bias, None for the bias itself."""
        dtype = activation_dtype(x) if torch._C._is_any_autocast_enabled() else x.dtype
        return in_place_of_bias(self, biases, dtype, torch.is_grad_enabled())

    def _bias(self) -> Tensor | None:
        if not self.has_bias:
            return None
        biases = self._parameters_of("bias")
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def _parameters_of(self, what: str) -> tuple[Any, ...]:
        """The parameters that the weight or the bias is made of."""
        return tuple([self._parameter(part + what) for part in self.parts])

    def _first_weight(self) -> Tensor:
        weight: Tensor = self._parameter(next(iter(self.parts)) + "weight")
        return weight

    def implementation(self) -> Choice:
        """What products run as on the device of the parameters, and why."""
        return self._product_choice()

    def extra_repr(self) -> str:
        named = "" if self.name is None else f", name={self.name!r}"
        shared = "" if self._parallel is None else f", {self.parallel_mode} of {self._parallel.size} ranks"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}{shared}{named}"


def split_sizes(who: str, out_features: int, split: Mapping[str, int] | Sequence[str] | None) -> dict[str, int]:
    """Prefixes of the parameters' names with their rows: {"": out_features} for a single weight.

    Raises: UserError for sizes that do not add up, or names that cannot share evenly.
    """
    if split is None:
        return {"": out_features}
    if not split:
        raise UserError(f"{who}: parameters_split is empty; pass names with their rows, or None.")
    if not isinstance(split, Mapping):
        if out_features % len(split):
            raise UserError(
                f"{who}: out_features {out_features} cannot be split evenly among {len(split)} names; pass a mapping "
                "from names to rows."
            )
        split = dict.fromkeys(split, out_features // len(split))
    if sum(split.values()) != out_features or any(rows < 1 for rows in split.values()):
        raise UserError(
            f"{who}: parameters_split has {' + '.join(map(str, split.values()))} rows and out_features is "
            f"{out_features}; pass positive rows that add up to it."
        )
    return {f"{name.removesuffix('_')}_": rows for name, rows in split.items()}
