"""The doctor's examination: every answer of `hardware`, every op of the catalogue on every device."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch

import fusestep
from fusestep import dispatch, hardware, precision
from fusestep.doctor import DeviceReport, Environment, OpReport, Report
from fusestep.hardware import Support
from fusestep.language import TRITON_IMPORT_ERROR, triton
from fusestep.ops.registry import Op, Proof, load_catalogue

#: Environment variables that change what runs.
VARIABLES = ("FUSESTEP_IMPL", "FUSESTEP_STRICT", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "CC")

#: What Triton's first launch needs, by the names that --require knows.
PARTS: dict[str, tuple[str, Callable[[], Support]]] = {
    "compiler": ("C compiler", hardware.c_compiler),
    "headers": ("Python headers", hardware.python_headers),
    "cache": ("kernel cache", hardware.cache_folder),
}


def requirement_names() -> list[str]:
    """Every name that `fusestep doctor --require` knows: abilities, then ops."""
    return ["cuda", "triton", "bf16", "fp8", *PARTS, *load_catalogue()]


def examine(progress: Callable[[str], None]) -> Report:
    """See `fusestep.doctor`, which calls this.

    Raises: UserError where FUSESTEP_IMPL or FUSESTEP_STRICT has a value that it does not have.
    """
    # Settings are read first, so that a wrong one is the first thing said.
    dispatch.asked_for_torch()
    dispatch.strict()
    cuda = hardware.cuda_support()
    devices = tuple(_device(device) for device in hardware.devices())
    ops = []
    with dispatch.examination():
        for op in load_catalogue().values():
            for device in (*(torch.device(d.name) for d in devices), torch.device("cpu")):
                progress(f"{op.name} on {device}")
                ops.append(_op(op, device))
    return Report(
        environment=environment(),
        cuda=cuda,
        devices=devices,
        parts={title: look() for title, look in PARTS.values()},
        ops=tuple(ops),
        requirements=_requirements(cuda, devices, ops),
    )


def environment() -> Environment:
    """Versions and the host."""
    return Environment(
        fusestep=fusestep.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_rocm=torch.version.hip,
        triton=None if TRITON_IMPORT_ERROR else triton.__version__,
        driver=hardware.driver_version(),
        driver_cuda=hardware.driver_cuda_version(),
        cores=os.cpu_count() or 1,
        memory=hardware.host_memory(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _device(device: hardware.Device) -> DeviceReport:
    choice = dispatch.explain_choice("every op", "cuda", device.index)
    return DeviceReport(
        name=f"cuda:{device.index}",
        model=device.name,
        capability=hardware.dotted(device.capability),
        multiprocessors=device.multiprocessors,
        memory=device.memory,
        free_memory=torch.cuda.mem_get_info(device.index)[0],
        triton=Support(choice.implementation == "triton", choice.reason),
        bf16=precision.bf16_support(device.index),
        fp8=_product(device, "tensor"),
        fp8_block=_product(device, "block"),
        mxfp8=_product(device, "mx"),
    )


def _product(device: hardware.Device, scaling: precision.Scaling) -> Support:
    """Whether FP8 products run on a device's own hardware."""
    choice = dispatch.explain_product("cuda", device.index, scaling)
    return Support(choice.implementation == "native", choice.reason)


def _op(op: Op, device: torch.device) -> OpReport:
    """Prove one op on one device; whatever it raises is a finding."""
    if op.is_product:
        choice = dispatch.explain_product(device.type, device.index)
    else:
        choice = dispatch.explain_choice(op.name, device.type, device.index)
    refused = choice.is_fallback and dispatch.strict()
    proofs: list[Proof] = []
    failure = None
    cuda = [device.index] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=cuda),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            proofs = op.prove(device)
    except Exception as error:
        failure = f"{type(error).__name__}: {hardware.first_line(error)}"
    return OpReport(
        op=op.name,
        summary=op.summary,
        device=str(device),
        implementation=choice.implementation,
        reason=f"refused under FUSESTEP_STRICT=1, since {choice.reason}" if refused else choice.reason,
        is_fallback=choice.is_fallback,
        proofs=tuple(proofs),
        failure=failure,
    )


def _requirements(cuda: Support, devices: tuple[DeviceReport, ...], ops: list[OpReport]) -> dict[str, Support]:
    """Each name of `requirement_names`, and whether it holds: on every CUDA device, where it belongs to devices."""
    choice = dispatch.explain_choice("every op", "cuda", 0)
    triton_anywhere = Support(choice.implementation == "triton", choice.reason)
    held = {
        "cuda": cuda,
        "triton": _all([(d.name, d.triton) for d in devices], otherwise=triton_anywhere),
        "bf16": _all([(d.name, d.bf16) for d in devices], otherwise=cuda),
        "fp8": _all([(d.name, d.fp8) for d in devices], otherwise=cuda),
        **{name: look() for name, (_, look) in PARTS.items()},
    }
    for name in dict.fromkeys(o.op for o in ops):
        # A GPU machine is asked about its GPUs: on its CPU every op is the reference, as it should be. A machine
        # without one has the reason why there is none.
        mine = [o for o in ops if o.op == name and (o.device != "cpu" or not devices)]
        held[name] = _all(
            [(o.device, _op_support(o, None if devices else triton_anywhere)) for o in mine], otherwise=cuda
        )
    return held


def _op_support(op: OpReport, without_gpu: Support | None) -> Support:
    """Whether an op runs as fast as it can, and right; `without_gpu` says why there is no GPU that it could run on."""
    if not op.ok:
        return Support(False, op.verdict)
    if op.implementation not in ("triton", "native"):
        reason = op.reason if without_gpu is None else without_gpu.reason
        how = "it is emulated" if op.implementation == "emulated" else "it runs as its PyTorch reference"
        return Support(False, f"{how}: {reason}")
    return Support(True, op.verdict)


def _all(answers: list[tuple[str, Support]], *, otherwise: Support) -> Support:
    """The first no, named by its device; else yes. `otherwise` where there is no device."""
    if not answers:
        return otherwise
    for device, answer in answers:
        if not answer.ok:
            return Support(False, f"{device}: {answer.reason}")
    return answers[0][1]
