"""Kernels that are bound by memory read and write whole vectors, which the compiler does only where it knows enough."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from fusestep.language import interpreted, triton
from fusestep.ops import adam_copies, scale


@pytest.mark.parametrize(
    ("op", "label"), [(scale, "fp32 to bf16"), (adam_copies, "copies, cast after: fp32 parameters, fp32 gradients")]
)
def test_tiles_are_read_and_written_by_vectors(op: ModuleType, label: str) -> None:
    compiler = pytest.importorskip("triton.compiler")
    if interpreted():
        pytest.skip("the interpreter compiles nothing")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    one = next(one for one in op.compilations() if one.label == label)
    places = {name: place for place, name in enumerate(one.kernel.arg_names)}
    aligned = {(places[name],): [["tt.divisibility", 16]] for name in one.divisible_by_16}
    source = compiler.ASTSource(one.kernel, dict(one.signature), dict(one.constexprs), aligned)
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages, "enable_fp_fusion": True}
    code = triton.compile(source, target=target, options=options).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v\d", code)
    assert re.search(r"st\.global\S*\.v\d", code)
