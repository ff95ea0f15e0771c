"""One step by the ops sgd_, adagrad_, lamb_ and novograd_: what their optimizers' tests cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops.adagrad import ADAGRAD, AdagradHyper, adagrad_
from fusestep.ops.adam_kernel import Master
from fusestep.ops.batches import BATCH
from fusestep.ops.lamb import LAMB, LambHyper, lamb_
from fusestep.ops.novograd import NOVOGRAD, NovoGradHyper, novograd_
from fusestep.ops.registry import load_catalogue
from fusestep.ops.sgd import SGD, SGDHyper, sgd_
from fusestep.ops.tensor_table import BLOCK, TensorTable, upload
from fusestep.ops.update import Members, Rule, Shared, UpdateSignature, update_entry, update_once

PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]
LR, BETA1, BETA2, EPS, DECAY = 0.03, 0.8, 0.95, 1e-6, 0.1


def sgd(w: Tensor, g: Tensor, v: Tensor, _: Tensor, t: int) -> list[Tensor]:
    """The formulas in float64, as step t; states after the weight."""
    g = g + DECAY * w
    v = g if t == 1 else BETA1 * v + 0.7 * g
    return [w - LR * v, v]


def adagrad(w: Tensor, g: Tensor, h: Tensor, _: Tensor, t: int) -> list[Tensor]:
    g = g + DECAY * w
    h = h + g * g
    return [w - LR / (1 + (t - 1) * 0.2) * g / (h.sqrt() + EPS), h]


def lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int) -> list[Tensor]:
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    u = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS) + DECAY * w
    return [w - LR * w.norm() / u.norm() * u, m, v]


def novograd(w: Tensor, g: Tensor, m: Tensor, n: Tensor, t: int) -> list[Tensor]:
    n = g.norm() if t == 1 else (BETA2 * n**2 + (1 - BETA2) * g.norm() ** 2).sqrt()
    m = BETA1 * m + (1 - BETA1) * g
    d = n / (1 - BETA2**t) ** 0.5 + EPS
    return [w - LR * (m / (1 - BETA1**t) / d + DECAY * w), m, n]


def run_sgd(m: Members, steps: list[Tensor], **more: Any) -> None:
    options = {"momentum": BETA1, "dampening": 0.3, "weight_decay": DECAY}
    sgd_(m.parameters, m.gradients, m.dense[0], steps, masters=m.masters, **{"lr": LR, **options, **more})


def run_adagrad(m: Members, steps: list[Tensor], **more: Any) -> None:
    options = {"lr_decay": 0.2, "eps": EPS, "weight_decay": DECAY}
    adagrad_(m.parameters, m.gradients, m.dense[0], steps, masters=m.masters, **{"lr": LR, **options, **more})


ADAPTIVE: dict[str, Any] = {"beta1": BETA1, "beta2": BETA2, "eps": EPS, "weight_decay": DECAY}


def run_lamb(m: Members, steps: list[Tensor], **more: Any) -> None:
    lamb_(m.parameters, m.gradients, *m.dense, steps, masters=m.masters, **{"lr": LR, **ADAPTIVE, **more})


def run_novograd(m: Members, steps: list[Tensor], **more: Any) -> None:
    options = {"lr": LR, **ADAPTIVE, **more}
    novograd_(m.parameters, m.gradients, m.dense[0], m.scalars, steps, masters=m.masters, **options)


Run = Callable[..., None]
OPS: dict[str, tuple[Run, Callable[..., list[Tensor]], int, bool]] = {
    # how it is run, the formula, states of the parameter's shape, whether there is a 0-d one
    "sgd": (run_sgd, sgd, 1, False),
    "adagrad": (run_adagrad, adagrad, 1, False),
    "lamb": (run_lamb, lamb, 2, False),
    "novograd": (run_novograd, novograd, 1, True),
}


def members(place: str, shapes: list[tuple[int, ...]], name: str, dtype: torch.dtype = torch.float32) -> Members:
    """The first state of the parameter's shape is a moment or a sum, so it is not negative here."""
    _, _, dense, has_scalar = OPS[name]
    weights = [torch.randn(shape).to(place, dtype) for shape in shapes]
    return Members(
        weights,
        [torch.randn(shape).to(place, dtype) for shape in shapes],
        [[torch.rand(shape).to(place) for shape in shapes] for _ in range(dense)],
        [torch.rand(()).to(place) for _ in shapes] if has_scalar else [],
        [] if dtype == torch.float32 else [(w.float() + torch.randn(w.shape).to(place) * 1e-4) for w in weights],
    )


def expected(name: str, m: Members, steps: list[int], divisor: float = 1.0) -> list[list[Tensor]]:
    _, formula, _, has_scalar = OPS[name]
    found = []
    for i, step in enumerate(steps):
        states = [one[i] for one in m.dense] + (m.scalars[i : i + 1] if has_scalar else [])
        first, second = (*states, states[0])[:2]
        w, g, a, b = (t.detach().cpu().double() for t in (m.weights[i], m.gradients[i], first, second))
        found.append(formula(w, g / divisor, a, b, step))
    return found


def check(name: str, m: Members, wanted: list[list[Tensor]]) -> None:
    for i, correct in enumerate(wanted):
        states = [one[i] for one in m.dense] + (m.scalars[i : i + 1] if OPS[name][3] else [])
        for value, right in zip((m.weights[i], *states), correct, strict=True):
            torch.testing.assert_close(value.detach().cpu().double(), right, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_equals_the_formula_with_a_count_for_each_parameter(place: str, name: str, dtype: torch.dtype) -> None:
    m, counts = members(place, [(3, 5), (), (1030,)], name, dtype), [0, 5_000_000, 3]
    wanted = expected(name, m, [count + 1 for count in counts])
    steps = [torch.tensor(float(count), device=place) for count in counts]
    OPS[name][0](m, steps)
    check(name, m, wanted)
    assert [float(step) for step in steps] == [count + 1.0 for count in counts]
    for parameter, master in zip(m.parameters, m.masters, strict=False):
        torch.testing.assert_close(parameter.float(), master, rtol=2**-7, atol=0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OPS)
def test_divisor_divides_gradients_and_skip_leaves_every_bit(place: str, name: str) -> None:
    m = members(place, [(7,), (6, 5)], name)
    tensors = [*m.parameters, *m.scalars, *(t for one in m.dense for t in one)]
    before = [t.clone() for t in tensors]
    steps = [torch.tensor(4.0, device=place) for _ in range(2)]
    divisor, skip = torch.tensor(8.0, device=place), torch.tensor(1.0, device=place)
    m.gradients[0][0] = math.nan
    OPS[name][0](m, steps, divisor=divisor, skip=skip)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert [float(step) for step in steps] == [4.0, 4.0]
    m.gradients[0][0] = 1.0
    wanted = expected(name, m, [5, 5], 8.0)
    OPS[name][0](m, steps, lr=torch.tensor(LR, device=place), divisor=divisor)
    check(name, m, wanted)


@pytest.mark.parametrize("name", OPS)
def test_long_parameters_are_cut_into_batches_without_a_seam(name: str) -> None:
    m = members("cpu", [((2 * BATCH + 13) // 7, 7), (5,)], name)
    for one in (m.parameters, m.gradients, *m.dense):
        one[0] = one[0].t()
    wanted = expected(name, m, [1, 1])
    OPS[name][0](m, [torch.zeros(()) for _ in range(2)])
    check(name, m, wanted)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPS)
def test_ops_are_registered_as_torch_expects(place: str, name: str) -> None:
    m = members(place, [(3, 4), (5,)], name)
    steps = [torch.ones((), device=place) for _ in range(2)]
    tail = (torch.tensor(1.0, device=place), torch.tensor(0.0, device=place))
    lr = torch.tensor(0.1, device=place)
    states = [*m.dense, *([m.scalars] if m.scalars else [])]
    options: dict[str, tuple[Any, ...]] = {
        "sgd": (0.9, 0.1, 0.1, False, True),
        "adagrad": (0.1, 1e-6, 0.1, True),
        "lamb": (0.9, 0.99, 1e-6, 0.1, True, True, True, False),
        "novograd": (0.9, 0.99, 1e-6, 0.1, True, False, True, False, False),
    }
    op = getattr(torch.ops.fusestep, f"{name}_").default
    torch.library.opcheck(op, (m.parameters, m.gradients, *states, [], steps, lr, *options[name], *tail))


RULES: list[tuple[str, Rule, Any]] = [
    ("sgd", SGD, SGDHyper(LR, BETA1, 0.3, DECAY)),
    ("adagrad", ADAGRAD, AdagradHyper(LR, 0.2, EPS, DECAY)),
    ("lamb", LAMB, LambHyper(LR, BETA1, BETA2, EPS, 0.0)),  # without trust ratios, which want every chunk
    ("novograd", NOVOGRAD, NovoGradHyper(LR, BETA1, BETA2, EPS, DECAY)),
]


def far_away(name: str, m: Members) -> list[list[Tensor]]:
    """What the first of a tensor's programs alone makes of step 4."""
    w, g, first = (t.double() for t in (m.weights[0], m.gradients[0], m.dense[0][0]))
    if name == "lamb":
        second = BETA2 * m.dense[1][0].double() + (1 - BETA2) * g * g
        first = BETA1 * first + (1 - BETA1) * g
        return [[w - LR * first / (1 - BETA1**4) / ((second / (1 - BETA2**4)).sqrt() + EPS), first, second]]
    if name == "novograd":
        first = BETA1 * first + (1 - BETA1) * g
        d = m.scalars[0].double() / (1 - BETA2**4) ** 0.5 + EPS
        return [[w - LR * (first / (1 - BETA1**4) / d + DECAY * w), first, m.scalars[0].double()]]
    return expected(name, m, [4])


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "rule", "hyper"), RULES, ids=OPS)
def test_offsets_past_2_31_elements_are_64_bit(name: str, rule: Rule, hyper: Any) -> None:
    """A table that claims 2^31 elements before the real ones: 32-bit products would write elsewhere."""
    m = members("cpu", [(BLOCK,)], name)
    wanted = far_away(name, m)
    before, lr = 1 << 31, torch.tensor(LR)
    scalar = m.scalars[0] if m.scalars else None
    made = update_entry(m.parameters[0], m.gradients[0], [one[0] for one in m.dense], scalar, None, lr.data_ptr(), 0, 0)
    shift = before * 4
    states = 2 if len(m.dense) > 1 else 1
    rows = [row - shift if place <= states else row for place, row in enumerate(made.rows)]
    column = [m.gradients[0].data_ptr() - shift, before + BLOCK, -before // BLOCK, 0, 0, 0, *rows]
    table = TensorTable(
        lr.device,
        1,
        1,
        False,
        False,
        torch.tensor(column).reshape(-1, 1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int64),
        None,  # type: ignore[arg-type]
    )
    signature = UpdateSignature(lr.device, torch.float32, torch.float32, torch.float32, Master.NONE, len(m.dense))
    shared = Shared(
        upload([hyper.row()], torch.float32, lr.device),
        torch.tensor([3.0]),
        torch.tensor([3.0]),
        torch.ones(()),
        torch.zeros(()),
        torch.zeros(2, dtype=torch.int64),
        0,
    )
    scratch = rule.scratch(table)
    rule.launch(signature, table, scratch, shared)
    check(name, m, wanted)
    if name == "novograd":
        assert float(scratch[0][0]) == pytest.approx(float(m.gradients[0].double().norm()), rel=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_tensors_on_several_devices_are_refused_before_anything_changes(name: str) -> None:
    m = members("cpu", [(3,), (5,)], name)
    before = [t.clone() for t in m.parameters]
    m.gradients[1] = torch.ones(5, device="meta")
    run = {"sgd": SGD, "adagrad": ADAGRAD, "lamb": LAMB, "novograd": NOVOGRAD}[name]
    hyper = next(hyper for its, _, hyper in RULES if its == name)
    with pytest.raises(UserError, match=f"{name}_: gradient 1 is on meta and parameter 0 on cpu"):
        update_once(run, m, [torch.zeros(()) for _ in range(2)], torch.tensor(0.1), hyper, None, None)
    assert all(torch.equal(a, b) for a, b in zip(m.parameters, before, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_catalogue_proves_and_covers_every_launch(name: str) -> None:
    op = load_catalogue()[name]
    proofs = op.prove(torch.device("cpu"))
    assert proofs
    assert all(proof.ok for proof in proofs)
    compiled = list(op.compilations())
    of_kernels = {one.kernel for one in compiled}
    assert len(of_kernels) == (1 if name in ("sgd", "adagrad") else 2)
    assert len({one.label for one in compiled}) == len(compiled)
    for kernel in of_kernels:
        labels = " ".join(one.label for one in compiled if one.kernel is kernel)
        assert all(dtype in labels for dtype in ("fp32", "bf16", "fp16", "strided"))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", OPS)
def test_kernels_are_proved_by_the_interpreter(name: str) -> None:
    assert all(proof.ok for proof in load_catalogue()[name].prove(torch.device("cpu")))
