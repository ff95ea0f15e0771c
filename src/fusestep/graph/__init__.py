"""The whole training step as one CUDA graph: `train_step.py` takes the steps, `batch.py` knows what a step is fed, and
`baked.py` what a graph holds that may change under it.
"""

from fusestep.graph.train_step import Capture, TrainStep

__all__ = ["Capture", "TrainStep"]
