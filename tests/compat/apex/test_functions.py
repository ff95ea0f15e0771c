"""Apex's functions of tensors: amp_C, losses, dense layers, rotary embedding, masked softmax; against float64."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import amp_C
import apex_C
import pytest
import torch
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.fused_dense import FusedDense, FusedDenseGeluDense, fused_dense_gelu_dense_function
from apex.mlp import MLP
from apex.multi_tensor_apply import multi_tensor_applier
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional import (
    FusedScaleMaskSoftmax,
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_2d,
    fused_apply_rotary_pos_emb_cached,
    fused_apply_rotary_pos_emb_thd,
)
from apex.transformer.functional.fused_softmax import scaled_masked_softmax, scaled_upper_triang_masked_softmax
from torch import Tensor, nn

from fusestep.compat import report
from fusestep.errors import UserError

SHAPES = [(7, 13), (31,), (), (0, 4), (3, 1, 5)]


def tensors(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(shape) * scale).to(dtype) for shape in SHAPES]


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


# amp_C, through multi_tensor_applier as scripts call it


def test_scale_writes_the_product_and_raises_the_flag_at_what_is_not_finite() -> None:
    assert multi_tensor_applier.available
    x, up = tensors(torch.bfloat16), flag()
    out = [torch.full(t.shape, math.nan) for t in x]
    assert multi_tensor_applier(amp_C.multi_tensor_scale, up, [x, out], 1 / 3) is None
    for a, b in zip(x, out, strict=True):
        assert torch.equal(b, a.float() * (1 / 3))
    assert up.item() == 0
    x[1][3] = math.inf
    multi_tensor_applier(amp_C.multi_tensor_scale, up, [x, x], 2.0)
    assert up.item() == 1
    assert x[1][3] == math.inf
    multi_tensor_applier(amp_C.multi_tensor_scale, up, [out, out], 2.0)
    assert up.item() == 1  # who raised it does not matter any more


@pytest.mark.parametrize(("check", "in_x", "in_y"), [(-1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_axpby_checks_what_it_is_asked_to(check: int, in_x: int, in_y: int) -> None:
    x, y = tensors(), tensors(torch.float16)
    out = [torch.empty(t.shape, dtype=torch.float64) for t in x]
    up = flag()
    amp_C.multi_tensor_axpby(65536, up, [x, y, out], 0.3, -2.0, check)
    for a, b, c in zip(x, y, out, strict=True):
        torch.testing.assert_close(c, 0.3 * a.double() - 2.0 * b.double(), rtol=1e-6, atol=1e-6)
    assert up.item() == 0
    for spoilt, wanted in ((x, in_x), (y, in_y)):
        before, up = spoilt[0].clone(), flag()
        spoilt[0][2, 1] = math.nan
        amp_C.multi_tensor_axpby(65536, up, [x, y, out], 0.3, -2.0, check)
        assert up.item() == wanted
        spoilt[0].copy_(before)


@pytest.mark.parametrize("name", ["l2norm", "l2norm_mp"])
def test_norms_are_of_all_and_of_each(name: str) -> None:
    x = [*tensors(), *tensors(torch.float16, 300.0)]
    up = flag()
    total, each = multi_tensor_applier(getattr(amp_C, f"multi_tensor_{name}"), up, [x], True)
    wanted = torch.tensor([t.double().norm() for t in x])
    assert total.shape == (1,)
    torch.testing.assert_close(total.double(), wanted.norm().reshape(1).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(each.double(), wanted.double(), rtol=1e-6, atol=1e-9)
    total, each = getattr(amp_C, f"multi_tensor_{name}")(65536, up, [x])
    assert each.shape == (0,)
    assert up.item() == 0
    x[1][0] = math.inf
    getattr(amp_C, f"multi_tensor_{name}")(65536, up, [x])
    assert up.item() == 1


def test_norms_with_scales() -> None:
    x, out = tensors(), tensors()
    norm = torch.tensor([t.double().norm() for t in x]).norm()
    total, each = amp_C.multi_tensor_l2norm_scale(65536, flag(), [x, out], 0.25, True)
    torch.testing.assert_close(total[0].double(), norm.double(), rtol=1e-6, atol=0)
    assert each.shape == (len(x),)
    assert all(torch.equal(b, a * 0.25) for a, b in zip(x, out, strict=True))
    total, each = amp_C.multi_tensor_unscale_l2norm(65536, flag(), [x], torch.tensor([0.125]), True)
    torch.testing.assert_close(total[0].double(), norm.double() / 8, rtol=1e-6, atol=0)
    torch.testing.assert_close(each[0].double(), x[0].double().norm() / 8, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_takes_the_step_that_it_is_told(mode: int) -> None:
    g, p, m, v = tensors(), tensors(), tensors(scale=0.1), [t.square() for t in tensors()]
    b1, b2, eps, wd, lr, step = 0.8, 0.9, 1e-3, 0.2, 0.05, 3
    wide = [[t.double() for t in one] for one in (g, p, m, v)]
    lists = [[t.clone() for t in one] for one in (g, p, m, v)]
    amp_C.multi_tensor_adam(65536, flag(), lists, lr, b1, b2, eps, step, mode, 1, wd)
    same = [[t.clone() for t in one] for one in (g, p, m, v)]
    scaled = [[t * 64 for t in same[0]], *same[1:]]
    numbers = (torch.tensor(lr), b1, b2, eps, torch.tensor([step], dtype=torch.int32), mode, 1, wd)
    amp_C.multi_tensor_adam_capturable(65536, flag(), scaled, *numbers, torch.tensor([1 / 64]))
    halves = [t.bfloat16() for t in p]
    with_masters = [g, halves, *([t.clone() for t in one] for one in (m, v, p))]
    amp_C.multi_tensor_adam_capturable_master(65536, flag(), with_masters, *numbers, torch.tensor([1.0]))
    for i, (gi, pi, mi, vi) in enumerate(zip(*wide, strict=True)):
        if mode == 0:
            gi = gi + wd * pi
        mi = b1 * mi + (1 - b1) * gi
        vi = b2 * vi + (1 - b2) * gi * gi
        u = mi / (1 - b1**step) / ((vi / (1 - b2**step)).sqrt() + eps) + (wd * pi if mode == 1 else 0.0)
        for got in (lists[1][i], scaled[1][i], with_masters[4][i]):
            torch.testing.assert_close(got.double(), pi - lr * u, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(halves[i], (pi - lr * u).bfloat16(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lists[2][i].double(), mi, rtol=1e-5, atol=1e-6)
    before = [t.clone() for t in scaled[1]]
    amp_C.multi_tensor_adam_capturable(65536, flag() + 1, scaled, *numbers, torch.tensor([1.0]))
    assert all(torch.equal(a, b) for a, b in zip(before, scaled[1], strict=True))


def test_lamb_sgd_novograd_and_adagrad_step_lists() -> None:
    b1, b2, eps, wd, lr, step = 0.8, 0.9, 1e-3, 0.2, 0.05, 3
    g, p, m, v = tensors(), tensors(), tensors(torch.float16, 0.1), [t.square() for t in tensors()]
    full = [i for i, shape in enumerate(SHAPES) if math.prod(shape)]

    def copies(*lists: list[Tensor]) -> list[list[Tensor]]:
        return [[t.clone() for t in one] for one in lists]

    def wide(*lists: list[Tensor]) -> list[list[Tensor]]:
        return [[t.double() for t in one] for one in lists]

    def check(got: list[Tensor], wanted: Any) -> None:
        for i in full:
            torch.testing.assert_close(got[i].double(), wanted(i), rtol=1e-4, atol=1e-5)

    gd, pd, md, vd = wide(g, p, m, v)
    lists = copies(g, p, m, v)
    norm = torch.tensor([4.0])
    amp_C.multi_tensor_lamb(65536, flag(), lists, lr, b1, b2, eps, step, 1, wd, 1, 1, norm, 0.5, False)

    def lamb(i: int) -> Tensor:
        gi = gd[i] / 8
        mi, vi = b1 * md[i] + (1 - b1) * gi, b2 * vd[i] + (1 - b2) * gi * gi
        u = mi / (1 - b1**step) / ((vi / (1 - b2**step)).sqrt() + eps) + wd * pd[i]
        return pd[i] - lr * pd[i].norm() / u.norm() * u

    check(lists[1], lamb)
    assert lists[2][0].dtype is torch.float16
    torch.testing.assert_close(lists[2][0].double(), b1 * md[0] + (1 - b1) * gd[0] / 8, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(g, lists[0], strict=True))

    lists = [*copies(g, p, m), [t.half() for t in p]]
    amp_C.multi_tensor_sgd(65536, flag(), lists, wd, 0.9, 0.3, lr, True, False, False, 0.5)

    def sgd(i: int) -> Tensor:
        gi = gd[i] / 2 + wd * pd[i]
        return pd[i] - lr * (gi + 0.9 * (0.9 * md[i] + 0.7 * gi))

    check(lists[1], sgd)
    assert all(torch.equal(a.half(), b) for a, b in zip(lists[1], lists[3], strict=True))
    before = copies(lists[1])[0]
    amp_C.multi_tensor_sgd(65536, flag() + 1, lists, wd, 0.9, 0.3, lr, True, False, False, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, lists[1], strict=True))

    norms = torch.rand(len(p)) + 1.0
    running = norms.clone()
    lists = copies(g, p, m)
    amp_C.multi_tensor_novograd(65536, flag(), lists, running, lr, b1, b2, eps, step, 1, wd, 1, 0, 2)

    def novograd(i: int) -> Tensor:
        n = math.sqrt(b2 * norms[i].item() ** 2 + (1 - b2) * float(gd[i].norm()) ** 2)
        assert math.isclose(running[i].item(), n, rel_tol=1e-5)
        d = n / math.sqrt(1 - b2**step) + eps
        return pd[i] - lr * (b1 * md[i] + (1 - b1) * (gd[i] / d + wd * pd[i])) / (1 - b1**step)

    check(lists[1], novograd)

    lists = copies(g, p, v)
    amp_C.multi_tensor_adagrad(65536, flag(), lists, lr, eps, 1, wd)
    check(lists[1], lambda i: pd[i] - lr * (gd[i] / ((vd[i] + gd[i] ** 2).sqrt() + eps) + wd * pd[i]))


@pytest.mark.gpu
def test_functions_of_lists_wait_for_nothing(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    g, p, m, v, out = ([t.cuda() for t in tensors()] for _ in range(5))
    v = [t.square() for t in v]
    up, lr, step = flag().cuda(), torch.tensor(0.1, device="cuda"), torch.tensor([2], dtype=torch.int32, device="cuda")
    inverse, scale = torch.ones(1, device="cuda"), torch.full((1,), 8.0, device="cuda")
    grown, left, found = (torch.zeros(1, dtype=d, device="cuda") for d in (torch.int32, torch.int32, torch.float32))

    def everything() -> list[Tensor]:
        amp_C.multi_tensor_scale(65536, up, [g, out], 0.5)
        amp_C.multi_tensor_axpby(65536, up, [g, p, out], 0.5, 2.0, -1)
        norms = [
            *amp_C.multi_tensor_l2norm(65536, up, [g], True),
            *amp_C.multi_tensor_unscale_l2norm(65536, up, [g], lr),
        ]
        numbers = (lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.1, inverse)
        amp_C.multi_tensor_adam_capturable(65536, up, [g, p, m, v], *numbers)
        amp_C.update_scale_hysteresis(scale, grown, left, found, 2.0, 0.5, 2000, 2)
        return norms

    norms = everything()
    with no_waiting():
        again = everything()
    assert all(torch.equal(a, b) for a, b in zip(norms, again, strict=True))
    wanted = torch.tensor([t.double().norm() for t in g])
    torch.testing.assert_close(norms[1].double().cpu(), wanted.double(), rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
def test_losses_and_rotations_agree_on_a_gpu() -> None:
    logits, labels = torch.randn(11, 29), torch.randint(0, 29, (11,))
    t, freqs = torch.randn(9, 2, 3, 16), angles(9, 10)[:, None, None]
    x = torch.randn(2, 4, 20, 20)
    for on in (lambda one: SoftmaxCrossEntropyLoss.apply(one(logits), one(labels), 0.1),
               lambda one: fused_apply_rotary_pos_emb(one(t), one(freqs)),
               lambda one: fused_apply_rotary_pos_emb_cached(one(t), one(freqs.cos()), one(freqs.sin())),
               lambda one: scaled_upper_triang_masked_softmax(one(x), None, 0.5)):  # fmt: skip
        torch.testing.assert_close(on(Tensor.cuda).cpu(), on(Tensor.cpu), rtol=1e-5, atol=1e-5)


def test_the_loss_scale_shrinks_only_after_hysteresis() -> None:
    scale, grown, left = torch.tensor([64.0]), torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    seen = []
    for bad in (0, 0, 1, 1, 0, 1, 1, 0, 0, 0):
        result = amp_C.update_scale_hysteresis(scale, grown, left, torch.tensor([float(bad)]), 2.0, 0.5, 3, 2)
        seen.append((result.item(), grown.item(), left.item()))
    assert result is scale
    # (scale, growth tracker, hysteresis left) after each: the second overflow in a row shrinks, three clean steps grow.
    assert seen == [
        *((64, 1, 2), (64, 2, 2), (64, 0, 1), (32, 0, 0), (32, 1, 2)),
        *((32, 0, 1), (16, 0, 0), (16, 1, 2), (16, 2, 2), (32, 0, 2)),
    ]


def test_names_of_amp_c_that_are_not_served_say_what_is() -> None:
    with pytest.raises(AttributeError, match=r"multi_tensor_lamb_mp; use apex\.optimizers\.FusedMixedPrecisionLamb"):
        _ = amp_C.multi_tensor_lamb_mp


def test_flatten_and_unflatten() -> None:
    x = tensors()
    flat = apex_C.flatten(x)
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in x]))
    assert all(torch.equal(a, b) for a, b in zip(apex_C.unflatten(flat, x), x, strict=True))


# contrib


def test_clipping_sums_in_fp32_and_leaves_what_is_not_finite() -> None:
    params = [nn.Parameter(torch.zeros(5, dtype=torch.float16)), nn.Parameter(torch.zeros(3, 2))]
    params[0].grad = torch.full((5,), 6e4, dtype=torch.float16)
    params[1].grad = torch.randn(3, 2)
    wanted = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
    before = [p.grad.double() for p in params]
    norm = clip_grad_norm_(params, 2.0)
    assert math.isclose(norm.item(), wanted, rel_tol=1e-6)
    for p, g in zip(params, before, strict=True):
        torch.testing.assert_close(p.grad.double(), g * 2.0 / wanted, rtol=1e-3, atol=1e-6)
    params[1].grad[0, 0] = math.nan
    before = [p.grad.clone() for p in params]
    clip_grad_norm_(params, 0.1)
    assert torch.equal(params[0].grad, before[0])
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_(params, 0.1, error_if_nonfinite=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_and_its_gradient(dtype: torch.dtype, smoothing: float) -> None:
    rows, classes = 11, 29
    logits = (torch.randn(rows, classes) * 4).to(dtype).requires_grad_()
    labels = torch.randint(1, classes, (rows,))
    labels[3] = labels[7] = 0  # padding unless told otherwise
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing)
    x = logits.detach().double().requires_grad_()
    lse = x.logsumexp(1)
    wanted = (1 - smoothing) * (lse - x[torch.arange(rows), labels]) + smoothing * (lse - x.mean(1))
    wanted = torch.where(labels == 0, 0.0, wanted)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    dloss = torch.randn(rows)
    kept = dloss.clone()
    (got,) = torch.autograd.grad(losses, logits, dloss)
    (want,) = torch.autograd.grad(wanted, x, dloss.double())
    assert torch.equal(dloss, kept)
    assert got.dtype is dtype
    # Rounded once.
    assert bool(((got.double() - want).abs() <= want.abs() * torch.finfo(dtype).eps + 1e-6).all())


def test_cross_entropy_takes_a_padding_label_out_of_range_and_refuses_others() -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    labels = torch.tensor([0, 3, -100, 4])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, -100)
    assert losses[2] == 0
    assert losses[0] > 0  # class 0 counts then
    losses.sum().backward()
    assert bool((logits.grad[2] == 0).all())
    with pytest.raises(UserError, match="target 5 is outside of the 5 classes"):
        SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([0, 5, 1, 1]))
    with pytest.raises(UserError, match=r"pass \(rows, classes\)"):
        SoftmaxCrossEntropyLoss.apply(torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64))


def test_cross_entropy_takes_its_arguments_by_name_and_strided_logits_and_tells_what_it_ran_as() -> None:
    report.reset()
    wide = torch.randn(5, 2, 7).half().requires_grad_()
    logits = wide[:, 1]  # as a slice of packed heads: rows are 14 elements apart
    labels = torch.tensor([4, 2, 6, 2, 0], dtype=torch.int32)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels=labels, half_to_float=True, padding_idx=2, smoothing=0.3)
    x = wide.detach()[:, 1].double()
    log = x.log_softmax(1)
    wanted = -0.7 * log[torch.arange(5), labels.long()] - 0.3 * log.mean(1)
    torch.testing.assert_close(losses.double(), torch.where(labels == 2, 0.0, wanted), rtol=1e-5, atol=1e-6)
    losses.sum().backward()
    assert bool((wide.grad[:, 0] == 0).all())
    assert bool((wide.grad[[0, 2, 4], 1] != 0).all())
    served = report.snapshot().served["apex.contrib.xentropy.SoftmaxCrossEntropyLoss"]
    assert served == ["fusestep.nn.functional.cross_entropy, torch"]
    # As an autograd function is called by those who look at it.
    assert torch.equal(SoftmaxCrossEntropyLoss.forward(None, logits, labels, 0.3, 2), losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_loss(smoothing: float) -> None:
    real, alpha, gamma = 7, 0.3, 1.7
    x = torch.randn(2, 9, 8, requires_grad=True)
    labels = torch.randint(-2, real, (2, 9))
    labels[0, :3] = torch.tensor([-2, -1, 6])
    count = torch.tensor([5.0])
    loss = focal_loss.focal_loss(x, labels, count, real, alpha, gamma, smoothing)
    wide = x.detach().double().requires_grad_()
    wanted = torch.zeros((), dtype=torch.float64)
    for row, label in zip(wide.reshape(-1, 8), labels.reshape(-1), strict=True):
        for c in range(real) if label != -2 else ():
            t = 1 - smoothing / 2 if label == c else smoothing / 2
            s = torch.sigmoid(row[c])
            bce = -(t * torch.log(s) + (1 - t) * torch.log(1 - s))
            wanted = wanted + (alpha * (1 - s) ** gamma if label == c else (1 - alpha) * s**gamma) * bce
    wanted = wanted / 5
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    (got,), (want,) = torch.autograd.grad(loss, x), torch.autograd.grad(wanted, wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    assert torch.equal(focal_loss.FocalLoss.apply(x, labels, count, real, alpha, gamma, smoothing), loss)


@pytest.mark.parametrize("act", ["", "silu"])
def test_group_norm(act: str) -> None:
    module = GroupNorm(3, 12, 1e-3, act=act)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    x = torch.randn(2, 12, 5, 4).to(torch.bfloat16, memory_format=torch.channels_last)
    groups = x.double().reshape(2, 3, -1)
    y = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    y = y.reshape(x.shape) * module.weight.double()[:, None, None] + module.bias.double()[:, None, None]
    y = y * torch.sigmoid(y) if act else y
    got = module(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), y, rtol=2**-7, atol=2**-7)
    with pytest.raises(ValueError, match="do not divide"):
        GroupNorm(5, 12)


# Dense layers


def test_dense_layers_are_linear_layers_with_any_leading_dimensions() -> None:
    x = torch.randn(3, 4, 10).transpose(0, 1)
    dense = FusedDense(10, 6)
    torch.testing.assert_close(dense(x), x @ dense.weight.t() + dense.bias)
    assert FusedDense(10, 6, bias=False).bias is None
    assert dense.weight.std() > 0.05  # initialised
    two = FusedDenseGeluDense(10, 12, 6)
    assert set(two.state_dict()) == {"weight1", "bias1", "weight2", "bias2"}
    h = x.double() @ two.weight1.double().t() + two.bias1.double()
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    wanted = h @ two.weight2.double().t() + two.bias2.double()
    torch.testing.assert_close(two(x).double(), wanted, rtol=1e-4, atol=1e-5)
    same = fused_dense_gelu_dense_function(x, two.weight1, two.bias1, two.weight2, two.bias2)
    assert torch.equal(same, two(x))
    with pytest.raises(AssertionError, match="always has biases"):
        FusedDenseGeluDense(10, 12, 6, bias=False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "function"), [("relu", torch.relu), ("none", lambda x: x), ("sigmoid", torch.sigmoid)]
)
def test_mlp_activates_after_every_layer(activation: str, function: Any, bias: bool) -> None:
    mlp = MLP([10, 33, 5], bias, activation)
    names = {f"{kind}_{i}" for kind in (["weight", "bias"] if bias else ["weight"]) for i in range(2)}
    assert set(mlp.state_dict()) == names
    x = torch.randn(4, 10)
    wanted = x
    for i in range(2):
        wanted = wanted @ mlp.weights[i].t() + (mlp.biases[i] if bias else 0.0)
        wanted = function(wanted)
    torch.testing.assert_close(mlp(x), wanted)
    with pytest.raises(TypeError, match="pass one of none, relu, sigmoid"):
        MLP([2, 2], activation="gelu")


def test_mlp_keeps_its_lists_when_parameters_are_replaced() -> None:
    mlp = MLP([6, 4])
    mlp.load_state_dict({name: torch.ones_like(value) for name, value in mlp.state_dict().items()}, assign=True)
    assert mlp.weights[0] is mlp.weight_0
    assert torch.equal(mlp(torch.ones(1, 6)), torch.full((1, 4), 7.0))
    assert mlp.bfloat16()(torch.ones(1, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16


# Rotary embedding


def rotated(t: Tensor, angles: Tensor) -> Tensor:
    """By pairs of halves in float64; angles broadcast to t's first r elements."""
    t, angles = t.double(), angles.double()
    r = angles.shape[-1]
    a, b, tail = t[..., : r // 2], t[..., r // 2 : r], t[..., r:]
    cos, sin = angles[..., : r // 2].cos(), angles[..., : r // 2].sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, tail), -1)


def angles(positions: int, r: int) -> Tensor:
    half = torch.arange(positions)[:, None] / 10.0 ** (torch.arange(r // 2) / r)
    return torch.cat((half, half), -1).float()


@pytest.mark.parametrize("transposed", [False, True])
def test_rope(transposed: bool) -> None:
    t = torch.randn(9, 2, 3, 16, requires_grad=True)
    freqs = angles(9, 10)[:, None, None]
    wanted = rotated(t.detach(), freqs)
    y = fused_apply_rotary_pos_emb(t, freqs, transposed)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert y.transpose(0, 1).is_contiguous() == transposed
    cached = fused_apply_rotary_pos_emb_cached(t, freqs.cos(), freqs.sin(), transposed)
    torch.testing.assert_close(cached.double(), wanted, rtol=1e-5, atol=1e-5)
    dy = torch.randn(y.shape)
    for result in (y, cached):
        (got,) = torch.autograd.grad(result, t, dy)
        torch.testing.assert_close(got.double(), rotated(dy, -freqs), rtol=1e-5, atol=1e-5)
    halves = fused_apply_rotary_pos_emb_cached(t.detach().bfloat16(), freqs.cos(), freqs.sin())
    torch.testing.assert_close(halves.double(), rotated(t.detach().bfloat16(), freqs), rtol=2**-8, atol=1e-6)


def test_rope_of_packed_sequences_begins_anew_in_each() -> None:
    t = torch.randn(11, 3, 16)
    cu_seqlens = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    freqs = angles(12, 16)
    positions = torch.tensor([*range(4), *range(7)])
    y = fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs[:, None, None])
    torch.testing.assert_close(y.double(), rotated(t, freqs[positions][:, None]), rtol=1e-5, atol=1e-5)


def test_rope_of_images_turns_halves_by_row_and_column() -> None:
    height, width, d = 3, 5, 8
    t = torch.randn(2, height * width, 3, d)
    rows, columns = angles(height + 2, d // 2), angles(width + 1, d // 2) * 0.7
    tables = [f(a)[None, :, None] for a in (rows, columns) for f in (torch.cos, torch.sin)]
    y = fused_apply_rotary_pos_emb_2d(t, height, width, *tables)
    for patch in range(height * width):
        i, j = divmod(patch, width)
        wanted = torch.cat(
            (rotated(t[:, patch, :, : d // 2], rows[i]), rotated(t[:, patch, :, d // 2 :], columns[j])), -1
        )
        torch.testing.assert_close(y[:, patch].double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="4 × 5 patches"):
        fused_apply_rotary_pos_emb_2d(t, 4, width, *tables)


# Masked softmax


def softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    e = torch.exp(x.double() * scale - (x.double() * scale).amax(-1, keepdim=True))
    e = e if mask is None else torch.where(mask, 0.0, e)
    total = e.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, e / total)


@pytest.mark.parametrize("keys", [20, 11])  # where Apex runs its kernel, and where not
@pytest.mark.parametrize("kind", [AttnMaskType.padding, AttnMaskType.causal])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scale_mask_softmax(dtype: torch.dtype, kind: AttnMaskType, keys: int) -> None:
    module = FusedScaleMaskSoftmax(
        *(dtype is torch.float16, dtype is torch.bfloat16, kind, True),
        *(lambda scores, mask: scores.masked_fill(mask, -10000.0), True, 0.25),
    )
    x = (torch.randn(2, 4, keys, keys) * 3).to(dtype).requires_grad_()
    causal = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    padding = torch.rand(2, 1, keys, keys) < 0.3
    padding[..., 0] = False
    unit = torch.finfo(dtype).eps
    for mask in (None, padding):
        total = causal if kind is AttnMaskType.causal else torch.zeros(keys, keys, dtype=torch.bool)
        total = total if mask is None else total | mask
        y = module(x, mask)
        assert y.dtype is dtype
        torch.testing.assert_close(y.double(), softmax(x.detach(), total, 0.25), rtol=unit, atol=1e-6)
        assert bool((y[total.expand(y.shape)] == 0).all())
    y.float().square().sum().backward()
    assert bool(x.grad.isfinite().all())


def test_a_row_that_is_masked_whole_is_zero_and_has_no_gradient() -> None:
    x = torch.randn(1, 4, 4, 20, requires_grad=True)
    mask = torch.zeros(1, 1, 4, 20, dtype=torch.bool)
    mask[:, :, 2] = True
    y = scaled_masked_softmax(x, mask, 0.5)
    assert bool((y[:, :, 2] == 0).all())
    y.square().sum().backward()
    assert bool((x.grad[:, :, 2] == 0).all())
    assert bool((x.grad[:, :, 1] != 0).any())
    with pytest.raises(UserError, match="as many queries as keys"):
        scaled_upper_triang_masked_softmax(x, None, 1.0)


def test_scale_mask_softmax_refuses_as_apex_does() -> None:
    with pytest.raises(RuntimeError, match="are both set"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.padding, True, None, True, None)
    with pytest.raises(RuntimeError, match="needs softmax_in_fp32"):
        FusedScaleMaskSoftmax(True, False, AttnMaskType.padding, True, None, False, 0.5)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("normalization.fused_layer_norm.FusedLayerNormAffineFunction",
         "input weight bias normalized_shape eps memory_efficient"),
        ("normalization.fused_layer_norm.FusedLayerNormAffineMixedDtypesFunction",
         "input weight bias normalized_shape eps memory_efficient"),
        ("normalization.fused_layer_norm.FusedLayerNormFunction", "input normalized_shape eps memory_efficient"),
        ("normalization.fused_layer_norm.FusedRMSNormAffineFunction",
         "input weight normalized_shape eps memory_efficient"),
        ("normalization.fused_layer_norm.FusedRMSNormAffineMixedDtypesFunction",
         "input weight normalized_shape eps memory_efficient"),
        ("normalization.fused_layer_norm.FusedRMSNormFunction", "input normalized_shape eps memory_efficient"),
        ("contrib.layer_norm.layer_norm.FastLayerNormFN", "x gamma beta epsilon memory_efficient"),
        ("contrib.focal_loss.focal_loss.FocalLoss",
         "cls_output cls_targets_at_level num_positive_sum num_real_classes alpha gamma label_smoothing"),
        ("contrib.xentropy.SoftmaxCrossEntropyLoss", "logits labels smoothing padding_idx half_to_float"),
        ("fused_dense.FusedDenseFunc", "input weight bias"),
        ("fused_dense.DenseNoBiasFunc", "input weight"),
        ("fused_dense.FusedDenseGeluDenseFunc", "input weight1 bias1 weight2 bias2"),
        ("mlp.MlpFunction", "bias activation"),
        ("transformer.functional.fused_softmax.ScaledMaskedSoftmax", "inputs mask scale"),
        ("transformer.functional.fused_softmax.ScaledUpperTriangMaskedSoftmax", "inputs scale"),
    ],
)  # fmt: skip
def test_functions_show_their_arguments_as_an_autograd_function_does(path: str, arguments: str) -> None:
    """Megatron looks at those of `forward` before it calls `apply`."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"apex.{module}"), name)
    assert inspect.getfullargspec(found.forward).args == ["ctx", *arguments.split()]
    assert callable(found.apply)


def test_a_forward_is_its_apply() -> None:
    from apex.fused_dense import FusedDenseFunc

    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    assert torch.equal(FusedDenseFunc.forward(None, x, weight, bias=bias), FusedDenseFunc.apply(x, weight, bias))
