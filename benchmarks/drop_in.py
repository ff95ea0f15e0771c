"""Whole programs for Transformer Engine and Apex under `fusestep run`, unedited: what they print, how fast they are.

    python -m benchmarks.drop_in [--tutorial FILE] [any argument of `python -m benchmarks`]

Transformer Engine's program runs twice, as it is (attention over the first dimension, which is the batch) and with
`--te-layout bshd`. It is the tutorial where there is one: FILE is Python, or a document whose fenced blocks are.
Without a file it is programs/transformer_engine_model.py, in the same style. Apex's is programs/apex_model.py, with
four rungs.

All are the small GPT of configuration A: 4 layers of 768, sequences of 256, batches of 32 where they are timed. Times
are what the programs print themselves, of eager steps, the host's part included: `BESIDE` has what the same training
took elsewhere on an H200, and the part `steps-a` what it takes whole, in this version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
#: Names the tutorial's file.
VARIABLE = "FUSESTEP_TUTORIAL"
#: Where it is in a checkout of the project's makers.
USUAL = Path(__file__).parents[2] / "shared" / "seeds" / "004_2846f0dc342a24d0.txt"
#: Milliseconds a step of configuration A, measured on an H200 with torch 2.11 before fusestep was: what a user of these
#: programs has without it, and the best of native PyTorch. Transformer Engine's, fed as the tutorial feeds it.
BESIDE = {
    "torch Adam, FP32": 39.5,
    "Apex FusedAdam and FusedLayerNorm, autocast BF16": 15.5,
    "torch.compile, autocast BF16, one graph": 4.28,
    "Transformer Engine FP8, eager": 30.7,
    "Transformer Engine FP8, its graphs": 6.8,
}
SECONDS = 240
ARGUMENTS: tuple[str, ...] = ()
TINY: dict[str, Any] = {"ARGUMENTS": ("--tiny",)}

COLUMNS = ("configuration", "loss", "BF16 (FP32) ms", "FP8 ms", "GB", "strides", "s")
IDENTITY = ("program", "configuration")
#: Eager steps, whose time is the host's: compared with nothing.
RATIOS: dict[str, str] = {}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the terminal shows it."""
    return [
        f"{row['program']}: {row['configuration']}",
        f"{row['loss']:.4f}",
        f"{row['bf16_ms']:.1f}" if row["bf16_ms"] is not None else f"({row['fp32_ms']:.1f})",
        "" if row["fp8_ms"] is None else f"{row['fp8_ms']:.1f}",
        f"{row['peak_gb']:.2f}",
        "" if row["strides"] is None else f"{row['stride_kept_for']} of {len(row['strides'])}",
        f"{row['seconds']:.0f}",
    ]


def run(copy: float) -> Iterator[dict[str, Any]]:  # noqa: ARG001 (programs time themselves)
    """Each program."""
    name, code = program()
    for layout in ("sbhd", "bshd"):
        row = {"program": name, "configuration": layout, "beside": BESIDE}
        done, report, seconds = under_fusestep(code, layout)
        if done.returncode:
            yield row | {"failed": done.stderr[-2000:]}
            continue
        yield row | of_transformer_engine(done.stdout) | report | {"seconds": seconds}
    row = {"program": "apex_model.py", "beside": BESIDE}
    done, report, seconds = under_fusestep((PROGRAMS / "apex_model.py").read_text(), "sbhd")
    if done.returncode:
        yield row | {"configuration": "all", "failed": done.stderr[-2000:]}
        return
    for rung in of_apex(done.stdout):
        yield row | rung | report | {"seconds": seconds}


def program() -> tuple[str, str]:
    """The name and the code of the program for Transformer Engine: the tutorial's, or else the project's own."""
    named = os.environ.get(VARIABLE)
    if ARGUMENTS or (named is None and not USUAL.exists()):  # a rehearsal is for a CPU, where the tutorial stops itself
        own = PROGRAMS / "transformer_engine_model.py"
        return own.name, own.read_text()
    return "tutorial", code_of(Path(named) if named is not None else USUAL)


def code_of(path: Path) -> str:
    """The Python of a file: all of it, or what stands between fences in a document, JSON or not, one after another."""
    text = path.read_text()
    if text.lstrip().startswith("{"):
        text = json.loads(text)["body_md"]
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join(textwrap.dedent(block) for block in blocks) if blocks else text


def under_fusestep(code: str, layout: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], float]:
    """Run a program's code; what it left, what it was served, and how many seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        script, told = Path(folder) / "program.py", Path(folder) / "report.json"
        script.write_text(code)
        command = [sys.executable, "-m", "fusestep.run", "--te-layout", layout, "--report", str(told), str(script)]
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, *ARGUMENTS],
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
            env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        seconds = time.perf_counter() - begun
        found = json.loads(told.read_text()) if told.exists() else {}
    report = {"served": found.get("served", {}), "refused": found.get("refused", {}), "hints": found.get("hints", [])}
    return done, report, round(seconds, 1)


def of_transformer_engine(printed: str) -> dict[str, Any]:
    """What such a program prints: losses, times, memory, FP8 state, strides of what it generated."""
    steps = re.findall(r"step +(\d+) \| loss ([\d.]+) \| +(\d+) ms/step", printed)
    timed = {
        name: (float(ms), float(memory))
        for name, ms, memory in re.findall(r"(BF16|FP32|FP8) *: +([\d.]+) ms/step \| peak mem ([\d.]+) GB", printed)
    }
    state = re.search(r"FP8 state of block-0 submodule '(.*)'", printed)
    diffs = re.search(r"step diffs: \[([\d, ]+)\]", printed)
    strides = [] if diffs is None else [int(one) for one in diffs.group(1).split(",")]
    kept = next((place for place, one in enumerate(strides) if one != strides[0]), len(strides))
    bf16, fp32, fp8 = (timed.get(name, (None, 0.0)) for name in ("BF16", "FP32", "FP8"))
    return {
        "losses": {step: float(loss) for step, loss, _ in steps},
        "loss": float(steps[-1][1]),
        "trained_ms": int(steps[-1][2]),
        "bf16_ms": bf16[0],
        "fp32_ms": fp32[0],
        "fp8_ms": fp8[0],
        "peak_gb": max(bf16[1], fp32[1], fp8[1]),
        "fp8_state_of": None if state is None else state.group(1),
        "strides": strides,
        "stride_kept_for": kept,
    }


def of_apex(printed: str) -> list[dict[str, Any]]:
    """The rungs that such a program prints."""
    found = re.findall(r"rung (.*): ([\d.]+) ms/step \| peak mem ([\d.]+) GB \| loss ([\d.]+)", printed)
    return [
        {
            "configuration": what,
            "loss": float(loss),
            "bf16_ms": float(ms) if "BF16" in what else None,
            "fp32_ms": None if "BF16" in what else float(ms),
            "fp8_ms": None,
            "peak_gb": float(memory),
            "strides": None,
        }
        for what, ms, memory, loss in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drop_in", description=__doc__, add_help=False)
    parser.add_argument("--tutorial", type=Path)
    arguments, others = parser.parse_known_args()
    if arguments.tutorial is not None:
        os.environ[VARIABLE] = str(arguments.tutorial.resolve())
    status = subprocess.run([sys.executable, "-m", "benchmarks", "drop_in", *others], check=False).returncode
    raise SystemExit(status)


if __name__ == "__main__":
    main()
