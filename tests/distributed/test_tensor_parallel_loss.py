"""The loss over a vocabulary that ranks share is the whole vocabulary's, in float64, and so are its gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusestep import linear_cross_entropy
from fusestep.errors import UserError
from fusestep.nn import LinearCrossEntropy
from fusestep.nn.functional import cross_entropy
from fusestep.ops.cross_entropy_parts import find_parts
from fusestep.ops.cross_entropy_rows import Options
from harness import run_ranks

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 8, 20, 52


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def exact_losses(logits: Tensor, target: Tensor, ignored: int, smoothing: float, z: float, cap: float | None) -> Tensor:
    """Losses of rows in float64, by torch's own."""
    y = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(y.flatten(0, -2), target.flatten(), reduction="none", ignore_index=ignored,
                             label_smoothing=smoothing)  # fmt: skip
    losses = losses + z * torch.where(target.flatten() == ignored, 0.0, y.flatten(0, -2).logsumexp(1) ** 2)
    return losses.view(target.shape)


CASES = [
    {},
    {"ignore_index": 5, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 8.0},
    {"ignore_index": -1, "z_loss": 1e-3},
]


def reduced(losses: Tensor, target: Tensor, weights: Tensor | None, ignored: int, reduction: str) -> Tensor:
    losses = losses if weights is None else losses * weights
    if reduction == "none":
        return losses
    counted = target != ignored
    by = counted.sum() if weights is None else (weights * counted).sum()
    return losses.sum() if reduction == "sum" else losses.sum() / by


def heads(rank: int, size: int) -> None:
    group = dist.group.WORLD
    ways = (("mean", "auto"), ("sum", "recompute"), ("none", "auto"))
    for number, (case, dim, (reduction, way)) in enumerate(product(CASES, (None, 0, 1), ways)):
        weighted = bool(number % 2)
        options: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, **case}
        lead = (LENGTH, BATCH) if dim == 0 else (BATCH, LENGTH)
        # Far from 0, where differences of large numbers lose digits: losses do not, gradients as in one process.
        x = torch.randn(*lead, WIDTH)
        weight, bias = torch.randn(VOCABULARY, WIDTH) * 2, torch.randn(VOCABULARY) + 30.0 * (options["softcap"] is None)
        target = torch.randint(6, VOCABULARY, lead)
        target[0, :2] = options["ignore_index"]
        weights = torch.rand(lead) + 0.1 if weighted else None
        exact = [one.double().requires_grad_() for one in (x, weight, bias)]
        losses = exact_losses(
            F.linear(*exact), target, options["ignore_index"], options["label_smoothing"], options["z_loss"],
            options["softcap"],
        )  # fmt: skip
        doubles = None if weights is None else weights.double()
        wanted = reduced(losses, target, doubles, options["ignore_index"], reduction)
        upstream = torch.randn(wanted.shape)
        wanted.backward(upstream.double())
        mine = [x if dim is None else x.chunk(size, dim)[rank], weight.chunk(size)[rank], bias.chunk(size)[rank]]
        mine = [one.clone().requires_grad_() for one in mine]
        found = linear_cross_entropy(
            mine[0], mine[1], target, mine[2], **options, reduction=reduction, token_weights=weights, gradients=way,
            chunk_tokens=7, tp_group=group, sequence_parallel=dim is not None, sequence_dim=dim or 0,
        )  # fmt: skip
        found.backward(upstream)
        assert error(found, wanted) < 1e-6
        dx, dweight, dbias = (one.grad for one in exact)
        dx = dx if dim is None else dx.chunk(size, dim)[rank]
        for one, other in zip(mine, (dx, dweight.chunk(size)[rank], dbias.chunk(size)[rank]), strict=True):
            assert one.grad is not None
            assert error(one.grad, other) < 1e-5, (case, dim, reduction)

        logits = F.linear(x, weight, bias)
        part = logits.chunk(size, -1)[rank].clone().requires_grad_()
        whole = logits.double().requires_grad_()
        values = (options["ignore_index"], options["label_smoothing"], options["z_loss"], options["softcap"])
        wanted = reduced(exact_losses(whole, target, *values), target, doubles, options["ignore_index"], reduction)
        found = cross_entropy(part, target, **options, reduction=reduction, token_weights=weights, tp_group=group)
        assert error(found, wanted) < 1e-6
        wanted.backward(upstream.double())
        found.backward(upstream)
        assert part.grad is not None
        assert error(part.grad, whole.grad.chunk(size, -1)[rank]) < 1e-5

    # A target that no rank has is refused on all of them, with nothing sent.
    for call in (
        lambda: cross_entropy(torch.ones(2, 6), torch.tensor([6 * size, 0]), tp_group=group),
        lambda: linear_cross_entropy(torch.ones(2, 4), torch.ones(6, 4), torch.tensor([-1, 0]), tp_group=group),
    ):
        with pytest.raises(UserError, match=f"outside of the {6 * size} classes"):
            call()


def transforms(rank: int, size: int) -> None:
    """What cannot cross ranks is refused by each of them, in the forward and in the backward, with nothing sent."""
    x, weight, target = torch.randn(2, 4), torch.randn(6, 4), torch.tensor([0, 6 * size - 1])
    calls = [
        (lambda logits: cross_entropy(logits, target, tp_group=dist.group.WORLD), torch.randn(2, 6)),
        *(
            (
                lambda x, way=way: linear_cross_entropy(x, weight, target, gradients=way, tp_group=dist.group.WORLD),
                x,
            )
            for way in ("forward", "recompute")
        ),
    ]
    for call, given in calls:
        with pytest.raises(UserError, match="do not cross ranks; leave tp_group out"):
            torch.func.grad(call)(given)
        leaf = given.clone().requires_grad_()
        loss = call(leaf)
        with pytest.raises(UserError, match="do not cross ranks; leave tp_group out"):
            torch.autograd.grad(loss, leaf, torch.ones(3), is_grads_batched=True)


def modules(rank: int, size: int) -> None:
    """The module's parts of the matrix that one process draws, its loss, and logits of all classes for generation."""
    made = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(4)
        made.append(LinearCrossEntropy(WIDTH, VOCABULARY, softcap=4.0, tp_group=group))
    whole, shared = made
    assert torch.equal(shared.weight, whole.weight.chunk(size)[rank])
    assert torch.equal(shared.bias, whole.bias.chunk(size)[rank])
    x, target = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(VOCABULARY, (BATCH, LENGTH))
    assert error(shared(x, target), whole(x, target)) < 1e-6
    assert error(shared.logits(x), whole.logits(x)) < 1e-6
    with pytest.raises(UserError, match="choose a multiple"):
        LinearCrossEntropy(WIDTH, VOCABULARY + 1, tp_group=dist.group.WORLD)


def all_of_it(rank: int, size: int) -> None:
    for one in (heads, transforms, modules):
        torch.manual_seed(99)
        one(rank, size)


def test_a_shared_vocabulary_gives_the_whole_ones_loss() -> None:
    run_ranks(all_of_it, 4, 4)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_finds_what_the_formulas_say(dtype: torch.dtype, device: torch.device) -> None:
    for columns, cap, smoothing in ((37, 0.0, 0.0), (200, 6.0, 0.1)):
        logits = (torch.randn(5, columns, device=device) * 4).to(dtype)
        logits[4, :] = -torch.inf
        target = torch.tensor([100, 100 + columns - 1, 99, -100, 103], device=device)
        parts = find_parts("cross_entropy", logits, target, Options(-100, smoothing, 0.0, cap), 100).double().cpu()
        y = logits.double().cpu()
        y = y if not cap else cap * torch.tanh(y / cap)
        picked = [y[0, 0], y[1, -1], torch.tensor(0.0), torch.tensor(0.0), y[4, 3]]
        rows = [0, 1, 2]
        assert error(parts[rows, 0], y[rows].amax(1)) < 1e-6
        assert error(parts[rows, 1], (y[rows] - y[rows].amax(1, keepdim=True)).exp().sum(1)) < 1e-5
        assert error(parts[rows, 2], torch.stack(picked)[rows]) < 1e-6
        assert parts[3].tolist() == [-torch.inf, 0.0, 0.0, 0.0]
        if smoothing:
            assert error(parts[rows, 3], y[rows].sum(1)) < 1e-5
        else:
            assert parts[4, 0] == -torch.inf
            assert parts[4, 1] == 0.0
