"""Reading optimizer states: ours, torch's, Apex's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fusestep.distributed.groups import is_dtensor, laid_out, local_of, wrapped
from fusestep.errors import UserError

NOTHING = "Nothing was changed."

#: Keys of a master in a state, with their dtypes: whole, or what a bf16 parameter leaves of it.
MASTER, REMAINDER = "master_param", "master_remainder"
MASTERS = {MASTER: torch.float32, REMAINDER: torch.int16}


def loaded_groups(
    who: str, groups: list[dict[str, Any]], saved: list[dict[str, Any]], defaults: dict[str, Any], kin: str
) -> list[dict[str, Any]]:
    """New groups with the saved options, today's parameters, and the constructor's values for options not saved.

    `capturable` is a property of this program, not of the state.

    Args:
        who, kin: for errors: the optimizer, and what a state may come from.
    """
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise UserError(
            f"{who}.load_state_dict: the state has groups of {saved_sizes} parameters, the optimizer of {sizes}; build "
            f"it from the same groups. {NOTHING}"
        )
    for number, group in enumerate(saved):
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UserError(
                    f"{who}.load_state_dict: group {number} was trained with {option}=True, which {who} has not; go "
                    f"on with what saved it, or load a state of {kin}. {NOTHING}"
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
    who: str,
    saved: dict[str, Any],
    parameter: Tensor,
    number: int,
    dense: Sequence[str],
    dtype: torch.dtype,
    has_master: bool,
    kin: str,
    scalars: Sequence[str] = (),
) -> dict[str, Any]:
    """The state of one parameter, copied, on its device, dense states in `dtype` and masters in fp32.

    What has the parameter's shape is laid out over processes as the parameter is, however it was saved.

    Args:
        who, number, kin: for errors: the optimizer, the parameter's number, and what a state may come from.
        dense: keys of states of the parameter's shape, all wanted.
        has_master: whether to take a master where there is one.
        scalars: keys of 0-d states, all wanted.
    """
    missing = {*dense, *scalars} - set(saved)
    if missing or saved.get("step") is None or "max_exp_avg_sq" in saved:
        found = ", ".join(sorted(str(key) for key, value in saved.items() if value is not None))
        raise UserError(
            f"{who}.load_state_dict: the state of parameter {number} has {found}, which is not "
            f"{who.removeprefix('Fused')}'s ({', '.join(('step', *dense, *scalars))}); load a state of {kin}. {NOTHING}"
        )
    state: dict[str, Any] = {"step": torch.as_tensor(saved["step"], dtype=torch.float32).detach().reshape(()).clone()}
    for key in scalars:
        number_of = torch.as_tensor(saved[key]).detach().reshape(())
        state[key] = torch.empty((), dtype=dtype.to_real(), device=parameter.device).copy_(number_of)
    for key, wanted in (*((key, dtype) for key in dense), *MASTERS.items()):
        if key in saved:
            if saved[key].shape != parameter.shape:
                raise UserError(
                    f"{who}.load_state_dict: {key} of parameter {number} is {tuple(saved[key].shape)}, the parameter "
                    f"is {tuple(parameter.shape)}; load it into the model it was saved from. {NOTHING}"
                )
            if key not in MASTERS or has_master:
                made = torch.empty_like(local_of(parameter), dtype=wanted, memory_format=torch.preserve_format)
                made = made.detach().copy_(local_of(laid_out(saved[key].detach(), parameter)))
                state[key] = wrapped(made, parameter) if is_dtensor(parameter) else made
    return state
