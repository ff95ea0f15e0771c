"""Training on several processes, on PyTorch's own engine: groups, sharded modules, sharded checkpoints.

`groups` is a leaf that any package may import; the others stand above the modules, the optimizers and the models. So
nothing is imported here: ask for the file that has it.
"""
