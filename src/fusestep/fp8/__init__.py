"""FP8: formats, recipes, the region in which modules multiply in FP8, and their scaling state."""

from fusestep.fp8.casting import count_saturation
from fusestep.fp8.context import fp8_autocast
from fusestep.fp8.export import export_state_dict
from fusestep.fp8.formats import Format
from fusestep.fp8.gathered import gather_in_fp8
from fusestep.fp8.model_init import fp8_model_init
from fusestep.fp8.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from fusestep.fp8.support import support

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "count_saturation",
    "export_state_dict",
    "fp8_autocast",
    "fp8_model_init",
    "gather_in_fp8",
    "support",
]
