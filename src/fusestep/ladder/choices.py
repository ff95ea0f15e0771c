"""What a reader is told of the choices that a plan made, and what is refused of the options of the rung fp8."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusestep import hardware
from fusestep.errors import UserError
from fusestep.fp8 import support
from fusestep.fp8.recipes import recipe_named
from fusestep.ladder.config import LadderConfig
from fusestep.ladder.rungs import Rung, recipe_of
from fusestep.language import interpreted


def remarks(config: LadderConfig, names: Sequence[str], rungs: Sequence[Rung], device: torch.device) -> list[str]:
    """Remarks about the choices that were made for the reader.

    Raises: UserError as `_of_fp8` does.
    """
    notes = []
    if device.type != "cuda":
        why = f" ({hardware.cuda_support().reason})" if config.device == "auto" else ""
        smaller = " with the smallest preset, tiny" if config.preset == "auto" and config.model is None else ""
        notes.append(
            f"Measured on the CPU{why}{smaller}; peak is the largest resident set of a process, libraries included."
        )
    notes += _of_fp8(config, names, rungs, device)
    graphed = [rung.name for rung in rungs if recipe_of(rung.name, rungs).graph and rung.name not in names]
    if config.rungs == "auto" and graphed and device.type != "cuda":
        notes.append(f"The rung {', '.join(graphed)} is left out, since CUDA graphs run on CUDA devices alone.")
    if interpreted():
        notes.append("TRITON_INTERPRET=1: kernels run through an interpreter, and their times say nothing of a GPU.")
    return notes


def _of_fp8(config: LadderConfig, names: Sequence[str], rungs: Sequence[Rung], device: torch.device) -> list[str]:
    """Check what is asked of the rung fp8, and say where it is emulated, left out or not the default.

    Raises: UserError for options that nothing comes of.
    """
    in_fp8 = [rung.name for rung in rungs if recipe_of(rung.name, rungs, names).precision == "fp8"]
    if config.amax_history is not None and config.scaling != "delayed":
        raise UserError(
            f"--amax-history is {config.amax_history} and --recipe is {config.scaling}, which has none; leave one out."
        )
    recipe = recipe_named(config.scaling, config.fp8_format, config.amax_history)
    is_native, why = support(device, recipe)
    if not set(in_fp8) & set(names):
        chosen = {"--recipe": config.scaling != "delayed", "--fp8-format": config.fp8_format != "auto"}
        chosen |= {"--amax-history": config.amax_history is not None, "--fp8-stats": config.fp8_stats}
        for option, is_given in chosen.items():
            if is_given:
                raise UserError(
                    f"{option} is of the rung fp8, which is not run; name it with --rungs, or leave it out."
                )
        if in_fp8 and config.rungs == "auto" and not is_native:
            left_out = f"The rung {', '.join(in_fp8)} is left out, since FP8 would be emulated: {why}"
            return [f"{left_out}; --rungs 1-{len(rungs)} runs it."]
        return []
    if config.fp8_stats and not recipe.has_history:
        raise UserError(
            f"--fp8-stats looks at the state of delayed scaling and --recipe is {config.scaling}; leave one out."
        )
    notes = [] if is_native else [f"FP8 is emulated: the numbers of FP8, and slower than without; {why}."]
    return notes if recipe == recipe_named() else [*notes, f"FP8 is {recipe}."]
