"""The speed targets, row by row: what is measured, what others reached, and what we want to reach on one H200.

Every target was set beside other libraries' figures, measured on the same model of GPU on 2026-12-01 with torch 2.11:
Transformer Engine 2.20, Apex of that day, Liger 0.8, torchao 0.18 and QuACK 0.6. `quoted` has those figures, for
libraries whose installation is too long to have them in every run; what is measured in the same run stands beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

GPU, QUOTED_ON = "NVIDIA H200", "2026-12-01"
#: Ours may be this much slower than the fastest other in the same run, which is noise.
OF_BEST_PEER = 0.97
Better = Literal["more", "less"]
Data = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """One row.

    Attributes:
        name: its key, in explanations.json too.
        table: the table that it stands in.
        label: what it is, for a reader.
        part: of the benchmarks.
        better: whether more or less is.
        goal: the target, in the unit of `value`.
        value: a result's figure.
        mine: whether a result is ours; of several the best counts.
        rivals: whether a result is another implementation's, of the same work, in the same run (memory may be the
            ladder's); ours must come up to OF_BEST_PEER of the best. None where a row has none.
        floor: the floor's figure beside ours, if there is one.
        quoted: what others reached on QUOTED_ON, in words.
        show: how a figure is written.
        bound_is_rival: whether the best rival itself is the target, whatever it is.
        compared: the figure by which ours is compared with rivals, where it is not `value`.
        variant: which of several ways of ours a result is, in words.
    """

    name: str
    table: str
    label: str
    part: str
    better: Better
    goal: float | None
    value: Callable[[Data], float | None]
    mine: Callable[[Data], bool]
    rivals: Callable[[Data], bool] | None = None
    floor: Callable[[Data], float | None] | None = None
    quoted: str = ""
    show: Callable[[float], str] = "{:.2f}".format
    bound_is_rival: bool = False
    compared: Callable[[Data], float | None] | None = None
    variant: Callable[[Data], str] | None = None


def field(name: str, unit: float = 1.0) -> Callable[[Data], float | None]:
    """A result's field, in a unit."""

    def read(row: Data) -> float | None:
        value = row.get(name)
        return None if value is None else float(value) / unit

    return read


def has(**wanted: Any) -> Callable[[Data], bool]:
    """Whether a result has these fields; a tuple is any of its values."""

    def check(row: Data) -> bool:
        return all(
            row.get(name) in value if isinstance(value, tuple) else row.get(name) == value
            for name, value in wanted.items()
        )

    return check


def targets() -> list[Target]:
    """Every row, in the order of the page."""
    return [*_adam(), *_norms(), *_fp8(), *_loss(), *_steps(), *_startup(), *_scaling(), *_ranks()]


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.2f} ms"


def _gigabytes(value: float) -> str:
    return f"{value:.2f} GB"


def _adam() -> Iterator[Target]:
    rows = (
        ("29M", "", 0.20, "torch fused 0.297, Apex 0.45, TE 0.53 ms"),
        ("124M", "", 0.86, "torch fused 1.35, Apex 1.33, TE 2.03 ms"),
        ("124M", "+clip", 0.98, "torch fused 2.13, Apex 2.10 ms"),
        ("1.3B", "", 9.0, "torch fused 13.1, Apex 12.4, TE 13.8 ms"),
        ("1.3B", "+clip", 10.3, "torch fused 15.7, Apex 16.9 ms"),
    )
    for size, clip, goal, quoted in rows:
        yield Target(
            f"adam/{size}{clip}",
            "Adam step, FP32 weights, gradients and moments",
            f"{size.replace('M', ' M').replace('B', ' B')} parameters" + (", norm clipped" if clip else ""),
            "adam",
            "less",
            goal,
            field("device_ms"),
            has(set=size, implementation=f"fusestep{clip}"),
            has(set=size, implementation=f"torch fused{clip}"),
            field("floor_ms"),
            quoted,
            _milliseconds,
        )


def _norms() -> Iterator[Target]:
    shapes = ((16384, 768), (16384, 2048), (16384, 4096), (16384, 8192), (8192, 16384))
    goals = {
        ("layer_norm", "forward"): (0.92, 0.92, 0.95, 0.95, 0.97),
        ("layer_norm", "backward"): (0.70, 0.87, 0.92, 0.95, 0.85),
        ("rms_norm", "forward"): (0.95, 0.95, 1.0, 1.0, 0.98),
        ("rms_norm", "backward"): (0.75, 0.88, 0.93, 0.95, 0.85),
    }
    quoted = {
        ("layer_norm", "forward"): ("QuACK 0.88", "QuACK 0.87", "Liger 0.91", "QuACK 0.90", "compile 0.965"),
        ("layer_norm", "backward"): ("compile 0.38", "QuACK 0.59", "QuACK 0.75", "QuACK 0.75", "QuACK 0.64"),
        ("rms_norm", "forward"): ("0.93", "0.92", "1.0", "1.0", "0.98"),
        ("rms_norm", "backward"): ("QuACK 0.50", "QuACK 0.76", "QuACK 0.82", "QuACK 0.79", "Liger 0.71"),
    }
    words = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
    for kind, direction in goals:
        for place, (rows, width) in enumerate(shapes):
            best = quoted[kind, direction][place]
            yield Target(
                f"norms/{kind}/{width}/{direction}",
                "Norms, BF16: the share of the floor, which is a copy's rate",
                f"{words[kind]} {rows} × {width}, {direction}",
                "norms",
                "more",
                goals[kind, direction][place],
                field(f"{direction}_of_floor"),
                has(kind=kind, width=width, implementation="fusestep"),
                has(kind=kind, width=width, implementation=("torch", "torch.compile", "liger", "quack")),
                None,
                best if best[0].isalpha() else f"compile, Liger {best}",
                "{:.3f}".format,
            )


def _fp8() -> Iterator[Target]:
    table = "FP8 linear layer, forward and backward, delayed scaling"
    rows = (
        ((8192, 768, 2304), 0.115, 1.33, 1.14),
        ((8192, 2048, 8192), 0.77, 1.33, 1.17),
        ((16384, 4096, 4096), 1.52, 1.69, 1.76),
        ((8192, 4096, 14336), 2.66, 2.47, 2.57),
        ((8192, 8192, 8192), 3.02, 2.69, 3.10),
    )
    for (tokens, inputs, outputs), goal, engine, torchao in rows:
        shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
        name, words = f"{tokens}x{inputs}x{outputs}", f"{tokens} × {inputs} × {outputs}"
        mine = has(**shape, implementation="delayed")
        others = has(**shape, implementation=("torch bf16", "torchao tensorwise, compiled"))
        quoted = f"in event time TE {engine}, torchao {torchao} ms"
        own: dict[str, Any] = {"table": table, "part": "fp8", "better": "less", "mine": mine}
        yield Target(
            name=f"fp8/{name}/device",
            label=f"{words}, device time",
            goal=goal,
            value=field("device_ms"),
            rivals=others,
            floor=field("floor_ms"),
            quoted=quoted,
            show=_milliseconds,
            **own,
        )
        yield Target(
            name=f"fp8/{name}/events",
            label=f"{words}, event time",
            goal=engine,
            value=field("events_ms"),
            quoted=quoted,
            show=_milliseconds,
            **own,
        )
        yield Target(
            name=f"fp8/{name}/host",
            label=f"{words}, host time over torch's in BF16",
            goal=2.0,
            value=field("host_over_torch"),
            **own,
        )


#: Gigabytes that linear + cross entropy may take, by vocabulary.
LOSS_MEMORY = {50304: 0.3, 128256: 1.1}


def _loss_variant(row: Data) -> str:
    """How a result of ours sums the weight's gradient, and its chunks."""
    return str(row["implementation"]).removeprefix("fusestep").removeprefix(", ") or "sums in fp32"


def _loss() -> Iterator[Target]:
    table = "Linear + cross entropy, BF16, forward and backward; memory beyond operands and final gradients"
    narrow = "torch 8.0 ms / 4.9 GB, compile 3.9 / 0.82, Liger 14.6 / 0.01, QuACK 3.09 / 0.51"
    wide = "torch 30.6 ms / 12.1 GB, compile 21.5 / 2.1, Liger 29.6 / 0.07, QuACK 20.1 / 1.63"
    rows = (((8192, 768, 50304), 3.05, narrow), ((8192, 2048, 128256), 20.0, wide))
    for (tokens, width, vocabulary), goal, quoted in rows:
        shape = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
        words = f"{tokens} × {width} × {vocabulary}"
        # The fastest of ours within the memory, and the memory of that one.
        mine, memory = has(**shape, is_claimed=True), LOSS_MEMORY[vocabulary]
        others = has(**shape, implementation=("torch", "torch.compile", "liger", "quack"))
        own: dict[str, Any] = {"table": table, "part": "loss", "better": "less", "mine": mine, "quoted": quoted}
        own |= {"variant": _loss_variant}
        yield Target(
            name=f"loss/{vocabulary}/time",
            label=f"{words}, time",
            goal=goal,
            value=field("device_ms"),
            rivals=others,
            # Other libraries cannot be captured in a graph; by events all are timed alike.
            compared=field("event_ms"),
            floor=field("products_ms"),
            show=_milliseconds,
            **own,
        )
        yield Target(
            name=f"loss/{vocabulary}/memory",
            label=f"{words}, memory",
            goal=memory,
            value=field("extra_bytes", 1e9),
            show=_gigabytes,
            **own,
        )
    yield Target(
        name="loss/128256/memory, bf16",
        table=table,
        label="8192 × 2048 × 128256, memory with sums in BF16",
        part="loss",
        better="less",
        goal=0.6,
        value=field("extra_bytes", 1e9),
        mine=has(vocabulary=128256, implementation="fusestep, sums in bf16"),
        show=_gigabytes,
    )


STEPS = "Whole training step in one graph: forward, backward, AdamW with FP32 moments"
#: What a reader has to know of the others' figures in a table.
WORDS = {
    STEPS: """\
(*) Transformer Engine's layers took (batch, sequence, width) for (sequence, batch, width), as its tutorial feeds them,
so they had less attention to compute than the others. The memory of a library that was not installed in a run is that
on the [ladder](measured.md) of the same model and batch, which was measured in another."""
}
#: Milliseconds, by model.
STEP_GOALS = {"a": 3.0, "b": 38.0, "c": 28.0, "d": 95.0}
OURS_BF16 = ("fusestep bf16", "fusestep bf16, torch's loss", "fusestep bf16, masters")
OURS_FP8 = (
    "fusestep fp8 delayed",
    "fusestep fp8 delayed, torch's loss",
    "fusestep fp8 delayed, masters",
    "fusestep fp8 delayed, remainders",
    "fusestep fp8 current",
)


def _others(model: str, *precisions: str) -> Callable[[Data], bool]:
    """Others that keep moments in fp32 as ours do, in these precisions; native amp, which has no FP8, in any."""

    def check(row: Data) -> bool:
        name = str(row.get("configuration", ""))
        if row.get("model") != model or name.startswith("fusestep") or row.get("moments") != "fp32":
            return False
        return name == "native, amp" or row.get("precision") in precisions

    return check


def _steps() -> Iterator[Target]:
    quotes = "Apex + amp {} ms, native amp {}, all bf16 {}, TE FP8 {}, with its graphs {} (*), torchao {}"
    rows = (
        ("a", "4 × 768, vocabulary 96, 32 × 256", quotes.format(15.5, 4.28, 3.85, 30.7, 6.8, 10.7)),
        ("b", "12 × 2048, vocabulary 96, 32 × 256", quotes.format(78.0, 61.6, 56.0, 62.1, 48.6, 55.5)),
        ("c", "12 × 768, vocabulary 50304, 16 × 1024", quotes.format(60.1, 41.6, 38.8, 67.6, 42.1, 46.0)),
        ("d", "24 × 2048, vocabulary 50304, 4 × 2048", "native amp 150.6 ms, all bf16 136.8, neither in a graph"),
    )
    for model, words, quoted in rows:
        label = f"{model.upper()}: {words}"
        own: dict[str, Any] = {"table": STEPS, "part": f"steps-{model}", "better": "less"}
        yield Target(
            name=f"steps/{model}/time",
            label=f"{label}: time",
            goal=STEP_GOALS[model],
            value=field("device_ms"),
            mine=has(model=model, is_claimed=True),
            rivals=_others(model, "bf16", "fp8"),
            floor=field("floor_ms"),
            quoted=quoted,
            show=_milliseconds,
            **own,
        )
        for precision, mine, rivals in (
            ("BF16", OURS_BF16, _others(model, "bf16")),
            ("FP8", OURS_FP8, _others(model, "fp8")),
        ):
            yield Target(
                name=f"steps/{model}/memory, {precision.lower()}",
                label=f"{label}: memory, {precision}",
                goal=None,
                value=field("peak_reserved_bytes", 1e9),
                # Of the very configuration whose time is claimed.
                mine=has(model=model, configuration=mine, is_claimed=True),
                rivals=rivals,
                show=_gigabytes,
                bound_is_rival=True,
                **own,
            )


def _startup() -> Iterator[Target]:
    for cache, goal in (("empty", 60.0), ("warm", 15.0)):
        for configuration in ("fusestep bf16", "fusestep fp8 delayed"):
            yield Target(
                f"startup/{cache}/{configuration}",
                "First steps of A in a fresh process: compiling and capturing",
                f"{configuration.removeprefix('fusestep ')}, {cache} cache",
                "startup",
                "less",
                goal,
                field("capture_seconds"),
                has(configuration=configuration, cache=cache),
                show="{:.1f} s".format,
            )


def _scaling() -> Iterator[Target]:
    for configuration in ("fusestep bf16", "fusestep fp8 delayed"):
        for axis in ("tokens", "width", "depth"):
            yield Target(
                f"scaling/{configuration}/{axis}",
                "Growth: the share of the floor at each size over the best at any smaller one; the worst of these",
                f"{configuration.removeprefix('fusestep ')}, {axis}",
                "scaling",
                "more",
                OF_BEST_PEER,
                field("share_kept"),
                has(configuration=configuration, axis=axis),
                show="{:.3f}".format,
            )


def _ranks() -> Iterator[Target]:
    table = "Two GPUs of one machine"
    for model in ("b", "d"):
        for precision in ("bf16", "fp8"):
            yield Target(
                f"ranks/{model}/{precision}/weak",
                table,
                f"{model.upper()}, {precision}, DDP: weak scaling, whole step in one graph",
                f"ranks-{model}",
                "more",
                0.95,
                field("efficiency"),
                has(precision=precision, path="ddp", mode="graph", kind="weak"),
                show="{:.3f}".format,
            )
    yield Target(
        "ranks/b/fsdp",
        table,
        "B, fp8, FSDP2: over plain FSDP2 in bf16, compiled, a batch on each rank",
        "ranks-b",
        "more",
        1.25,
        field("over_native"),
        has(precision="fp8", path="fsdp", kind="weak"),
        show="{:.2f}×".format,
    )
