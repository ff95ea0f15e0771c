"""What a model learns in FP8: the mini GPT from three seeds under every recipe, beside plain bf16.

Embeddings and head start with torch's own initial values, as in the tutorials that the mini GPT comes from.

- Arithmetic sequences, 100 steps of AdamW at 3e-4: the loss at steps 60 and 100, and on how many of 64 held-out prompts
  24 greedily generated tokens keep the constant stride.
- Text (the Python standard library's sources), `TEXT_STEPS` steps: the mean loss of the last 100,
  beside bf16's from the same seed. bf16 with the rows of each batch reversed is the same training but for the order of
  sums: how far it comes out from bf16 is the noise of this comparison.

Every run is a process of its own and they share the GPU, so nothing here says anything about speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from fusestep import fp8
from fusestep.data import Source, open_source
from fusestep.fp8.recipes import Recipe
from fusestep.models import GPT, PRESETS, generate
from fusestep.optim import FusedAdam

REVERSED = "bf16, rows reversed"
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    REVERSED: None,
    "delayed": fp8.DelayedScaling(amax_history_len=16),
    "current": fp8.Float8CurrentScaling(),
    "block": fp8.Float8BlockScaling(),
    "mxfp8": fp8.MXFP8BlockScaling(),
}
SEEDS = (1234, 1, 2)
PROMPTS, PROMPT, NEW = 64, 8, 24
BATCH, ARITHMETIC_STEPS, TEXT_STEPS, LAST = 16, 100, 2000, 100
#: The long run: no recipe whose every product is emulated on most GPUs.
TEXT_SEEDS, NOT_ON_TEXT = SEEDS, ("mxfp8",)
PROCESSES = 8

COLUMNS = ("recipe", "seed", "loss at 60", "strides kept", "loss at 100", "strides kept", "text, last 100", "to bf16")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    if "failed" in row:
        return [row["recipe"], str(row["seed"]), "failed"]
    text, relative = row.get("text_loss"), row.get("text_over_bf16")
    return [
        row["recipe"],
        str(row["seed"]),
        f"{row['loss_60']:.3f}",
        f"{row['kept_60']}/{PROMPTS}",
        f"{row['loss_100']:.3f}",
        f"{row['kept_100']}/{PROMPTS}",
        "" if text is None else f"{text:.4f}",
        "" if relative is None else f"{relative - 1:+.2%}",
    ]


def run(copy: float) -> list[dict[str, Any]]:  # noqa: ARG001 (nothing here is timed)
    """Every recipe and seed on both kinds of data."""
    jobs = [(recipe, seed, "arithmetic") for seed in SEEDS for recipe in RECIPES]
    jobs += [(recipe, seed, "text") for seed in TEXT_SEEDS for recipe in RECIPES if recipe not in NOT_ON_TEXT]
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = dict(zip(jobs, pool.map(in_a_process, jobs), strict=True))
    rows = []
    for recipe in RECIPES:
        for seed in SEEDS:
            row = {"recipe": recipe, "seed": seed, **results[recipe, seed, "arithmetic"]}
            text = results.get((recipe, seed, "text"))
            if text is not None:
                row |= text
            if text is not None and "text_loss" in text:
                row["text_over_bf16"] = text["text_loss"] / results["bf16", seed, "text"]["text_loss"]
            rows.append(row)
    return rows


def in_a_process(job: tuple[str, int, str]) -> dict[str, Any]:
    recipe, seed, data = job
    command = [sys.executable, "-m", "benchmarks.learning", recipe, str(seed), data]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"failed": done.stderr[-2000:]}
    if done.returncode == 0:
        result = json.loads(done.stdout.splitlines()[-1])
    print(f"{recipe} from seed {seed} on {data}: {result}", flush=True)
    return result


class Run:
    """One model that trains on one source."""

    def __init__(self, recipe: str, seed: int, source: Source, device: str) -> None:
        torch.manual_seed(seed)
        config = dataclasses.replace(PRESETS["mini"], form="fused").with_vocabulary(source.vocab_size)
        self.model = GPT(config, device=device)
        for module in (self.model.embedding, self.model.position, self.model.head):
            assert module is not None
            module.reset_parameters()
        self.optimizer = FusedAdam(self.model.parameters(), lr=3e-4, weight_decay=0.01)
        self.recipe, self.source, self.device = RECIPES[recipe], source, torch.device(device)
        self.is_reversed = recipe == REVERSED
        self.position = 0

    @contextlib.contextmanager
    def precision(self) -> Any:
        """bf16 by autocast, and FP8 where there is a recipe."""
        region = contextlib.nullcontext() if self.recipe is None else fp8.fp8_autocast(recipe=self.recipe)
        with torch.autocast(self.device.type, torch.bfloat16), region:
            yield

    def step(self) -> torch.Tensor:
        """One step; its loss, on the device."""
        inputs, targets = self.source.batch(self.position, BATCH, self.model.config.context)
        self.position += BATCH
        if self.is_reversed:
            inputs, targets = inputs.flip(0), targets.flip(0)
        with self.precision():
            logits = self.model(inputs.to(self.device, non_blocking=True))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.device, non_blocking=True).flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def strides_kept(self) -> int:
        """How many held-out prompts are continued with their own stride."""
        prompts, _ = self.source.batch(0, PROMPTS, PROMPT, held_out=True)
        with self.precision():
            rows = torch.stack(generate(self.model, list(prompts), NEW)).cpu()
        steps = (rows[:, 1:] - rows[:, :-1]) % self.source.vocab_size
        return int((steps == steps[:, :1]).all(dim=1).sum())


def learn(recipe: str, seed: int, data: str, device: str = "cuda") -> dict[str, Any]:
    """What one run comes to."""
    source = open_source("synthetic" if data == "arithmetic" else "text:stdlib", seed=seed)
    run = Run(recipe, seed, source, device)
    if data == "text":
        losses = [run.step() for _ in range(TEXT_STEPS)]
        return {"text_loss": statistics.fmean(torch.stack(losses[-LAST:]).tolist())}
    found: dict[str, Any] = {}
    for step in range(1, ARITHMETIC_STEPS + 1):
        loss = run.step()
        if step in (60, 100):
            found |= {f"loss_{step}": float(loss), f"kept_{step}": run.strides_kept()}
    return found


if __name__ == "__main__":
    print(json.dumps(learn(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
