"""apex.normalization and contrib.layer_norm against two-pass norms in float64, their dtypes, and what they refuse."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.normalization import fused_layer_norm as functions
from torch import Tensor, nn

import fusestep
from fusestep.errors import UserError

WIDTH = 37


def reference(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    x = x.double()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if w is None else y * w.double()
    return y if b is None else y + b.double()


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 2 ** {torch.float32: -18, torch.float16: -10, torch.bfloat16: -7}.get(got.dtype, -40)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def randomised(module: Any) -> Any:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) + 0.5)
    return module


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, FastLayerNorm])
def test_modules_and_their_gradients_follow_the_formula(kind: Any, memory_efficient: bool) -> None:
    module = randomised(kind(WIDTH, 1e-4, memory_efficient=memory_efficient))
    centred = kind not in (FusedRMSNorm, MixedFusedRMSNorm)
    x = (torch.randn(5, 3, WIDTH) * 2 + 1).requires_grad_()
    leaves = [x, *module.parameters()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = reference(wide[0], wide[1], wide[2] if centred else None, 1e-4, centred=centred)
    dy = torch.randn(wanted.shape)
    y = module(x)
    close(y, wanted)
    for got, want in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, wide, dy.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fused_norms_return_the_inputs_dtype_and_mixed_ones_the_weights(
    inputs: torch.dtype, weights: torch.dtype
) -> None:
    for kind, centred in (
        *((FusedLayerNorm, True), (FusedRMSNorm, False)),
        *((MixedFusedLayerNorm, True), (MixedFusedRMSNorm, False), (FastLayerNorm, True)),
    ):
        module = randomised(kind(WIDTH)).to(weights)
        x = torch.randn(4, WIDTH).to(inputs).requires_grad_()
        y = module(x)
        assert y.dtype is (inputs if kind in (FusedLayerNorm, FusedRMSNorm) else weights)
        # Rounded once: no further from the exact value than half a step of y's dtype and the arithmetic of fp32.
        wanted = reference(x.detach(), module.weight, module.bias if centred else None, 1e-5, centred=centred)
        unit = torch.finfo(y.dtype).eps / 2
        assert bool(((y.double() - wanted).abs() <= wanted.abs() * unit + 2e-6).all())
        y.float().square().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is inputs
        assert all(p.grad.dtype is weights for p in module.parameters())


def test_functions_take_apexs_order_and_its_eps() -> None:
    x = torch.randn(6, WIDTH) * 1e-3  # so that eps matters
    w, b, n = torch.randn(WIDTH), torch.randn(WIDTH), (WIDTH,)
    f = functions
    for got, w_, b_, eps, centred in (
        (f.fused_layer_norm_affine(x, w, b, n), w, b, 1e-6, True),
        (f.mixed_dtype_fused_layer_norm_affine(x, w, b, n), w, b, 1e-6, True),
        (f.fused_layer_norm(x, n), None, None, 1e-6, True),
        (f.fused_rms_norm_affine(x, w, n), w, None, 1e-6, False),
        (f.mixed_dtype_fused_rms_norm_affine(x, w, n), w, None, 1e-6, False),
        (f.fused_rms_norm(x, n), None, None, 1e-6, False),
        (f.manual_rms_norm(x, n, w, 1e-5), w, None, 1e-5, False),
        (f.FusedLayerNormAffineFunction.apply(x, w, b, n, 1e-3), w, b, 1e-3, True),
        (f.FusedLayerNormAffineMixedDtypesFunction.apply(x, w, b, n, 1e-3, True), w, b, 1e-3, True),
        (f.FusedLayerNormFunction.apply(x, n, 1e-3), None, None, 1e-3, True),
        (f.FusedRMSNormAffineFunction.apply(x, w, n, 1e-3), w, None, 1e-3, False),
        (f.FusedRMSNormAffineMixedDtypesFunction.apply(x, w, n, 1e-3, True), w, None, 1e-3, False),
        (f.FusedRMSNormFunction.apply(x, n, 1e-3), None, None, 1e-3, False),
        (FastLayerNormFN.apply(x, w, b, 1e-3), w, b, 1e-3, True),
    ):
        close(got, reference(x, w_, b_, eps, centred=centred))


def test_mixed_functions_return_the_weights_dtype() -> None:
    x, w = torch.randn(3, WIDTH), torch.randn(WIDTH, dtype=torch.bfloat16)
    assert functions.mixed_dtype_fused_rms_norm_affine(x, w, (WIDTH,)).dtype is torch.bfloat16
    assert functions.fused_rms_norm_affine(x, w, (WIDTH,)).dtype is torch.float32


def test_states_have_apexs_keys_and_go_to_torch_and_back() -> None:
    assert list(FusedLayerNorm(8).state_dict()) == ["weight", "bias"]
    assert list(FusedRMSNorm(8).state_dict()) == ["weight"]
    assert list(FusedLayerNorm(8, elementwise_affine=False).state_dict()) == []
    theirs = randomised(nn.LayerNorm((4, 8)))
    ours = FusedLayerNorm((4, 8))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_modules_look_as_in_apex() -> None:
    module = FusedLayerNorm(8, 1e-3, False, True)
    assert module.normalized_shape == torch.Size((8,))
    assert (module.eps, module.elementwise_affine, module.memory_efficient) == (1e-3, False, True)
    assert module.weight is None
    assert module.bias is None
    assert not isinstance(module, nn.LayerNorm)
    assert repr(module) == "FusedLayerNorm((8,), eps=0.001, elementwise_affine=False)"
    assert not hasattr(FusedRMSNorm(8), "bias") or FusedRMSNorm(8).bias is None
    assert FastLayerNorm(8, 1e-3).epsilon == 1e-3
    for wrong in ({"bias": False}, {"device": "cpu"}, {"dtype": torch.float32}):
        with pytest.raises(TypeError):
            FusedLayerNorm(8, **wrong)


def test_mixed_norms_refuse_what_apex_swallows() -> None:
    with pytest.raises(RuntimeError, match="always has a weight"):
        MixedFusedLayerNorm(8, elementwise_affine=False)
    with pytest.warns(UserWarning, match="elementwise_affine=True is not needed"):
        MixedFusedRMSNorm(8, elementwise_affine=True)
    with pytest.raises(TypeError, match="no argument 'bias'"):
        MixedFusedLayerNorm(8, bias=False)


def test_a_weight_of_zero_has_an_exact_gradient() -> None:
    """Apex raises it to eps in the gradient of the input."""
    for memory_efficient in (False, True):
        module = randomised(FusedLayerNorm(WIDTH, memory_efficient=memory_efficient))
        with torch.no_grad():
            module.weight[::2] = 0.0
        x = torch.randn(4, WIDTH, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        dy = torch.randn(4, WIDTH)
        (got,) = torch.autograd.grad(module(x), x, dy)
        wanted = reference(wide, module.weight.detach(), module.bias.detach(), 1e-5, centred=True)
        (want,) = torch.autograd.grad(wanted, wide, dy.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_wrong_shapes_are_one_sentence() -> None:
    with pytest.raises(UserError, match="normalized_shape"):
        FusedLayerNorm(8)(torch.randn(3, 7))


def test_explain_counts_them_among_ours() -> None:
    model = nn.Sequential(FusedLayerNorm(8), FastLayerNorm(8), nn.Linear(8, 8))
    assert [module.is_ours for module in fusestep.explain(model).modules] == [True, True, False]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_they_compile_without_graph_breaks() -> None:
    module = randomised(MixedFusedLayerNorm(WIDTH))
    x = torch.randn(4, WIDTH)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, FastLayerNorm])
def test_under_cuda_autocast_the_result_has_its_dtype(kind: Any) -> None:
    module = randomised(kind(WIDTH)).cuda()
    x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=dtype):
            y = module(x)
        assert y.dtype is dtype
        y.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, FastLayerNorm])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_can_be_saved(kind: Any) -> None:
    """Which takes operations of torch's own alone, as ONNX does."""
    module = randomised(kind(WIDTH)).to(torch.bfloat16)
    saved = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, torch.randn(3, WIDTH)), saved)
    saved.seek(0)
    x = torch.randn(5, WIDTH)
    y = torch.jit.load(saved)(x)
    assert y.dtype is module(x).dtype
    torch.testing.assert_close(y, module(x))
