# ruff: noqa: T201
"""A script as people write them for Transformer Engine: a small causal model of arithmetic sequences, trained in FP8.

It feeds (batch, sequence, width) to layers whose default is (sequence, batch, width). Runs on a GPU or without.
"""

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Format

VOCAB, WIDTH, HEADS, SEQ, BATCH, STEPS = 16, 48, 2, 12, 10, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=8, amax_compute_algo="max")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                WIDTH, 2 * WIDTH, HEADS, layer_number=i + 1, hidden_dropout=0.0, attention_dropout=0.0,
                params_dtype=torch.float32,
            )
            for i in range(2)
        )  # fmt: skip
        self.norm = te.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.symbols(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(size=BATCH):
    first, stride = torch.randint(0, VOCAB, (size, 1)), torch.randint(1, 5, (size, 1))
    row = (first + stride * torch.arange(SEQ + 1)) % VOCAB
    return row[:, :-1].to(DEVICE), row[:, 1:].to(DEVICE)


torch.manual_seed(5)
model = Model().to(DEVICE)
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
for step in range(1, STEPS + 1):
    ids, wanted = batch()
    with te.fp8_autocast(enabled=True, fp8_recipe=FP8):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().reshape(-1, VOCAB), wanted.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")

with torch.no_grad():
    ids = batch(1)[0][:, :3]
    while ids.shape[1] < SEQ:  # 1 × 4, 1 × 5, …: shapes that FP8 products of other makers refuse
        with te.fp8_autocast(enabled=True, fp8_recipe=FP8):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
print("generated", ids[0].tolist())
for name, module in model.named_modules():
    if "scaling_fwd" in (getattr(module, "fp8_meta", None) or {}):
        print("FP8 state of", name, module.fp8_meta["scaling_fwd"].scale[:3].tolist())
        break
