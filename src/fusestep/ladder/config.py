"""What a person asks of a ladder."""

from __future__ import annotations

from dataclasses import dataclass

from fusestep.fp8.recipes import FormatName, RecipeName


@dataclass(frozen=True)
class LadderConfig:
    """What to measure; None lets the device decide.

    Attributes:
        preset: a name of `fusestep.models.PRESETS`; auto is mini on a GPU and tiny on a CPU.
        rungs: which, as `fusestep.ladder.rungs.select` reads it; auto is all that mean something on the device.
        data: what the timed steps train on, as `fusestep.data.open_source` reads it, or random (tokens of the whole
            vocabulary); auto is synthetic for a small vocabulary and random for a large one. The gate has its own text.
        rounds: how often each rung is timed, each time in a process of its own; 5 on a GPU, 3 on a CPU.
        steps: timed steps a process, rounded up to whole windows; up to 36 on a GPU, up to 24 on a CPU, and fewer where
            a step takes long.
        gate_steps: steps of each loss curve that the gate compares; 200 on a GPU, 40 on a CPU.
        batch: sequences a step.
        device: as `fusestep.hardware.device_named` reads it.
        seed: of weights, data and the order of the rungs.
        scaling, fp8_format, amax_history: of the rung fp8, as `fusestep.fp8.recipes.recipe_named` takes them.
        fp8_stats: count what FP8 saturates while the gate runs.
        model: a factory of the user's, "pkg.mod:function", in place of a preset.
        base: the rung that all are compared with; those before it are left out.
        natives: as `fusestep.ladder.contenders.native_names` reads it.
        compiled: whether natives go through torch.compile; None: on a GPU.
        peers: as `fusestep.ladder.contenders.peer_names` reads it.
    """

    preset: str = "auto"
    rungs: str = "auto"
    data: str = "auto"
    rounds: int | None = None
    steps: int | None = None
    gate_steps: int | None = None
    batch: int | None = None
    device: str = "auto"
    seed: int = 0
    scaling: RecipeName = "delayed"
    fp8_format: FormatName = "auto"
    amax_history: int | None = None
    fp8_stats: bool = False
    model: str | None = None
    base: str | None = None
    natives: str = "auto"
    compiled: bool | None = None
    peers: str = ""
