"""Models of your own on the ladder: what each speed-up buys for them, on this machine.

    cd examples
    fusestep ladder --model ladder_model:sorting
    fusestep ladder --model ladder_model:llama     # pip install 'fusestep[integrations]'

`sorting` is plain PyTorch with a batch and a loss of its own. `llama` is a Hugging Face model by itself: the ladder
trains it on text. docs/ladder-model.md tells the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusestep


class Sorter(nn.Module):
    """Reads numbers and says, place by place, what they are in order."""

    def __init__(self, numbers: int = 50, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(numbers, width)
        self.position = nn.Parameter(torch.randn(24, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, numbers)

    def hidden(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.hidden(numbers))


class Sorting:
    """What the ladder needs to know: a model, how to make a batch, and its loss."""

    def __init__(self) -> None:
        self.model = Sorter()

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        # Random numbers from the generator alone: each rung then trains on the same batches.
        numbers = torch.randint(50, (32, 24), generator=generator)
        return numbers, numbers.sort(dim=1).values

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        numbers, ordered = batch
        return F.cross_entropy(model(numbers).float().flatten(0, 1), ordered.flatten())

    def fused_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        # Optional, for the rung `loss`: the same without holding all logits.
        numbers, ordered = batch
        return fusestep.linear_cross_entropy(model.hidden(numbers), model.head.weight, ordered, model.head.bias)


def sorting() -> Sorting:
    return Sorting()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)
