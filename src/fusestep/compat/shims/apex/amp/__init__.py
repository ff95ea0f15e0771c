"""apex.amp, which Apex has removed, over torch.autocast and loss scaling of the same kind.

New code is shorter with torch's own: `with torch.autocast("cuda", dtype=torch.bfloat16): …` and nothing else, or
torch.float16 with torch.amp.GradScaler.
"""

from apex.amp._amp_state import _amp_state as _amp_state  # scripts read its loss_scalers
from apex.amp._amp_state import master_params
from apex.amp.frontend import initialize, load_state_dict, state_dict
from apex.amp.handle import disable_casts, scale_loss
from fusestep.compat.names import module_getattr

__all__ = [
    "disable_casts",
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
]

_DECORATOR = "use torch.amp.custom_fwd(cast_inputs=…), or enter torch.autocast(enabled=False) and cast"

NOT_SERVED = {
    "float_function": (_DECORATOR, False),
    "half_function": (_DECORATOR, False),
    "init": ("use amp.initialize", False),
    "promote_function": (_DECORATOR, False),
    "register_float_function": (_DECORATOR, False),
    "register_half_function": (_DECORATOR, False),
    "register_promote_function": (_DECORATOR, False),
}

__getattr__ = module_getattr(__name__, NOT_SERVED)
