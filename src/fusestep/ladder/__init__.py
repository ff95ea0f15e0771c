"""The ladder: what each speed-up buys, measured rung by rung.

`rungs.py` names the changes, `run.py` runs them (gate first, then interleaved rounds, each in a process of its own),
`results.py` says what may be claimed, `report.py` writes it down.
"""

from fusestep.ladder.results import Ladder
from fusestep.ladder.run import LadderConfig, ladder

__all__ = ["Ladder", "LadderConfig", "ladder"]
