"""Checkpointing, graphs, cross entropy, rotary embedding and the smaller functions."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusestep.compat import report
from fusestep.errors import UserError

# Checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_checkpoint_gives_the_same_gradients_and_records_nothing_twice(
    te: ModuleType, recipe: ModuleType, reentrant: bool, in_fp8: bool
) -> None:
    plain = te.TransformerLayer(16, 24, 2, hidden_dropout=0.2, attention_dropout=0.0, device="cpu")
    again = te.TransformerLayer(16, 24, 2, hidden_dropout=0.2, attention_dropout=0.0, device="cpu")
    again.load_state_dict(plain.state_dict())
    for step in range(3):
        results = []
        for model in (plain, again):
            torch.manual_seed(step)
            x = torch.randn(5, 3, 16, requires_grad=True)
            mask = torch.zeros(3, 1, 1, 5, dtype=torch.bool)
            with te.autocast(in_fp8, recipe=recipe.DelayedScaling(amax_history_len=3)):
                options = {"self_attn_mask_type": "padding_causal"}
                y = (
                    model(x, mask, **options)
                    if model is plain
                    else te.checkpoint(model, x, mask, use_reentrant=reentrant, **options)
                )
            model.zero_grad()
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    if in_fp8:
        ours, theirs = (m.layernorm_mlp.fp8_meta["scaling_fwd"].amax_history for m in (plain, again))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_meets_the_states_of_a_tracker_again(te: ModuleType, reentrant: bool) -> None:
    def gradients(checkpoints: bool) -> tuple[Tensor, Tensor]:
        tracker = te.CudaRNGStatesTracker()
        tracker.add("stream", 3)

        def noisy(x: Tensor) -> Tensor:
            with tracker.fork("stream"):
                return x.square() * torch.rand(x.shape)

        x = torch.linspace(1, 2, 5, requires_grad=True)
        options: dict[str, Any] = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
        y = te.checkpoint(noisy, x, **options) if checkpoints else noisy(x)
        z = noisy(y)  # draws between forward and backward
        z.sum().backward()
        with tracker.fork("stream"):
            return x.grad, torch.rand(2)

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


def test_options_that_torch_refuses_are_handed_to_it(te: ModuleType) -> None:
    x = torch.ones(2, requires_grad=True)
    te.checkpoint(torch.sin, x, use_reentrant=False, determinism_check="none", debug=False).sum().backward()
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        te.checkpoint(torch.sin, x, debug=True)


def test_streams_of_random_numbers(te: ModuleType) -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    before = torch.random.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    states = tracker.get_states()
    with tracker.fork("a"):
        second = torch.rand(2)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), second)
    assert not torch.equal(first, second)
    for name, seed in (("a", 5), ("c", 2)):
        with pytest.raises(UserError, match="is there already"):
            tracker.add(name, seed)
    with pytest.raises(UserError, match="there is no stream 'd'"), tracker.fork("d"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}


# Cross entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_of_each_token_and_its_mean(te: ModuleType, dtype: torch.dtype, smoothing: float) -> None:
    logits = (torch.randn(3, 5, 19) * 3).to(dtype).requires_grad_()
    target = torch.randint(0, 19, (3, 5))
    target[1, 2] = target[0, 0] = -7
    p = logits.detach().double().requires_grad_()
    log = p.log_softmax(-1)
    taken = log.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    wanted = -(1 - smoothing) * taken - smoothing * log.mean(-1)
    wanted = torch.where(target == -7, 0.0, wanted)
    found = te.parallel_cross_entropy(logits, target, smoothing, ignore_idx=-7)
    assert (found.dtype, found.shape) == (torch.float32, (3, 5))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=2e-6)
    weights = torch.randn(3, 5)
    before = logits.detach().clone()
    for _ in range(2):  # a second backward pass, which adds the same
        logits.grad = None
        (found * weights).sum().backward(retain_graph=True)
        (wanted_gradient,) = torch.autograd.grad((wanted * weights).sum(), p, retain_graph=True)
        tolerance = 2e-6 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(logits.grad.double(), wanted_gradient, rtol=tolerance, atol=tolerance)
    assert torch.equal(logits.detach(), before)
    mean = te.parallel_cross_entropy(logits, target, smoothing, True, None, -7)
    torch.testing.assert_close(mean.double(), wanted.sum() / (target != -7).sum(), rtol=2e-6, atol=2e-6)
    flat = te.parallel_cross_entropy(logits, target.flatten().int(), smoothing, ignore_idx=-7)
    assert torch.equal(flat, found)  # as many targets in another shape
    assert torch.equal(te.parallel_cross_entropy(_input=logits, target=target, ignore_idx=-7,
                                                 label_smoothing=smoothing), found)  # fmt: skip
    with pytest.raises(UserError, match=r"shapes \(3, 5, 19\) and \(3, 4\)"):
        te.parallel_cross_entropy(logits, target[:, :4])
    served = report.snapshot().served["transformer_engine.pytorch.parallel_cross_entropy"]
    assert served == ["fusestep.nn.functional.cross_entropy, torch"]


# Rotary embedding


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(te: ModuleType, layout: str, interleaved: bool) -> None:
    rope = te.RotaryPositionEmbedding(8, rotary_base=100.0, interleaved=interleaved)
    angles = rope(7, offset=2)
    assert (angles.shape, angles.dtype) == ((7, 1, 1, 8), torch.float32)
    t = torch.randn(7, 2, 3, 10) if layout == "sbhd" else torch.randn(2, 7, 3, 10)
    found = te.attention.rope.apply_rotary_pos_emb(t, angles, layout, interleaved=interleaved)
    place = torch.arange(2, 9, dtype=torch.float64)
    theta = place[:, None] * 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    theta = theta[:, None, None] if layout == "sbhd" else theta[None, :, None]
    head = t[..., :8].double()
    one, two = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :4], head[..., 4:])
    parts = one * theta.cos() - two * theta.sin(), two * theta.cos() + one * theta.sin()
    wanted = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    torch.testing.assert_close(found[..., :8].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., 8:], t[..., 8:])
    assert torch.equal(te.apply_rotary_pos_emb(t, angles, layout, None, interleaved, True), found)


def test_rotation_as_1_x_spells_it(te: ModuleType) -> None:
    """`fused` in fourth place, cu_seqlens in fifth."""
    angles, t = te.RotaryPositionEmbedding(8)(7), torch.randn(7, 3, 8)
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    wanted = te.attention.apply_rotary_pos_emb(t, angles, "thd", cu_seqlens=starts)
    assert torch.equal(te.attention.apply_rotary_pos_emb(t, angles, "thd", True, starts), wanted)
    assert torch.equal(wanted[3:], te.apply_rotary_pos_emb(t[None, 3:], angles, "bshd")[0])
    t = torch.randn(7, 2, 3, 8)
    assert torch.equal(te.apply_rotary_pos_emb(t, angles, "sbhd", False), te.apply_rotary_pos_emb(t, angles))
    moved = te.apply_rotary_pos_emb(t[:3], angles, "sbhd", torch.tensor([0, 4]))
    assert torch.equal(moved[:, 0], te.apply_rotary_pos_emb(t[:3], angles)[:, 0])


# Graphs


def test_without_a_gpu_graphed_modules_are_the_modules(te: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    layer = te.Linear(4, 6, device="cpu")
    with caplog.at_level(logging.WARNING):
        assert te.make_graphed_callables(layer, (torch.randn(2, 4),), enabled=True) is layer
        pair = (layer, te.Linear(6, 2, device="cpu"))
        assert te.make_graphed_callables(pair, ((torch.randn(2, 4),), (torch.randn(2, 6),))) is pair
    assert "there are no graphs on a CPU" in caplog.text
    with pytest.raises(UserError, match="do not go together"):
        te.make_graphed_callables(pair, ((torch.randn(2, 4),),))
    with pytest.raises(UserError, match="enabled and fp8_enabled are two names"):
        te.make_graphed_callables(layer, (torch.randn(2, 4),), enabled=True, fp8_enabled=True)


class Block(torch.nn.Module):
    """Deterministic to the bit, with a keyword argument that is a tensor and one that is none."""

    def __init__(self, te: ModuleType, device: str) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(32, 48, device=device)
        self.second = te.LayerNormMLP(48, 64, activation="relu", device=device)

    def forward(
        self, x: Tensor, *, factor: Tensor, twice: bool = False, is_first_microbatch: bool | None = None
    ) -> Any:
        y = self.second(self.first(x, is_first_microbatch), is_first_microbatch) * factor
        return y + y if twice else y


def check_graphed_training(te: ModuleType, chosen: Any, device: str) -> None:
    """A graphed module beside the module, bit for bit, with accumulation, evaluation and other arguments in between."""
    eager, graphed = Block(te, device), Block(te, device)
    graphed.load_state_dict(eager.state_dict())

    def step(model: Block, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        found = []
        model.zero_grad()
        for twice in (False, False, True):
            x = torch.randn(5, 32, generator=generator).to(device).requires_grad_()
            with te.autocast(chosen is not None, recipe=chosen):
                y = model(x, factor=torch.tensor(number + 0.5, device=device), twice=twice)
            y.square().mean().backward()
            found += [y.detach().clone(), x.grad.clone()]
        with torch.no_grad(), te.autocast(chosen is not None, recipe=chosen):
            wide = torch.full((5, 32), 100.0, device=device).cumsum(1)
            found.append(model(wide, factor=torch.ones((), device=device), twice=False).clone())
        found += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        return found

    for model in (eager, graphed):  # some training before the capture
        step(model, 0)
    calls: list[str] = []
    made = te.make_graphed_callables(
        graphed,
        (torch.randn(5, 32, device=device, requires_grad=True),),
        sample_kwargs={"twice": False, "factor": torch.ones((), device=device), "is_first_microbatch": True},
        enabled=chosen is not None,
        recipe=chosen,
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("after"),
    )
    assert made is graphed
    assert calls == ["before", "after"]
    assert set(graphed.state_dict()) == set(eager.state_dict())
    for number in range(1, 5):
        for one, other in zip(step(eager, number), step(graphed, number), strict=True):
            assert torch.equal(one, other), number
    if chosen is not None and chosen.delayed():
        for part in ("first", "second"):
            ours, theirs = (getattr(m, part).fp8_meta for m in (eager, graphed))
            for direction in ("scaling_fwd", "scaling_bwd"):
                assert torch.equal(ours[direction].scale, theirs[direction].scale)
                assert torch.equal(ours[direction].amax_history, theirs[direction].amax_history)
    graphed.eval(), eager.eval()
    x, factor = torch.randn(5, 32, device=device), torch.ones((), device=device)
    assert torch.equal(graphed(x, factor=factor), eager(x, factor=factor))


NAMES = [None, "DelayedScaling", "Float8CurrentScaling"]


@pytest.mark.parametrize("name", NAMES)
def test_what_surrounds_a_graph(
    te: ModuleType, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """On a CPU, with stand-ins for capture and replay: a replay computes where no region of this thread hears of it."""
    import threading

    import transformer_engine.pytorch.graph as module

    chosen = None if name is None else getattr(recipe, name)()
    replays: list[int] = []

    def capture(callables: Any, samples: Any, num_warmup_iters: int, **_: Any) -> Any:
        for one, sample in zip(callables, samples, strict=True):
            forward = one.forward
            for _ in range(num_warmup_iters):
                torch.autograd.grad(forward(*sample).sum(), [t for t in sample if t.requires_grad])

            def replay(*tensors: Tensor, forward: Any = forward) -> Any:
                replays.append(1)
                result = []

                def run() -> None:
                    with torch.enable_grad(), te.autocast(chosen is not None, recipe=chosen):
                        result.append(forward(*tensors))

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                return result[0]

            one.forward = replay
        return callables

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(module, "_on_cuda", lambda *_: True)
    check_graphed_training(te, chosen, "cpu")
    assert len(replays) == 4 * 2  # not where an argument was another one, without gradients, or in evaluation


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_graphed_modules_train_as_the_modules_do(te: ModuleType, recipe: ModuleType, name: str | None) -> None:
    check_graphed_training(te, None if name is None else getattr(recipe, name)(), "cuda")


@pytest.mark.gpu
def test_graphed_layers_learn(te: ModuleType, recipe: ModuleType) -> None:
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    layers = tuple(te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, **options) for _ in range(2))
    x = torch.randn(4, 24, 64, device="cuda", dtype=torch.bfloat16)
    chosen = recipe.DelayedScaling(amax_history_len=4)
    samples = tuple((x.clone().requires_grad_(),) for _ in layers)
    te.make_graphed_callables(layers, samples, fp8_enabled=True, fp8_recipe=chosen, fp8_weight_caching=True)
    optimizer = te.optimizers.FusedAdam([p for one in layers for p in one.parameters()], lr=1e-2, master_weights=True)
    losses = []
    for _ in range(8):
        with te.autocast(recipe=chosen):
            loss = layers[1](layers[0](x, is_first_microbatch=True)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    scale = layers[0].layernorm_mlp.fp8_meta["scaling_fwd"].scale
    assert bool((scale[[0, 1, 3, 4]] != 1).all())


@pytest.mark.gpu
def test_a_graph_without_a_region_and_of_two_modules(te: ModuleType, recipe: ModuleType) -> None:
    """Scales stand still outside of autocast; modules of one call share it, each in FP8 or not."""
    one, two = te.Linear(64, 48), te.Linear(48, 32)
    x = torch.randn(16, 64, device="cuda")
    chosen = recipe.DelayedScaling(amax_history_len=4)
    with torch.no_grad():  # a backward graph that is alive keeps its nodes on this stream, of which torch warns
        wanted, middle = two(one(x)), one(x)
    te.make_graphed_callables(
        (one, two), ((x.clone().requires_grad_(),), (middle.requires_grad_(),)), enabled=(False, True),
        recipe=chosen,
    )  # fmt: skip
    assert one.fp8_state is None
    with te.autocast(recipe=chosen):
        y = two(one(x))
    assert not torch.equal(y, wanted)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))
    y.sum().backward()
    with te.autocast(recipe=chosen):
        pass
    scale = two.fp8_state.scale.clone()
    assert bool((scale > 0).all())
    two(one(x * 100)).sum().backward()
    assert torch.equal(two.fp8_state.scale, scale)
    two.eval()
    assert torch.equal(two(one(x)), torch.nn.functional.linear(one(x), two.weight, two.bias))


# The rest


def test_padding_of_groups_of_rows(te: ModuleType) -> None:
    x, splits = torch.randn(20, 6), [3, 0, 17]
    padded, sizes = te.Fp8Padding(3)(x, splits)
    assert sizes == [16, 0, 32]
    assert torch.equal(padded[:3], x[:3])
    assert torch.equal(padded[16:33], x[3:])
    assert not padded[3:16].any()
    assert not padded[33:].any()
    assert torch.equal(te.Fp8Unpadding(3)(padded, splits), x)
    assert te.Fp8Padding(2, 4)(x, [8, 12])[0] is x


def test_export_and_versions(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with te.onnx_export(False):
        pass
    with (
        pytest.raises(NotImplementedError, match=r"onnx_export\(enabled=True\); load the state dict"),
        te.onnx_export(True),
    ):
        pass
    for version, wanted in ((None, (0, 0, 0)), (8907, (8, 9, 7)), (91002, (9, 10, 2))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert te.get_cudnn_version() == wanted
    assert te.is_bf16_available() in (True, False)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # torch's own, as it traces
def test_compiled_layers_in_and_out_of_fp8(te: ModuleType, recipe: ModuleType) -> None:
    layer = te.LayerNormLinear(8, 8, device="cpu")
    x = torch.randn(3, 8)
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
    for chosen in (recipe.DelayedScaling(amax_history_len=3), recipe.Float8CurrentScaling()):
        with te.autocast(recipe=chosen):
            torch.testing.assert_close(compiled(x), layer(x))
