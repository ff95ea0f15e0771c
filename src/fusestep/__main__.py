"""`python -m fusestep` is the command `fusestep`."""

from fusestep.cli import main

main()
