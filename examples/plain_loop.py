"""fusestep in a training loop of your own: two imports replace nn.LayerNorm and torch.optim.AdamW.

    python examples/plain_loop.py

A small classifier learns which of its inputs is largest. On a GPU the norm, the optimizer and the clipping of the
global norm run as one or two kernels each; on a CPU the same code runs their PyTorch references.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import fusestep
from fusestep.nn import FusedLayerNorm
from fusestep.optim import FusedAdam

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(
    nn.Linear(16, 128),
    FusedLayerNorm(128),
    nn.GELU(),
    nn.Linear(128, 16),
).to(device)

# Clipping belongs to the step: no pass of its own over the gradients, and no wait for the GPU.
optimizer = FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

print(fusestep.explain(model))

for step in range(200):
    x = torch.randn(256, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), x.argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 50 == 0 or step == 199:
        norm = float(optimizer.last_grad_norm)
        print(
            f"step {step:3}  loss {loss.item():.3f}  gradient norm {norm:.2f}  skipped {int(optimizer.skipped_steps)}"
        )
