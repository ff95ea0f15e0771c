"""A tour of FP8: the modules, a recipe, a small GPT that trains, its speed, its scales, and what it has learnt.

    python examples/fp8_tour.py            # a GPU trains 4 layers of width 768, a CPU something smaller, in emulation
    python examples/fp8_tour.py --steps 100 --recipe current --format e4m3

The GPT learns arithmetic sequences, (phase + stride · t) mod 96: to continue one it has to find the stride and keep it.
Everything is batch first (bshd), so that attention runs over the sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import fp8
from fusestep import nn as fused
from fusestep.data import arithmetic_sequences, strides
from fusestep.errors import UserError
from fusestep.fp8.recipes import recipe_named
from fusestep.hardware import device_named
from fusestep.optim import FusedAdam

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--steps", type=int, help="of training; 60 on a GPU, 120 on a CPU")
options.add_argument("--timed", type=int, default=30, help="steps of each benchmark, after a third as many to warm up")
options.add_argument("--recipe", default="delayed", choices=["delayed", "current", "block", "mxfp8"])
options.add_argument("--format", default="auto", choices=["auto", "hybrid", "e4m3"])
options.add_argument("--amax-history", type=int, help="steps that delayed scaling remembers")
options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
asked = options.parse_args()
try:
    device = device_named(asked.device)
    recipe = recipe_named(asked.recipe, asked.format, asked.amax_history)
except UserError as error:
    options.error(str(error))
if asked.timed < 0 or (asked.steps is not None and asked.steps < 1):
    options.error("--steps takes a number of steps from 1 on, --timed from 0 on.")

VOCABULARY = 96
if device.type == "cuda":
    WIDTH, HEADS, LAYERS, FFN, SEQUENCE, LEARNING_RATE = 768, 12, 4, 3072, 256, 3e-4
else:
    WIDTH, HEADS, LAYERS, FFN, SEQUENCE, LEARNING_RATE = 128, 4, 2, 512, 64, 3e-3

STEPS = asked.steps or (60 if device.type == "cuda" else 120)

torch.manual_seed(1234)
is_native, reason = fp8.support(device, recipe)
print(f"FP8 on {device}: {'native' if is_native else 'emulated'} ({reason})\nrecipe: {recipe}")

# 1. The modules. Any shape goes, in any precision; within fp8_autocast they multiply in FP8.
x = torch.randn(8, 32, WIDTH, device=device, dtype=torch.bfloat16)
where = {"device": device, "dtype": torch.bfloat16}
tour = {
    "Linear": fused.Linear(WIDTH, WIDTH, **where),
    "LayerNorm": fused.LayerNorm(WIDTH, **where),
    "LayerNormLinear": fused.LayerNormLinear(WIDTH, 3 * WIDTH, **where),
    "LayerNormMLP": fused.LayerNormMLP(WIDTH, 4 * WIDTH, **where),
    "TransformerLayer": fused.TransformerLayer(WIDTH, FFN, HEADS, **where).eval(),
}
print("\nmodules, and the shape that each makes of", tuple(x.shape))
with torch.no_grad(), fp8.fp8_autocast(recipe=recipe):
    for name, module in tour.items():
        print(f"  {name:16} {tuple(module(x).shape)}")


# 2. A GPT of them.
class MiniGPT(nn.Module):
    """Token and position embeddings, transformer layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(
            fused.TransformerLayer(WIDTH, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, layer_number=number)
            for number in range(1, LAYERS + 1)
        )
        self.norm = fused.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to (B, T, VOCABULARY) logits."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = MiniGPT().to(device)
optimizer = FusedAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
data = arithmetic_sequences(VOCABULARY, seed=1234)
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"\nmodel: {parameters / 1e6:.1f} M parameters, {LAYERS} layers × {WIDTH}")


@contextlib.contextmanager
def precision(in_fp8: bool):
    """torch.amp in bf16; within it, the products of the blocks in FP8 or not."""
    with torch.autocast(device.type, torch.bfloat16), fp8.fp8_autocast(enabled=in_fp8, recipe=recipe):
        yield


def train_step(inputs: Tensor, targets: Tensor, in_fp8: bool) -> Tensor:
    with precision(in_fp8):
        logits = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# 3. It trains.
print(f"\n{STEPS} steps in FP8, 16 sequences each")
loss = torch.zeros(())
for step in range(1, STEPS + 1):
    inputs, targets = data.batch(16 * (step - 1), 16, SEQUENCE)
    loss = train_step(inputs.to(device), targets.to(device), in_fp8=True)
    if step % 10 == 0:
        print(f"  step {step:3}  loss {loss.item():.4f}")
print(f"  final loss {loss.item():.4f}; a random guess has ln {VOCABULARY} = {math.log(VOCABULARY):.2f}")

# 4. What delayed scaling remembers of each tensor. The other recipes remember nothing.
state = model.blocks[0].self_attention.layernorm_qkv.fp8_state
if state is not None:
    print("\nFP8 state of block 0's self_attention.layernorm_qkv, newest amax last")
    for name, scale, history in zip(
        state.names, state.scale.tolist(), state.ordered_history().t().tolist(), strict=True
    ):
        print(f"  {name:12} scale {scale:.4g}  amaxes … {'  '.join(f'{amax:.4g}' for amax in history[-4:])}")

# 5. It continues sequences that it has never seen, greedily.
model.eval()
tokens = data.batch(0, 1, 8, held_out=True)[0].to(device)
with torch.no_grad(), precision(in_fp8=True):
    for _ in range(24):
        newest = model(tokens[:, -SEQUENCE:])[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, newest], dim=1)
model.train()
steps = strides(tokens[0].tolist(), VOCABULARY)
print(f"\n8 ids and 24 generated ones: {tokens[0].tolist()}")
print(f"step differences: {steps} <- {'a constant stride' if len(set(steps)) == 1 else 'the stride changes'}")

# 6. What it costs, last, since these steps train on.
if asked.timed:
    inputs, targets = (part.to(device) for part in data.batch(0, 32, SEQUENCE))
    print("\na step (forward, backward, optimizer), 32 sequences")
    for name, in_fp8 in (("bf16", False), ("fp8", True)):
        for _ in range(asked.timed // 3):
            train_step(inputs, targets, in_fp8)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(asked.timed):
            train_step(inputs, targets, in_fp8)
        if device.type == "cuda":
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - began) / asked.timed
        peak = f"  peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device.type == "cuda" else ""
        print(f"  {name:4} {ms:8.2f} ms{peak}")
    if not is_native:
        print("  emulated: these are the numbers of FP8, not its speed")
