"""One Adam step by the op, on the CPU, through the interpreter and on a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops import adam as op
from fusestep.ops.adam import adam_
from fusestep.ops.adam_kernel import (
    DTYPE_PAIRS,
    MOMENT_DTYPES,
    AdamSignature,
    Master,
    adam_rows,
    compilations,
    launch_adam,
)
from fusestep.ops.adam_reference import Hyperparameters
from fusestep.ops.batches import BATCH
from fusestep.ops.tensor_table import BLOCK, TensorTable, upload

PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]
OPTIONS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def oracle(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    is_decoupled: bool = True,
    is_corrected: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in float64, one tensor at a time; `step` counts this step."""
    w, g, m, v = (t.detach().cpu().double() for t in (w, g, m, v))
    beta1, beta2, decay = OPTIONS["beta1"], OPTIONS["beta2"], OPTIONS["weight_decay"]
    w, g = (w * (1 - lr * decay), g) if is_decoupled else (w, g + decay * w)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if is_corrected else (1.0, 1.0)
    return w - lr * (m / c1) / ((v / c2).sqrt() + OPTIONS["eps"]), m, v


def check(value: Tensor, expected: Tensor, rtol: float = 2e-6) -> None:
    torch.testing.assert_close(value.detach().cpu().double(), expected, rtol=rtol, atol=3e-7)


def case(place: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[list[Tensor]]:
    w, g, m = ([torch.randn(s).to(place, dtype) for s in shapes] for _ in range(3))
    return [w, g, [x.float() for x in m], [torch.rand(s, device=place) for s in shapes]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("step", [0, 1, 700, 5_000_000])
def test_step_equals_the_formula(place: str, is_decoupled: bool, is_corrected: bool, step: int) -> None:
    shapes = [(3, 5), (), (0, 4), (1023,), (1024,), (1500,)]
    w, g, m, v = case(place, shapes, torch.float32)
    expected = [oracle(*one, step + 1, 0.03, is_decoupled, is_corrected) for one in zip(w, g, m, v, strict=True)]
    steps = [torch.tensor(float(step), device=place) for _ in shapes]
    options = {"adam_w_mode": is_decoupled, "bias_correction": is_corrected, **OPTIONS}
    adam_(w, g, m, v, steps, lr=0.03, **options)
    for one, wanted in zip(zip(w, m, v, strict=True), expected, strict=True):
        for value, correct in zip(one, wanted, strict=True):
            check(value, correct)
    assert [float(s) for s in steps] == [step + 1.0] * len(shapes)


@pytest.mark.parametrize("place", PLACES)
def test_each_parameter_has_its_own_step_count(place: str) -> None:
    w, g, m, v = case(place, [(7,), (9,), (11,)], torch.float32)
    counts = [0, 10, 3]
    expected = [oracle(*one, n + 1, 0.1) for n, one in zip(counts, zip(w, g, m, v, strict=True), strict=True)]
    steps = [torch.tensor(float(n), device=place) for n in counts]
    adam_(w, g, m, v, steps, lr=torch.tensor(0.1), **OPTIONS)
    for value, wanted in zip(w, expected, strict=True):
        check(value, wanted[0])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("beta2", [0.999, 0.99999, 0.0])
def test_bias_correction_keeps_fp32s_last_places(place: str, beta2: float) -> None:
    """1 − 0.99999 in fp32 alone would be off by 10⁻³."""
    w, g, m, v = [torch.zeros(5, device=place)], [torch.full((5,), 0.25, device=place)], [], []
    m, v = [torch.zeros(5, device=place)], [torch.zeros(5, device=place)]
    adam_(w, g, m, v, [torch.zeros((), device=place)], lr=1.0, beta1=0.9, beta2=beta2, eps=1e-30)
    check(w[0], torch.full((5,), -1.0, dtype=torch.float64), rtol=5e-7)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_with_masters_are_the_rounded_masters(place: str, dtype: torch.dtype) -> None:
    w, g, m, v = case(place, [(33, 31), (5,)], dtype)
    masters = [x.float() + torch.randn_like(x.float()) * 1e-4 for x in w]
    expected = [oracle(*one, 1, 0.03) for one in zip(masters, g, m, v, strict=True)]
    adam_(w, g, m, v, [torch.zeros((), device=place) for _ in w], lr=0.03, masters=masters, **OPTIONS)
    for parameter, master, wanted in zip(w, masters, expected, strict=True):
        check(master, wanted[0])
        # The interpreter cuts off where a device rounds, so one unit in the last place is allowed.
        spacing = 2**-7 if dtype == torch.bfloat16 else 2**-10
        check(parameter, master.cpu().double(), rtol=spacing)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_without_masters_are_updated_in_fp32_and_rounded_once(place: str, dtype: torch.dtype) -> None:
    w, g, m, v = case(place, [(1500,)], dtype)
    expected = oracle(w[0], g[0], m[0], v[0], 1, 0.03)
    adam_(w, g, m, v, [torch.zeros((), device=place)], lr=0.03, **OPTIONS)
    check(w[0], expected[0], rtol=2**-7 if dtype == torch.bfloat16 else 2**-10)
    check(m[0], expected[1])


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_other_dtypes_are_widened(place: str) -> None:
    for w_dtype, g_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        w, _, m, v = case(place, [(200,)], w_dtype)
        g = [torch.randn(200).to(place, g_dtype)]
        masters = [] if w_dtype == torch.float32 else [w[0].float()]
        expected = oracle(masters[0] if masters else w[0], g[0], m[0], v[0], 1, 0.03)
        adam_(w, g, m, v, [torch.zeros((), device=place)], lr=0.03, masters=masters, **OPTIONS)
        check(masters[0] if masters else w[0], expected[0])


@pytest.mark.parametrize("place", PLACES)
def test_bf16_moments_are_stored_rounded(place: str) -> None:
    w, g, m, v = case(place, [(1100,)], torch.float32)
    m, v = [m[0].bfloat16()], [v[0].bfloat16()]
    expected = oracle(w[0], g[0], m[0], v[0], 1, 0.03)
    adam_(w, g, m, v, [torch.zeros((), device=place)], lr=0.03, **OPTIONS)
    check(w[0], expected[0])
    check(m[0], expected[1], rtol=2**-7)
    check(v[0], expected[2], rtol=2**-7)


@pytest.mark.parametrize("place", PLACES)
def test_divisor_divides_gradients_and_skip_leaves_every_bit(place: str) -> None:
    w, g, m, v = case(place, [(7,), (1030,)], torch.float32)
    before = [t.clone() for t in (*w, *m, *v)]
    steps = [torch.tensor(4.0, device=place) for _ in w]
    scalar = {"divisor": torch.tensor(8.0, device=place), "skip": torch.tensor(1.0, device=place)}
    g[0][0] = math.nan
    adam_(w, g, m, v, steps, lr=0.03, **scalar, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip((*w, *m, *v), before, strict=True))
    assert [float(s) for s in steps] == [4.0, 4.0]
    g[0][0] = 1.0
    expected = [oracle(a, b / 8, c, d, 5, 0.03) for a, b, c, d in zip(w, g, m, v, strict=True)]
    adam_(w, g, m, v, steps, lr=0.03, divisor=scalar["divisor"], **OPTIONS)
    for value, wanted in zip(w, expected, strict=True):
        check(value, wanted[0])


@pytest.mark.interpreter
def test_parameter_of_a_view_leaves_its_neighbours_alone() -> None:
    base = torch.full((40, 60), math.nan)
    w = base[3:30:2, 5:50]
    w.copy_(torch.randn(w.shape))
    g, m, v = torch.randn(45, 14).t(), torch.randn(14, 45), torch.rand(14, 45)
    outside = base.isnan()
    expected = oracle(w, g, m, v, 1, 0.03)
    adam_([w], [g], [m], [v], [torch.zeros(())], lr=0.03, **OPTIONS)
    check(w, expected[0])
    assert torch.equal(base.isnan(), outside)


@pytest.mark.interpreter
def test_offsets_past_2_31_elements_are_64_bit() -> None:
    """A table that claims 2^31 elements before the real ones: 32-bit products would write elsewhere."""
    w, g, m, v = (torch.randn(BLOCK) for _ in range(4))
    v.abs_()
    expected = oracle(w, g, m, v, 1, 0.03)
    before = 1 << 31
    tensors, rows = adam_rows(w, m, v, None, torch.tensor(0.03).data_ptr(), 0, 0)
    lr = torch.tensor(0.03)
    rows = (0, lr.data_ptr(), 0, 0)
    column = [g.data_ptr() - before * 4, before + BLOCK, -before // BLOCK, 0, 0, 0]
    column += [t.data_ptr() - before * 4 for t in tensors]
    table = TensorTable(
        w.device,
        1,
        1,
        False,
        False,
        torch.tensor([*column, *rows]).reshape(-1, 1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int64),
        None,  # type: ignore[arg-type]
    )
    hyper = upload([Hyperparameters(0.03, 0.8, 0.95, 1e-6, 0.1).row()], torch.float32, w.device)
    signature = AdamSignature(w.device, w.dtype, g.dtype, m.dtype, Master.NONE)
    launch_adam(signature, table, hyper, torch.zeros(1), torch.zeros(1), torch.zeros(2, dtype=torch.int64))
    check(w, expected[0])


def arguments(place: str) -> tuple[object, ...]:
    def tensors() -> list[Tensor]:
        return [torch.rand(3, 4, device=place), torch.rand(5, device=place)]

    steps = [torch.ones((), device=place) for _ in range(2)]
    lr, one, zero = (torch.tensor(x, device=place) for x in (0.1, 1.0, 0.0))
    return (tensors(), tensors(), tensors(), tensors(), [], steps, lr, 0.9, 0.99, 1e-8, 0.0, True, True, one, zero)


def test_op_is_registered_as_torch_expects() -> None:
    torch.library.opcheck(torch.ops.fusestep.adam_.default, arguments("cpu"))


@pytest.mark.gpu
def test_op_is_registered_as_torch_expects_on_a_gpu() -> None:
    torch.library.opcheck(torch.ops.fusestep.adam_.default, arguments("cuda"))


def test_long_parameters_are_cut_into_batches_without_a_seam() -> None:
    n = 2 * BATCH + 13
    w, g, m, v = (torch.randn(n // 7, 7) for _ in range(4))
    w, g, m, v = w.t(), g.t(), m.t(), v.abs().t()
    expected = oracle(w, g, m, v, 1, 0.03)
    adam_([w], [g], [m], [v], [torch.zeros(())], lr=0.03, **OPTIONS)
    check(w, expected[0])
    check(v, expected[2])


def test_catalogue_proves_and_covers_every_launch() -> None:
    assert all(proof.ok for proof in op._prove(torch.device("cpu")))
    labels = [one.label for one in compilations()]
    assert len(set(labels)) == len(labels) == 88 - 20 + 4  # of fp16 half, and one of remainders
    dtypes = {label.partition(" moments")[0] for label in labels}
    assert len(dtypes) == len(DTYPE_PAIRS) * len(MOMENT_DTYPES)


def test_tensors_on_several_devices_are_refused_before_anything_changes() -> None:
    lists = [[torch.ones(3), torch.ones(5)] for _ in range(4)]
    lists[1][1] = torch.ones(5, device="meta")
    steps = [torch.zeros(()) for _ in range(2)]
    with pytest.raises(UserError, match="adam_: gradient 1 is on meta and parameter 0 on cpu"):
        op._adam(*lists, [], steps, torch.tensor(0.1), 0.9, 0.99, 1e-8, 0.0, True, True, None, None)
    assert all(torch.equal(t, torch.ones_like(t)) for t in (*lists[0], *lists[2]))
