"""A GPT in three forms that share state dicts, its presets, and generation."""

from fusestep.models.config import PRESETS, GPTConfig
from fusestep.models.generate import generate
from fusestep.models.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig", "generate"]
