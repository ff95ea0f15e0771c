"""The oracle of the FP8 modules: each operand quantised as the kernels do, x · scale in fp32; products in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fusestep.fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from fusestep.fp8.recipes import Recipe

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "delayed e4m3": DelayedScaling(fp8_format=Format.E4M3, margin=1),
    "current": Float8CurrentScaling(),
    "current powers of two": Float8CurrentScaling(use_power_2_scales=True),
    "blocks": Float8BlockScaling(),
    "blocks fp32": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
}


@pytest.fixture(params=list(RECIPES))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


def power_of_two(scale: Tensor) -> Tensor:
    """Rounded down."""
    mantissa, exponent = torch.frexp(scale.double())
    return torch.ldexp(torch.full_like(mantissa, 0.5), exponent).float()


def saturated(x: Tensor, scale: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    q = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return q.double() * scale_inv.double()


def blockwise(x: Tensor, rows: int, columns: int) -> Tensor:
    """The amax of each element's block."""
    amax = x.float().abs()
    for dim, size in ((0, rows), (1, columns)):
        pieces = [piece.amax(dim, keepdim=True).expand_as(piece) for piece in amax.split(size, dim)]
        amax = torch.cat(pieces, dim)
    return amax


@dataclass
class Oracle:
    """What a recipe makes of tensors that it sees for the first time, in float64."""

    recipe: Recipe

    def cast(self, x: Tensor, gradient: bool, weight: bool = False) -> Tensor:
        """Values of x (rows, columns) as products read it that sum over its columns."""
        x = x.detach()
        dtype = self.recipe.fp8_format.backward if gradient else self.recipe.fp8_format.forward
        largest = torch.finfo(dtype).max
        if isinstance(self.recipe, MXFP8BlockScaling):
            mantissa, exponent = torch.frexp((blockwise(x, 1, 32).double() / largest).float())
            exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-126)
            one = torch.ones_like(mantissa)
            return saturated(x, torch.ldexp(one, -exponent), torch.ldexp(one, exponent), dtype)
        if isinstance(self.recipe, Float8BlockScaling):
            amax = blockwise(x, 128, 128) if weight else blockwise(x, 1, 128)
            power = not self.recipe.use_f32_scales
        else:
            amax = x.float().abs().amax()
            power = isinstance(self.recipe, Float8CurrentScaling) and self.recipe.use_power_2_scales
        margin = self.recipe.margin if isinstance(self.recipe, DelayedScaling) else 0
        # Tensor by tensor: torch computes a number by a tensor as the number times a rounded reciprocal.
        scale = (torch.full_like(amax, largest) / amax / 2.0**margin).clamp(max=2.0**126)
        scale = torch.where(amax > 0, scale, 1.0)
        if power:
            scale = power_of_two(scale)
        return saturated(x, scale, torch.ones_like(scale) / scale, dtype)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.cast(x, False) @ self.cast(weight, False, weight=True).t()
        return y if bias is None else y + bias.detach().double()

    def gradients(self, dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x, the weight and the bias."""
        dx = self.cast(dy, True) @ self.cast(weight.detach().t(), False, weight=True).t()
        dweight = self.cast(dy.t(), True) @ self.cast(x.detach().t(), False).t()
        return dx, dweight, dy.double().sum(0)


@pytest.fixture
def oracle(recipe: Recipe) -> Oracle:
    return Oracle(recipe)


@pytest.fixture
def close() -> Callable[..., None]:
    """Within a relative norm of the difference: 1e-5 of what is kept in fp32, else a rounding to the dtype.

    On a GPU forward products accumulate fast, which keeps about 14 bits of each partial sum.
    """

    def check(value: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
        assert value.shape == wanted.shape
        if tolerance is None:
            tolerance = 1e-5 if not value.is_cuda else 1e-3
            tolerance = max(tolerance, {torch.bfloat16: 4e-3, torch.float16: 6e-4}.get(value.dtype, 0.0))
        difference = (value.detach().double() - wanted.double()).norm()
        assert difference <= tolerance * wanted.double().norm(), (float(difference), float(wanted.double().norm()))

    return check
