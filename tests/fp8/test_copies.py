"""Copies of weights as modules and optimizers hold them: asking, being current, and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusestep
from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, fp8_autocast
from fusestep.fp8.copies import CopyFormat, WeightCopies, attach, copies_of, current_copy, revision
from fusestep.fp8.held import Copies, drop_copies, give, part_of
from fusestep.fp8.recipes import Recipe
from fusestep.nn import Linear
from fusestep.optim import FusedAdam


def weight(rows: int = 5, columns: int = 7) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns))


def test_asking_again_for_the_same_keeps_what_is_there() -> None:
    w, slots = weight(), torch.zeros(3, 4)
    first = attach(w, DelayedScaling(), slots, 1)
    seen = revision()
    assert attach(w, DelayedScaling(), slots, 1) is first
    assert attach(w, DelayedScaling(amax_history_len=4), slots, 1) is first
    assert revision() == seen


@pytest.mark.parametrize(
    ("recipe", "index"), [(DelayedScaling(margin=2), 1), (DelayedScaling(), 2), (Float8CurrentScaling(), 0)]
)
def test_asking_for_something_else_starts_anew(recipe: Recipe, index: int) -> None:
    w, slots = weight(), torch.zeros(3, 4)
    first = attach(w, DelayedScaling(), slots, 1)
    seen = revision()
    second = attach(w, recipe, slots, index)
    assert second is not first
    assert copies_of(w) is second
    assert revision() > seen


def test_asking_for_more_starts_anew_and_for_less_does_not() -> None:
    w = weight()
    data = attach(w, Float8CurrentScaling(), transposed=False)
    both = attach(w, Float8CurrentScaling())
    assert both is not data
    assert attach(w, Float8CurrentScaling(), transposed=False) is both


def test_layers_that_share_a_weight_share_its_copies_though_they_want_more_and_less_of_them() -> None:
    first, second = Linear(16, 16), Linear(16, 16)
    second.weight = first.weight
    optimizer = FusedAdam([first.weight], lr=0.01)
    with fp8_autocast(recipe=Float8CurrentScaling()):
        second(first(torch.randn(16, 16))).sum().backward()  # nobody wants the gradient of the first one's input
        optimizer.step()
        written = current_copy(first.weight)
        assert written is not None
        second(first(torch.randn(16, 16)))
        assert current_copy(first.weight) is written


def test_slots_that_moved_are_others() -> None:
    w = weight()
    first = attach(w, DelayedScaling(), torch.zeros(3, 4), 1)
    assert attach(w, DelayedScaling(), torch.zeros(3, 4), 1) is not first


def test_copies_are_current_from_the_mark_to_the_next_change() -> None:
    w = weight()
    copies = attach(w, Float8CurrentScaling())
    assert current_copy(w) is None
    copies.write(w.detach())
    assert current_copy(w) is None
    copies.mark(w)
    assert current_copy(w) is copies.quantized is not None
    copies.drop()
    assert current_copy(w) is None


def _give_other_memory(parameter: nn.Parameter) -> None:
    # As moving a module does: the values and the version stay, the address does not.
    version = parameter._version
    parameter.data = parameter.data.clone()
    assert parameter._version == version


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "written in place": lambda parameter: parameter.mul_(2),
    "other memory": _give_other_memory,
    "dropped": lambda parameter: drop_copies([parameter]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_part_is_stale_whenever_the_whole_is_through_it(change: str, place: int) -> None:
    both = weight(3), weight(2)
    whole = Copies([3, 2])
    give(both, whole)
    for number, one in enumerate(both):
        whole.mark(one, number)
    parts = [part_of(one) for one in both]
    assert whole.is_current(*both)
    assert [part is not None and part.is_current(one) for part, one in zip(parts, both, strict=True)] == [True, True]
    with torch.no_grad():
        CHANGES[change](both[place])
    assert not whole.is_current(*both)
    are_current = [part is not None and part.is_current(one) for part, one in zip(parts, both, strict=True)]
    # What is dropped is all of the copies; any other change is of one parameter.
    assert are_current == [change != "dropped" and number != place for number in range(2)]


def test_copies_are_written_over_in_place() -> None:
    w = weight()
    copies = attach(w, Float8CurrentScaling())
    copies.write(w.detach())
    first = copies.quantized
    assert first is not None
    copies.write(w.detach() * 3)
    assert copies.quantized is first
    torch.testing.assert_close(first.dequantize(torch.float32), w.detach() * 3, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
def test_memory_for_a_kernel_has_the_layout_of_a_cast(recipe: Recipe) -> None:
    copies = WeightCopies(CopyFormat.of(recipe), torch.zeros(1, 4))
    made, cast = copies.allocate((130, 300), torch.device("cpu")), copies.cast(torch.randn(130, 300))
    for name in ("data", "transposed", "scale_inv", "transposed_scale_inv"):
        ours, theirs = getattr(made, name), getattr(cast, name)
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), name
    assert not made.dequantize(torch.float32).any()
    assert copies.allocate((130, 300), torch.device("cpu")) is made
    assert copies.allocate((130, 310), torch.device("cpu")) is not made


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
def test_operands_of_a_weight_that_is_in_by_out_are_those_of_its_transpose(recipe: Recipe) -> None:
    form, slots, values = CopyFormat.of(recipe), torch.tensor([[2.0, 0.0, 448.0, 0.0]]), torch.randn(144, 300)
    copies, others = WeightCopies(form, slots), WeightCopies(form, slots)
    copies.write(values)
    others.write(values.t().contiguous())
    for mine, theirs in ((copies.right_operands(True), others.right_operands()),) * 2 + (
        (copies.right_operands(), others.right_operands(True)),
    ):
        for ours, wanted in zip(mine, theirs, strict=True):
            assert ours is not None
            assert wanted is not None
            assert (ours.shape, ours.stride()) == (wanted.shape, wanted.stride())
            assert torch.equal(ours.float(), wanted.float())
    assert copies.right_operands()[0] is copies.right_operands()[0]  # views that no call makes anew


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()])
def test_a_quantised_matrix_is_transposed_without_a_copy(recipe: Recipe) -> None:
    values = torch.randn(48, 300)
    quantized = WeightCopies(CopyFormat.of(recipe)).cast(values)
    turned = quantized.t()
    assert turned.shape == (300, 48)
    assert turned.data is quantized.transposed
    torch.testing.assert_close(turned.dequantize(), values.t(), rtol=0.07, atol=0.01)
    assert turned.t() == quantized


def test_microblocks_are_cast_and_never_allocated() -> None:
    with pytest.raises(ValueError, match="microblocks"):
        WeightCopies(CopyFormat.of(MXFP8BlockScaling())).allocate((4, 4), torch.device("cpu"))


def test_a_recipe_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="recipe is Recipe"):
        attach(weight(), Recipe())


def test_a_deep_copy_of_a_parameter_or_of_copies_is_without_them() -> None:
    w = weight()
    attach(w, Float8CurrentScaling()).write(w.detach())
    assert copies_of(copy.deepcopy(w)) is None
    assert not isinstance(copy.deepcopy(copies_of(w)), WeightCopies)


def test_refresh_drops_copies_and_tells_modules() -> None:
    class Caching(nn.Linear):
        dropped = 0

        def drop_caches(self) -> None:
            self.dropped += 1

    module = Caching(4, 6)
    copies = attach(module.weight, Float8CurrentScaling())
    copies.write(module.weight.detach())
    copies.mark(module.weight)
    module.weight.data.mul_(2)
    assert current_copy(module.weight) is not None
    fusestep.refresh(nn.Sequential(module))
    assert current_copy(module.weight) is None
    assert module.dropped == 1
