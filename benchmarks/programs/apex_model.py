"""A program for Apex as people write them: the same small GPT four times, each with one more of Apex's parts.

It knows nothing of fusestep. `--tiny` makes it small enough for a CPU.
"""

import sys
import time

import torch
import torch.nn.functional as F
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from torch import nn

TINY = "--tiny" in sys.argv
VOCAB = 96
WIDTH, HEADS, LAYERS, FFN, SEQ = (32, 2, 2, 64, 24) if TINY else (768, 12, 4, 3072, 256)
BATCH, STEPS = (2, 1) if TINY else (32, 20)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, FFN), nn.GELU(), nn.Linear(FFN, WIDTH))

    def forward(self, x, mask):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class MiniGPT(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.symbols, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(LAYERS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, mask):
        x = self.symbols(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def measured(optimizer_class, norm, amp):
    torch.manual_seed(0)
    model = MiniGPT(norm).to(DEVICE)
    optimizer = optimizer_class(model.parameters(), lr=3e-4)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQ, device=DEVICE)
    first, stride = torch.randint(0, VOCAB, (BATCH, 1)), torch.randint(1, 7, (BATCH, 1))
    rows = ((first + stride * torch.arange(SEQ + 1)) % VOCAB).to(DEVICE)

    def step():
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=amp):
            logits = model(rows[:, :-1], mask)
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(STEPS // 2):
        step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.time()
    for _ in range(STEPS):
        loss = step()
    loss = loss.item()  # waits
    milliseconds = (time.time() - begun) / STEPS * 1000
    return milliseconds, torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0, loss


for what, *parts in (
    ("Adam, FP32", torch.optim.Adam, nn.LayerNorm, False),
    ("FusedAdam", FusedAdam, nn.LayerNorm, False),
    ("+ FusedLayerNorm", FusedAdam, FusedLayerNorm, False),
    ("+ autocast BF16", FusedAdam, FusedLayerNorm, True),
):
    print("rung {}: {:.2f} ms/step | peak mem {:.2f} GB | loss {:.4f}".format(what, *measured(*parts)))
