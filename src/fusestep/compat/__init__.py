"""Drop-in: the names of NVIDIA Apex and Transformer Engine over fusestep's own parts.

`shims/` is a folder for sys.path, not a package: `shims/apex/optimizers` is what a script gets for `apex.optimizers`.
What is there translates arguments, layouts and state dicts, and uses fusestep's public names for all numerics.

- `report`: which names were served, by what, and which were refused;
- `names`: what a shim module does with names that it does not serve;
- `implementation`: what a served name runs as, and functions that scripts know as autograd.Functions;
- `stepping`: what both packages' optimizers do around a step of fusestep's;
- `install`: the shims on the path, and off it again;
- `run`: the command;
- `settings`: what `fusestep run` was asked for, in environment variables, so that subprocesses know it too.
"""

from fusestep.compat.install import install_shims, uninstall_shims

__all__ = ["install_shims", "uninstall_shims"]
