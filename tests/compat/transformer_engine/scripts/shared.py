# ruff: noqa: T201
"""A script as people write them for Transformer Engine's tensor parallelism: a causal model whose layers ranks share.

Under torchrun every rank has a part of each layer and of the head's vocabulary, and a slice of the sequence between the
layers; alone it has all. Sequence first; runs on GPUs or without.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling

VOCAB, WIDTH, HEADS, SEQ, BATCH = 16, 32, 4, 12, 10
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
group = None
if RANKS > 1:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    group = dist.new_group(list(range(RANKS)))
RANK = dist.get_rank(group) if RANKS > 1 else 0
SHARED = {"tp_group": group, "tp_size": RANKS, "sequence_parallel": RANKS > 1, "params_dtype": torch.float32}
torch.manual_seed(5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                WIDTH, 2 * WIDTH, HEADS, layer_number=i + 1, hidden_dropout=0.0, attention_dropout=0.0,
                set_parallel_mode=True, fuse_qkv_params=True, **SHARED,
            )
            for i in range(2)
        )  # fmt: skip
        self.head = te.LayerNormLinear(WIDTH, VOCAB, bias=False, parallel_mode="column", **SHARED)
        for table in (self.symbols, self.places):
            table.weight.sequence_parallel = RANKS > 1

    def forward(self, ids):
        x = self.symbols(ids) + self.places(torch.arange(SEQ, device=ids.device))[:, None]
        x = x.chunk(RANKS)[RANK]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch():
    first, stride = torch.randint(0, VOCAB, (BATCH, 1)), torch.randint(1, 5, (BATCH, 1))
    row = (first + stride * torch.arange(SEQ + 1)) % VOCAB
    return row[:, :-1].t().contiguous().to(DEVICE), row[:, 1:].t().contiguous().to(DEVICE)


model = Model().to(DEVICE)
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3)
recipe = DelayedScaling(amax_history_len=4)
for step in range(1, 13):
    ids, wanted = batch()
    with te.fp8_autocast(enabled=step > 8, fp8_recipe=recipe, fp8_group=group):
        logits = model(ids)
    if RANKS > 1:
        loss = te.parallel_cross_entropy(logits, wanted, 0.1, True, group)
    else:
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}")
if RANKS > 1:
    dist.destroy_process_group()
