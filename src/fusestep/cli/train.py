"""`fusestep train`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fusestep.cli.several import as_one_of_several
from fusestep.distributed.launch import launched_rank, launched_size, restarts
from fusestep.fp8.recipes import AMAX_HISTORY
from fusestep.models import PRESETS
from fusestep.train import TrainConfig, train
from fusestep.train.config import MODEL_FIELDS, has_begun, settings_of
from fusestep.train.progress import for_terminal

_DEFAULT = TrainConfig()


def _option(text: str, default: Any = None) -> Any:
    """An option that is None unless given, so that a config file and a resumed run can supply its value."""
    shown = (
        ""
        if default is None
        else f" [default: {default:g}]"
        if isinstance(default, float)
        else f" [default: {default}]"
    )
    return typer.Option(help=text + shown, show_default=False)


def command(
    preset: Annotated[
        str | None, _option(f"Model: auto (mini on a GPU, tiny on a CPU), {', '.join(PRESETS)}.", "auto")
    ] = None,
    config: Annotated[
        str | None,
        _option(
            "JSON or TOML file of these settings by their names; its table `model` may set "
            f"{', '.join(MODEL_FIELDS)} in place of the preset's."
        ),
    ] = None,
    form: Annotated[
        str | None, _option("Model code: seed, plain or fused; all load each other's weights.", _DEFAULT.form)
    ] = None,
    data: Annotated[
        str | None,
        _option(
            "synthetic, text:PATH (a file or folder, as bytes; text:stdlib is Python's own source) or tokens:PATH.",
            _DEFAULT.data,
        ),
    ] = None,
    steps: Annotated[
        int | None, _option("Step at which the run ends, counted from its very start.", _DEFAULT.steps)
    ] = None,
    batch: Annotated[
        int | None, _option("Sequences in one forward and backward pass, over all ranks.", _DEFAULT.batch)
    ] = None,
    accumulate: Annotated[int | None, _option("Passes whose gradients make one step.", _DEFAULT.accumulate)] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", _DEFAULT.lr)] = None,
    warmup: Annotated[
        int | None, _option("Steps of linear warm-up; a cosine down to a tenth follows.", _DEFAULT.warmup)
    ] = None,
    schedule_steps: Annotated[
        int | None, _option("Step at which the cosine ends; 0 follows --steps. Set it to extend a run bit for bit.", 0)
    ] = None,
    weight_decay: Annotated[float | None, _option("Decoupled weight decay.", _DEFAULT.weight_decay)] = None,
    clip: Annotated[
        float | None, _option("Largest global norm of the gradient; 0 does not clip.", _DEFAULT.clip)
    ] = None,
    dropout: Annotated[float | None, _option("Dropout probability.", _DEFAULT.dropout)] = None,
    precision: Annotated[
        str | None,
        _option(
            "fp32; bf16 or fp16 (with loss scaling), by torch.amp; fp8: bf16 with the blocks' products in FP8.",
            _DEFAULT.precision,
        ),
    ] = None,
    recipe: Annotated[
        str | None, _option("How FP8 scales are chosen: delayed, current, block or mxfp8.", "delayed")
    ] = None,
    fp8_format: Annotated[
        str | None,
        _option("hybrid (E4M3, gradients in E5M2), e4m3, or auto: hybrid, and e4m3 for block and mxfp8.", "auto"),
    ] = None,
    amax_history: Annotated[
        int | None, _option("Steps whose largest values delayed scaling remembers.", AMAX_HISTORY)
    ] = None,
    fp8_stats: Annotated[
        bool | None,
        typer.Option(
            "--fp8-stats/--no-fp8-stats",
            help="Count what delayed scaling saturates and flushes to zero, into fp8.jsonl, for fusestep inspect.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        _option(
            "Dtype of the weights: fp32, or that of --precision (bf16 for fp8) with fp32 masters.", _DEFAULT.weights
        ),
    ] = None,
    eval_every: Annotated[
        int | None, _option("Steps between evaluations on held-out data; 0 for none.", _DEFAULT.eval_every)
    ] = None,
    save_every: Annotated[
        int | None, _option("Steps between checkpoints; 0 saves at the end alone.", _DEFAULT.save_every)
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing/--no-activation-checkpointing",
            help="Keep only each block's input for the backward pass: less memory, more time.",
            show_default=False,
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="The same run gives the same bits on a GPU too (on a CPU it always does).",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, _option("auto, cpu or cuda.", _DEFAULT.device)] = None,
    parallel: Annotated[
        str | None,
        _option(
            "How the ranks that torchrun started share the work: ddp, fsdp, tp=N, or a list as fsdp,tp=2 or tp=2,sp.",
            _DEFAULT.parallel,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        _option("Seconds that no rank may be slow or silent; then all end and one is named.", _DEFAULT.timeout),
    ] = None,
    out: Annotated[
        str | None, _option("Folder of the run: config.json, metrics.jsonl, checkpoints/.", _DEFAULT.out)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its newest good checkpoint.")
    ] = False,
    seed: Annotated[int | None, _option("Seed of weights, data and dropout.", _DEFAULT.seed)] = None,
) -> None:
    """Train a GPT on text, token files or arithmetic sequences.

    A setting comes from the command line; where it is not there, from --config; with --resume, where it is not there
    either, from the run in --out; else it has its default. A resumed run keeps its data, seed, model and --weights; all
    other settings may change.
    """
    given = {name: value for name, value in locals().items() if value is not None and name not in ("config", "resume")}

    def configured() -> TrainConfig:
        # torchrun started the processes anew after one of them failed: they go on from what the last ones saved.
        resumes = resume or (restarts() > 0 and has_begun(given, file=config))
        return TrainConfig(**settings_of(given, file=config, resume=resumes))

    if launched_size() == 1:
        result = train(configured(), for_terminal())
    else:
        shown = for_terminal() if launched_rank() == 0 else None
        result = as_one_of_several("fusestep train", configured, lambda config: train(config, shown))
    if result.stopped_by is not None:
        raise typer.Exit(128 + result.stopped_by)
