"""apex.amp.frontend: `initialize`, and the state of the loss scalers.

O0  fp32                                            loss scale 1
O1  fp16 by torch.autocast around each forward      dynamic
O2  fp16 model, fp32 batch norm and masters         dynamic
O3  fp16 model                                      1
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from apex.amp._amp_state import Properties, _amp_state
from apex.amp._optimizer import Backward
from apex.amp.scaler import LossScaler
from fusestep.compat.report import served
from fusestep.errors import UserError

__all__ = ["initialize", "load_state_dict", "state_dict"]

_LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0, None),
    "O1": Properties(True, "O1", None, True, None, False, "dynamic", None),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic", None),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0, None),
}

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,  # noqa: ARG001
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers for mixed precision; both, or the models alone, in the shape that they came in.

    Right where Apex is not: masters follow weights that are loaded into the model later.

    Args:
        models, optimizers: one, or a list of them. Models come before their parallel wrappers.
        enabled: False returns both as they are, and scale_loss passes losses on.
        opt_level: "O0" to "O3". O1 casts within the models' forward, and what leaves that is fp32. State dicts of O2's
            models are fp32.
        cast_model_type, keep_batchnorm_fp32, master_weights, loss_scale, cast_model_outputs: override the level's.
        patch_torch_functions: nothing but the level's own value.
        num_losses: loss scalers to keep. min_loss_scale, max_loss_scale: of dynamic ones.
        verbosity: without effect; nothing is printed.
    Raises: UserError for values that do not exist, and for what is no model or optimizer; RuntimeError for what was
        initialised, or wrapped, before. Nothing is changed then.
    """
    served("apex.amp.initialize", "torch.autocast" if opt_level == "O1" else "torch")
    if opt_level not in _LEVELS:
        raise UserError(
            f'amp.initialize: opt_level is {opt_level!r}; pass "O0", "O1", "O2" or "O3", with the letter O.'
        )
    level = _LEVELS[opt_level]
    if patch_torch_functions not in (None, level.patch_torch_functions):
        raise UserError(
            f"amp.initialize: patch_torch_functions={patch_torch_functions} is not served with {opt_level}; choose "
            "O1, which casts by torch.autocast, or leave it out."
        )
    overrides = {
        "cast_model_type": cast_model_type,
        "keep_batchnorm_fp32": _as_bool("keep_batchnorm_fp32", keep_batchnorm_fp32),
        "master_weights": _as_bool("master_weights", master_weights),
        "loss_scale": _as_scale(loss_scale),
        "cast_model_outputs": cast_model_outputs,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    if opt_level == "O1" and given.keys() - {"loss_scale", "cast_model_outputs"}:
        raise UserError(
            f"amp.initialize: {', '.join(sorted(given))} with O1, whose weights stay fp32; leave it out, or choose O2."
        )
    if not isinstance(num_losses, int) or num_losses < 1:
        raise UserError(f"amp.initialize: num_losses is {num_losses!r}; pass a whole number of at least 1.")
    steppers, parts = _listed(optimizers), _listed(models)
    if enabled:
        _check(parts, steppers)
    properties = Properties(**{**vars(level), **given, "enabled": enabled})
    _amp_state.opt_properties = properties
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    _amp_state.loss_scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    for model in parts:
        if properties.cast_model_type is not None:
            _cast(model, properties)
        if opt_level == "O2":
            for module in model.modules():
                module.register_state_dict_post_hook(_in_fp32)
        _wrap_forward(model, properties)
    for optimizer in steppers:
        optimizer._amp_backward = Backward(optimizer, properties.master_weights)
    return models if optimizers is None else (models, optimizers)


def state_dict() -> OrderedDict[str, dict[str, float]]:
    """{"loss_scaler0": {"loss_scale": …, "unskipped": …}, …}."""
    return OrderedDict(
        (f"loss_scaler{number}", {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped})
        for number, scaler in enumerate(_amp_state.loss_scalers)
    )


def load_state_dict(state_dict: Mapping[str, Mapping[str, float]]) -> None:
    """Put loss scalers where they were; call it after `initialize`.

    Raises: RuntimeError for entries that are no loss scaler's.
    """
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        warnings.warn(
            f"amp.load_state_dict: the state has {len(state_dict)} loss scalers and there are {len(scalers)}; those "
            "that both have are loaded.",
            stacklevel=2,
        )
    for key, value in state_dict.items():
        number = key.removeprefix("loss_scaler")
        if not key.startswith("loss_scaler") or not number.isdecimal():
            raise RuntimeError(f"amp.load_state_dict: {key!r} is no loss scaler; pass what amp.state_dict() returned.")
        if int(number) < len(scalers):
            scalers[int(number)]._loss_scale = float(value["loss_scale"])
            scalers[int(number)]._unskipped = int(value["unskipped"])


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _check(models: list[Any], optimizers: list[Any]) -> None:
    """Refuse, before anything is changed, what is no model or optimizer, was wrapped or went through this before."""
    for what, others in (
        ("a model", [one for one in models if not isinstance(one, nn.Module)]),
        ("an optimizer", [one for one in optimizers if not _is_optimizer(one)]),
    ):
        if others:
            raise UserError(
                f"amp.initialize: {what} is of type {type(others[0]).__name__}; pass amp.initialize(model, optimizer), "
                "or a list of either."
            )
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_backward"):
            raise RuntimeError("amp.initialize: this optimizer went through it before; pass each one once.")
    for model in models:
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                f"amp.initialize: the model is wrapped in {type(model).__name__}; initialise it before that."
            )


def _is_optimizer(value: Any) -> bool:
    """Also what wraps one, as LARC does."""
    return not isinstance(value, type) and hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _as_scale(value: float | str | None) -> float | str | None:
    """Apex takes a number's text too, from command lines."""
    if value is None or value == "dynamic":
        return value
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not 0.0 < scale < math.inf:
        raise UserError(f'amp.initialize: loss_scale is {value!r}; pass a finite number above 0, or "dynamic".')
    return scale


def _as_bool(name: str, value: bool | str | None) -> bool | None:
    """Apex takes words too, from command lines."""
    if value is None or isinstance(value, bool):
        return value
    if value not in ("True", "False"):
        raise UserError(f"amp.initialize: {name} is {value!r}; pass True or False.")
    return value == "True"


def _cast(model: nn.Module, properties: Properties) -> None:
    """Cast parameters and buffers; the parameters stay the same objects."""
    for module in model.modules():
        if properties.keep_batchnorm_fp32 and isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype != properties.cast_model_type:
                parameter.data = parameter.data.to(properties.cast_model_type)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(properties.cast_model_type))


def _in_fp32(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Of a state dict: 16-bit weights as fp32, so that it loads anywhere."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            state[key] = value.float()


def _wrap_forward(model: nn.Module, properties: Properties) -> None:
    """Cast what enters and leaves forward, as the level has it."""
    forward: Callable[..., Any] = model.forward
    inside = properties.cast_model_type
    outside = properties.cast_model_outputs or torch.float32

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if inside is None:
            device = next((p.device.type for p in model.parameters()), "cpu")
            with torch.autocast(device, dtype=torch.float16):
                result = forward(*args, **kwargs)
        else:
            args, kwargs = _to(args, inside), _to(kwargs, inside)
            result = forward(*args, **kwargs)
        return _to(result, outside)

    model.forward = cast


def _to(tree: Any, dtype: torch.dtype) -> Any:
    return _pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)
