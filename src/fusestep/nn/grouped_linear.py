"""GroupedLinear: several linear layers of one shape, each for its share of the rows, as mixtures of experts need them.

y[rows of i] = x[rows of i] · Wᵢᵀ + bᵢ
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.fp8.casts import Casts
from fusestep.fp8.context import Region
from fusestep.fp8.model_init import prepare_weights
from fusestep.nn.fp8_module import FP8Module, Initialiser, activation_dtype, initialise
from fusestep.nn.linear_function import GRADIENT, INPUT, WEIGHT, apply_linear
from fusestep.nn.operands import in_place_of_bias
from fusestep.nn.products import plain_linear
from fusestep.ops.quantized import Quantized

#: Slots of each of the layers.
EACH = 3


class GroupedLinear(FP8Module):
    """`num_gemms` linear layers, in FP8 where the region says so, with scaling state of its own for each.

    Args:
        num_gemms: how many layers.
        in_features, out_features, bias, device, dtype: of each, as of Linear.
        init_method: fills each weight in place; None: N(0, 0.023). Biases are 0.
        return_bias: do not add the biases but return them too, as (y, [bias0, …]).
        name: of the module, for error messages.

    Parameters: `weight0`, `bias0`, `weight1`, …
    """

    SLOTS: tuple[str, ...]

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_method: Initialiser | None = None,
        return_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        sizes = (("num_gemms", num_gemms), ("in_features", in_features), ("out_features", out_features))
        for what, size in sizes:
            if not isinstance(size, int) or size < 1:
                raise UserError(f"{type(self).__name__}: {what} is {size!r}; pass an integer of at least 1.")
        self.num_gemms, self.in_features, self.out_features, self.has_bias = num_gemms, in_features, out_features, bias
        self.init_method, self.return_bias = init_method, return_bias
        self.SLOTS = tuple(f"{what}{i}" for i in range(num_gemms) for what in ("input", "weight", "grad_output"))
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
            self.register_parameter(f"weight{i}", weight)
        for i in range(num_gemms):
            values = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"bias{i}", values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters, and forget all scales."""
        for i in range(self.num_gemms):
            initialise(getattr(self, f"weight{i}"), self.init_method)
            if self.has_bias:
                nn.init.zeros_(getattr(self, f"bias{i}"))
        self._reset_fp8()
        prepare_weights(self, [f"weight{i}" for i in range(self.num_gemms)])

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Multiply.

        Args:
            x: (…, in_features), whose rows, in the order of memory, go to the layers in turn.
            m_splits: how many rows each layer takes, zero too; a tensor is read by the host, which waits for it.
            is_first_microbatch: as of Linear.
        Returns: (…, out_features), or with return_bias (y, list of biases).
        Raises: UserError for splits that do not fit x, and as Linear.
        """
        region = self._region_of_call()
        if torch.compiler.is_compiling() and self._leaves_graph(region):
            return self._outside_of_a_graph(x, m_splits, is_first_microbatch)
        self._check_input(x, self.in_features, region)
        rows = x.reshape(-1, self.in_features)
        parts = rows.split(self._checked_splits(m_splits, rows.shape[0]))
        casts = None
        grad = torch.is_grad_enabled()
        if region is not None and region.enabled and x.numel():
            casts = self._casts_of(region, records=grad and self.training)
        outputs = [self._one(i, part, casts, region, grad, is_first_microbatch) for i, part in enumerate(parts)]
        y = torch.cat(outputs).view(*x.shape[:-1], self.out_features)
        if not self.return_bias:
            return y
        return y, [self._parameter(f"bias{i}") for i in range(self.num_gemms)]

    def _one(
        self, i: int, x: Tensor, casts: Casts | None, region: Region | None, grad: bool, first: bool | None
    ) -> Tensor:
        """The product of one layer."""
        weight, bias = self._parameter(f"weight{i}"), self._parameter(f"bias{i}")
        added = None if self.return_bias else bias
        offset = EACH * i
        if casts is not None and x.numel():
            shifted = _Shifted(self, casts, offset)
            other = in_place_of_bias(self, (added,), activation_dtype(x), grad)
            product: Tensor = apply_linear(x, weight, added, (shifted, shifted, (weight,), other, grad, first, None))
            return product
        self._calibrate(region, offset + INPUT, x)
        self._calibrate(region, offset + WEIGHT, weight)
        y = plain_linear(self, x, weight, added, region)
        self._calibrate_gradient(region, offset + GRADIENT, y)
        return y

    def _checked_splits(self, m_splits: Sequence[int] | Tensor, rows: int) -> list[int]:
        splits = [int(size) for size in (m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits)]
        if len(splits) != self.num_gemms or sum(splits) != rows or any(size < 0 for size in splits):
            raise UserError(
                f"{self._described()}: m_splits is {splits} for {rows} rows; pass {self.num_gemms} numbers that are "
                "not negative and add up to the rows."
            )
        return splits

    def _first_weight(self) -> Tensor:
        weight: Tensor = self._parameter("weight0")
        return weight

    def implementation(self) -> Choice:
        """What products run as on the device of the parameters, and why."""
        return self._product_choice()

    def extra_repr(self) -> str:
        named = "" if self.name is None else f", name={self.name!r}"
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}{named}"
        )


class _Shifted:
    """The casts of one of the layers, and its way to kept weights: those of the module, `offset` slots further."""

    _in_by_out = False

    def __init__(self, module: GroupedLinear, casts: Casts, offset: int) -> None:
        self._module, self._casts, self._offset = module, casts, offset
        self.block, self.weight_block = casts.block, casts.weight_block

    def gradient(
        self, dy: Tensor, index: int, rowwise: bool, columnwise: bool, sums_dtype: torch.dtype | None
    ) -> tuple[Quantized, Tensor | None]:
        return self._casts.gradient(dy, self._offset + index, rowwise, columnwise, sums_dtype)

    def input(self, x: Tensor, index: int, columnwise: bool) -> Quantized:
        return self._casts.input(x, self._offset + index, columnwise)

    def planned_product(self, *_: Any) -> None:
        """The layers are cast one by one."""

    def _known_weight(
        self, weight: Tensor, sources: tuple[Tensor, ...], index: int, _casts: Any, *options: Any
    ) -> Quantized | None:
        return self._module._known_weight(weight, sources, self._offset + index, self._casts, *options)

    def _quantized_operands(
        self,
        x: Tensor,
        weight: Tensor,
        sources: tuple[Tensor, ...],
        indices: tuple[int, int],
        _casts: Any,
        *options: Any,
    ) -> tuple[Quantized, Quantized]:
        shifted = self._offset + indices[0], self._offset + indices[1]
        return self._module._quantized_operands(x, weight, sources, shifted, self._casts, *options)
