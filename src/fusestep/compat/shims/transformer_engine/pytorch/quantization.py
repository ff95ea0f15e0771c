"""Regions and weights in FP8, what the device multiplies, and the state that is kept for all modules."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ContextDecorator
from types import SimpleNamespace
from typing import Any

import torch

from fusestep import fp8
from fusestep.compat.names import module_getattr
from fusestep.compat.report import served
from fusestep.compat.stepping import renew_scales
from fusestep.fp8 import context
from fusestep.fp8.model_init import asked
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    restored,
    translated,
)

__all__ = [
    "DelayedScaling",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

_STATE = "scaling state is in each module: read module.fp8_meta, or `fusestep.fp8.statistics.collect(model)`"
NOT_SERVED = {
    "CustomRecipe": ("use one of the recipes that are served", False),
    **{
        f"{kind}RecipeState": (_STATE, False)
        for kind in ("", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    },
    "NVFP4BlockScalingRecipeState": (_STATE, False),
    "CustomRecipeState": (_STATE, False),
}
__getattr__ = module_getattr(__name__, NOT_SERVED)

PACKAGE = "transformer_engine.pytorch"

#: Compute capabilities, major numbers, whose default recipe is not delayed scaling.
MXFP8_DEFAULT, CURRENT_DEFAULT = (10, 11), 12


# Regions


class autocast(ContextDecorator):
    """Multiply in FP8 within; see fusestep.fp8.fp8_autocast, which holds on a device without FP8 too, by emulation.

    Args:
        enabled, calibrating: as there.
        recipe: of transformer_engine.common.recipe; None: get_default_fp8_recipe().
        amax_reduction_group: over whose ranks delayed scaling reduces amaxes; None: over all.
    Raises: NotImplementedError for recipes, and fields of recipes, that are not served; before anything is switched on.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        if enabled or calibrating:
            served(f"{PACKAGE}.{type(self).__name__}", "fusestep.fp8.fp8_autocast")
            chosen = translated(get_default_fp8_recipe() if recipe is None else recipe)
        else:
            chosen = None
        group = _world() if amax_reduction_group is None else amax_reduction_group
        self._asked = enabled, chosen, group, calibrating
        self._regions: list[fp8.fp8_autocast] = []

    def _recreate_cm(self) -> autocast:
        made = object.__new__(type(self))
        made._asked, made._regions = self._asked, []
        return made

    def __enter__(self) -> None:
        enabled, recipe, group, calibrating = self._asked
        region = fp8.fp8_autocast(enabled, recipe, group, calibrating)
        region.__enter__()
        self._regions.append(region)

    def __exit__(self, *exception: object) -> None:
        self._regions.pop().__exit__(*exception)


def _world() -> Any:
    """All ranks, where there are several."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return distributed.group.WORLD


class fp8_autocast(autocast):
    """autocast, with its old names of arguments."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """Build modules whose weights live in FP8 alone; see fusestep.fp8.fp8_model_init.

    With any layout of parameters, and with scales from the weights themselves.
    """
    if not enabled:
        return fp8.fp8_model_init(False)
    served(f"{PACKAGE}.quantized_model_init", "fusestep.fp8.fp8_model_init")
    chosen = translated(get_default_fp8_recipe() if recipe is None else recipe)
    return fp8.fp8_model_init(True, chosen, preserve_high_precision_init_val)


fp8_model_init = quantized_model_init


# What the device multiplies


def get_default_fp8_recipe() -> Recipe:
    """The recipe for this device: MXFP8 on compute capability 10 and 11, current scaling from 12 on, else delayed."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    if major in MXFP8_DEFAULT:
        return MXFP8BlockScaling()
    return Float8CurrentScaling() if major >= CURRENT_DEFAULT else DelayedScaling()


def get_default_recipe() -> Recipe:
    """get_default_fp8_recipe(), by its new name."""
    return get_default_fp8_recipe()


def _support(recipe: Recipe) -> tuple[bool, str]:
    ok, reason = fp8.support(recipe=translated(recipe))
    # Emulation has the numbers of FP8 but not its speed, which is what the question is about.
    return (
        ok,
        "" if ok else f"{reason}; within autocast FP8 is emulated here, with the same numbers and no gain in speed",
    )


def check_fp8_support() -> tuple[bool, str]:
    """Whether this device multiplies FP8 with one scale a tensor, and if not why not."""
    return _support(DelayedScaling())


def check_mxfp8_support() -> tuple[bool, str]:
    """Whether this device multiplies MXFP8, and if not why not."""
    return _support(MXFP8BlockScaling())


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Whether this device multiplies FP8 with a scale for each block, and if not why not."""
    return _support(Float8BlockScaling())


def check_nvfp4_support() -> tuple[bool, str]:
    """False, and that fusestep has no NVFP4."""
    return False, "fusestep does not serve NVFP4; use MXFP8BlockScaling or Float8CurrentScaling."


def check_recipe_support(recipe: Recipe) -> None:
    """Nothing for a recipe that runs, natively or by emulation. Raises: NotImplementedError for one that does not."""
    translated(recipe)


def _answer(found: tuple[bool, str], return_reason: bool) -> bool | tuple[bool, str]:
    return found if return_reason else found[0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """check_fp8_support(), with the reason on request."""
    return _answer(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """check_mxfp8_support(), with the reason on request."""
    return _answer(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """check_fp8_block_scaling_support(), with the reason on request."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """check_nvfp4_support(), with the reason on request."""
    return _answer(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the device multiplies bf16: from compute capability 8.0 on."""
    if not torch.cuda.is_available():
        return _answer((False, "there is no CUDA device; bf16 runs on the CPU, slowly"), return_reason)
    major, minor = torch.cuda.get_device_capability()
    reason = "" if major >= 8 else f"bf16 needs compute capability 8.0, this device has {major}.{minor}"
    return _answer((major >= 8, reason), return_reason)


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The dtype of a recipe's tensors, forward or backward."""
    chosen = _served_format(fp8_recipe)
    return chosen.forward if fprop_tensor else chosen.backward


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> Any:
    """The dtype of a recipe's tensors, forward or backward, as a member of DType."""
    from transformer_engine.pytorch.tensor import DType

    return DType(get_fp8_torch_dtype(fp8_recipe, fprop_tensor))


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest finite value of a recipe's tensors, forward or backward."""
    chosen = _served_format(fp8_recipe)
    return chosen.max_fwd if fprop_tensor else chosen.max_bwd


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What Fp8Padding pads to; products of ours take any size."""
    return 32 if recipe.mxfp8() else 16


def _served_format(recipe: Recipe) -> fp8.Format:
    chosen = translated(recipe)
    assert chosen is not None
    return chosen.fp8_format


# State of all modules


class _StateOfRegion(type):
    """Class attributes of FP8GlobalStateManager up to 2.14, which tell what the region is."""

    @property
    def FP8_ENABLED(cls) -> bool:
        return context.is_enabled()

    @property
    def FP8_CALIBRATION(cls) -> bool:
        return FP8GlobalStateManager.is_fp8_calibration()

    @property
    def FP8_PARAMETERS(cls) -> bool:
        return asked() is not None

    @property
    def FP8_RECIPE(cls) -> Recipe:
        return FP8GlobalStateManager.get_fp8_recipe()

    @property
    def quantization_state(cls) -> SimpleNamespace:
        """The same since 2.15, a snapshot."""
        return SimpleNamespace(
            fp8_enabled=cls.FP8_ENABLED,
            fp8_calibration=cls.FP8_CALIBRATION,
            fp8_recipe=cls.FP8_RECIPE,
            fp8_parameters=cls.FP8_PARAMETERS,
        )


class FP8GlobalStateManager(metaclass=_StateOfRegion):
    """What holds in the region that this thread is in; scaling state itself is in the modules."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules called here multiply in FP8."""
        return context.is_enabled()

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules called here record amaxes without multiplying in FP8."""
        region = context.current()
        return region is not None and region.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules built here keep their weights in FP8."""
        return asked() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether they keep the values before the cast too."""
        wanted = asked()
        return wanted is not None and wanted.preserves

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the region, or the default one."""
        region = context.current()
        return get_default_fp8_recipe() if region is None else restored(region.recipe)

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The ranks over which the region reduces amaxes."""
        region = context.current()
        return None if region is None else region.group

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """check_fp8_support()."""
        return check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """check_mxfp8_support()."""
        return check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """check_fp8_block_scaling_support()."""
        return check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """check_nvfp4_support()."""
        return check_nvfp4_support()

    @classmethod
    def reset(cls) -> None:
        """Nothing: there is no state but that of regions, which end, and of modules, which die."""

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Have amaxes enter the histories and renew scales now; the next region would do it as it begins.

        Transformer Engine calls it once forward and once backward. Only the latter acts, since in between a forward may
        be computed again by the scales that it had.
        """
        if forward:
            return
        if context.current() is not None:
            warnings.warn(
                "FP8GlobalStateManager.reduce_and_update_fp8_tensors: inside a region scales stand still; call it "
                "after the region, or leave it out.",
                stacklevel=2,
            )
            return
        renew_scales()
