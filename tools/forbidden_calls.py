"""Find calls that no kernel may make: atomics on floats, program numbers of 32 bits, and tuning as it runs.

    python tools/forbidden_calls.py FILE_OR_FOLDER…

- Atomics add in whatever order the programs come, so the same step would give other bits the next time. Integers do
  not mind the order (a ticket, a count, a maximum), and their line says so with a comment that begins `# integer`.
- `tl.program_id(…)` is a 32-bit number, and row × stride overflows it from 2^31 elements on; write
  `tl.program_id(…).to(tl.int64)`, or where it is divided first, which costs less in 32 bits, `# widened later`.
- `triton.autotune` runs a kernel once for each candidate, so one that writes what it reads, as an optimizer's does, is
  applied as often; and which candidate wins, and with it the order of sums, may be another in the next process.
"""

from __future__ import annotations

import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

INTEGER, LATER = "# integer", "# widened later"
WIDENED = [".", "to", "(", "tl", ".", "int64", ")"]
IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def findings(path: Path) -> Iterator[str]:
    """One line for each forbidden call in a file."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    code = [token for token in tokens if token.type not in IGNORED]
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    words = [token.string for token in code]
    for index, token in enumerate(code):
        line = token.start[0]
        comment = comments.get(line, "")
        if token.type != tokenize.NAME:
            continue
        if token.string.startswith("atomic_") and not comment.startswith(INTEGER):
            yield f"{path}:{line}: {token.string}: sums would depend on the order of programs; reduce in two stages"
        if token.string == "program_id" and not is_widened(words, index) and not comment.startswith(LATER):
            yield f"{path}:{line}: program_id is 32 bits wide; append .to(tl.int64)"
        if token.string == "autotune":
            yield f"{path}:{line}: autotune: a kernel would run once for each candidate; choose by a rule"


def is_widened(words: list[str], index: int) -> bool:
    """Whether the call of the name at `index` is followed by .to(tl.int64)."""
    if words[index + 1] != "(":
        return False
    depth = 0
    for place in range(index + 1, len(words)):
        depth += {"(": 1, ")": -1}.get(words[place], 0)
        if depth == 0:
            return words[place + 1 : place + 1 + len(WIDENED)] == WIDENED
    return False


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments]
    missing = [str(path) for path in paths if not path.exists()]
    if missing or not paths:
        print(f"forbidden_calls: nothing to read at {', '.join(missing) or 'no path'}", file=sys.stderr)
        return 2
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    found = [line for file in files for line in findings(file)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
