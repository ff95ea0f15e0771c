"""Find files too large for the repository: data and models belong elsewhere, results are small tables.

python tools/large_files.py FILE…
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 512 << 10  # bytes


def main(arguments: list[str]) -> int:
    found = [path for path in map(Path, arguments) if path.is_file() and path.stat().st_size > LIMIT]
    for path in found:
        print(f"{path}: {path.stat().st_size >> 10} KiB, more than {LIMIT >> 10}; keep it out of the repository")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
