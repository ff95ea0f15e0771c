"""The trainer: a run from its configuration to its checkpoints, and back."""

from fusestep.train.checkpoint import Checkpoint, load_model
from fusestep.train.config import TrainConfig
from fusestep.train.loop import TrainResult, train

__all__ = ["Checkpoint", "TrainConfig", "TrainResult", "load_model", "train"]
