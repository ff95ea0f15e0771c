"""The training steps that are made of other libraries' parts, each at its best setting.

Everything of theirs is imported here, in the process of one contender.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusestep.errors import UserError
from fusestep.ladder.own import Own
from fusestep.ladder.peer_functions import CHUNK, liger_loss, quack_layer_norm, quack_loss
from fusestep.ladder.peer_model import LayersGPT, PeerGPT
from fusestep.ladder.peers import load
from fusestep.ladder.rungs import Recipe
from fusestep.ladder.step import AUTOCAST, Part, prepare
from fusestep.ladder.subject import BuiltIn, Subject, loss_of_logits
from fusestep.ladder.torch_step import TorchStep
from fusestep.models import GPT
from fusestep.models.blocks import EPSILON

_DECAY = 0.01


def peer_step(recipe: Recipe, subject: Subject, device: torch.device, seed: int) -> TorchStep:
    """The step of a peer's recipe.

    Raises: whatever the library raises; UserError for what a person can mend.
    """
    prepare(seed)
    parts = _Parts(recipe, subject, device)
    build = {"apex": _apex, "te": _te, "liger": _liger, "torchao": _torchao, "quack": _quack}[recipe.peer]
    step: TorchStep = build(parts)
    return step


class _Parts:
    """What every builder needs: the model to start from, and ways to make a step of it."""

    def __init__(self, recipe: Recipe, subject: Subject, device: torch.device) -> None:
        self.recipe, self.subject, self.device = recipe, subject, device

    def gpt(self, norm: Callable[[int], nn.Module] | None = None) -> PeerGPT:
        source = self.source()
        as_seed = self.recipe.form == "seed"
        return PeerGPT(source, as_seed=as_seed) if norm is None else PeerGPT(source, norm, as_seed=as_seed)

    def source(self) -> GPT:
        """The built-in GPT, for its weights."""
        if not isinstance(self.subject, BuiltIn):
            raise UserError("its parts replace a GPT's blocks, and this model is one of your own.")
        model = self.subject.model(Recipe(form="plain"), self.device)
        assert isinstance(model, GPT)
        return model

    def with_norms(self, make: Callable[[int, float], nn.Module]) -> nn.Module:
        """The GPT, or a model of the user's, with its LayerNorms replaced."""
        if not isinstance(self.subject, Own):
            return self.gpt(lambda width: make(width, EPSILON))
        model = self.subject.model(self.recipe, self.device)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.LayerNorm and child.bias is not None and len(child.normalized_shape) == 1:
                    new = make(child.normalized_shape[0], child.eps).to(child.weight.device, child.weight.dtype)
                    new.load_state_dict(child.state_dict())
                    setattr(parent, name, new)
        return model

    def loss(self) -> Callable[..., Tensor]:
        return loss_of_logits if isinstance(self.subject, BuiltIn) else self.subject.loss(Recipe())

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr=self.recipe.lr, weight_decay=_DECAY, fused=True, capturable=self.recipe.graph
        )

    def step(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        *what: Part,
        optimizer: torch.optim.Optimizer | None = None,
        words: str = "torch.optim.AdamW (fused)",
        graphed: bool | None = None,
        **options: Any,
    ) -> TorchStep:
        def of_batch(*batch: Any) -> Tensor:
            return loss(model, *batch)

        return TorchStep(
            torch.compile(of_batch) if self.recipe.compiled else of_batch,
            optimizer or self.adam(model),
            self.device,
            autocast=AUTOCAST[self.recipe.precision],
            graphed=self.recipe.graph if graphed is None else graphed,
            words=words,
            parts=tuple(what),
            **options,
        )


def _apex(parts: _Parts) -> TorchStep:
    """FusedAdam, FusedLayerNorm, torch.amp."""
    norms, optimizers = load("apex.normalization"), load("apex.optimizers")
    model = parts.with_norms(lambda width, eps: norms.FusedLayerNorm(width, eps=eps))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=parts.recipe.lr, weight_decay=_DECAY)
    what = Part("FusedLayerNorm", "apex", norms.__name__)
    return parts.step(model, parts.loss(), what, optimizer=optimizer, words="apex.optimizers.FusedAdam")


def _te(parts: _Parts) -> TorchStep:
    """TransformerLayer on (batch, sequence, width), FP8 with delayed scaling; with `graph` its own graphed layers.

    Weights in BF16, its FusedAdam with FP32 masters.
    """
    te, optimizers = load("transformer_engine.pytorch"), load("transformer_engine.pytorch.optimizers")
    recipes = load("transformer_engine.common.recipe")
    gpt = parts.source()
    config = gpt.config

    def layer(number: int) -> nn.Module:
        made: nn.Module = te.TransformerLayer(
            config.width,
            config.ffn_width,
            config.heads,
            layernorm_epsilon=EPSILON,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=number,
            self_attn_mask_type="causal",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
            params_dtype=torch.bfloat16,
            device=parts.device,
        )
        return made

    model = LayersGPT(gpt, layer, torch.bfloat16)
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    what = Part("TransformerLayer", "te", "bshd, FP8 delayed scaling")
    if parts.recipe.graph:
        batch = next(parts.subject.batches(parts.device))[0]
        sample = torch.zeros(*batch.shape, config.width, device=parts.device, dtype=torch.bfloat16, requires_grad=True)
        model.called = list(
            te.make_graphed_callables(
                tuple(model.blocks),
                tuple((sample,) for _ in model.blocks),
                num_warmup_iters=3,
                fp8_enabled=True,
                fp8_recipe=recipe,
            )
        )
        what = Part("TransformerLayer", "te", "bshd, FP8 delayed scaling, layers by make_graphed_callables")
    optimizer = optimizers.FusedAdam(model.parameters(), lr=parts.recipe.lr, weight_decay=_DECAY, master_weights=True)
    return parts.step(
        model,
        loss_of_logits,
        what,
        optimizer=optimizer,
        words="transformer_engine FusedAdam, FP32 masters of BF16 weights",
        graphed=False,
        region=lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe),
    )


def _liger(parts: _Parts) -> TorchStep:
    """Its LayerNorm, and on the built-in GPT its fused linear cross entropy."""
    norms = load("liger_kernel.transformers.layer_norm")
    model = parts.with_norms(lambda width, eps: norms.LigerLayerNorm(width, eps=eps, bias=True))
    what = Part("LigerLayerNorm", "liger", norms.__name__)
    if not isinstance(model, PeerGPT):
        return parts.step(model, parts.loss(), what)
    part = Part("fused linear cross entropy", "liger", f"at most about {CHUNK} tokens' logits exist at a time")
    return parts.step(model, _of_hidden(liger_loss), what, part)


def _of_hidden(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The loss of a PeerGPT, from one that takes the head's input and weight."""

    def of_model(model: PeerGPT, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, weight = _in_bf16(model, tokens)
        with torch.autocast(hidden.device.type, enabled=False):
            return loss(hidden, weight, targets.flatten())

    return of_model


def _in_bf16(model: PeerGPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Head's input (B·T, W) and weight (V, W) as BF16, which is what the libraries' losses were made for."""
    hidden = model.hidden(tokens).flatten(0, 1).to(torch.bfloat16)
    return hidden, model.head.weight.to(torch.bfloat16)


def _torchao(parts: _Parts) -> TorchStep:
    """Linear layers of the blocks in FP8 with a scale for each tensor, found anew each time; compiled."""
    float8 = load("torchao.float8")
    own = isinstance(parts.subject, Own)
    model = parts.subject.model(parts.recipe, parts.device) if own else parts.gpt()
    config = float8.Float8LinearConfig.from_recipe_name("tensorwise")

    def is_wanted(module: nn.Module, path: str) -> bool:
        """Hidden layers whose sides are multiples of 16, which is what its products take."""
        if not own:
            return "blocks" in path
        sides = (*module.weight.shape,) if isinstance(module, nn.Linear) else ()
        return "head" not in path and all(side % 16 == 0 for side in sides)

    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
    return parts.step(model, parts.loss(), Part("Float8Linear", "torchao", "tensorwise, dynamic scaling"))


def _quack(parts: _Parts) -> TorchStep:
    """Its LayerNorm and its chunked linear cross entropy."""
    model = parts.gpt(lambda width: _QuackLayerNorm(width, EPSILON))
    what = (
        Part("LayerNorm", "quack", "layernorm_fwd and layernorm_bwd"),
        Part("linear cross entropy", "quack", "chunks"),
    )
    return parts.step(model, _of_hidden(quack_loss), *what)


class _QuackLayerNorm(nn.Module):
    """QuACK's LayerNorm, BF16 in and out, as torch.amp's fused kernels would have it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return quack_layer_norm(x.to(torch.bfloat16), self.weight, self.bias, self.eps)
