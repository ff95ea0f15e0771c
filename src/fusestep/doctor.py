"""The doctor's report: what this machine is, which implementation every op gets on it, and the proof.

This file says what the report holds and how it reads; `examine.py` fills it. Neither torch nor Triton is imported
before `doctor()` is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fusestep.tables import table

if TYPE_CHECKING:
    from fusestep.hardware import Support
    from fusestep.ops.registry import Proof

SCHEMA = 1


@dataclass(frozen=True)
class Environment:
    """Versions and the host. `memory` is in bytes; None where it cannot be told.

    Attributes:
        torch_cuda, torch_rocm: what torch is built for; both None for a CPU build.
        driver: the NVIDIA driver's version; driver_cuda: the newest CUDA that it serves.
        variables: those environment variables that are set and change what runs (see `examine.VARIABLES`).
    """

    fusestep: str
    python: str
    platform: str
    torch: str
    torch_cuda: str | None
    torch_rocm: str | None
    triton: str | None
    driver: str | None
    driver_cuda: str | None
    cores: int
    memory: int | None
    variables: dict[str, str]


@dataclass(frozen=True)
class DeviceReport:
    """One CUDA device. Memory in bytes; free as the driver tells it, other processes included.

    Attributes:
        fp8, fp8_block, mxfp8: whether FP8 products run on its own hardware, with a scale for each tensor, for each
            block, and in MXFP8; where they do not, they are emulated.
    """

    name: str
    model: str
    capability: str
    multiprocessors: int
    memory: int
    free_memory: int
    triton: Support
    bf16: Support
    fp8: Support
    fp8_block: Support
    mxfp8: Support


@dataclass(frozen=True)
class OpReport:
    """One op on one device: what a call runs, why, and how that compares with the reference.

    Attributes:
        failure: what the op or its reference raised, or None.
    """

    op: str
    summary: str
    device: str
    implementation: str
    reason: str
    is_fallback: bool
    proofs: tuple[Proof, ...]
    failure: str | None

    @property
    def ok(self) -> bool:
        """Whether the op ran and every comparison is within its tolerance."""
        return self.failure is None and bool(self.proofs) and all(proof.ok for proof in self.proofs)

    @property
    def verdict(self) -> str:
        """The proof in a few words: the comparison that comes nearest to its tolerance, or what failed."""
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        if not self.proofs:
            return "FAILED: nothing was compared"
        if not self.ok:
            failed = (f"{p.what} {p.error:.1e} > {p.tolerance:.1e}" for p in self.proofs if not p.ok)
            return "FAILED: " + ", ".join(failed)
        if self.implementation == "torch":
            return "ok, the reference itself"
        worst = max(self.proofs, key=lambda proof: proof.error / proof.tolerance if proof.tolerance else 0.0)
        return f"ok in {len(self.proofs)} comparisons: error {worst.error:.1e} of {worst.tolerance:.1e} ({worst.what})"


@dataclass(frozen=True)
class Report:
    """What `doctor` found; prints as a page."""

    environment: Environment
    cuda: Support
    devices: tuple[DeviceReport, ...]
    parts: dict[str, Support]
    ops: tuple[OpReport, ...]
    requirements: dict[str, Support]

    @property
    def ok(self) -> bool:
        """Whether every op agrees with its reference on every device."""
        return all(op.ok for op in self.ops)

    def as_dict(self) -> dict[str, Any]:
        """Plain values with a `schema` number, as `fusestep doctor --json` prints them."""
        content = asdict(self)
        for entry, op in zip(content["ops"], self.ops, strict=True):
            entry["ok"] = op.ok
            for proof in entry["proofs"]:
                # JSON has no NaN and no infinity.
                proof["error"] = proof["error"] if math.isfinite(proof["error"]) else None
        return {"schema": SCHEMA, "ok": self.ok, **content}

    def __str__(self) -> str:
        sections = [self._environment(), self._devices(), self._parts(), self._ops(), self._conclusion()]
        return "\n\n".join(sections)

    def _environment(self) -> str:
        e = self.environment
        builds = (("CUDA", e.torch_cuda), ("ROCm", e.torch_rocm))
        build = next((f"built for {what} {number}" for what, number in builds if number), "a CPU build")
        rows = [
            ("fusestep", e.fusestep),
            ("Python", f"{e.python} on {e.platform}"),
            ("torch", f"{e.torch}, {build}"),
            ("Triton", e.triton or "none that can be imported"),
            ("driver", f"{e.driver}, serves CUDA {e.driver_cuda or 'unknown'}" if e.driver else "no NVIDIA driver"),
            ("host", f"{e.cores} cores, {_gibibytes(e.memory) if e.memory else 'unknown'} of memory"),
            *((name, value or "(set, and empty)") for name, value in e.variables.items()),
        ]
        return table(rows)

    def _devices(self) -> str:
        if not self.devices:
            rows = [("cpu", "", f"only: {self.cuda.reason}"), ("", "FP8", "emulated")]
            return f"Devices\n{table(rows, indent='  ')}"
        rows = []
        for d in self.devices:
            size = f"{_gibibytes(d.memory)}, {_gibibytes(d.free_memory)} free"
            rows.append((d.name, "", f"{d.model}, capability {d.capability}, {d.multiprocessors} SMs, {size}"))
            rows += [("", what, _told(s)) for what, s in (("Triton", d.triton), ("bf16", d.bf16))]
            kinds = (("FP8", d.fp8), ("FP8 blocks", d.fp8_block), ("MXFP8", d.mxfp8))
            rows += [("", what, f"{'native' if s.ok else 'emulated'}: {s.reason}") for what, s in kinds]
        return f"Devices\n{table(rows, indent='  ')}"

    def _parts(self) -> str:
        rows = [(name, _told(part)) for name, part in self.parts.items()]
        return f"What Triton's first launch needs\n{table(rows, indent='  ')}"

    def _ops(self) -> str:
        # Each op and device is a line; the reasons, which many share, follow as a list.
        rows = [("op", "device", "runs as", "against its reference")]
        rows += [(o.op, o.device, o.implementation + " (fallback)" * o.is_fallback, o.verdict) for o in self.ops]
        reasons: dict[tuple[str, str], list[str]] = {}
        for o in self.ops:
            names = reasons.setdefault((o.device, o.reason), [])
            names.append(o.op)
        count = len({o.op for o in self.ops})
        why = [
            (device, f"{'every op' if len(names) == count else ', '.join(names)}: {reason}")
            for (device, reason), names in reasons.items()
        ]
        return f"Ops\n{table(rows, indent='  ')}\n\nWhy\n{table(why, indent='  ')}"

    def _conclusion(self) -> str:
        failed = [f"{o.op} on {o.device}" for o in self.ops if not o.ok]
        if failed:
            return (
                f"WRONG RESULTS: {', '.join(failed)}. Do not train with them; FUSESTEP_IMPL=torch runs the reference."
            )
        kernels = sum(o.implementation == "triton" for o in self.ops)
        fallbacks = sum(o.is_fallback for o in self.ops)
        if kernels:
            conclusion = f"Every op agrees with its reference: {kernels} run Triton kernels, {fallbacks} fall back."
        else:
            conclusion = "Every op runs, as its PyTorch reference; no Triton kernel runs here."
        native = [d.name for d in self.devices if d.fp8.ok]
        conclusion += f" FP8 products are native on {', '.join(native)}." if native else " FP8 products are emulated."
        if fallbacks and self.environment.variables.get("FUSESTEP_STRICT") == "1":
            conclusion += " FUSESTEP_STRICT=1 refuses what falls back."
        return conclusion


def doctor(*, progress: Callable[[str], None] | None = None) -> Report:
    """Look at this machine, run every op on every device of it, and compare each with its reference.

    The first run on a GPU compiles kernels, which takes a while. Nothing that is missing or broken raises: it is what
    the report says. torch's random state is left as it was.

    Args:
        progress: told in a few words what is being proved.
    """
    # Not at the top: `import fusestep` and the command line's help do not wait for torch.
    from fusestep.examine import examine

    return examine(progress or (lambda _: None))


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _told(support: Support) -> str:
    return f"{'yes' if support.ok else 'NO'}: {support.reason}"
