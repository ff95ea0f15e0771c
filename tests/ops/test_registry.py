"""How an op becomes known to torch and to the doctor."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.library import opcheck

from fusestep.language import tl, triton
from fusestep.ops import registry
from fusestep.ops.registry import Compilation, Op, Proof, define, load_catalogue, relative_error


@triton.jit
def _add_kernel(out_ptr, x_ptr, n, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x * scale, mask=offsets < n)


FITTING = Compilation(
    _add_kernel,
    "a test's kernel",
    {"out_ptr": "*bf16", "x_ptr": "*fp32", "n": "i64", "scale": "fp32", "BLOCK": "constexpr"},
    {"BLOCK": 1024},
    num_warps=4,
    divisible_by_16=frozenset({"x_ptr", "n"}),
)

scale_op = define(
    "_test_scale(Tensor x, float factor) -> Tensor",
    lambda x, factor: x * factor,
    lambda x, factor: torch.empty_like(x),
)


def _double(x: torch.Tensor) -> None:
    x.mul_(2)


double_op = define("_test_double(Tensor(a!) x) -> ()", _double, lambda x: None)


# torch's side


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()])
def test_a_defined_op_passes_opcheck(shape: tuple[int, ...]) -> None:
    opcheck(scale_op, (torch.randn(shape), 3.0))
    opcheck(double_op, (torch.randn(shape),))


def test_a_defined_op_computes_traces_and_has_meta_shapes() -> None:
    x = torch.randn(4, 3)
    torch.testing.assert_close(scale_op(x, 0.5), x / 2)
    assert scale_op(torch.empty(4, 3, device="meta"), 0.5).shape == (4, 3)
    compiled = torch.compile(lambda y: scale_op(y, 2.0) + 1, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), 2 * x + 1)


def test_an_op_that_lies_about_what_it_writes_fails_opcheck() -> None:
    def secretly_double(x: torch.Tensor) -> torch.Tensor:
        _double(x)
        return x.clone()

    lying = define("_test_lying(Tensor x) -> Tensor", secretly_double, lambda x: torch.empty_like(x))
    with pytest.raises(Exception, match="mutat"):
        opcheck(lying, (torch.randn(3),))


# The catalogue


def test_the_catalogue_holds_every_op_by_name() -> None:
    ops = load_catalogue()
    assert list(ops) == sorted(ops)
    assert {"adam", "layer_norm", "rms_norm"} <= set(ops)
    assert all(name == op.name and op.summary for name, op in ops.items())


def test_a_name_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CATALOGUE", {})
    op = Op("twice", "", lambda device: [], list)
    registry.catalogue(op)
    with pytest.raises(ValueError, match="two ops are named twice"):
        registry.catalogue(op)


# Proofs


@pytest.mark.parametrize(
    ("error", "tolerance", "ok"),
    [(0.0, 0.0, True), (1e-6, 1e-6, True), (2e-6, 1e-6, False), (math.nan, 1e-6, False), (math.inf, 1e-6, False)],
)
def test_a_proof_holds_within_its_tolerance(error: float, tolerance: float, ok: bool) -> None:
    assert Proof("forward", error, tolerance).ok is ok


def test_relative_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0
    # 1 + 2⁻²⁴ is 1 in fp32: the difference is taken in float64.
    assert relative_error(torch.tensor([1.0]), torch.tensor([1.0 + 2**-24], dtype=torch.float64)) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_right(bad: float) -> None:
    for value, reference in (([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, bad])):
        error = relative_error(torch.tensor(value), torch.tensor(reference))
        assert not Proof("value", error, 1e-3).ok


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"value is \(3,\), reference \(1, 3\)"):
        relative_error(torch.ones(3), torch.ones(1, 3))


# Compilations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"signature": {"out_ptr": "*fp32", "BLOCK": "constexpr"}}, "signature .* n, scale, x_ptr"),
        ({"signature": {**FITTING.signature, "stride": "i64"}}, "signature .* stride"),
        ({"constexprs": {}}, "constexprs .* BLOCK"),
        ({"constexprs": {"BLOCK": 128, "n": 3}}, "constexprs .* n"),
        ({"divisible_by_16": frozenset({"x"})}, "divisible_by_16 .* x"),
        ({"divisible_by_16": frozenset({"BLOCK"})}, "divisible_by_16 .* BLOCK"),
    ],
)
def test_a_compilation_that_does_not_fit_its_kernel_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"a test's kernel: {words}"):
        dataclasses.replace(FITTING, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [80, 90])
def test_a_compilation_is_all_that_triton_needs_to_build(capability: int) -> None:
    backends = pytest.importorskip("triton.backends.compiler", exc_type=ImportError)
    from triton.compiler import ASTSource

    places = {name: place for place, name in enumerate(FITTING.kernel.arg_names)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in FITTING.divisible_by_16}
    source = ASTSource(FITTING.kernel, dict(FITTING.signature), dict(FITTING.constexprs), attributes)
    options = {"num_warps": FITTING.num_warps, "num_stages": FITTING.num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in built.asm["ptx"]
    # Four elements a load, which only the promised divisibility allows.
    assert "ld.global.v4" in built.asm["ptx"]
