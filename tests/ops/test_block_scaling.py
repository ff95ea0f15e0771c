"""Casts to FP8 by blocks and their products, against an oracle that looks every byte up in the format's own table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusestep import dispatch
from fusestep.errors import UserError
from fusestep.ops import block_product, block_scaling
from fusestep.ops.block_product import PAIRS
from fusestep.ops.block_scaling import BLOCKS, quantize_blocks, quantize_blocks_op
from fusestep.ops.dtypes import FP8
from fusestep.ops.quantized import Quantized, padded
from fusestep.ops.scaled_mm import scaled_mm, tolerance

E4M3, E5M2 = FP8
ROW, TILE, MX = BLOCKS

#: Half the distance of neighbouring values over the smaller: the largest error of a value, so also of a block's amax.
RELATIVE = {E4M3: 2**-4, E5M2: 2**-3}


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values whose sizes differ from row to row and from column to column."""
    sizes = torch.randn(rows, 1) + torch.randn(1, columns)
    return (torch.randn(rows, columns) * sizes.clamp(max=3).exp()).to(dtype)


def bits(values: Tensor) -> Tensor:
    """The bytes of a tensor, which tell −0 from 0 and NaN from NaN."""
    return values.contiguous().view(torch.int8 if values.element_size() == 1 else torch.int32)


# The oracle


def oracle_bytes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest values of a format by search in its table: ties to the even code, saturated; 0x7F of NaN and of an
    infinity, which stands for an infinite value, since no block's scale makes a finite one overflow."""
    positive = torch.arange(0x7F if dtype is E4M3 else 0x7C, dtype=torch.uint8)
    table = positive.view(dtype).double()
    middles = (table[1:] + table[:-1]) / 2
    size = scaled.double().abs().contiguous()
    code = torch.searchsorted(middles, size, right=False)
    is_tie = (code < len(middles)) & (middles[code.clamp(max=len(middles) - 1)] == size)
    code += (is_tie & (code % 2 == 1)).long()
    sign = torch.where(torch.signbit(scaled), 0x80, 0)
    return torch.where(scaled.isfinite(), code | sign, 0x7F).to(torch.uint8)


def oracle_scale(values: Tensor, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool) -> tuple[float, float]:
    """(scale, inverse or E8M0 exponent) of the elements of one block, from Python's own numbers."""
    amax = float(values.abs().max())  # NaN if there is one
    largest = torch.finfo(dtype).max
    if block == MX:
        if amax == 0 or not math.isfinite(amax):
            exponent = 0 if amax == 0 else 254 if amax == math.inf else 255
        else:
            mantissa, power = math.frexp(amax / largest)  # 0.5 <= mantissa < 1; float64 holds the quotient closely
            exponent = max(0, min(254, power + 127 - (mantissa == 0.5)))
        return (math.nan if exponent == 255 else 2.0 ** (127 - exponent)), float(exponent)
    scale = 1.0
    if amax > 0 and math.isfinite(amax):
        scale = min(float(torch.tensor(largest, dtype=torch.float32) / torch.tensor(amax)), 2.0**126)
        if power_of_two:
            scale = 2.0 ** (math.frexp(scale)[1] - 1)
    return scale, float(1 / torch.tensor(scale))


def oracle(x: Tensor, dtype: torch.dtype, block: tuple[int, int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(bytes of x without padding, inverse scales or exponents of its blocks)."""
    x = x.float()
    rows, columns = x.shape
    height, width = block
    scale = torch.zeros(-(-rows // height), -(-columns // width))
    inverse = torch.zeros_like(scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            values = x[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale[i, j], inverse[i, j] = oracle_scale(values, dtype, block, power_of_two)
    wide = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return oracle_bytes(x * wide, dtype), inverse


def check_form(data: Tensor, scales: Tensor, x: Tensor, block: tuple[int, int], power_of_two: bool) -> None:
    """One form of a quantised matrix: bytes, zero padding, scales."""
    rows, columns = x.shape
    assert data.shape == (padded(rows), padded(columns))
    assert data.is_contiguous()
    code, inverse = oracle(x, data.dtype, block, power_of_two)
    found = data.view(torch.uint8)
    assert torch.equal(found[:rows, :columns], code)
    assert not found[rows:].any()
    assert not found[:, columns:].any()
    there = scales[: inverse.shape[0], : inverse.shape[1]]
    assert torch.equal(there.float(), inverse)
    assert torch.isfinite(scales.float()).all()


def check_quantized(q: Quantized, x: Tensor, block: tuple[int, int], power_of_two: bool = True) -> None:
    assert q.shape == tuple(x.shape)
    assert q.block == block
    if q.data is not None:
        check_form(q.data, q.scale_inv, x, block, power_of_two)
    if q.transposed is not None:
        check_form(q.transposed, q.transposed_scale_inv, x.t(), block, power_of_two)


# Casts


@given(
    rows=st.integers(1, 400),
    columns=st.integers(1, 400),
    block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from(FP8),
    element=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=25)
@example(128, 128, TILE, E4M3, torch.bfloat16, True, 0)
@example(1, 1, ROW, E5M2, torch.float16, False, 1)
def test_bytes_and_scales_are_those_of_the_table(
    rows: int,
    columns: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    element: torch.dtype,
    power_of_two: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = random_matrix(rows, columns, element)
    q, sums = quantize_blocks(x, dtype, block, columnwise=True, power_of_two=power_of_two, sums_dtype=torch.float32)
    check_quantized(q, x, block, power_of_two)
    assert sums is not None
    true = x.double().sum(0)
    assert float((sums - true).abs().max()) <= 1e-5 * float(x.double().abs().sum(0).max())


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 130])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", FP8)
def test_a_partial_last_block_takes_its_scale_from_what_is_there(
    columns: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    x = random_matrix(5, columns)
    q, _ = quantize_blocks(x, dtype, block, columnwise=True)
    height, width = block
    found = q.dequantize()
    for start in range(0, columns, width):
        part, true = found[:, start : start + width], x[:, start : start + width]
        amax = true.abs().amax(1, keepdim=True) if height == 1 else true.abs().max()
        assert bool(((part - true).abs() <= RELATIVE[dtype] * amax).all())
    transposed = Quantized(q.shape, None, q.transposed, q.scale_inv, q.transposed_scale_inv, block).dequantize()
    assert float((transposed - x).norm() / x.norm()) <= RELATIVE[dtype]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
def test_zero_block_gives_zeros_and_leaves_its_neighbours_alone(block: tuple[int, int], element: torch.dtype) -> None:
    x = random_matrix(260, 300, element)
    x[:, 128:256] = 0
    x[128:256] = 0
    q, _ = quantize_blocks(x, E4M3, block, columnwise=True)
    check_quantized(q, x, block)
    assert not q.dequantize()[:, 128:256].any()
    if block != MX:
        assert bool((q.scale_inv[:, 1] == 1).all())


@pytest.mark.parametrize("block", BLOCKS)
def test_one_huge_value_spoils_its_own_block_alone(block: tuple[int, int]) -> None:
    x = random_matrix(256, 256)
    quiet, _ = quantize_blocks(x, E4M3, block, columnwise=True)
    x[3, 5] = 1e30
    q, _ = quantize_blocks(x, E4M3, block, columnwise=True)
    check_quantized(q, x, block)
    assert q.data is not None
    assert quiet.data is not None
    differs = (q.data.view(torch.uint8) != quiet.data.view(torch.uint8)).nonzero()
    assert differs[:, 0].max() < block[0] + (3 if block[0] == 1 else 0)
    assert differs[:, 1].max() < block[1]
    assert torch.equal(q.dequantize()[200:], quiet.dequantize()[200:])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-38, 1e-36, 1e-30, 1e-9, 3e38])
def test_tiny_and_large_amaxes_keep_scales_and_inverses_finite(
    block: tuple[int, int], dtype: torch.dtype, amax: float
) -> None:
    x = torch.rand(33, 140).mul_(amax)
    x[0, 0] = amax
    for power_of_two in (True, False):
        q, _ = quantize_blocks(x, dtype, block, columnwise=True, power_of_two=power_of_two)
        check_quantized(q, x, block, power_of_two)
        if amax >= 1e-30:
            assert float((q.dequantize().double() - x).norm() / x.double().norm()) <= RELATIVE[dtype]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", FP8)
def test_values_that_are_not_finite_are_seen_in_their_place(block: tuple[int, int], dtype: torch.dtype) -> None:
    x = random_matrix(40, 300)
    x[3, 5], x[4, 130], x[35, 260], x[36, 1] = math.inf, -math.inf, math.nan, -math.nan
    q, _ = quantize_blocks(x, dtype, block, columnwise=True)
    found = q.dequantize()
    for place in ((3, 5), (4, 130), (35, 260), (36, 1)):
        assert bool(found[place].isnan())
    assert q.transposed is not None
    for data in (q.data, q.transposed.t()):
        assert data is not None
        assert {int(data.view(torch.uint8)[place]) for place in ((3, 5), (4, 130), (35, 260), (36, 1))} == {0x7F}
    quiet = found[10:30, 200:250] if block == ROW else found[10:30, 32:64]
    assert bool(quiet.isfinite().all()) or block == TILE


def test_exponents_of_mxfp8_round_up() -> None:
    # 448 · 2^k needs 2^k; a little more needs the next.
    for amax, exponent in (
        (448.0, 127),
        (448.00003, 128),
        (447.99997, 127),
        (224.0, 126),
        (0.0, 0),
        (1.75 * 2.0**-119, 0),
    ):
        q, _ = quantize_blocks(torch.full((1, 32), amax), E4M3, MX)
        assert int(q.scale_inv[0, 0]) == exponent
    for amax, exponent in ((math.inf, 254), (math.nan, 255)):
        q, _ = quantize_blocks(torch.full((1, 32), amax), E4M3, MX)
        assert int(q.scale_inv[0, 0]) == exponent


def test_power_of_two_scales_lose_no_bit_of_values_that_fp8_holds() -> None:
    codes = torch.randint(0, 0x7E, (64, 256), dtype=torch.uint8)
    x = codes.view(E4M3).float() * 2.0**-5
    for block in BLOCKS:
        q, _ = quantize_blocks(x, E4M3, block, columnwise=True)
        big = x.abs() >= x.abs().max() * 2.0**-10
        assert torch.equal(q.dequantize()[big], x[big])


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (300, 1)])
@pytest.mark.parametrize("block", BLOCKS)
def test_empty_and_single_rows_and_columns(shape: tuple[int, int], block: tuple[int, int]) -> None:
    x = random_matrix(*shape)
    q, sums = quantize_blocks(x, E4M3, block, columnwise=True, sums_dtype=torch.float32)
    check_quantized(q, x, block)
    assert sums is not None
    assert torch.allclose(sums, x.sum(0))
    assert q.dequantize().shape == shape


@pytest.mark.parametrize("block", BLOCKS)
def test_strides_change_nothing(block: tuple[int, int]) -> None:
    x = random_matrix(150, 201)
    expected, _ = quantize_blocks(x, E4M3, block, columnwise=True)
    assert expected.data is not None
    padded_out = torch.full((150, 300), 1e9)
    padded_out[:, 50:251] = x
    for strided in (
        x.t().contiguous().t(),
        padded_out[:, 50:251],
        x.repeat_interleave(2, 0)[::2],
        torch.nn.Parameter(x),
    ):
        found, _ = quantize_blocks(strided, E4M3, block, columnwise=True)
        for one, other in (
            (found.data, expected.data),
            (found.transposed, expected.transposed),
            (found.scale_inv, expected.scale_inv),
            (found.transposed_scale_inv, expected.transposed_scale_inv),
        ):
            assert one is not None
            assert other is not None
            assert torch.equal(bits(one), bits(other))
            assert not one.requires_grad
    row = random_matrix(1, 201)
    expanded, _ = quantize_blocks(row.expand(20, 201), E4M3, block)
    check_quantized(expanded, row.repeat(20, 1), block)


def test_only_the_form_that_is_wanted_is_made() -> None:
    x = random_matrix(20, 30)
    q, sums = quantize_blocks(x, E4M3, ROW, rowwise=False, columnwise=True)
    assert q.data is None
    assert sums is None
    check_quantized(q, x, ROW)
    assert quantize_blocks(x, E4M3, ROW)[0].transposed is None


def test_the_layout_of_scales_is_that_of_cublas() -> None:
    q, _ = quantize_blocks(random_matrix(300, 700), E4M3, ROW, columnwise=True)
    assert (q.scale_inv.shape, q.scale_inv.stride()) == ((304, 6), (1, 304))
    assert (q.transposed_scale_inv.shape, q.transposed_scale_inv.stride()) == ((704, 3), (1, 704))
    q, _ = quantize_blocks(random_matrix(300, 700), E4M3, TILE, columnwise=True)
    assert (q.scale_inv.shape, q.scale_inv.stride()) == ((3, 8), (8, 1))
    assert (q.transposed_scale_inv.shape, q.transposed_scale_inv.stride()) == ((6, 4), (4, 1))
    assert bool((q.scale_inv[:, 6:] == 1).all())


@pytest.mark.parametrize(
    ("x", "dtype", "block", "forms", "words"),
    [
        (torch.ones(3), E4M3, ROW, (True, True), "shape (3,); pass a matrix"),
        (torch.ones(3, 3, dtype=torch.float64), E4M3, ROW, (True, True), "float64; pass float32"),
        (torch.ones(3, 3), torch.float16, ROW, (True, True), "pass torch.float8_e4m3fn"),
        (torch.ones(3, 3), E4M3, (1, 64), (True, True), "(1, 64); pass (1, 128)"),
        (torch.ones(3, 3), E4M3, ROW, (False, False), "rowwise=True or columnwise=True"),
    ],
)
def test_what_cannot_be_cast_is_refused(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], forms: tuple[bool, bool], words: str
) -> None:
    with pytest.raises(UserError) as raised:
        quantize_blocks(x, dtype, block, rowwise=forms[0], columnwise=forms[1])
    assert words in str(raised.value)


def test_the_op_is_lawful() -> None:
    x = random_matrix(20, 30)
    for block, forms in ((ROW, (True, True)), (TILE, (False, True))):
        torch.library.opcheck(
            quantize_blocks_op,
            (x, E4M3, list(block), *forms, True, torch.float32),
            # The tests of gradients and of AOT need FP8 tensors to be comparable, which they are not.
            test_utils=("test_schema", "test_faketensor"),
        )


# Products


def operand(q: Quantized, is_transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scales, exact values) of a form."""
    whole = q.transposed if is_transposed else q.data
    assert whole is not None
    scales = q.transposed_scale_inv if is_transposed else q.scale_inv
    rows, columns = reversed(q.shape) if is_transposed else q.shape
    assert q.block is not None
    height, width = q.block
    inverse = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    wide = inverse.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    return whole, scales, whole[:rows, :columns].double() * wide


def check_products(m: int, n: int, k: int, recipe: str, gradient: torch.dtype, device: torch.device) -> None:
    """The three products of a linear layer against float64 of the dequantised operands."""
    block, weight_block = (MX, MX) if recipe == "mx" else (ROW, TILE)
    power_of_two = recipe != "fp32 scales"
    x, w, dy = (random_matrix(*shape).to(device) for shape in ((m, k), (n, k), (m, n)))
    qx, _ = quantize_blocks(x, E4M3, block, columnwise=True, power_of_two=power_of_two)
    qw, _ = quantize_blocks(w, E4M3, weight_block, columnwise=True, power_of_two=power_of_two)
    qd, _ = quantize_blocks(dy, gradient, block, columnwise=True, power_of_two=power_of_two)
    bias = torch.randn(n, device=device)
    for a, b, rows, columns, blocks, added in (
        (operand(qx, False), operand(qw, False), m, n, (block, weight_block), bias),
        (operand(qd, False), operand(qw, True), m, k, (block, weight_block), None),
        (operand(qd, True), operand(qx, True), n, k, (block, block), None),
    ):
        true = a[2] @ b[2].t()
        size = a[2].abs() @ b[2].abs().t()
        native = block_product._runs_natively(a[0], b[0], *blocks)
        for out_dtype in (torch.float32, torch.bfloat16):
            rounded = None if added is None else added.to(out_dtype).double()
            exact, bound = (true, size) if rounded is None else (true + rounded, size + rounded.abs())
            out = scaled_mm(
                *(a[0], a[1], b[0], b[1]),
                rows=rows,
                columns=columns,
                out_dtype=out_dtype,
                bias=added,
                a_block=blocks[0],
                b_block=blocks[1],
            )
            assert out.shape == (rows, columns)
            assert out.dtype == out_dtype
            # Sums of values this unequal lose more to the product's short accumulator than those of normal ones.
            limit = tolerance(native, False, out_dtype) * (3 if native else 1)
            assert bool(((out.double() - exact).abs() <= limit * bound + 1e-30).all())


@given(
    m=st.integers(1, 400),
    n=st.integers(1, 400),
    k=st.integers(1, 400),
    recipe=st.sampled_from(["block", "fp32 scales", "mx"]),
    gradient=st.sampled_from(FP8),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=25)
@example(1, 1, 1, "block", E5M2, 0)
@example(17, 127, 129, "fp32 scales", E4M3, 1)
def test_products_of_any_shape(m: int, n: int, k: int, recipe: str, gradient: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    check_products(m, n, k, recipe, gradient, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["block", "fp32 scales", "mx"])
@pytest.mark.parametrize("gradient", FP8)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 130, 129), (300, 77, 515), (1024, 512, 256)])
def test_products_on_a_gpu(recipe: str, gradient: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_products(*shape, recipe, gradient, torch.device("cuda", 0))


def test_products_without_elements_are_the_bias() -> None:
    bias = torch.randn(5)
    x, _ = quantize_blocks(torch.zeros(3, 0), E4M3, ROW)
    w, _ = quantize_blocks(torch.zeros(5, 0), E4M3, TILE)
    assert x.data is not None
    assert w.data is not None
    out = scaled_mm(
        *(x.data, x.scale_inv, w.data, w.scale_inv),
        rows=3,
        columns=5,
        out_dtype=torch.float32,
        bias=bias,
        a_block=ROW,
        b_block=TILE,
    )
    assert torch.equal(out, bias.expand(3, 5))


def test_blocks_that_do_not_meet_and_scales_of_others_are_refused() -> None:
    x, _ = quantize_blocks(random_matrix(20, 300), E4M3, ROW)
    w, _ = quantize_blocks(random_matrix(20, 300), E4M3, TILE)
    assert x.data is not None
    assert w.data is not None

    def product(a: Quantized, b: Quantized, a_scales: Tensor, blocks: tuple[tuple[int, int] | None, ...]) -> None:
        assert a.data is not None
        assert b.data is not None
        scaled_mm(
            *(a.data, a_scales, b.data, b.scale_inv),
            rows=20,
            columns=20,
            out_dtype=torch.float32,
            a_block=blocks[0],
            b_block=blocks[1],
        )

    assert (TILE, TILE) not in PAIRS
    for blocks in ((TILE, TILE), (ROW, MX), (ROW, None), (None, TILE)):
        with pytest.raises(UserError, match="in blocks of"):
            product(x, w, x.scale_inv, blocks)
    for scales in (x.scale_inv[:20], x.scale_inv.contiguous(), x.scale_inv.double(), w.scale_inv):
        with pytest.raises(UserError, match="which are not the scales of a"):
            product(x, w, scales, (ROW, TILE))


def test_emulated_products_are_announced_and_refused_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU may multiply natively")
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    monkeypatch.setattr(dispatch, "_chosen", {("block_scaling", torch.device("cpu")): False})
    x, _ = quantize_blocks(random_matrix(16, 32), E4M3, MX)
    assert x.data is not None
    with pytest.raises(dispatch.StrictFallbackError, match="emulate"):
        scaled_mm(
            *(x.data, x.scale_inv, x.data, x.scale_inv),
            rows=16,
            columns=16,
            out_dtype=torch.float32,
            a_block=MX,
            b_block=MX,
        )


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_that_the_device_gives_in_fp32_alone_is_rounded_once(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = quantize_blocks(random_matrix(48, 300), E4M3, ROW)
    w, _ = quantize_blocks(random_matrix(32, 300), E4M3, TILE)
    bias = torch.randn(32) if has_bias else None
    assert x.data is not None
    assert w.data is not None
    operands = (x.data, x.scale_inv, w.data, w.scale_inv)
    options = {"rows": 48, "columns": 32, "out_dtype": torch.bfloat16, "a_block": ROW, "b_block": TILE}
    wanted = scaled_mm(*operands, **options, bias=bias)

    def in_fp32(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *rest: object) -> Tensor:
        assert dtype is torch.float32
        assert rest[0] is None
        return block_product.emulated_product(a, a_scale, b, b_scale, ROW, TILE)

    monkeypatch.setattr(block_product, "_runs_natively", lambda *_: True)
    monkeypatch.setattr(block_product, "_asked", lambda *_: False)
    monkeypatch.setattr(block_product, "_native", in_fp32)
    assert torch.equal(scaled_mm(*operands, **options, bias=bias), wanted)


# The kernel


def same_bits(found: tuple[Tensor | None, ...], true: tuple[Tensor | None, ...]) -> bool:
    def same(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        return torch.equal(bits(one.cpu()), bits(other))

    return all(same(one, other) for one, other in zip(found, true, strict=True))


def compare_with_reference(
    shape: tuple[int, int],
    element: torch.dtype,
    block: tuple[int, int],
    dtype: torch.dtype,
    power_of_two: bool,
    device: torch.device,
) -> None:
    x = random_matrix(*shape, element)
    if shape[0] > 3 and shape[1] > 130:
        x[3] = x[:, 20] = 0
        x[0, 5], x[0, 6], x[-1, -1] = math.nan, -math.nan, math.inf
        x[shape[0] // 2, :100] = 1e-41
    is_large = x.numel() > 2**14
    for forms in ((True, True),) if is_large else ((True, True), (True, False), (False, True)):
        sums_dtype = (torch.float32 if element is torch.float16 else element) if forms[0] else None
        options = (dtype, block, *forms, power_of_two, sums_dtype)
        found = block_scaling.run_quantize_blocks(x.to(device), *options)
        true = block_scaling._reference(x, *options)
        assert same_bits(found[:4], true[:4])
        found_sums, true_sums = found[4], true[4]
        if found_sums is None or true_sums is None:
            assert found_sums is true_sums
            continue
        assert found_sums.dtype is true_sums.dtype is sums_dtype
        is_finite = true_sums.isfinite()
        assert torch.equal(found_sums.cpu().isfinite(), is_finite)
        sums = true_sums[is_finite]
        # In another order, and rounded once.
        rtol = 1e-4 if sums_dtype is torch.float32 else 2.0**-7
        assert torch.allclose(found_sums.cpu()[is_finite], sums, rtol=rtol, atol=1e-5 * float(sums.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times zero
@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(1, 1), (130, 137), (35, 20)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("element", "dtype", "power_of_two"),
    [(torch.float32, E4M3, False), (torch.bfloat16, E5M2, True), (torch.float16, E4M3, True)],
)
def test_the_kernel_writes_the_bits_of_the_reference(
    shape: tuple[int, int], block: tuple[int, int], element: torch.dtype, dtype: torch.dtype, power_of_two: bool
) -> None:
    compare_with_reference(shape, element, block, dtype, power_of_two, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (130, 257), (515, 4100), (777, 2064), (2048, 1024)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("element", "dtype", "power_of_two"),
    [
        (torch.float32, E4M3, False),
        (torch.bfloat16, E4M3, True),
        (torch.bfloat16, E5M2, True),
        (torch.float16, E4M3, True),
    ],
)
def test_the_kernel_writes_the_bits_of_the_reference_on_a_gpu(
    shape: tuple[int, int], block: tuple[int, int], element: torch.dtype, dtype: torch.dtype, power_of_two: bool
) -> None:
    compare_with_reference(shape, element, block, dtype, power_of_two, torch.device("cuda", 0))


@pytest.mark.interpreter
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("forms", [(True, False), (False, True)])
def test_the_kernel_writes_one_form_over_several_tiles(block: tuple[int, int], forms: tuple[bool, bool]) -> None:
    x = random_matrix(140, 139, torch.bfloat16)
    found = block_scaling.run_quantize_blocks(x, E4M3, block, *forms, True, None)
    assert same_bits(found, block_scaling._reference(x, E4M3, block, *forms, True, None))


def extreme_magnitudes() -> Tensor:
    """fp32 numbers where a scale is a power of two less, ends, or begins."""
    edge = torch.tensor([1.75, 1.0, 448.0, 57344.0])
    edge = torch.cat([edge, torch.nextafter(edge, edge * 2), torch.nextafter(edge, edge / 2)])
    powers = 2.0 ** torch.tensor([-126, -120, -118, -117, -111, -110, 0, 111, 117, 126], dtype=torch.float64)
    wide = (edge.double()[:, None] * powers).flatten().clamp(max=torch.finfo(torch.float32).max).float()
    return torch.cat([wide, torch.tensor([2.0**-149, 2.0**-127, 3.4e38, 0.0, math.inf, math.nan])])


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")  # infinity times zero
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("block", [ROW, MX])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_of_extreme_magnitudes_are_those_of_the_reference(
    dtype: torch.dtype, block: tuple[int, int], power_of_two: bool
) -> None:
    amaxes = extreme_magnitudes()
    x = torch.zeros(amaxes.numel(), 32)
    x[:, 0], x[:, 1], x[:, 2] = amaxes, -amaxes / 2, amaxes / 3
    found = block_scaling.run_quantize_blocks(x, dtype, block, True, False, power_of_two, None)
    assert same_bits(found, block_scaling._reference(x, dtype, block, True, False, power_of_two, None))


@pytest.mark.interpreter
def test_the_kernel_follows_row_strides() -> None:
    x = random_matrix(20, 90)
    for strided in (x[:, 30:60], x[::2, :40], x.t()[:33], x[:1].expand(20, 90)):
        found = block_scaling.run_quantize_blocks(strided, E4M3, ROW, True, True, True, None)
        true = block_scaling._reference(strided.contiguous(), E4M3, ROW, True, True, True, None)
        assert same_bits(found, true)


@pytest.mark.interpreter
def test_offsets_have_sixty_four_bits() -> None:
    # Three rows 2^30 elements apart, in memory that is reserved but never touched between them.
    base = torch.empty(2**31 + 64, dtype=torch.float16)
    x = base.as_strided((3, 20), (2**30, 1))
    x.copy_(torch.randn(3, 20))
    found = block_scaling.run_quantize_blocks(x, E4M3, ROW, True, True, True, None)
    assert same_bits(found, block_scaling._reference(x.clone(), E4M3, ROW, True, True, True, None))
