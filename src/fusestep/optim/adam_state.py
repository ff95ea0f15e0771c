"""Reading optimizer states: ours, torch's, Apex's."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fusestep.errors import UserError

WHO = "FusedAdam.load_state_dict"
NOTHING = "Nothing was changed."
KNOWN = {"step", "exp_avg", "exp_avg_sq", "master_param"}


def loaded_groups(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]], defaults: dict[str, Any]
) -> list[dict[str, Any]]:
    """New groups with the saved options, today's parameters, and the constructor's values for options not saved.

    `capturable` is a property of this program, not of the state.
    """
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise UserError(
            f"{WHO}: the state has groups of {saved_sizes} parameters, the optimizer of {sizes}; build it from the "
            f"same groups. {NOTHING}"
        )
    for number, group in enumerate(saved):
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UserError(
                    f"{WHO}: group {number} was trained with {option}=True, which FusedAdam has not; go on with "
                    f"torch.optim.AdamW, or start a new state. {NOTHING}"
                )
    merged = []
    for group, options in zip(groups, saved, strict=True):
        new = {key: deepcopy(value) for key, value in options.items() if key not in ("params", "step")}
        for name, default in defaults.items():
            new.setdefault(name, default)
        new["params"] = group["params"]
        new["capturable"] = group["capturable"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
        merged.append(new)
    return merged


def keep_lr_tensors(groups: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    """A learning rate in a tensor stays that tensor and takes the loaded value: a scheduler or a graph may hold it."""
    for group, new in zip(groups, loaded, strict=True):
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr.detach().copy_(torch.as_tensor(new["lr"]).reshape(lr.shape))
            new["lr"] = lr
        elif isinstance(new["lr"], Tensor):
            new["lr"] = float(new["lr"])


def loaded_state(
    saved: dict[str, Any],
    group_step: Any,
    parameter: Tensor,
    number: int,
    moment_dtype: torch.dtype,
    has_master: bool,
) -> dict[str, Any]:
    """The state of one parameter, copied, on its device, moments in `moment_dtype` and masters in fp32.

    Args:
        group_step: the step of the parameter's group, where the state has none of its own (Apex).
        number: of the parameter, for errors.
    """
    step = saved.get("step", group_step)
    missing = {"exp_avg", "exp_avg_sq"} - set(saved)
    if missing or step is None or "max_exp_avg_sq" in saved:
        raise UserError(
            f"{WHO}: the state of parameter {number} has {', '.join(sorted(map(str, saved)))}, which is not Adam's "
            f"(step, exp_avg, exp_avg_sq); load a state of FusedAdam or torch.optim.AdamW without amsgrad. {NOTHING}"
        )
    for key in KNOWN & set(saved) - {"step"}:
        if saved[key].shape != parameter.shape:
            raise UserError(
                f"{WHO}: {key} of parameter {number} is {tuple(saved[key].shape)}, the parameter is "
                f"{tuple(parameter.shape)}; load it into the model it was saved from. {NOTHING}"
            )
    state: dict[str, Any] = {"step": torch.as_tensor(step, dtype=torch.float32).detach().reshape(()).clone()}
    for key, dtype in (("exp_avg", moment_dtype), ("exp_avg_sq", moment_dtype), ("master_param", torch.float32)):
        if key in saved and (key != "master_param" or has_master):
            made = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            state[key] = made.detach().copy_(saved[key].detach())
    return state
