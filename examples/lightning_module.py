"""fusestep in a LightningModule: convert in the constructor, FusedAdam in configure_optimizers.

    pip install 'fusestep[integrations]'
    python examples/lightning_module.py

A small network of torch's own modules learns which of its inputs is largest.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fusestep
from fusestep.optim import FusedAdam


class Largest(lightning.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.RMSNorm(width),
            nn.GELU(), nn.Linear(width, 16),
        )  # fmt: skip
        # In place: checkpoints hold the names that they held before, and load into the plain network.
        self.report = fusestep.convert(self.net)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (x,) = batch
        loss = F.cross_entropy(self.net(x), x.argmax(1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        # Clipping belongs to the step: leave gradient_clip_val of the Trainer alone.
        optimizer = FusedAdam(self.parameters(), lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network with Lightning and fusestep.")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    module = Largest()
    print(module.report)
    loader = DataLoader(TensorDataset(torch.randn(4096, 16)), batch_size=128, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=arguments.steps,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    few = max(1, len(module.losses) // 10)
    first, last = torch.stack(module.losses[:few]).mean(), torch.stack(module.losses[-few:]).mean()
    print(f"loss {first:.3f} -> {last:.3f}")
    module.report.undo()
    print("undone:", type(module.net[1]).__name__)


if __name__ == "__main__":
    main()
