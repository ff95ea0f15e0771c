"""The trial of a swap: the old and the new forward, and their gradients, on the same random input.

Errors are relative, ‖new − old‖ / ‖old‖, and the largest of all outputs and gradients counts. Where 16-bit numbers take
part, old and new are both compared with the old module in fp32, and the new one must not be farther from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusestep.convert.classes import become
from fusestep.convert.twins import Results, materialised, run, seed, signature, twin, undisturbed

if TYPE_CHECKING:
    from fusestep.convert.patterns import Pattern

#: How far numbers of these dtypes may be from the old module's.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

#: How much farther than the old module from the truth the new one may be, by chance: with the rows of the probes the
#: quotient of two such errors spreads by some hundredths.
SLACK = 1.15

HALVES = (torch.bfloat16, torch.float16)

#: Arguments of a forward.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class NotKnownError(Exception):
    """What a trial finds that no pattern knows; its words are the reason why nothing is swapped."""


@dataclass(frozen=True)
class Trial:
    """One way to run old and new.

    Attributes:
        name: for the report; empty for the plain trial.
        dtype: of the inputs; None: the module's.
        region: makes the context that the forwards run in.
        only_new: whether the new module alone runs in that context.
        weights: the dtype that the weights are cast to; None: they stay.
        other_mode: whether modules that train are run in evaluation, and the other way round.
        always: whether each of several layers that look alike goes through it, as each does through the plain one.
        narrow: whether 16-bit numbers take part although inputs, weights and outputs do not show it.
        tolerance: None: that of the numbers' dtype.
    """

    name: str = ""
    dtype: torch.dtype | None = None
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    only_new: bool = False
    weights: torch.dtype | None = None
    other_mode: bool = False
    always: bool = False
    narrow: bool = False
    tolerance: float | None = None


@dataclass(frozen=True)
class Probe:
    """Makes the inputs of a trial, on the device and in the dtype of the module."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers; the same ones on all devices. With some 64 rows, chance plays no part where 16 bits round."""
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return numbers.to(self.device, self.dtype)


@dataclass(frozen=True)
class Agreement:
    """What the trials of a swap found.

    Attributes:
        ok: whether new may stand for old.
        error: of the plain trial: from old; where the numbers have 16 bits, from fp32.
        own: where the numbers have 16 bits, how far old is from fp32.
        others: of the other trials, by name: from old.
        reason: what disagreed, or why there was no trial.
    """

    ok: bool
    error: float = 0.0
    own: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    reason: str = ""


def usual_trials(dtype: torch.dtype, device: torch.device) -> list[Trial]:
    """In training and in evaluation, with inputs of the other width, and under torch.autocast in bf16."""
    modes = [Trial(), Trial("other mode", other_mode=True)]
    if dtype is torch.float64:
        return modes
    other = torch.float32 if dtype in HALVES else torch.bfloat16
    return [
        *modes,
        Trial(f"{str(other).removeprefix('torch.')} input", other, narrow=True),
        Trial("autocast", region=lambda: torch.autocast(device.type, dtype=torch.bfloat16), narrow=True),
    ]


class Trials:
    """Tries swaps.

    Of modules that differ in their weights' values alone, as repeated layers do, the first goes through all trials and
    the others through the plain one; where the values are not known, on the meta device, the first speaks for all.
    """

    def __init__(self, default: Tensor | None) -> None:
        """`default`: its device and dtype are taken for modules that have no parameter."""
        self._default = default
        self._known: dict[Any, Agreement] = {}  # what agreed, by signature

    def run(self, module: nn.Module, pattern: Pattern, trials: Sequence[Trial] | None) -> Agreement:
        """Whether `module`, which stays as it is, may become what the pattern makes of it.

        Args:
            trials: None: the usual ones.
        """
        first = next((p for p in module.parameters() if p.is_floating_point()), self._default)
        if first is None:
            first = torch.empty(0, device="cpu")
        is_meta = first.device.type == "meta"
        key = (pattern.becomes, *signature(module))
        known = self._known.get(key)
        if known is not None and is_meta:
            return known
        device = torch.device("cpu") if is_meta else first.device
        with undisturbed(device):
            if pattern.stripped is None:
                old = twin(module, materialised if is_meta else None)
            else:  # first, since the rest may be large
                stripped = twin(module)
                pattern.stripped(stripped)
                old = twin(stripped, materialised) if is_meta else stripped
            for name in pattern.quiet:
                setattr(old, name, 0.0)
            new = twin(old)
            become(new, pattern.becomes, pattern.attributes(new))
            pair = _Pair(old, new, pattern, device, first.dtype)
            wanted = usual_trials(first.dtype, device) if trials is None else trials
            try:
                found = pair.compare(
                    wanted if known is None else [trial for trial in wanted if trial.always or not trial.name]
                )
            except torch.OutOfMemoryError:
                return Agreement(False, reason="there is no memory left to try it")
        if found.ok and known is None:
            self._known[key] = found
        return found


class _Pair:
    """An old module and the new one, with what makes their inputs."""

    def __init__(
        self,
        old: nn.Module,
        new: nn.Module,
        pattern: Pattern,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.old, self.new, self.pattern, self.device, self.dtype = old, new, pattern, device, dtype
        self._wide: dict[torch.dtype, nn.Module] = {}

    def compare(self, trials: Sequence[Trial]) -> Agreement:
        """The result of all trials, or of the first that disagrees."""
        plain = Agreement(True)
        others: list[tuple[str, float]] = []
        for trial in trials:
            try:
                old = self._results(self.old, trial, nullcontext if trial.only_new else trial.region)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # What the old module cannot do, the new one need not; but the plain trial is what it is for.
                if not trial.name:
                    return Agreement(False, reason=f"it cannot be tried by itself: {_sentence(error)}")
                continue
            try:
                new = self._results(self.new, trial, trial.region)
            except torch.OutOfMemoryError:
                raise
            except NotKnownError as error:
                return Agreement(False, reason=str(error))
            except Exception as error:
                return Agreement(False, reason=_told(trial, f"it raises {_sentence(error)}"))
            found = self._judged(trial, old, new)
            if not found.ok:
                return found
            if trial.name:
                others.append((trial.name, found.error))
            else:
                plain = found
        return Agreement(True, plain.error, plain.own, tuple(others))

    def _results(
        self,
        module: nn.Module,
        trial: Trial,
        region: Callable[[], AbstractContextManager[Any]],
        dtype: torch.dtype | None = None,
    ) -> list[Results]:
        """The outputs and gradients of each call; the same inputs for all modules, cast to `dtype` if given."""
        generator = torch.Generator().manual_seed(20240229)
        calls = self.pattern.inputs(self.old, Probe(self.device, trial.dtype or self.dtype, generator))
        if trial.weights is not None and dtype is None:
            module = _in_dtype(module, trial.weights)
        if trial.other_mode:
            module = twin(module).train(not module.training)
        found = []
        for args, kwargs in calls:
            seed(self.device)
            used = () if self.pattern.uses is None else self.pattern.uses(module)
            found.append(run(module, args, kwargs, region, dtype, used, self.pattern.outcome))
        return found

    def _judged(self, trial: Trial, old: list[Results], new: list[Results]) -> Agreement:
        for theirs, ours in zip(old, new, strict=True):
            if (difference := _unlike(theirs, ours)) is not None:
                return Agreement(False, reason=_told(trial, difference))
        error, where = _largest(new, old)
        if trial.tolerance is not None:
            if error <= trial.tolerance:
                return Agreement(True, error)
            return Agreement(False, error, reason=_told(trial, f"{where} differs by {error:.1e}"))
        halves = [t.dtype for results in old for t in results.values() if t is not None and t.dtype in HALVES]
        is_narrow = trial.narrow or bool(halves)
        tolerance = torch.finfo(torch.bfloat16).eps / 4 if is_narrow else TOLERANCE.get(self.dtype, 1e-5)
        if error <= tolerance and not is_narrow:
            return Agreement(True, error)
        wide = torch.float32 if is_narrow else torch.float64
        truth = self._results(self._widened(trial, wide), trial, nullcontext, wide)
        found, where = _largest(new, truth)
        own, _ = _largest(old, truth)
        if math.isfinite(found) and found <= max(SLACK * own, tolerance):
            return Agreement(True, error if trial.name else found, None if trial.name else own)
        what = f"{where} is {found:.1e} from that of a wider dtype, the old module's {own:.1e}"
        return Agreement(False, found, own, reason=_told(trial, what))

    def _widened(self, trial: Trial, dtype: torch.dtype) -> nn.Module:
        """The old module in a wider dtype, with the very numbers that it has in this trial."""
        if trial.weights is not None:
            return _in_dtype(_in_dtype(self.old, trial.weights), dtype)
        if dtype not in self._wide:
            self._wide[dtype] = _in_dtype(self.old, dtype)
        return self._wide[dtype]


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return twin(module, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _unlike(old: Results, new: Results) -> str | None:
    """In words, what is not even of the same shape or dtype."""
    if old.keys() != new.keys():
        extra, missing = (", ".join(sorted(one.keys() - other.keys())) for one, other in ((new, old), (old, new)))
        return f"it gives {extra or 'nothing'} where the old one gives {missing or 'nothing'}"
    for name, theirs in old.items():
        ours = new[name]
        if theirs is None or ours is None:
            if theirs is not ours:
                return f"{name} is missing from {'it' if ours is None else 'the old one'}"
        elif theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            return f"{name} is {tuple(ours.shape)} {ours.dtype}, the old one's {tuple(theirs.shape)} {theirs.dtype}"
    return None


def _largest(found: list[Results], wanted: list[Results]) -> tuple[float, str]:
    """The largest relative error, infinite where a number is not finite that should be, and of what."""
    worst, where = 0.0, "nothing"
    for results, truth in zip(found, wanted, strict=True):
        for name, value in results.items():
            true = truth[name]
            if value is None or true is None:
                continue
            norm = float(true.double().norm())
            error = float((value.double() - true.double()).norm()) / (norm if norm > 0 else 1.0)
            if not error <= worst:  # NaN is worse than all
                worst, where = (error, name) if error == error else (float("inf"), name)
    return worst, where


def _told(trial: Trial, what: str) -> str:
    return f"disagrees{f' ({trial.name})' if trial.name else ''}: {what}"


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
