"""What the assembler makes of a cast to FP8."""

from __future__ import annotations

import re

import pytest

from fusestep.language import interpreted, tl, triton
from fusestep.ops.fp8_cast import fp8_code, fp8_words, scaled_values


@triton.jit
def _first_column_kernel(x_ptr, bytes_ptr, words_ptr, E4M3: tl.constexpr):
    """Cast one column of a tile: all else are zeros, which the compiler knows to be one pair."""
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row + column, mask=column < 1, other=0.0)
    tl.store(bytes_ptr + row * 128 + column, fp8_code(scaled_values(x, 3.0), E4M3, True))
    word = tl.arange(0, 32)[None, :]
    tl.store(words_ptr + row * 32 + word, fp8_words(scaled_values(x, 5.0), E4M3, True))


@pytest.mark.parametrize("e4m3", [True, False])
def test_no_pair_of_bytes_is_joined_to_another_by_the_instruction_that_casts(e4m3: bool) -> None:
    """The assembler of CUDA 12.8 leaves out what such a pair is joined to, and writes what was there before."""
    compiler = pytest.importorskip("triton.compiler")
    if interpreted():
        pytest.skip("the interpreter compiles nothing")
    signature = {"x_ptr": "*fp32", "bytes_ptr": "*u8", "words_ptr": "*i32", "E4M3": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = compiler.ASTSource(_first_column_kernel, signature, {"E4M3": e4m3}, aligned)
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": True}).asm["sass"]
    casts = re.findall(r"F2FP\.SATFINITE\.E\dM\d\.F32\.PACK_AB_MERGE_C (\w+), (\w+), (\w+), (\w+)", code)
    assert casts
    assert {joined for *_, joined in casts} == {"RZ"}
