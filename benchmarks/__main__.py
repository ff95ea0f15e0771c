"""Measure on the GPU at hand, compare with the committed results of its model, and write results files.

    python -m benchmarks [PART…] [--seconds N] [--out FOLDER] [--against FOLDER]

Each part runs in a process of its own. The exit status is 1 where something got slower than noise explains, where a
part failed, and where it was cut off, by Ctrl-C or SIGTERM too (what it has is kept in a file that ends in .unfinished
instead of .json); 2 where nothing can be measured. A part that needs more GPUs than there are is left out, which is
said, unless it is asked for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import compare, parts, peers
from fusestep import durable, hardware

RESULTS = Path(__file__).parent / "results"
TEXT_COLUMNS = ("norm", "implementation", "recipe", "configuration", "operation", "cache")
#: A part whose row takes this much longer than its time is ended.
PATIENCE = 90


def show(part: parts.Part, document: dict[str, Any]) -> None:
    """Print the rows of one part as a table."""
    copy = document["copy_bytes_per_second"]
    absent = [name for name, version in document["peers"].items() if version == peers.NOT_INSTALLED]
    title = f"{part.name}: a copy reaches {copy / 1e12:.2f} TB/s (read + written); {document['seconds']:.0f} s"
    table = Table(title=title, caption=f"not installed: {', '.join(absent)}" if absent else None)
    for heading in part.module.COLUMNS:
        table.add_column(heading, justify="left" if heading in TEXT_COLUMNS else "right")
    for row in document["rows"]:
        if "failed" in row:
            table.add_row(*map(str, part.identity(row)), f"failed: {row['failed'][-300:]}")
        else:
            table.add_row(*part.module.cells(row))
    Console(width=140).print(table)


def run(name: str, file: Path, seconds: float, is_rehearsal: bool) -> str | None:
    """Run one part in a process of its own; why it has no whole result, or None.

    Raises: KeyboardInterrupt once the part is ended, when this process is told to end.
    """
    command = [sys.executable, "-m", "benchmarks.parts", name, str(file), "--seconds", str(seconds)]
    process = subprocess.Popen([*command, *(["--rehearse"] if is_rehearsal else [])], start_new_session=True)
    try:
        status = process.wait(timeout=seconds + PATIENCE)
    except BaseException as error:
        # Its own processes too: the part leads a group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"ended after {seconds + PATIENCE:.0f} s within a row"
    if status:
        return f"failed with status {status}"
    document = json.loads(file.read_text())
    failed = sum("failed" in row and parts.load(name).ours(row) for row in document["rows"])
    if document["unfinished"]:
        return f"cut off after {seconds:.0f} s, {len(document['rows'])} rows measured"
    return f"{failed} of {len(document['rows'])} rows failed" if failed else None


def report(part: parts.Part, file: Path, against: Path, problem: str | None) -> tuple[list[str], dict[str, Any] | None]:
    """Show a part's rows and what got slower; the problems in words, and the document where there is one."""
    problems = [] if problem is None else [f"{part.name}: {problem}"]
    document: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    if document is None or not document["rows"]:
        return problems or [f"{part.name}: no row was measured"], None
    show(part, document)
    if document["environment"]["gpu"] is not None:
        before, changes = compare.with_results(part, against, document)
        said = "no results of before on this model of GPU" if before is None else f"compared with {before.name}"
        print(f"{part.name}: {said}: {len(changes)} ratios worse" if before else f"{part.name}: {said}")
        problems += [str(change) for change in changes]
    return problems, document


def main() -> None:
    parser = parts.Parser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(f"{name} ({seconds} s)" for name, seconds in parts.PARTS.items())
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"which (a module's name is all of its parts), and what each takes on an H200: {known}; all without one",
    )
    parser.add_argument(
        "--seconds", type=parts.positive, help="begin no row of a part after N seconds; 3 times its usual time"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--against", type=Path, default=RESULTS, help="folder of the results to compare with")
    parser.add_argument("--rehearse", action="store_true", help="run tiny shapes on a CPU and write nothing")
    arguments = parser.parse_args()
    chosen, gpus = parts.named(arguments.parts), len(hardware.devices())
    unknown = [name for name in chosen if name not in parts.PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}; choose from {', '.join(parts.PARTS)}")
    if not gpus and not arguments.rehearse:
        parser.error(f"a CUDA device is needed ({hardware.cuda_support().reason}); --rehearse runs tiny shapes here")
    if not arguments.against.is_dir():
        parser.error(f"--against names {arguments.against}, which is no folder; leave it out, or name one with results")
    if not arguments.rehearse and (blocked := durable.obstacle(arguments.out)) is not None:
        parser.error(f"--out {arguments.out} cannot be written, for {blocked} stands in the way; name another folder")
    lacking = {name: parts.load(name).lacks(gpus) for name in chosen or parts.PARTS if not arguments.rehearse}
    for name in chosen:
        if lacking.get(name) is not None:
            parser.error(f"{lacking[name]}; leave it out, or run it on a machine with more of them")
    # As Ctrl-C does it: a part has processes of its own, which would run on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen or parts.PARTS:
            if lacking.get(name) is not None:
                print(f"{lacking[name]}: it is left out", flush=True)
                continue
            part, file = parts.load(name), Path(folder) / f"{name}.json"
            began = time.monotonic()
            seconds = arguments.seconds or 3 * parts.PARTS[name]
            is_told_to_end = False
            try:
                problem = run(name, file, seconds, arguments.rehearse)
            except KeyboardInterrupt:
                is_told_to_end, problem = True, "ended from outside"
            found, document = report(part, file, arguments.against, problem)
            problems += found
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            if document is not None and not arguments.rehearse:
                gpu = compare.slug(document["environment"]["gpu"])
                arguments.out.mkdir(parents=True, exist_ok=True)
                whole = arguments.out / f"{datetime.date.today().isoformat()}-{gpu}-{name}.json"
                unfinished = whole.with_suffix(".unfinished")
                durable.write_together({unfinished if document["unfinished"] else whole: file.read_text()})
                if not document["unfinished"]:
                    # What an earlier run of this day was cut off in is all in the whole one.
                    unfinished.unlink(missing_ok=True)
            if is_told_to_end:
                break
    if problems:
        print("\n".join(["", f"{len(problems)} to look at:", *problems]))
        raise SystemExit(1)


if __name__ == "__main__":
    main()
