"""What a ladder asks of its worker processes: plain values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fusestep.ladder.rungs import Recipe


@dataclass(frozen=True)
class Request:
    """What to run: the loss curve of a recipe (`gate`), or its times (`time`), over `steps` steps; what is known of a
    user's model (`describe`); or `ceilings`, for which only the device matters.

    Attributes:
        model: the fields of a GPTConfig; None for a model of the user's.
        data, batch: what the GPT trains on; of a user's model `batch` is None where none was asked for.
        reverse: turn the samples of every batch around.
        fp8_stats: count what FP8 saturates while the gate runs, which costs time.
        factory: the name of the user's factory.
        rungs: whose changes to a user's model are looked at.
        profiled: see which kernels take the time, after the timed steps.
        enough_ms: fewer steps are timed where a window of them takes longer, as `fusestep.ladder.timing.measure` does.
        beside: how many processes work on this machine meanwhile, this one included.
        turn: how to wait for the device once all is ready to be timed, as `fusestep.ladder.turns.take_turn` takes it.
    """

    task: Literal["gate", "time", "ceilings", "describe"]
    recipe: Recipe
    model: dict[str, Any] | None
    data: str
    batch: int | None
    steps: int
    device: str
    seed: int
    reverse: bool = False
    fp8_stats: bool = False
    factory: str | None = None
    rungs: tuple[str, ...] = ()
    profiled: bool = False
    enough_ms: float | None = None
    beside: int = 1
    turn: tuple[str, int] | None = None

    @classmethod
    def from_json(cls, text: str) -> Request:
        fields = json.loads(text)
        fields |= {"recipe": Recipe(**fields["recipe"]), "rungs": tuple(fields["rungs"])}
        return cls(**{**fields, "turn": fields["turn"] and tuple(fields["turn"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
