"""fusestep in a loop with accelerate: convert before `prepare`, and let FusedAdam clip.

    pip install 'fusestep[integrations]'
    accelerate launch examples/accelerate_loop.py        (or python examples/accelerate_loop.py)

A small encoder of torch's own modules learns to tell which of two tokens a sequence holds more of.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fusestep
from fusestep.optim import FusedAdam


class Classifier(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier with accelerate and fusestep.")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(0, 8, (4096, 15))
    labels = ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=32, shuffle=True)

    model = Classifier()
    report = fusestep.convert(model)
    optimizer = FusedAdam(model.parameters(), lr=2e-3, max_grad_norm=1.0)

    accelerator = Accelerator(mixed_precision="bf16")
    accelerator.print(report)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[Tensor] = []
    while len(losses) < arguments.steps:
        for batch, wanted in loader:
            loss = F.cross_entropy(model(batch), wanted)
            # No accelerator.clip_grad_norm_: the step clips, and skips gradients that are not finite.
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == arguments.steps:
                break
    few = max(1, len(losses) // 10)
    first, last = torch.stack(losses[:few]).mean(), torch.stack(losses[-few:]).mean()
    accelerator.print(f"loss {first:.3f} -> {last:.3f}")

    # As it was, for whoever gets the model next.
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    report.undo()
    accelerator.print("undone:", type(plain.encoder.norm).__name__)


if __name__ == "__main__":
    main()
