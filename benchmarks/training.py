"""Whole training steps in processes of their own: ours, and the best of native PyTorch on the same model.

The native model is one that a user would write: nn.Linear, one product for q, k and v, causal
scaled_dot_product_attention. Model and loss are compiled together by torch.compile, the optimizer is torch's fused
AdamW, and forward, backward and step are one CUDA graph, captured as torch's manual says. Ours is
`fusestep.models.GPT` under `fusestep.TrainStep`. Both start from the same weights and see the same random tokens.

A process builds its step, runs it until it is captured, says so, and times it when it is told to: several may get
ready beside each other, and are timed one after another. Its peak of memory is `max_memory_reserved` since its start.

This module must not touch a device when it is imported: processes are forked after that.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch._dynamo  # torch.optim imports it in its first step
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import TrainStep
from fusestep.fp8.recipes import recipe_named
from fusestep.ladder.timing import clock_of, measure
from fusestep.models import GPT, GPTConfig
from fusestep.optim import FusedAdam

Whose = Literal["ours", "native", "torchao"]
Dtype = Literal["fp32", "bf16"]
LR, WEIGHT_DECAY, INITIAL_STD = 3e-4, 0.01, 0.023
#: Batches that the timed steps take turns with, and steps that surely end with a captured one.
BATCHES, PREPARED = 4, 6
#: Seconds that a process may take to get ready, and to be timed.
PATIENCE = 300.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a step is made.

    Attributes:
        name: of the row.
        whose: fusestep's, native PyTorch's, or native with torchao's FP8.
        precision: what products are computed in; in FP8 those of the blocks.
        weights: the parameters' dtype; with fp32 products run under autocast. Moments have it too, unless there are
            masters.
        masters: fp32 master weights, and fp32 moments, beside bf16 weights.
        loss: fusestep.linear_cross_entropy or torch's, of all logits.
        steps: that are timed.
    """

    name: str
    whose: Whose
    precision: Literal["bf16", "fp8 delayed", "fp8 current", "fp8 tensorwise"] = "bf16"
    weights: Dtype = "fp32"
    masters: bool = False
    loss: Literal["fused", "torch"] = "fused"
    compiled: bool = True

    @property
    def dtypes(self) -> dict[str, str]:
        """In words, for a row."""
        masters = {True: "fp32", False: "none"}[self.masters]
        return {"weights": self.weights, "moments": "fp32" if self.masters else self.weights, "masters": masters}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one process is to do."""

    setup: Setup
    config: GPTConfig
    batch: int
    steps: int
    device: str


class NativeBlock(nn.Module):
    """A pre-norm block in plain PyTorch."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, config.ffn_width),
            nn.Linear(config.ffn_width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, W))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class NativeGPT(nn.Module):
    """The GPT of `fusestep.models` in plain PyTorch; its matrices in the same order."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(NativeBlock(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def loss_of_logits(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of all logits, in fp32."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def initialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Storage and values for a model on the meta device: each matrix from the device's generator, in their order."""
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape, device=device)
                parameter.copy_(drawn.normal_(0.0, INITIAL_STD, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def build(work: Work) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of a work: takes tokens and targets, returns the loss on the device."""
    setup, device = work.setup, torch.device(work.device)
    torch.set_float32_matmul_precision("highest")
    dtype = torch.float32 if setup.weights == "fp32" else torch.bfloat16
    autocast = torch.bfloat16 if setup.weights == "fp32" else None
    if setup.whose == "ours":
        config = dataclasses.replace(work.config, form="fused")
        model = initialise(GPT(config, device="meta"), device, dtype)
        optimizer = FusedAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, master_weights=setup.masters)
        _, is_fp8, scaling = setup.precision.partition("fp8 ")
        recipe = recipe_named(scaling) if is_fp8 else None  # type: ignore[arg-type]
        loss = GPT.loss if setup.loss == "fused" else loss_of_logits
        return TrainStep(model, loss, optimizer, autocast=autocast, fp8_recipe=recipe)
    with torch.device("meta"):
        native: nn.Module = NativeGPT(work.config)
    native = initialise(native, device, dtype)
    if setup.whose == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            native,
            config=Float8LinearConfig.from_recipe_name("tensorwise"),
            module_filter_fn=lambda _, name: "blocks" in name,
        )
    return NativeStep(native, device, autocast, is_compiled=setup.compiled)


class NativeStep:
    """Forward, backward and torch's fused AdamW as one CUDA graph (on a CPU: one after another)."""

    def __init__(
        self, model: nn.Module, device: torch.device, autocast: torch.dtype | None, *, is_compiled: bool
    ) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.loss = torch.compile(loss_of_logits, dynamic=False) if is_compiled else loss_of_logits
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True, capturable=device.type == "cuda"
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.calls = 0
        self.static: tuple[Tensor, ...] = ()
        self.result: Tensor | None = None

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.stream is None:
            return self._step(tokens, targets)
        if self.calls <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self._step(tokens, targets)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.graph is None:
            self.static = (tokens.clone(), targets.clone())
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self._step(*self.static)
        for place, given in zip(self.static, (tokens, targets), strict=True):
            place.copy_(given, non_blocking=True)
        self.graph.replay()
        assert self.result is not None
        return self.result.clone()

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # Without the cache of casts: a graph must hold each step's own.
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            loss = self.loss(self.model, tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def batches(work: Work) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets."""
    generator = torch.Generator(work.device).manual_seed(1)

    def drawn() -> Tensor:
        shape = (work.batch, work.config.context)
        return torch.randint(work.config.symbols, shape, generator=generator, device=work.device)

    return [(drawn(), drawn()) for _ in range(BATCHES)]


class Prepared:
    """A step that was run until it is captured."""

    def __init__(self, work: Work) -> None:
        self.work, self.device = work, torch.device(work.device)
        self.clock = clock_of(self.device)
        self.batches = batches(work)
        self.step = build(work)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        for number in range(PREPARED):
            begun = time.perf_counter()
            self.losses.append(float(self.step(*self.batches[number % BATCHES])))
            self.seconds.append(time.perf_counter() - begun)
        if isinstance(self.step, TrainStep) and self.step.fallback is not None and self.device.type == "cuda":
            raise RuntimeError(f"the step was not captured: {self.step.fallback}")
        # The losses were read above, which made the host wait; nothing below does.
        self.count = 0

    def once(self) -> None:
        """The next step."""
        self.step(*self.batches[self.count % BATCHES])
        self.count += 1

    def timed(self) -> dict[str, Any]:
        """Times of a step in ms, and the peak of the process in bytes."""
        is_cuda = self.device.type == "cuda"
        timing = measure(self.once, self.clock, steps=self.work.steps, warmup_ms=300.0 if is_cuda else 0.0)
        steps = sorted(timing.steps)
        return {
            "device_ms": timing.step if timing.device is None else timing.device,
            "wall_ms": timing.step,
            "wall_ms_quartiles": [steps[len(steps) // 4], steps[-1 - len(steps) // 4]],
            "host_ms": timing.host,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
            "loss": self.losses[-1],
        }


def child(connection: Connection, work: Work) -> None:
    """A process's life: get ready, wait for the word, time, and end."""
    try:
        prepared = Prepared(work)
        connection.send({"ready": prepared.losses})
        connection.recv()
        connection.send(prepared.timed())
    except Exception:
        connection.send({"failed": traceback.format_exc()[-2000:]})


def measured(works: Sequence[Work], together: int) -> Iterator[tuple[Work, dict[str, Any]]]:
    """Each work in a process of its own: `together` of them get ready beside each other, and are timed in turn."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.training"])
    for first in range(0, len(works), together):
        running = []
        for work in works[first : first + together]:
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, work))
            process.start()
            theirs.close()
            running.append((work, process, ours))
        try:
            replies = [_reply(connection) for _, _, connection in running]
            for (work, process, connection), reply in zip(running, replies, strict=True):
                if "failed" not in reply:
                    connection.send("go")
                    reply = _reply(connection)
                process.join(PATIENCE)
                yield work, reply
        finally:
            for _, process, connection in running:
                connection.close()
                if process.is_alive():
                    process.kill()
                process.join()


def _reply(connection: Connection) -> dict[str, Any]:
    """What a process says next."""
    if not connection.poll(PATIENCE):
        return {"failed": f"no word within {PATIENCE:.0f} s"}
    try:
        reply: dict[str, Any] = connection.recv()
    except EOFError:
        return {"failed": "its process ended without a word"}
    return reply
