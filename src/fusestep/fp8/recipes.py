"""Recipes: how the scales of FP8 tensors are chosen. Frozen, validated, printable configuration objects.

A tensor is stored as q = cast(saturate(x · scale)) and read as q / scale. The recipes differ in what shares a scale and
when it is known:

- DelayedScaling: one scale a tensor, from the largest magnitudes (amax) that the tensor had in earlier steps;
- Float8CurrentScaling: one scale a tensor, from its own amax;
- Float8BlockScaling: one scale for each 1 × 128 elements of activations and gradients, each 128 × 128 of weights;
- MXFP8BlockScaling: one power-of-two scale (E8M0) for each 32 elements.

    scale = largest value of the format / amax / 2^margin

Sources: Transformer Engine's user guide for the recipes; OCP Microscaling Formats (MX) v1.0 for MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from fusestep.errors import UserError
from fusestep.fp8.formats import Format

#: A margin beyond this leaves nothing of E4M3's range: 448 / 2^16 is below its smallest value.
LARGEST_MARGIN = 16

#: A longer history than this is a slip: it would hold a million steps.
LONGEST_HISTORY = 2**20

#: Recipes and formats by the names that command lines and configuration files use; "auto" is a recipe's own format.
RecipeName = Literal["delayed", "current", "block", "mxfp8"]
FormatName = Literal["auto", "hybrid", "e4m3"]

#: Steps that delayed scaling remembers where a program is not told how many.
AMAX_HISTORY = 16

#: (history, slots) amaxes, oldest first, to the (slots,) amaxes that scales come from.
AmaxAlgorithm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every recipe says."""

    fp8_format: Format = Format.HYBRID

    def __post_init__(self) -> None:
        self._check_format()

    def _check_format(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise UserError(
                f"{type(self).__name__}: fp8_format is {self.fp8_format!r}; pass Format.HYBRID, or Format.E4M3."
            )
        if self.fp8_format is Format.E5M2:
            raise UserError(
                f"{type(self).__name__}: weights and activations in E5M2 keep two bits of mantissa and do not train; "
                "pass Format.HYBRID for E5M2 gradients alone."
            )

    def _check_switch(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise UserError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}; pass True or False.")

    @property
    def has_history(self) -> bool:
        """Whether modules keep scaling state from step to step."""
        return False


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amaxes of earlier steps, so that the cast needs one read.

    The first scale of a tensor comes from the tensor itself. An amax of zero, or one that is not finite, keeps the old
    scale and does not enter the history.

    Args:
        margin: scales are smaller by 2^margin, which leaves room for a tensor that grows between steps; 0 to 16.
        fp8_format: HYBRID (E4M3 forward, E5M2 gradients) or E4M3 for all.
        amax_history_len: steps that are remembered, at least 1.
        amax_compute_algo: "max" of the history, its "most_recent" entry, or a function from the (history, slots)
            amaxes on the device, oldest first and zero where there is none yet, to (slots,) amaxes.
        reduce_amax: take the largest amax over the ranks of the region's group.
    Raises: UserError.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | AmaxAlgorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        self._check_format()
        if not _is_integer(self.margin) or not 0 <= self.margin <= LARGEST_MARGIN:
            raise UserError(f"DelayedScaling: margin is {self.margin!r}; pass an integer from 0 to {LARGEST_MARGIN}.")
        if not _is_integer(self.amax_history_len) or not 1 <= self.amax_history_len <= LONGEST_HISTORY:
            raise UserError(
                f"DelayedScaling: amax_history_len is {self.amax_history_len!r}; pass a number of steps from 1 to "
                f"{LONGEST_HISTORY}."
            )
        algorithm = self.amax_compute_algo
        if isinstance(algorithm, type) or not (callable(algorithm) or algorithm in ("max", "most_recent")):
            raise UserError(
                f'DelayedScaling: amax_compute_algo is {algorithm!r}; pass "max", "most_recent" or a function of the '
                "history."
            )
        self._check_switch("reduce_amax")

    @property
    def has_history(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own amax: no state, at the price of a second read.

    Args:
        fp8_format: HYBRID or E4M3.
        use_power_2_scales: round scales down to a power of two, so that scaling loses no bit.
    """

    use_power_2_scales: bool = False

    def __post_init__(self) -> None:
        self._check_format()
        self._check_switch("use_power_2_scales")


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """A scale for each block: 1 × 128 of activations and gradients along the product's sum, 128 × 128 of weights.

    The last block of a row or column may be partial; its scale comes from the elements that are there.

    Args:
        fp8_format: E4M3 for all; a block's range is narrow enough.
        use_f32_scales: any fp32 scales instead of powers of two.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False

    def __post_init__(self) -> None:
        self._check_format()
        self._check_switch("use_f32_scales")


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale (E8M0) for each 32 elements along the product's sum, for weights too."""

    fp8_format: Format = Format.E4M3


def recipe_named(
    name: RecipeName = "delayed", fp8_format: FormatName = "auto", amax_history_len: int | None = None
) -> Recipe:
    """The recipe that a command line names.

    Args:
        fp8_format: "auto" is the recipe's own: HYBRID for one scale a tensor, E4M3 for blocks.
        amax_history_len: steps that delayed scaling remembers, AMAX_HISTORY if None; the others remember none.
    Raises: UserError for a name that is none, and as DelayedScaling.
    """
    kinds: dict[str, type[Recipe]] = {
        "current": Float8CurrentScaling,
        "block": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
    }
    for what, value, known in (("recipe", name, RecipeName), ("fp8_format", fp8_format, FormatName)):
        if value not in get_args(known):
            raise UserError(f"recipe_named: {what} is {value!r}; choose one of {', '.join(get_args(known))}.")
    formats: dict[str, Any] = {} if fp8_format == "auto" else {"fp8_format": Format[fp8_format.upper()]}
    if name == "delayed":
        return DelayedScaling(
            amax_history_len=AMAX_HISTORY if amax_history_len is None else amax_history_len, **formats
        )
    if amax_history_len is not None:
        raise UserError(f"recipe_named: {name} keeps no history of amaxes; leave amax_history_len out.")
    return kinds[name](**formats)


def _is_integer(value: object) -> bool:
    """Whether a value is an integer; True and False, which Python counts among them, are not."""
    return isinstance(value, int) and not isinstance(value, bool)
