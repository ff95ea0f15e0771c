"""`fusestep plan`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fusestep.cli.plan_table import show
from fusestep.errors import UserError
from fusestep.plan import SHAPES, Estimate, Work, estimate, measured_rates

_SETTINGS = ("batch", "accumulate", "precision", "recipe", "weights", "form", "activation_checkpointing", "parallel")
_DEFAULT = Work(SHAPES["mini"])


def _option(text: str, default: Any = None) -> Any:
    """An option that is None unless given, so that a config file can supply its value."""
    return typer.Option(help=text + ("" if default is None else f" [default: {default}]"), show_default=False)


def _rate(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


def command(
    preset: Annotated[str | None, _option(f"Model: {', '.join(SHAPES)}.", "mini")] = None,
    config: Annotated[
        str | None,
        _option(
            "JSON or TOML file as of fusestep train; its table `model` may also set kv_heads, gated, biases, positions."
        ),
    ] = None,
    layers: Annotated[int | None, _option("Layers, in place of the preset's.")] = None,
    width: Annotated[int | None, _option("Width.")] = None,
    heads: Annotated[int | None, _option("Heads.")] = None,
    kv_heads: Annotated[int | None, _option("Groups of keys and values.")] = None,
    ffn_width: Annotated[int | None, _option("Features of the feed-forward layer.")] = None,
    vocab_size: Annotated[int | None, _option("Symbols.")] = None,
    context: Annotated[int | None, _option("Tokens of a sequence.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the run.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="Of which a machine has so many.")] = 8,
    parallel: Annotated[
        str | None, _option("As of fusestep train: ddp, fsdp, tp=N, or a list as fsdp,tp=2.", "none")
    ] = None,
    shard_over: Annotated[
        int | None,
        _option("With fsdp: ranks that share each weight, groups of which hold the same (HSDP); all unless told."),
    ] = None,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share each sequence; fusestep train has none.")] = 1,
    batch: Annotated[int | None, _option("Sequences in one pass, over all ranks.", _DEFAULT.batch)] = None,
    accumulate: Annotated[int | None, _option("Passes whose gradients make one step.", _DEFAULT.accumulate)] = None,
    precision: Annotated[str | None, _option("fp32, bf16, fp16 or fp8.", _DEFAULT.precision)] = None,
    recipe: Annotated[str | None, _option("With fp8: delayed, current, block or mxfp8.", _DEFAULT.recipe)] = None,
    weights: Annotated[str | None, _option("Dtype of the weights, as of fusestep train.", _DEFAULT.weights)] = None,
    form: Annotated[str | None, _option("Model code: seed, plain or fused.", _DEFAULT.form)] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Keep only each block's input for the backward pass.",
            show_default=False,
        ),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="The whole step in one CUDA graph, by TrainStep.")] = False,
    tokens: Annotated[
        float | None, _option("Tokens of the whole run, for its length and GPU hours, as in 2e12.")
    ] = None,
    gpu_memory: Annotated[float | None, _rate("GiB of the GPU.")] = None,
    product_tflops: Annotated[
        float | None, _rate("TFLOP/s of products, of any size, in the planned precision.")
    ] = None,
    copy_tbps: Annotated[float | None, _rate("TB/s of a copy on the GPU, read plus written.")] = None,
    link_gbps: Annotated[float | None, _rate("GB/s each way that a GPU reaches within a machine.")] = None,
    network_gbps: Annotated[float | None, _rate("GB/s each way that a GPU reaches between machines.")] = None,
    storage_gbps: Annotated[float | None, _rate("GB/s at which a machine writes checkpoints.")] = None,
    failure_hours: Annotated[float | None, _rate("GPU hours between failures.")] = None,
    restart_minutes: Annotated[float | None, _rate("Minutes from a failure to the next step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Estimate memory, communication and step time of a run, each with its formula.

    Rates are those measured on one H200, unless given; what one GPU cannot tell (links, storage, failures) is assumed,
    and the plan says which is which. Nothing is run, and no GPU is needed.
    """
    given = locals()
    table, settings = _from_file(config)
    name = preset or settings.pop("preset", "mini")
    if name not in SHAPES:
        raise UserError(f"--preset is {name!r}; choose one of {', '.join(SHAPES)}.")
    sizes = ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size", "context")
    changes = {**table, **{size: given[size] for size in sizes if given[size] is not None}}
    work = Work(
        SHAPES[name].changed(changes),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        shard_over=shard_over,
        context_parallel=context_parallel,
        graph=graph,
        **{**settings, **{one: given[one] for one in _SETTINGS if given[one] is not None}},
    )
    own = {
        "copy": _times(copy_tbps, 1e12),
        "link": _times(link_gbps, 1e9),
        "network": _times(network_gbps, 1e9),
        "storage": _times(storage_gbps, 1e9),
        "failures": failure_hours,
        "restart": _times(restart_minutes, 60),
    }
    rates = measured_rates().with_changes(own, product=_times(product_tflops, 1e12), memory=_times(gpu_memory, 2.0**30))
    if tokens is not None and not 1 <= tokens < 1e18:
        raise UserError(f"--tokens is {tokens:g}; pass 1 to 1e18.")
    found: Estimate = estimate(work, rates, tokens=tokens)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        show(found)


def _from_file(path: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model table and those settings of a config file that a plan is made of."""
    if path is None:
        return {}, {}
    # Only here: the trainer's settings need torch's devices, a plan does not.
    from fusestep.train.config import read_config_file

    settings = read_config_file(path)
    model = settings.get("model", {})
    if not isinstance(model, dict):
        raise UserError(f"--config {path} sets model to {model!r}; write a table of sizes.")
    return model, {
        name: value for name, value in settings.items() if name in (*_SETTINGS, "preset") and value is not None
    }


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
