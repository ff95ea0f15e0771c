"""apex.transformer.enums, with Apex's numbers."""

from enum import Enum

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType"]


class LayerType(Enum):
    """Of a transformer's layers."""

    encoder = 1
    decoder = 2


class AttnType(Enum):
    """What attention looks at."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """What attention leaves out."""

    padding = 1
    causal = 2


class ModelType(Enum):
    """What a model is made of."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
