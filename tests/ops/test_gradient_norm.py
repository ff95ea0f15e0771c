"""The norm of many gradients, on the CPU, through the interpreter and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.ops import gradient_norm as op
from fusestep.ops.dtypes import KERNEL_DTYPES
from fusestep.ops.gradient_norm import NormScratch, gradient_norm, norm_reference, verdict_of
from fusestep.ops.tensor_table import BLOCK, TensorTable, build_table, entry

PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


def exact(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.detach().cpu().double().square().sum()) for g in gradients))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_norm_equals_the_float64_sum_of_squares(place: str, dtype: torch.dtype) -> None:
    gradients = [torch.randn(s).mul(3).to(place, dtype) for s in ((3, 5), (), (0, 4), (1023,), (1025,), (67, 61), (1,))]
    assert float(gradient_norm(gradients)) == pytest.approx(exact(gradients), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_dtypes_meet_in_one_norm(place: str) -> None:
    gradients = [torch.randn(33, 7).to(place, dtype) for dtype in KERNEL_DTYPES for _ in range(2)]
    assert float(gradient_norm(gradients)) == pytest.approx(exact(gradients), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.reshape(-1)[1:],
        lambda x: x[:1, :1].expand(70, 40),
        lambda x: x[:, 3:4].expand(-1, 9),
        lambda x: x[:30].reshape(2, 3, 5, 41).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "every other column", "odd address", "expanded", "half expanded", "channels last"],
)
def test_any_layout_is_summed_element_by_element(place: str, make: object) -> None:
    gradient = make(torch.randn(33, 41, device=place))  # type: ignore[operator]
    assert float(gradient_norm([gradient, torch.ones(3, device=place)])) == pytest.approx(
        exact([gradient, torch.ones(3)]), rel=3e-6
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1e20, 3e37, 1.0, 1e-25, 1e-40])
def test_neither_large_nor_small_values_leave_the_range_of_fp32(place: str, size: float) -> None:
    gradients = [torch.full((5,), size, device=place), torch.full((7,), size / 3, device=place)]
    assert float(gradient_norm(gradients)) == pytest.approx(exact(gradients), rel=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_ranges_meet_in_one_norm(place: str) -> None:
    gradients = [torch.tensor([3e13, 4e12, 1.0, 1e-20], device=place), torch.tensor([2e12, 1e-13], device=place)]
    assert float(gradient_norm(gradients)) == pytest.approx(exact(gradients), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_fp16_values_whose_squares_overflow_fp16(place: str) -> None:
    norm = gradient_norm([torch.full((2,), 6e4, dtype=torch.float16, device=place)])
    assert float(norm) == pytest.approx(84853, rel=1e-3)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
def test_a_million_bf16_values_do_not_stall_the_sum(place: str) -> None:
    gradient = torch.full((1_000_003,), 0.01, dtype=torch.bfloat16, device=place)
    assert float(gradient_norm([gradient])) == pytest.approx(exact([gradient]), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_one_value_that_is_not_finite_shows(place: str, value: float, dtype: torch.dtype) -> None:
    gradients = [torch.ones(2000, dtype=dtype, device=place) for _ in range(3)]
    gradients[1][1999] = value
    assert not math.isfinite(float(gradient_norm(gradients)))


@pytest.mark.parametrize("place", PLACES)
def test_no_elements_and_zeros_have_norm_0(place: str) -> None:
    assert float(gradient_norm([torch.zeros(0, 3, device=place)])) == 0.0
    assert float(gradient_norm([torch.zeros(1500, device=place)])) == 0.0


def test_complex_and_float64_gradients_count_as_their_parts() -> None:
    gradients = [torch.randn(7, dtype=torch.complex64), torch.randn(5, dtype=torch.float64)]
    parts = [torch.view_as_real(gradients[0]), gradients[1]]
    assert float(gradient_norm(gradients)) == pytest.approx(exact(parts), rel=1e-6)


def test_reference_does_not_lose_a_long_sum() -> None:
    gradient = torch.randn(3_000_000) * 1e-3 + 2e-3
    assert float(norm_reference([gradient])) == pytest.approx(exact([gradient]), rel=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_verdict_takes_out_scale_and_clips(place: str) -> None:
    gradients = [torch.tensor([3.0, 0.0], device=place) * 8, torch.tensor([[4.0]], device=place) * 8]
    scale, zero = torch.tensor(8.0, device=place), torch.tensor(0.0, device=place)
    for max_norm, divisor in ((1.0, 8 * 5.000001), (5.1, 8.0), (math.inf, 8.0)):
        norm, found, skip = verdict(gradients, max_norm, scale, zero).tolist()
        assert (norm, skip) == (5.0, 0.0)
        assert found == pytest.approx(divisor, rel=1e-6)
    assert verdict(gradients, 1.0, scale, zero + 2)[2] == 1
    gradients[0][1] = math.nan
    assert verdict(gradients, 1.0, scale, zero)[2] == 1
    assert verdict(gradients, math.inf, scale, zero)[2] == 1


def verdict(gradients: list[Tensor], max_norm: float, scale: Tensor, found_inf: Tensor) -> Tensor:
    """By the kernel where it runs, else by torch ops: both must judge alike."""
    if not op.uses_triton("gradient_norm", gradients[0].device):
        return verdict_of(norm_reference(gradients), max_norm, scale, found_inf)
    table = build_table(gradients[0].device, [entry(g, g) for g in gradients])
    made = torch.full((3,), math.nan, device=gradients[0].device)
    NormScratch(table.device, [(table, gradients[0].dtype)], made).launch(max_norm, scale, found_inf)
    by_torch = verdict_of(norm_reference(gradients), max_norm, scale, found_inf)
    torch.testing.assert_close(made, by_torch, rtol=1e-6, atol=0, equal_nan=True)
    return made


@pytest.mark.interpreter
def test_a_launch_can_be_repeated_and_forgets_the_one_before() -> None:
    gradient = torch.randn(5000)
    table = build_table(gradient.device, [entry(gradient, gradient)])
    made = torch.zeros(3)
    scratch = NormScratch(table.device, [(table, torch.float32)], made)
    for factor in (1.0, 0.5, 3.0):
        gradient.mul_(factor)
        scratch.launch(math.inf)
        assert float(made[0]) == pytest.approx(exact([gradient]), rel=1e-6)
    assert int(scratch.ticket) == 0


@pytest.mark.interpreter
def test_offsets_past_2_31_elements_are_64_bit() -> None:
    """A table that claims 2^31 elements before the real ones: 32-bit products would read elsewhere."""
    gradient = torch.arange(1.0, BLOCK + 1)
    before = 1 << 31
    values = [gradient.data_ptr() - before * 4, before + BLOCK, -before // BLOCK, 0, 0, 0]
    table = TensorTable(
        gradient.device,
        1,
        1,
        False,
        False,
        torch.tensor(values).reshape(6, 1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int64),
        None,  # type: ignore[arg-type]
    )
    made = torch.zeros(3)
    NormScratch(gradient.device, [(table, torch.float32)], made).launch(math.inf)
    assert float(made[0]) == pytest.approx(exact([gradient]), rel=1e-6)


def test_op_is_registered_as_torch_expects() -> None:
    torch.library.opcheck(torch.ops.fusestep.gradient_norm.default, ([torch.randn(3, 4), torch.randn(5).half()],))


@pytest.mark.gpu
def test_op_is_registered_as_torch_expects_on_a_gpu() -> None:
    gradients = [torch.randn(3, 4, device="cuda"), torch.randn(5, device="cuda").half()]
    torch.library.opcheck(torch.ops.fusestep.gradient_norm.default, (gradients,))


@pytest.mark.gpu
def test_many_real_shapes_on_a_gpu_twice_the_same_bits() -> None:
    shapes = [(50304, 768), (1024, 768), *[(2304, 768), (2304,), (768, 3072), (768,)] * 12, (7, 11)]
    gradients = [torch.randn(shape, device="cuda") for shape in shapes]
    first, second = gradient_norm(gradients), gradient_norm(gradients)
    assert torch.equal(first, second)
    total = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert float(first) == pytest.approx(total, rel=1e-6)


@pytest.mark.gpu
def test_more_than_2_31_elements_on_a_gpu() -> None:
    gradient = torch.full(((1 << 31) + 1031,), 0.5, dtype=torch.bfloat16, device="cuda")
    gradient[-1] = 4096.0
    expected = math.sqrt(0.25 * (gradient.numel() - 1) + 4096.0**2)
    assert float(gradient_norm([gradient])) == pytest.approx(expected, rel=1e-6)


def test_catalogue_proves_and_covers_every_launch() -> None:
    assert all(proof.ok for proof in op._prove(torch.device("cpu")))
    labels = [one.label for one in op._compilations()]
    assert len(set(labels)) == len(labels) == 12


def test_gradients_on_several_devices_are_refused() -> None:
    with pytest.raises(UserError, match="gradient_norm: gradient 1 is on meta and gradient 0 on cpu"):
        op._gradient_norm([torch.ones(3), torch.ones(3, device="meta")])
