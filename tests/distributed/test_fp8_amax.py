"""Delayed scaling over ranks: one collective a roll, the same scales everywhere, modules that ran on some only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusestep.distributed.amax import LAG, Roster, agreed_table
from fusestep.errors import UserError
from fusestep.fp8 import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_autocast
from fusestep.fp8.casting import stateless_casts
from fusestep.fp8.recipes import Recipe
from fusestep.fp8.statistics import states_of
from fusestep.nn import LayerNormMLP, Linear
from harness import run_ranks

RECIPE = DelayedScaling(amax_history_len=4)

# Which modules make the table


def roster(ran: list[int], built: str, widths: int = 3) -> Roster:
    return Roster([], ran, [widths] * len(ran), list(built))


@pytest.mark.parametrize(
    ("rosters", "seats"),
    [
        ([roster([0, 1], "LL"), roster([0, 1], "LL")], [[0, 1], [0, 1]]),
        ([roster([0, 1], "LLLM"), roster([0, 2], "LLLM")], [[0, 1, 2], [0, 1, 2]]),
        ([roster([1], "LLM"), roster([], "LLM")], [[1], [1]]),
        ([roster([], "LLM"), roster([], "LLM")], [[], []]),
        # the first rank built two others before; all ran
        ([roster([2, 3], "LLLM"), roster([0, 1], "LM")], [[2, 3], [0, 1]]),
        ([roster([2, 3], "LLLLLL"), roster([0, 1], "LLLL")], [[2, 3], [0, 1]]),
        # the same, and another copy of the model on both afterwards
        ([roster([2, 3], "LLLMLM"), roster([0, 1], "LMLM")], [[2, 3], [0, 1]]),
        # the first built others before, and other branches ran
        ([roster([3, 4], "MMMLLL"), roster([0, 2], "LLL")], [[3, 4, 5], [0, 1, 2]]),
        ([roster([3, 5], "LLLLLL"), roster([], "LLL")], [[3, 5], [0, 2]]),
        # the second built more afterwards, and another branch ran
        ([roster([0, 1], "LLL"), roster([0, 2], "LLLL")], [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_ranks_agree_on_the_modules_of_the_table(rosters: list[Roster], seats: list[list[int]]) -> None:
    assert agreed_table(rosters) == ([], seats, [3] * len(seats[0]))


def test_places_stay_while_their_module_is_on_some_rank() -> None:
    rosters = [Roster([4, -1, -1, 8], [9], [2], ["L"] * 10), Roster([-1, 5, -1, 8], [], [], ["L"] * 10)]
    assert agreed_table(rosters) == ([0, 1, 3], [[9], [9]], [2])


@pytest.mark.parametrize(
    ("rosters", "words"),
    [
        ([roster([0, 1], "LL"), roster([0], "LM")], "number 1 L on rank 0 and M on rank 1"),
        ([roster([0], "LL"), roster([0, 2], "LLL")], "number 2 L on rank 1 and nothing on rank 0"),
        ([roster([0], "L", 3), roster([0], "L", 6)], "casts 3 and 6 tensors"),
        ([roster([1], "LL", 3), roster([0], "L", 6)], "casts 3 and 6 tensors"),
        ([Roster([0], [1, 2], [3, 3], list("LLM")), Roster([1], [2], [3], list("LLMM"))], "number 1 L on rank 0"),
    ],
)
def test_ranks_with_different_modules_are_told_so(rosters: list[Roster], words: str) -> None:
    with pytest.raises(UserError, match=words):
        agreed_table(rosters)


# Parts of a tensor that ranks share


@pytest.mark.parametrize("cut", [128, 100])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["current", "block"])
def test_a_part_is_cast_by_itself_as_finely_as_its_own_amax_allows(recipe: Recipe, cut: int) -> None:
    whole = torch.randn(64, 300) * torch.logspace(-3, 1, 300)
    cast = stateless_casts(recipe)
    together = cast.input(whole, 0, columnwise=True)
    for part, rows in ((whole[:, :cut], slice(0, cut)), (whole[:, cut:], slice(cut, None))):
        alone = cast.input(part.contiguous(), 0, columnwise=True)
        exact = part.double()
        own, shared = alone.dequantize().double(), together.dequantize().double()[:, rows]
        # Three bits of mantissa, and steps of 2^-9 at a scale that is up to a power of two below 448 / amax.
        allowed = exact.abs().div(2**4).clamp(min=float(exact.abs().max()) / 448 * 2 / 2**10) * (1 + 1e-6)
        assert bool(((own - exact).abs() <= allowed).all())
        if cut == 128 and rows.start == 0:
            assert bool(((shared - exact).abs() > allowed).any()) == (recipe == Float8CurrentScaling())
        if recipe != Float8CurrentScaling() and cut == 128:  # blocks of the whole begin at the border too
            assert torch.equal(own, shared)


# On ranks


class Branches(nn.Module):
    """a, then b or c or both or none, as it is told; hidden sizes are odd and unlike each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Linear(9, 7), Linear(7, 7), LayerNormMLP(7, 11)

    def forward(self, x: Tensor, which: str) -> Tensor:
        x = self.a(x)
        for name in which:
            x = x + getattr(self, name)(x)
        return x


@contextmanager
def counted_collectives(name: str = "all_reduce") -> Iterator[list[int]]:
    """The sizes of the all-reduces of within, or of all-gathers."""
    sizes: list[int] = []
    real = getattr(torch.distributed, name)

    def counting(*args: Any, **options: Any) -> Any:
        sizes.append(args[name != "all_reduce"].numel())
        return real(*args, **options)

    setattr(torch.distributed, name, counting)
    try:
        yield sizes
    finally:
        setattr(torch.distributed, name, real)


def snapshot(model: nn.Module) -> dict[str, tuple[list[Any], ...]]:
    """All of the state that ranks share, by module; that is all but the amaxes that wait for a roll."""
    return {
        path: (state.slots[:, [0, 2, 3]].tolist(), state.history.tolist(), state.rolls.tolist())
        for path, state in states_of(model)
        if state.rolls.any()
    }


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 9, generator=generator) * (1 + 2 * rank + step % 3)


def train(
    rank: int, model: nn.Module, steps: int, which: Callable[[int], str] = lambda step: "bc", first: int = 0
) -> list[dict[str, Any]]:
    """Steps without an optimizer; the state after the roll of each."""
    seen = []
    for step in range(first, first + steps):
        with fp8_autocast(recipe=RECIPE):
            y = model(inputs(rank, step), which(step))
        y.square().sum().backward()
        with fp8_autocast(recipe=RECIPE):
            seen.append(snapshot(model))
    return seen


def check_amaxes(rank: int) -> dict[str, Any]:
    """Each amax of the input is the largest of the ranks', and so in every history."""
    model = Branches()
    with counted_collectives() as sizes, counted_collectives("all_gather") as exchanged:
        seen = train(rank, model, 6)
    wanted = [max(inputs(one, step).abs().max().item() for one in range(world())) for step in range(6)]
    newest = [state["a"][1][0][step % 4] for step, state in enumerate(seen)]
    # Three slots of each Linear, six of the MLP, and a flag; nothing at the first region, two for each step.
    return {"seen": seen, "right": newest == pytest.approx(wanted, rel=0), "sizes": sizes, "exchanged": exchanged}


def world() -> int:
    return torch.distributed.get_world_size()


def check_branches(rank: int) -> dict[str, Any]:
    """Modules that run on one rank only, from the first step or later."""
    model = Branches()

    def which(step: int) -> str:
        if step < 3:
            return "b" if rank == 0 else ""
        return "c" if rank == world() - 1 and step == 3 else ""

    seen = train(rank, model, 8, which)
    return {"seen": seen, "b": model.b.fp8_state.rolls.tolist(), "c": model.c.fp8_state.rolls.tolist()}


def check_poison(rank: int) -> dict[str, Any]:
    """What is not finite on one rank is refused by all."""
    model = Branches()
    seen = []
    for step in range(5):
        x = inputs(rank, step)
        if rank == 0 and step in (0, 2):
            x[1, 2] = math.nan if step else math.inf
        with fp8_autocast(recipe=RECIPE):
            y = model(x, "b")
        y.square().sum().backward()
        with fp8_autocast(recipe=RECIPE):
            seen.append(snapshot(model))
    return {"seen": seen, "refused": model.a.fp8_state.refused.tolist(), "rolls": model.a.fp8_state.rolls.tolist()}


def check_accumulation(rank: int) -> dict[str, Any]:
    """Micro-batches, recomputation and evaluations on one rank, of other modules too."""
    model = Branches()
    seen = []
    for step in range(4):
        if rank == 0:
            with torch.no_grad(), fp8_autocast(recipe=RECIPE):
                model(inputs(7, step) * 100, "bc")
                Branches().eval()(inputs(7, step), "b")
        with counted_collectives() as sizes, fp8_autocast(recipe=RECIPE):
            for micro in range(3):
                x = inputs(rank, 3 * step + micro).requires_grad_()
                y = checkpoint(model, x, "bc", use_reentrant=False)
                with fp8_autocast(recipe=RECIPE):
                    y = y + model.b(y)
                y.square().sum().backward()
        seen.append({**snapshot(model), "sizes": sizes})
    return {"seen": seen, "rolls": model.a.fp8_state.rolls.tolist()}


def check_copies_and_files(rank: int) -> dict[str, Any]:
    """A copy on one rank only, a state saved by one rank and loaded by all, and a reset."""
    model = Branches()
    average = copy.deepcopy(model) if rank == 0 else None
    seen = train(rank, model, 3)
    saved = [copy.deepcopy(model.state_dict()) if rank == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    assert saved[0] is not None
    straight = train(rank, model, 3, first=3)
    again = Branches()
    again.load_state_dict(saved[0])
    with ThreadPoolExecutor(1) as another:  # where no table is known, as in another process
        seen += another.submit(train, rank, again, 3, first=3).result()
        again.a.reset_parameters()
        seen += another.submit(train, rank, again, 5).result()
    return {"seen": seen, "same": seen[3:6] == straight, "average": average is None or average.a.fp8_state is None}


def check_alone(rank: int) -> dict[str, Any]:
    """Recipes that reduce nothing call nobody; a group of one neither."""
    alone = DelayedScaling(amax_history_len=4, reduce_amax=False)
    groups = [torch.distributed.new_group([one]) for one in range(world())]
    model = Branches()
    with counted_collectives() as sizes:
        for recipe, group in ((alone, None), (RECIPE, groups[rank]), (Float8CurrentScaling(), None)):
            for step in range(3):
                with fp8_autocast(recipe=recipe, group=group):
                    model(inputs(rank, step), "b").square().sum().backward()
    return {"sizes": sizes, "scale": model.a.fp8_state.scale.tolist()}


def check_groups(rank: int) -> dict[str, Any]:
    """Halves of the ranks reduce among themselves."""
    halves = [torch.distributed.new_group([one, one + 1]) for one in range(0, world(), 2)]
    model = Branches()
    for step in range(3):
        with fp8_autocast(recipe=RECIPE, group=halves[rank // 2]):
            model(inputs(rank, step), "b").square().sum().backward()
    return {"seen": [snapshot(model)]}


def check_drop_in(rank: int) -> dict[str, Any]:
    """Transformer Engine's names: fp8_group, all ranks where it is None, and reduce_amax."""
    import fusestep

    fusestep.install_shims()
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling as Delayed

        pair = torch.distributed.new_group([0, 1])
        scales = []
        for group, reduces in ((None, True), (pair, True), (pair, False)):
            torch.manual_seed(5)
            model = te.Linear(16, 16, device="cpu")
            for step in range(2):
                with te.fp8_autocast(fp8_recipe=Delayed(amax_history_len=4, reduce_amax=reduces), fp8_group=group):
                    model(
                        torch.randn(4, 16, generator=torch.Generator().manual_seed(step + 10 * rank))
                    ).sum().backward()
            scales.append(model.fp8_meta["scaling_fwd"].scale.tolist())
    finally:
        fusestep.uninstall_shims()
    return {"scales": scales}


def check_compiled(rank: int) -> dict[str, Any]:
    """A region that begins in a compiled function reduces as any other."""
    model = Branches()

    def step(x: Tensor) -> Tensor:
        with fp8_autocast(recipe=RECIPE):
            loss: Tensor = model(x, "b").square().sum()
            return loss

    compiled = torch.compile(step, backend="eager")
    for number in range(3):
        compiled(inputs(rank, number)).backward()
    return {"seen": [snapshot(model)]}


def check_converted(rank: int) -> dict[str, Any]:
    """Modules that conversion made, of which one runs on one rank only."""
    import fusestep

    model: Any = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
    fusestep.convert(model, fp8=RECIPE)
    model = copy.deepcopy(model)
    for number in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        with fp8_autocast(recipe=RECIPE):
            y = model[0](x)
            y = model[1](y) if rank else model[2](y)
        y.square().sum().backward()
    with fp8_autocast(recipe=RECIPE):
        return {"seen": [snapshot(model)]}


def check_strangers(rank: int) -> dict[str, Any]:
    """Ranks that built different modules all raise, again and again, and go on with a recipe that reduces nothing."""
    model: Any = nn.Sequential(Linear(9, 9), Linear(9, 9) if rank else LayerNormMLP(9, 9))
    words = []
    with fp8_autocast(recipe=RECIPE):
        model(inputs(rank, 0)).sum().backward()
    for _ in range(2):
        with pytest.raises(UserError) as caught, fp8_autocast(recipe=RECIPE):
            pass
        words.append(str(caught.value))
    return {"words": words}


def check_all(rank: int, names: list[str]) -> dict[str, Any]:
    """Each in a thread of its own, where no table is known yet."""
    results = {}
    for name in names:
        torch.manual_seed(3)
        with ThreadPoolExecutor(1) as alone:
            results[name] = alone.submit(globals()[f"check_{name}"], rank).result()
    return results


TOGETHER = [
    "amaxes",
    "branches",
    "poison",
    "accumulation",
    "copies_and_files",
    "alone",
    "drop_in",
    "compiled",
    "converted",
    "strangers",
]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(check_all, 2, TOGETHER)


def assert_alike(results: list[dict[str, Any]], name: str) -> None:
    first = results[0][name]["seen"]
    assert first
    assert all(first[-1].values())
    for other in results[1:]:
        assert other[name]["seen"] == first


def test_amaxes_are_the_largest_of_the_ranks_in_one_collective(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "amaxes")
    for one in two:
        assert one["amaxes"]["right"]
        assert one["amaxes"]["sizes"] == [3 + 3 + 6 + 1] * 11
        assert len(one["amaxes"]["exchanged"]) == 2  # hosts speak once: how long their words are, and the words


def test_a_module_that_ran_on_one_rank_only_has_the_same_scales_on_all(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "branches")
    for one in two:
        assert one["branches"]["b"] == [3, 3, 3]
        assert one["branches"]["c"] == [1] * 6
    # c ran first when the table was made, and came in once its flag was read
    came = [step for step, state in enumerate(two[0]["branches"]["seen"]) if any(state.get("c", ([], [], [0]))[2])]
    assert came[0] == 3 + LAG // 2


def test_what_is_not_finite_on_one_rank_is_refused_by_all(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "poison")
    assert two[0]["poison"]["refused"] == two[1]["poison"]["refused"] == [2.0, 0.0, 2.0]
    assert two[0]["poison"]["rolls"] == [3, 5, 3]


def test_micro_batches_recomputation_and_evaluations_call_nobody(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "accumulation")
    assert [state["sizes"] for state in two[0]["accumulation"]["seen"]] == [[], [13], [13], [13]]
    assert two[0]["accumulation"]["rolls"] == [3, 3, 3]


def test_states_go_through_files_and_copies(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "copies_and_files")
    assert all(one["copies_and_files"]["same"] and one["copies_and_files"]["average"] for one in two)


def test_who_reduces_nothing_calls_nobody(two: list[dict[str, Any]]) -> None:
    assert all(one["alone"]["sizes"] == [] for one in two)
    assert two[0]["alone"]["scale"] != two[1]["alone"]["scale"]


def test_transformer_engine_s_names_reduce_over_the_same_ranks(two: list[dict[str, Any]]) -> None:
    first, second = (one["drop_in"]["scales"] for one in two)
    assert first[:2] == second[:2]
    assert first[0] == first[1]
    assert first[2] != second[2]


def test_a_compiled_function_reduces_too(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "compiled")
    assert two[0]["compiled"]["seen"][0]["a"][2] == [2, 2, 2]


def test_converted_modules_are_known_on_all_ranks(two: list[dict[str, Any]]) -> None:
    assert_alike(two, "converted")
    assert set(two[0]["converted"]["seen"][0]) == {"0", "1", "2"}


def test_ranks_that_built_different_modules_all_raise(two: list[dict[str, Any]]) -> None:
    first, second = (one["strangers"]["words"] for one in two)
    assert first == second
    assert first[0] == first[1]
    assert "built different modules" in first[0]


def test_four_ranks_in_halves_and_together() -> None:
    results = run_ranks(check_all, 4, ["amaxes", "branches", "groups"])
    for name in ("amaxes", "branches"):
        assert_alike(results, name)
    for half in (results[:2], results[2:]):
        assert_alike(half, "groups")
    assert results[0]["groups"] != results[2]["groups"]
