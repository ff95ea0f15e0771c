"""The ladder: what each speed-up buys, measured rung by rung.

`rungs.py` names the changes, `plan.py` checks what is asked, `run.py` runs them (gate first, then interleaved rounds,
each in a process of its own), `journal.py` keeps them as they come. `results.py` says what may be claimed of each rung,
`verdict.py` what to switch on; `table.py`, `report.py`, `page.py` and `plots.py` write it down.
"""

from fusestep.ladder.config import LadderConfig
from fusestep.ladder.results import Ladder
from fusestep.ladder.run import ladder

__all__ = ["Ladder", "LadderConfig", "ladder"]
