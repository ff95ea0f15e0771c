"""The walk through a model: what is recognised is tried, and what agrees is swapped; all of it, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusestep.convert import causal_loss
from fusestep.convert.agreement import Agreement, Trials
from fusestep.convert.classes import become, is_converted, pickles_by_itself
from fusestep.convert.linears import FP8Forward, FP8Linear, check_arguments, fp8_patterns
from fusestep.convert.patterns import Pattern, Stage, has_no_shape, is_a, is_named, known_patterns
from fusestep.convert.report import Report, Row
from fusestep.errors import UserError


def run(
    model: nn.Module,
    skip: Sequence[str],
    fp8: Any,
    fp8_skip: Sequence[str],
    fp8_keep_blocks: tuple[int, int],
    fused_loss: bool,
    dry_run: bool,
) -> Report:
    """`fusestep.convert`; its docstring says what the arguments mean."""
    if not isinstance(model, nn.Module):
        raise UserError(f"convert: {type(model).__name__} is no torch.nn.Module; pass the model itself.")
    for what, value in (("skip", skip), ("fp8_skip", fp8_skip)):
        if isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise UserError(f"convert: {what} is {value!r}; pass a list of patterns such as ['*.layers.0.*'].")
    check_arguments(fp8, fp8_keep_blocks)
    if fp8 is None and (fp8_skip or any(fp8_keep_blocks)):
        raise UserError(
            "convert: fp8_skip and fp8_keep_blocks name linear layers that FP8 leaves, but fp8 is None; pass fp8 too, "
            "or leave them out."
        )
    asked = [] if fp8 is None else fp8_patterns(model, fp8, fp8_skip, fp8_keep_blocks)
    patterns = known_patterns([*asked, *(causal_loss.PATTERNS if fused_loss else ())])
    walk = _Walk(model, skip)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    unmatched = tuple(one for one in (*skip, *fp8_skip) if not any(is_named(path, [one]) for path in paths))
    report = Report((), dry_run, walk.swaps, unmatched)
    try:
        for stage in Stage:
            walk.visit([pattern for pattern in patterns if pattern.stage is stage])
        if fp8 is not None:
            walk.set_region(fp8)
    except BaseException:
        report.undo()
        raise
    report.rows = walk.in_order()
    if dry_run:
        report.undo()
    return report


#: Beside the stages: when the region of FP8 is set.
_REGION = len(Stage)


class _Walk:
    """One conversion under way.

    Attributes:
        swaps: what was swapped, as (path, module), in order.
    """

    def __init__(self, model: nn.Module, skip: Sequence[str]) -> None:
        self._model = model
        self.swaps: list[tuple[str, nn.Module]] = []
        self._rows: dict[tuple[str, int], Row] = {}
        self._order = {path: number for number, (path, _) in enumerate(model.named_modules())}
        # A module in several places is skipped by any of its names.
        everywhere = model.named_modules(remove_duplicate=False)
        self._passed_over = {id(module) for path, module in everywhere if is_named(path, skip)}
        known = (p for p in model.parameters() if p.is_floating_point() and not has_no_shape(p))
        default: Tensor | None = next(known, None)
        self._trials = Trials(default)

    def visit(self, patterns: Sequence[Pattern]) -> None:
        """Look for these patterns in all modules."""
        for path, module in self._model.named_modules():
            if id(module) in self._passed_over:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                self._passed_over |= {id(one) for one in module.modules()}
                self._rows[path, Stage.WHOLE] = Row(path, type(module).__name__, None, "it is scripted")
                continue
            if is_converted(module) and not any(module is one for _, one in self.swaps):
                self._rows[path, Stage.WHOLE] = Row(path, type(module).__name__, None, "it was converted before")
                continue
            self._look_at(path, module, patterns)

    def _look_at(self, path: str, module: nn.Module, patterns: Sequence[Pattern]) -> None:
        """Swap a module for what the first of these patterns makes of it that agrees, or say why not."""
        kind = type(module).__name__
        failed: list[tuple[str, Agreement | None]] = []
        for pattern in patterns:
            answer = pattern.matches(module)
            if answer is False:
                continue
            obstacle = answer if isinstance(answer, str) else _obstacle(module)
            if obstacle is not None:
                failed.append((obstacle, None))
                continue
            attributes = pattern.attributes(module)
            taken = attributes.keys() & module.__dict__.keys()
            if taken:
                failed.append((f"it has an attribute named {min(taken)} already", None))
                continue
            trials = None if pattern.trials is None else pattern.trials(*self._numbers(module))
            found = self._trials.run(module, pattern, trials)
            if not found.ok:
                failed.append((found.reason, found))
                continue
            self._passed_over |= set() if pattern.uses is None else {id(one) for one in pattern.uses(module)}
            become(module, pattern.becomes, attributes)
            self.swaps.append((path, module))
            became = type(module).__name__
            # A block keeps the name of its class; say what it is all the same.
            became = pattern.becomes.__name__ if became == kind else became
            self._rows[path, pattern.stage] = Row(path, kind, became, pattern.what, found)
            return
        if failed:
            # Of several forms that were tried the nearest tells most.
            reason, agreement = min(failed, key=lambda one: one[1].error if one[1] is not None else 0.0)
            self._rows[path, patterns[0].stage] = Row(path, kind, None, reason, agreement)

    def _numbers(self, module: nn.Module) -> tuple[torch.dtype, torch.device]:
        first = next((p for p in module.parameters() if p.is_floating_point()), None)
        return (torch.float32, torch.device("cpu")) if first is None else (first.dtype, first.device)

    def set_region(self, recipe: Any) -> None:
        """Have the model's forward run in FP8, if any layer does."""
        if not any(is_a(module, FP8Linear) for _, module in self.swaps):
            return
        kind = type(self._model).__name__
        obstacle = _obstacle(self._model)
        if obstacle is None and type(self._model).forward is nn.Module.forward:
            obstacle = "it has no forward"
        if obstacle is None and is_converted(self._model) and not any(self._model is one for _, one in self.swaps):
            obstacle = "it was converted before"
        model: Any = self._model
        if is_a(model, FP8Forward):
            region = f"fp8_autocast ({type(model.fp8_recipe).__name__})"
            what = f"its forward runs within {region} since it was converted before"
            self._rows["", _REGION] = Row("", kind, None, what)
        elif obstacle is not None:
            reason = f"{obstacle}: call it within fusestep.fp8.fp8_autocast(recipe=…) yourself"
            self._rows["", _REGION] = Row("", kind, None, reason)
        else:
            become(model, FP8Forward, {"fp8_recipe": recipe})
            self.swaps.append(("", model))
            what = f"its forward runs within fp8_autocast ({type(recipe).__name__})"
            self._rows["", _REGION] = Row("", kind, "FP8Forward", what)

    def in_order(self) -> tuple[Row, ...]:
        """The rows in the order of the modules."""
        order = sorted(self._rows, key=lambda key: (self._order[key[0]], key[1]))
        return tuple(self._rows[key] for key in order)


def _obstacle(module: nn.Module) -> str | None:
    """Why no module like this is swapped, whatever its class."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the object itself"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    if pickles_by_itself(module):
        return "it is copied and pickled in a way of its own (__reduce__)"
    for name, parameter in module.named_parameters():
        if type(parameter).__name__ == "DTensor":  # by name, since its import takes half a second
            return f"its {name} is sharded: convert before the model is"
        if has_no_shape(parameter):
            return f"its {name} has no shape yet: call the model once before"
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if type(parameter.data) is not Tensor:
            return f"its {name} is a {type(parameter.data).__name__}"
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"its {name} is quantised ({parameter.dtype})"
        if parameter.is_inference():
            return f"its {name} was made in inference mode, and has no gradient"
    return None
