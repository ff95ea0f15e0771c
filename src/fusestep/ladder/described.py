"""What is known of a user's model before its rungs run: its size, its work, and which rungs change nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fusestep.convert import Report
from fusestep.convert.linears import FP8Linear
from fusestep.convert.patterns import is_a
from fusestep.errors import UserError
from fusestep.factory import guarded
from fusestep.ladder.own import Own, is_norm, tokens_of
from fusestep.ladder.rungs import Recipe

FLOPS_FORMULA = (
    "counted by torch.utils.flop_counter over one forward and backward of the model as it is, attention's whole square "
    "included"
)
BYTES_FORMULA = (
    "28 · parameters (the optimizer, FP32) + 4 · parameters (their gradients, written) + what the products of one "
    "forward and backward read and write, counted in FP32 and halved where they run in BF16 or FP8"
)


@dataclass(frozen=True)
class Description:
    """A user's model in numbers and words.

    Attributes:
        kind: the name of its class.
        parameters: that are trained, each once.
        tokens: of a step.
        flops: of a step; operands: bytes that its products read and write in FP32.
        swapped: what each rung swaps, in a few words; unchanged: why a rung changes nothing.
    """

    kind: str
    parameters: int
    tokens: int
    flops: int
    operands: int
    swapped: dict[str, str]
    unchanged: dict[str, str]

    def moved(self, precision: str) -> int:
        """`BYTES_FORMULA`."""
        return 32 * self.parameters + (self.operands if precision == "fp32" else self.operands // 2)


class _Operands(TorchDispatchMode):
    """Counts the bytes of what goes into products and comes out of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.bytes += sum(one.nbytes for one in tree_leaves((args, out)) if isinstance(one, Tensor))
        return out


def describe(own: Own, device: torch.device, asked: Sequence[str]) -> dict[str, Any]:
    """Make the model and train one step of it, in numbers; then see what the rungs that are asked for would swap.

    Raises: UserError for whatever of the factory, the batches or the loss cannot be.
    """
    asked_of = Recipe()
    first = _weights(own.model(asked_of, device))
    work = _one_step(own, own.model(asked_of, device), first, device)
    swapped, unchanged = _rungs(own, device, asked)
    return asdict(Description(*work, swapped, unchanged))


def _one_step(own: Own, model: nn.Module, weights: list[float], device: torch.device) -> tuple[str, int, int, int, int]:
    """The model's class, parameters, tokens a step, FLOPs and operands' bytes, from a step forward and backward."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--model: {own.name}() gives a model with nothing to train; let parameters require gradients.")
    if weights != _weights(model):
        raise UserError(
            f"--model: {own.name}() gives other weights at every call, so rungs would not start alike; let its random "
            "numbers come from torch, numpy or random, which are seeded before each call."
        )
    own.check_batches()
    batch = next(own.batches(device))
    loss_of = own.loss(Recipe())
    with FlopCounterMode(display=False) as counter, _Operands() as operands:
        loss = guarded(f"--model: the loss of {own.name} fails", lambda: loss_of(model, *batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise UserError(f"--model: the loss of {own.name} is of {got}; return a tensor of one element to train on.")
        if not loss.requires_grad:
            raise UserError(
                f"--model: the loss of {own.name} has no gradient; let it come from the model's output without "
                "detach(), item() or torch.no_grad()."
            )
        guarded(f"--model: the backward of {own.name} fails", loss.reshape(()).backward)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert own.task is not None
    tokens = tokens_of(own.task, batch)
    return type(model).__name__, parameters, tokens, counter.get_total_flops(), operands.bytes


def _weights(model: nn.Module) -> list[float]:
    """A sum of each parameter, which tells two models apart."""
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def _rungs(own: Own, device: torch.device, asked: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What each of the rungs that are asked for swaps, in words, and why others change nothing."""
    recipe = Recipe(optimizer="fused", norm="fused")
    swapped: dict[str, str] = {}
    unchanged: dict[str, str] = {}

    def note(rung: str, kinds: list[str], why: str) -> None:
        if kinds:
            swapped[rung] = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        else:
            unchanged[rung] = why

    if "fused-norm" in asked:
        model, report = _converted(own, device, recipe)
        kinds = [row.kind for row in report.swapped if is_norm(model.get_submodule(row.path))]
        note("fused-norm", kinds, _why(report, "Norm", "it has no LayerNorm or RMSNorm that fusestep.convert knows"))
    if not {"blocks", "loss", "fp8"} & set(asked):
        return swapped, unchanged
    whole = replace(recipe, form="fused", loss="fused")
    model, report = _converted(own, device, replace(whole, precision="fp8") if "fp8" in asked else whole)
    modules = [(row, model.get_submodule(row.path)) for row in report.swapped if row.path]
    heads = [row.kind for row in report.swapped if row.became == "FusedCausalLM"]
    others = [row.kind for row, module in modules if not is_norm(module) and not is_a(module, FP8Linear)]
    others = [kind for kind in others if kind not in heads]
    if "blocks" in asked:
        note("blocks", others, "fusestep.convert knows no block, attention, gated MLP or activation of it")
    if "loss" in asked and hasattr(own.task, "fused_loss"):
        swapped["loss"] = "its loss for its own fused_loss"
    elif "loss" in asked:
        why = (
            "its loss is computed outside of the model; let the factory return an object with a fused_loss(model, "
            "batch) that calls fusestep.linear_cross_entropy"
        )
        note("loss", heads, _why(report, "ForCausalLM", why))
    if "fp8" in asked:
        kinds = [row.kind for row, module in modules if is_a(module, FP8Linear)]
        note("fp8", kinds, _why(report, "Linear", "it has no linear layer that can multiply in FP8"))
    return swapped, unchanged


def _converted(own: Own, device: torch.device, recipe: Recipe) -> tuple[nn.Module, Report]:
    model = own.model(recipe, device)
    assert own.report is not None
    return model, own.report


def _why(report: Report, kind: str, otherwise: str) -> str:
    """Why candidates of a kind stayed what they are, where there were any."""
    row = next((row for row in report.left if kind in row.kind), None)
    return otherwise if row is None else f"its {row.kind} {row.path} stays, since {row.reason}"
