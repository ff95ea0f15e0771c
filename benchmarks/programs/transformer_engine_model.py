"""A program for Transformer Engine as people write them: a small GPT of arithmetic sequences, in FP8 where it can.

It knows nothing of fusestep, and feeds (batch, sequence, width) to layers whose default is (sequence, batch, width).
`--tiny` makes it small enough for a CPU.
"""

import itertools
import math
import sys
import time

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe

TINY = "--tiny" in sys.argv
VOCAB = 96
WIDTH, HEADS, LAYERS, FFN, SEQ = (32, 2, 2, 64, 24) if TINY else (768, 12, 4, 3072, 256)
TRAINED, BENCHED, EVERY = (6, 1, 1) if TINY else (60, 30, 10)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_FP8 = te.fp8.check_fp8_support()[0] or TINY
RECIPE = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


class MiniGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                FFN,
                HEADS,
                self_attn_mask_type="causal",
                layer_number=number + 1,
                params_dtype=torch.bfloat16,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            )
            for number in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.symbols(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.float()))


def batch(size):
    first, stride = torch.randint(0, VOCAB, (size, 1)), torch.randint(1, 7, (size, 1))
    rows = (first + stride * torch.arange(SEQ + 1)) % VOCAB
    return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


torch.manual_seed(1234)
model = MiniGPT().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if TINY else 3e-4)


def step(tokens, wanted, in_fp8):
    with te.fp8_autocast(enabled=in_fp8, fp8_recipe=RECIPE):
        logits = model(tokens)
    loss = F.cross_entropy(logits.float().reshape(-1, VOCAB), wanted.reshape(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def bench(in_fp8):
    given = batch(2 if TINY else 32)
    for _ in range(max(1, BENCHED // 3)):
        step(*given, in_fp8)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.time()
    for _ in range(BENCHED):
        step(*given, in_fp8)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    return (time.time() - begun) / BENCHED * 1000, peak


begun = time.time()
for number in range(1, TRAINED + 1):
    loss = step(*batch(2 if TINY else 16), CAN_FP8)
    if number % EVERY == 0:
        print(f"   step {number:3d} | loss {loss:.4f} | {(time.time() - begun) / number * 1000:.0f} ms/step")
print(f">> Final loss: {loss:.4f} (random guess would be ~{math.log(VOCAB):.2f})")
for name, in_fp8 in (("BF16", False), ("FP8 ", True)):
    if CAN_FP8 or not in_fp8:
        print("   {}: {:7.1f} ms/step | peak mem {:.2f} GB".format(name, *bench(in_fp8)))
for name, module in model.blocks[0].named_modules():
    if "scaling_fwd" in (getattr(module, "fp8_meta", None) or {}):
        print(f">> FP8 state of block-0 submodule '{name}':", module.fp8_meta["scaling_fwd"].scale.tolist())
        break
with torch.no_grad():
    tokens = batch(1)[0][:, :8]
    for _ in range(24):  # 1 × 9, 1 × 10, …
        with te.fp8_autocast(enabled=CAN_FP8, fp8_recipe=RECIPE):
            tokens = torch.cat((tokens, model(tokens[:, -SEQ:])[:, -1:].argmax(-1)), 1)
row = tokens[0].tolist()
print("   step diffs:", [(b - a) % VOCAB for a, b in itertools.pairwise(row)])
