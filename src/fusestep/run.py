"""`python -m fusestep.run` is the command `fusestep run`, and needs no extra."""

from fusestep.compat.run import main

if __name__ == "__main__":
    main()
