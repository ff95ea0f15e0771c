"""What `fusestep.convert` buys: whole training steps of models as they are, converted, and converted with FP8.

    python -m benchmarks convert

Llama's and GPT-2's shapes, from Hugging Face's configurations where that library is installed and from lookalikes.py
where it is not (`source` says which), and the model of torch.nn.TransformerEncoderLayer that the tutorials start from,
which is configuration A of the steps. All have fp32 weights under torch.autocast in bf16, forward, backward and AdamW:
as they are with torch's fused AdamW, converted with FusedAdam, in FP8, launch by launch and then as one CUDA graph by
TrainStep. `fallback` says why a step was not captured.

`device_ms` is the device's time of a step that is queued before it starts, `wall_ms` what a loop of steps takes, which
is the host's time where the host is the slower one. `peak_bytes` is the most that was allocated in a step, weights
and optimizer included. The first losses of a converted model must be those of the model as it is.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fusestep
from benchmarks import lookalikes, timing
from benchmarks.lookalikes import Shape
from fusestep import TrainStep
from fusestep.fp8 import DelayedScaling
from fusestep.ladder.timing import clock_of, measure
from fusestep.optim import FusedAdam


@dataclasses.dataclass(frozen=True)
class Setup:
    """A row: what is done to the model, and whose optimizer it has."""

    name: str
    converts: bool
    optimizer: Literal["torch", "fusestep"]
    fp8: bool = False
    graph: bool = False


AS_IT_IS = "as it is"
SETUPS = (
    Setup(AS_IT_IS, False, "torch"),
    Setup("converted", True, "fusestep"),
    Setup("converted, FP8", True, "fusestep", fp8=True),
    Setup("converted, one graph", True, "fusestep", graph=True),
    Setup("converted, FP8, one graph", True, "fusestep", fp8=True, graph=True),
)
SHAPES = {
    "encoder": Shape(768, 12, 4, 3072, 96, 256, 32),
    "gpt2": Shape(768, 12, 12, 3072, 50304, 1024, 8),
    "llama": Shape(2048, 16, 8, 5632, 32000, 2048, 4, key_heads=8),
}
#: Steps that are timed, and those before them, with which a graph is surely captured.
STEPS, FIRST = 12, 6
#: Losses of the first steps may differ from those of the model as it is by this much of the first. They fall as far as
#: one batch is learnt by heart, in which FP8 lags a little, whoever multiplies: torchao's lags as far.
WITHIN = {False: 0.001, True: 0.025}
TINY = {
    "SHAPES": {
        "encoder": Shape(32, 2, 2, 64, 96, 16, 2),
        "gpt2": Shape(32, 2, 2, 64, 97, 16, 2),
        "llama": Shape(32, 4, 2, 48, 97, 16, 2, key_heads=2),
    },
}

COLUMNS = ("configuration", "swapped", "device ms", "wall ms", "host ms", "over as it is", "GB", "loss", "convert s")
IDENTITY = ("model", "configuration")
RATIOS = {"over_as_it_is": "more", "wall_over_as_it_is": "more", "memory_over_as_it_is": "less"}


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is of our code."""
    return bool(row["configuration"] != AS_IT_IS)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    host, peak = row["host_ms"], row["peak_bytes"]
    return [
        f"{row['model']} ({row['source']}): {row['configuration']}",
        str(row["swapped"]),
        f"{row['device_ms']:.2f}",
        f"{row['wall_ms']:.2f}",
        "" if host is None else f"{host:.2f}",
        f"{row['over_as_it_is']:.2f}",
        "" if peak is None else f"{peak / 1e9:.2f}",
        f"{row['loss']:.4f}",
        f"{row['convert_seconds']:.1f}",
    ]


def built(name: str) -> tuple[nn.Module, str]:
    """A model on the device, and where its code comes from."""
    torch.manual_seed(0)
    # Initial values are drawn on the device: the host would take many seconds for half a billion.
    with timing.DEVICE:
        return made(name, SHAPES[name])


def made(name: str, shape: Shape) -> tuple[nn.Module, str]:
    """The model on torch's default device."""
    if name == "encoder":
        return lookalikes.Plain(shape), "torch"
    if importlib.util.find_spec("transformers") is None:
        make: Callable[[Shape], nn.Module] = getattr(lookalikes, name)
        return make(shape), "lookalike"
    import transformers

    transformers.logging.set_verbosity_error()
    common = {"vocab_size": shape.vocabulary, "use_cache": False, "attn_implementation": "sdpa"}
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            **common,
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=shape.width,
            n_inner=shape.ffn_width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=shape.context,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    return model.train(), f"transformers {transformers.__version__}"


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (no byte floor here)
    """Each model in every way."""
    for name in SHAPES:
        before: dict[str, Any] | None = None
        for setup in SETUPS:
            row = {"model": name, "configuration": setup.name} | dataclasses.asdict(SHAPES[name])
            row |= measured(name, setup)
            timing.free()
            before = row if before is None else before
            pairs = list(zip(row["first_losses"], before["first_losses"], strict=True))
            worst = max(abs(one - other) for one, other in pairs) / before["first_losses"][0]
            if not worst <= WITHIN[setup.fp8]:
                yield row | {"failed": f"its first losses differ by {worst:.1%} from the model's as it is"}
                continue
            memory = row["peak_bytes"]
            yield row | {
                "over_as_it_is": before["device_ms"] / row["device_ms"],
                "wall_over_as_it_is": before["wall_ms"] / row["wall_ms"],
                "memory_over_as_it_is": None if memory is None else memory / before["peak_bytes"],
            }


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model's own, of predicting the next token."""
    loss: Tensor = model(input_ids=tokens, labels=tokens)["loss"]
    return loss


class Training:
    """A model that trains on one batch of random tokens."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.model, self.source = built(name)
        self.graphed: TrainStep | None = None
        self.swapped, self.left, self.convert_seconds = 0, [], 0.0
        if setup.converts:
            begun = time.perf_counter()
            report = fusestep.convert(self.model, fp8=DelayedScaling(amax_history_len=16) if setup.fp8 else None)
            self.convert_seconds = time.perf_counter() - begun
            self.swapped = len(report.swapped)
            self.left = sorted({f"{row.kind}: {row.reason}" for row in report.left})
        if setup.optimizer == "torch":
            options = {"fused": True} if timing.DEVICE.type == "cuda" else {}
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 1e-4, weight_decay=0.01, **options)
        else:
            self.optimizer = FusedAdam(self.model.parameters(), 1e-4, weight_decay=0.01)
        shape = SHAPES[name]
        generator = torch.Generator(timing.DEVICE).manual_seed(1)
        self.tokens = torch.randint(
            shape.vocabulary, (shape.batch, shape.context), generator=generator, device=timing.DEVICE
        )

        if setup.graph:
            self.graphed = TrainStep(self.model, loss_of, self.optimizer, autocast=torch.bfloat16)

    def step(self) -> Tensor:
        """One step; its loss, on the device."""
        if self.graphed is not None:
            return self.graphed(self.tokens)
        with torch.autocast(timing.DEVICE.type, torch.bfloat16):
            loss = loss_of(self.model, self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def measured(name: str, setup: Setup) -> dict[str, Any]:
    """Times and memory of a step."""
    training = Training(name, setup)
    losses = [float(training.step()) for _ in range(FIRST)]
    is_cuda = timing.DEVICE.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    timed = measure(
        training.step,
        clock_of(timing.DEVICE),
        steps=STEPS,
        warmup_ms=300.0 if is_cuda else 0.0,
    )
    return {
        "source": training.source,
        "swapped": training.swapped,
        "left": training.left,
        "fallback": None if training.graphed is None else training.graphed.fallback,
        "convert_seconds": round(training.convert_seconds, 2),
        "device_ms": timed.step if timed.device is None else timed.device,
        "wall_ms": timed.step,
        "host_ms": timed.host,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "first_losses": losses,
        "loss": losses[-1],
    }
