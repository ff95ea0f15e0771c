"""Recipes with Transformer Engine's names, order of arguments and printed form, over fusestep's.

They are plain data: what fusestep does not serve is refused where a recipe is used (`translated`), so that scripts may
build recipes that they never enter. Unknown keywords are refused at once.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusestep import fp8
from fusestep.compat.names import module_getattr
from fusestep.compat.report import not_served, served
from fusestep.errors import UserError
from fusestep.fp8.recipes import Recipe as ServedRecipe

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]

NOT_SERVED = {
    "CustomRecipe": ("use one of the recipes that are served", False),
}
__getattr__ = module_getattr(__name__, NOT_SERVED)


class _FormatHelper(NamedTuple):
    """The largest values of a format, forward and backward."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """The formats of a recipe; `Format.HYBRID.value.max_bwd` is the largest value of its gradients."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """How a product accumulates: with the split accumulator, precisely, or fast."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a tensor is cast: with scales that are powers of two, and with a smallest amax."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(repr=False)
class Recipe:
    """What all recipes have: predicates of their kind, how their tensors are cast, and a printed form."""

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether the recipe is NVFP4BlockScaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether the recipe is MXFP8BlockScaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether the recipe is DelayedScaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether the recipe is Float8CurrentScaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether the recipe has one scale a tensor."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether the recipe is Float8BlockScaling."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether the recipe is a function of the user's; none is."""
        return False

    def _power_of_two(self) -> bool:
        return False

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        """How inputs are cast."""
        return QParams(self._power_of_two())

    @property
    def fp8_quant_fwd_weight(self) -> QParams:
        """How weights are cast."""
        return QParams(self._power_of_two())

    @property
    def fp8_quant_bwd_grad(self) -> QParams:
        """How gradients are cast."""
        return QParams(self._power_of_two())

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        if "fp8_format" in shown:
            shown = {"format" if name == "fp8_format" else name: value for name, value in shown.items()}
        parts = [f"recipe_type={type(self).__name__}"]
        parts += [f"{name}={value.name if isinstance(value, Format) else value}" for name, value in shown.items()]
        return ", ".join(parts)


def _check_format(recipe: Any, allowed: tuple[Format, ...] = (Format.HYBRID, Format.E4M3)) -> None:
    if recipe.fp8_format not in allowed:
        raise UserError(
            f"{type(recipe).__name__}: fp8_format is {recipe.fp8_format!r}; choose one of "
            f"{', '.join(f'Format.{one.name}' for one in allowed)}."
        )


#: From the history (length, columns) to the amaxes (columns,); in row 0 the newest amax, below it the oldest first.
AmaxAlgorithm = Callable[[Tensor], Tensor]


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """One scale a tensor from the amaxes of earlier steps; see fusestep.fp8.DelayedScaling.

    A function for amax_compute_algo gets what Transformer Engine gives it: (length, columns), row 0 the newest. Of 1.x
    `interval`, which had no effect since 1.8, and `override_linear_precision` are taken by keyword.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | AmaxAlgorithm = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    interval: InitVar[int] = field(default=-1, kw_only=True)
    override_linear_precision: InitVar[Any] = field(default=(False, False, False), kw_only=True)

    def __post_init__(self, interval: int, override_linear_precision: Any) -> None:
        if not isinstance(interval, int):
            raise UserError(f"DelayedScaling: interval is {interval!r}; leave it out, it has no effect.")
        if isinstance(self.fp8_format, int):
            raise UserError(
                f"DelayedScaling: fp8_format is {self.fp8_format!r}; 1.x had interval in second place, so pass "
                "fp8_format=… and those after it by keyword."
            )
        if any(override_linear_precision):
            raise not_served(
                f"transformer_engine.common.recipe.DelayedScaling(override_linear_precision={override_linear_precision!r})",
                "keep all three products in FP8, or run the module outside of the region",
            )
        _check_format(self)
        _served_delayed(self.margin, self.fp8_format, self.amax_history_len, self.amax_compute_algo, self.reduce_amax)


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own amax; see fusestep.fp8.Float8CurrentScaling."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_format(self)

    def _power_of_two(self) -> bool:
        return self.use_power_2_scales


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for each 32 elements; see fusestep.fp8.MXFP8BlockScaling."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _check_format(self)

    def _power_of_two(self) -> bool:
        return True


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """A scale for each 1 × 128 or 128 × 128 elements; see fusestep.fp8.Float8BlockScaling."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check_format(self)

    def _power_of_two(self) -> bool:
        return not self.use_f32_scales


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """Blocks of 16 in E2M1. Only data: entering a region with it is refused."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


# Translation


def translated(recipe: Recipe | None) -> ServedRecipe | None:
    """fusestep's recipe for one of these; None stays None. The same recipe gives the same object.

    Raises: NotImplementedError for what is not served, UserError for what is no recipe.
    """
    if recipe is None:
        return None
    if not isinstance(recipe, Recipe):
        raise UserError(
            f"autocast: recipe is {recipe!r}; pass an object of transformer_engine.common.recipe, DelayedScaling() for "
            "instance."
        )
    kind = type(recipe).__name__
    if isinstance(recipe, NVFP4BlockScaling):
        raise not_served(
            "transformer_engine.common.recipe.NVFP4BlockScaling", "use MXFP8BlockScaling or Float8CurrentScaling"
        )
    _refuse_fields(recipe, kind)
    served(f"transformer_engine.common.recipe.{kind}", f"fusestep.fp8.{kind}")
    if isinstance(recipe, DelayedScaling):
        return _served_delayed(
            recipe.margin, recipe.fp8_format, recipe.amax_history_len, recipe.amax_compute_algo, recipe.reduce_amax
        )
    if isinstance(recipe, Float8CurrentScaling):
        return _served_current(recipe.use_power_2_scales, recipe.fp8_format)
    if isinstance(recipe, Float8BlockScaling):
        return _served_blocks(recipe.use_f32_scales, recipe.fp8_format)
    if isinstance(recipe, MXFP8BlockScaling):
        return _served_mx(recipe.fp8_format)
    raise UserError(f"autocast: recipe is of type {kind}; pass one of {', '.join(__all__[:3])} or MXFP8BlockScaling.")


#: Fields whose other values would change results that fusestep cannot give: (value that is served, what to do).
_FIELDS: dict[str, tuple[Any, str]] = {
    "fp8_dpa": (False, "leave it False, attention then computes in high precision"),
    "fp8_mha": (False, "leave it False, attention then computes in high precision"),
    "backward_override": (None, "leave it None, backward then has the recipe's own casts"),
    "scaling_factor_compute_algo": (None, "choose the amax by amax_compute_algo, and leave room by margin"),
    "enable_2d_quantization": (False, "leave it False, weights then have blocks of 32 in both directions"),
    "x_block_scaling_dim": (1, "leave it 1"),
    "w_block_scaling_dim": (2, "leave it 2"),
    "grad_block_scaling_dim": (1, "leave it 1"),
    "fp8_gemm_dgrad": (MMParams(True), "leave it as it is, products of gradients accumulate precisely"),
    "fp8_gemm_wgrad": (MMParams(True), "leave it as it is, products of gradients accumulate precisely"),
}


def _refuse_fields(recipe: Recipe, kind: str) -> None:
    values = vars(recipe)
    forward: dict[str, tuple[Any, str]] = {
        "fp8_gemm_fprop": (MMParams(isinstance(recipe, Float8BlockScaling)), "leave it as it is")
    }
    if isinstance(recipe, MXFP8BlockScaling):
        forward["margin"] = (0, "leave it 0, blocks need no room to grow")
    for name, (usual, instead) in {**_FIELDS, **forward}.items():
        if name in values and values[name] != usual:
            raise not_served(f"transformer_engine.common.recipe.{kind}({name}={values[name]!r})", instead)


@dataclass(frozen=True)
class _NewestFirst:
    """An algorithm of the user's, given the history as Transformer Engine lays it out: the newest amax in row 0."""

    algorithm: AmaxAlgorithm

    def __call__(self, history: Tensor) -> Tensor:
        return self.algorithm(torch.roll(history, 1, 0))


def _served_format(chosen: Format) -> fp8.Format:
    return fp8.Format[chosen.name]


@functools.lru_cache(maxsize=256, typed=True)
def _served_delayed(
    margin: int, fp8_format: Format, length: int, algorithm: Any, reduce_amax: bool
) -> fp8.DelayedScaling:
    return fp8.DelayedScaling(
        margin=margin,
        fp8_format=_served_format(fp8_format),
        amax_history_len=length,
        amax_compute_algo=_NewestFirst(algorithm) if callable(algorithm) else algorithm,
        reduce_amax=reduce_amax,
    )


@functools.lru_cache(maxsize=64, typed=True)
def _served_current(power_of_two: bool, fp8_format: Format) -> fp8.Float8CurrentScaling:
    return fp8.Float8CurrentScaling(fp8_format=_served_format(fp8_format), use_power_2_scales=power_of_two)


@functools.lru_cache(maxsize=64, typed=True)
def _served_blocks(f32_scales: bool, fp8_format: Format) -> fp8.Float8BlockScaling:
    return fp8.Float8BlockScaling(fp8_format=_served_format(fp8_format), use_f32_scales=f32_scales)


@functools.lru_cache(maxsize=64, typed=True)
def _served_mx(fp8_format: Format) -> fp8.MXFP8BlockScaling:
    return fp8.MXFP8BlockScaling(fp8_format=_served_format(fp8_format))


def restored(recipe: ServedRecipe) -> Recipe:
    """The recipe of these for one of fusestep's: the way back of `translated`."""
    chosen = Format[recipe.fp8_format.name]
    if isinstance(recipe, fp8.DelayedScaling):
        algorithm = recipe.amax_compute_algo
        return DelayedScaling(
            margin=recipe.margin,
            fp8_format=chosen,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=algorithm.algorithm if isinstance(algorithm, _NewestFirst) else algorithm,
            reduce_amax=recipe.reduce_amax,
        )
    if isinstance(recipe, fp8.Float8CurrentScaling):
        return Float8CurrentScaling(recipe.use_power_2_scales, chosen)
    if isinstance(recipe, fp8.Float8BlockScaling):
        return Float8BlockScaling(recipe.use_f32_scales, chosen)
    return MXFP8BlockScaling(fp8_format=chosen)
