"""Copies in torch.autocast's dtype: what a cast of the parameter gives, written in the step, current when they are."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import fusestep
from fusestep.fp8.held import part_of
from fusestep.fp8.plain_copies import PlainCopies, attach_plain
from fusestep.language import interpreted
from fusestep.optim import FusedAdam, accumulate_in_fp32, weight_copies

BF16, FP16 = torch.bfloat16, torch.float16


def parameter(*shape: int, place: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(place))


def current(*parameters: Tensor) -> Tensor | None:
    part = part_of(parameters[0])
    if part is None or not isinstance(part.copies, PlainCopies) or not part.copies.is_current(*parameters):
        return None
    return part.copies.values


def give_gradients(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
    for one in parameters:
        one.grad = torch.randn(one.shape).to(one.device, dtype or one.dtype)


def same(found: Tensor | None, *parameters: Tensor, dtype: torch.dtype = BF16) -> None:
    assert found is not None
    wanted = torch.cat([one.detach() for one in parameters]).to(dtype)
    assert found.dtype is dtype
    assert found.is_contiguous()
    if interpreted() and dtype is BF16:
        # The interpreter rounds fp32 to bf16 towards zero, a GPU to nearest.
        cut = (torch.cat([one.detach() for one in parameters]).view(torch.int32) >> 16).to(torch.int16)
        assert torch.equal(found.view(torch.int16), cut) or torch.equal(found, wanted)
    else:
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def forbid_casts(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run, have them write the copies or fail."""

    def write(copies: Sequence[object]) -> None:
        if copies:
            raise AssertionError("cast after the step, not in it")

    if place.type == "cuda" or interpreted():
        monkeypatch.setattr(weight_copies, "write_plain", write)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_kernel_writes_what_a_cast_of_each_parameter_gives(
    place: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_casts(place, monkeypatch)
    weight, bias, odd, other = (parameter(*shape, place=place) for shape in ((33, 70), (33,), (1, 1), (2049,)))
    across = nn.Parameter(torch.randn(20, 30).to(place).t())
    aside = nn.Parameter(torch.randn(1 + 12 * 24).to(place)[1:].view(12, 24))  # at an odd address
    asked = [weight, bias, odd, across, aside]
    for one in asked:
        attach_plain((one,), dtype)
    # Halves with masters are of the same launch, since to the kernel a copy is a half with its master.
    half = nn.Parameter(torch.randn(7, 5).to(place, dtype))
    optimizer = FusedAdam([*asked, other, half], lr=0.03, weight_decay=0.1, master_weights=True)
    for _ in range(3):
        give_gradients([*asked, other, half])
        optimizer.step()
        for one in asked:
            same(current(one), one, dtype=dtype)
        same(half.detach(), optimizer.state[half]["master_param"], dtype=dtype)
    assert current(other) is None


def test_the_step_itself_is_the_same_with_and_without_copies(place: torch.device) -> None:
    weight = parameter(40, 70, place=place)
    other = nn.Parameter(weight.detach().clone())
    attach_plain((weight,), BF16)
    optimizers = [FusedAdam([one], lr=0.03, weight_decay=0.1, max_grad_norm=0.5) for one in (weight, other)]
    for _ in range(3):
        give_gradients([weight])
        assert weight.grad is not None
        other.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(weight, other)
    assert set(optimizers[0].state[weight]) == set(optimizers[1].state[other]) == {"step", "exp_avg", "exp_avg_sq"}
    for key, value in optimizers[0].state[weight].items():
        assert torch.equal(value, optimizers[1].state[other][key]), key


@pytest.mark.parametrize("heights", [(16, 8, 8), (3, 5, 1)])
def test_parameters_put_together_have_one_copy(
    place: torch.device, heights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_casts(place, monkeypatch)
    weights, biases = ([parameter(h, *width, place=place) for h in heights] for width in ((13,), ()))
    attach_plain(weights, BF16)
    attach_plain(biases, BF16)
    optimizer = FusedAdam([{"params": weights}, {"params": biases, "lr": 0.1}], lr=0.01)
    for _ in range(2):
        give_gradients([*weights, *biases])
        optimizer.step()
        same(current(*weights), *weights)
        same(current(*biases), *biases)
    # Of parameters that are written by themselves, those that were not stepped are right as they are.
    weights[1].grad = None
    optimizer.step()
    same(current(*weights), *weights)


def test_gradients_of_other_dtypes_and_layouts(place: torch.device) -> None:
    weight, bias = parameter(20, 30, place=place), parameter(30, place=place)
    gap = nn.Parameter(torch.randn(20, 40).to(place)[:, :30])
    for one in (weight, bias, gap):
        attach_plain((one,), BF16)
    optimizer = FusedAdam([weight, bias, gap], lr=0.03)
    handle = accumulate_in_fp32([bias])
    for _ in range(2):
        weight.grad = torch.randn(30, 20).to(place).t()
        gap.grad = torch.randn(1, 30).to(place).expand(20, 30)
        (bias * torch.randn(30).to(place)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for one in (weight, bias, gap):
            same(current(one), one)
    handle.remove()


@pytest.mark.parametrize("cause", ["norm", "scaler"])
def test_a_skipped_step_leaves_copies_right_and_renews_stale_ones(place: torch.device, cause: str) -> None:
    weight, bias = parameter(20, 48, place=place), parameter(20, place=place)
    for one in (weight, bias):
        attach_plain((one,), BF16)
    optimizer = FusedAdam([weight, bias], lr=0.03, max_grad_norm=1.0 if cause == "norm" else None)
    scaler = torch.amp.GradScaler(place.type, init_scale=8.0, enabled=cause == "scaler")
    # The very first step, one after copies were written, and one after the weight was written by others.
    for number in range(3):
        if number == 1:
            optimizer.zero_grad()
            scaler.scale((weight.sum() + bias.square().sum()) * 1.0).backward()
            scaler.step(optimizer)
            scaler.update()
        if number == 2:
            with torch.no_grad():
                weight.copy_(torch.randn(20, 48))
        optimizer.zero_grad()
        kept = weight.detach().clone()
        scaler.scale((weight.sum() + bias.sum()) * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, kept)
        for one in (weight, bias):
            same(current(one), one)
    assert int(optimizer.skipped_steps) + (cause == "scaler") * 3 >= 3


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.randn(24, 16)}),
    "copy_": lambda m: m.weight.copy_(torch.randn(24, 16)),
    "averaging": lambda m: m.weight.lerp_(torch.zeros(24, 16, device=m.weight.device), 0.1),
    "another optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    "new memory": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "data and refresh": lambda m: (m.weight.data.mul_(2), fusestep.refresh(m)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_other_change_of_a_weight_makes_its_copy_stale(place: torch.device, change: str) -> None:
    module = nn.Linear(16, 24, bias=False, device=place)
    attach_plain((module.weight,), BF16)
    optimizer = FusedAdam(module.parameters(), lr=0.01)
    for _ in range(2):
        give_gradients([module.weight])
        optimizer.step()
        assert current(module.weight) is not None
    with torch.no_grad():
        CHANGES[change](module)
    assert current(module.weight) is None
    give_gradients([module.weight])
    optimizer.step()
    same(current(module.weight), module.weight)


def test_copies_are_written_over_in_place_and_may_change_their_dtype(place: torch.device) -> None:
    weight = parameter(9, 7, place=place)
    optimizer = FusedAdam([weight], lr=0.01)
    give_gradients([weight])
    optimizer.step()
    first = attach_plain((weight,), BF16)
    assert attach_plain((weight,), BF16) is first
    memory = []
    for _ in range(2):
        give_gradients([weight])
        optimizer.step()
        memory.append(first.values)
    assert memory[0] is memory[1]
    assert attach_plain((weight,), FP16) is not first
    give_gradients([weight])
    optimizer.step()
    same(current(weight), weight, dtype=FP16)


def test_copies_are_no_part_of_any_state(place: torch.device) -> None:
    module = nn.Linear(16, 24, device=place)
    optimizer = FusedAdam(module.parameters(), lr=0.01)
    keys = set(module.state_dict())
    for one in module.parameters():
        attach_plain((one,), BF16)
    give_gradients(list(module.parameters()))
    optimizer.step()
    assert current(module.weight) is not None
    assert set(module.state_dict()) == keys
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert part_of(copy.deepcopy(module).weight) is None
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    assert part_of(torch.load(file, weights_only=True)) is None
    with pytest.raises(AttributeError):
        copy.deepcopy(part_of(module.weight)).copies  # noqa: B018 (nothing stands for the copies)
