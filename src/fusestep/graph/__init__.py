"""The whole training step as one CUDA graph: `train_step.py` takes the steps, `batch.py` knows what a step is fed and
`shapes.py` which kinds of that there are, `capture.py` takes a step into a graph, `baked.py` and `attributes.py` know
what a graph holds that may change under it, `outside.py` and `reach.py` what of that loss_fn has from elsewhere,
`rates.py` where it reads learning rates, `watch.py` what no graph can hold, `checks.py` what a step cannot be built
from, `segments.py` keeps memory together, and `recovery.py` comes back from a capture that failed.
"""

from fusestep.graph.capture import Capture
from fusestep.graph.recovery import recovered_capture
from fusestep.graph.train_step import TrainStep

__all__ = ["Capture", "TrainStep", "recovered_capture"]
