"""The doctor: what it finds, how it says it, and that a wrong op is said loudly."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable

import pytest
import torch

import fusestep
from fusestep import dispatch, examine, hardware, precision
from fusestep.doctor import OpReport, Report
from fusestep.errors import UserError
from fusestep.hardware import Device, Support
from fusestep.ops.registry import Op, Proof, load_catalogue


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.delenv("FUSESTEP_STRICT", raising=False)


def op(name: str, prove: Callable[[torch.device], list[Proof]]) -> Op:
    return Op(name, "for a test", prove, list)


def right(device: torch.device) -> list[Proof]:
    return [Proof("forward", 2e-8, 1e-6), Proof("backward", 5e-7, 1e-6)]


def wrong(device: torch.device) -> list[Proof]:
    return [Proof("forward", 2e-8, 1e-6), Proof("backward", 0.25, 1e-6)]


def unsure(device: torch.device) -> list[Proof]:
    return [Proof("forward", math.nan, 1e-6)]


def raising(device: torch.device) -> list[Proof]:
    raise RuntimeError("illegal memory access\nsecond line")


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    """The catalogue of a test: one op that is right, to which the test adds others."""
    known = {"good": op("good", right)}
    monkeypatch.setattr(examine, "load_catalogue", lambda: known)
    return known


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU that works and a Turing GPU."""
    chips = (Device(0, "Hopper", (9, 0), 80 << 30, 132), Device(1, "Turing", (7, 5), 16 << 30, 40))
    old = Support(False, "Turing has compute capability 7.5, our kernels need 8.0 (Ampere)")
    kernels = {"cuda": {0: Support(True, "Triton on Hopper"), 1: old}}
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(True, "2 CUDA devices"))
    monkeypatch.setattr(hardware, "devices", lambda: chips)
    monkeypatch.setattr(
        precision, "fp8_support", lambda i, scaling: precision.fp8_by_capability(chips[i], "13.0", scaling)
    )
    monkeypatch.setattr(
        hardware, "triton_support", lambda kind, i: kernels[kind][i] if kind in kernels else Support(False, "on a CPU")
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 << 30, 80 << 30))
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    # No tensor is made on these devices: nothing here has one.
    monkeypatch.setattr(dispatch.hardware, "reset", lambda: None)


# On this machine, as it is


def test_this_machine_is_described_and_every_op_agrees() -> None:
    report = fusestep.doctor()
    assert report.ok
    assert {o.op for o in report.ops} == set(load_catalogue())
    assert {"layer_norm", "adam"} <= {o.op for o in report.ops}
    assert {o.device for o in report.ops} == {"cpu", *(d.name for d in report.devices)}
    assert report.environment.torch == torch.__version__
    assert report.cuda.ok is torch.cuda.is_available()
    page = str(report)
    for word in ("torch", "Triton", "driver", "C compiler", "Python headers", "layer_norm"):
        assert word in page


def test_the_report_is_json() -> None:
    content = json.loads(json.dumps(fusestep.doctor().as_dict(), allow_nan=False))
    assert content["schema"] == 1
    assert content["ok"] is True
    assert {entry["op"] for entry in content["ops"]} == set(load_catalogue())
    assert all(proof["error"] <= proof["tolerance"] for entry in content["ops"] for proof in entry["proofs"])


def test_every_requirement_name_is_answered() -> None:
    assert set(fusestep.doctor().requirements) == set(examine.requirement_names())


def test_the_doctor_leaves_the_process_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        fusestep.doctor()
    assert torch.equal(torch.get_rng_state(), before)
    assert caplog.records == []
    # What falls back later is still announced.
    with caplog.at_level(logging.WARNING, logger="fusestep"):
        dispatch.uses_triton("layer_norm", torch.device("cpu"))
    assert len(caplog.records) == 1


def test_progress_is_told(ops: dict[str, Op]) -> None:
    told: list[str] = []
    fusestep.doctor(progress=told.append)
    assert told[-1] == "good on cpu"


@pytest.mark.gpu
def test_every_op_runs_its_kernel_on_the_gpu() -> None:
    report = fusestep.doctor()
    kernels = [o for o in report.ops if o.device != "cpu"]
    assert kernels
    assert {o.implementation for o in kernels if not load_catalogue()[o.op].is_product} == {"triton"}
    assert all(report.requirements[name].ok for name in ("cuda", "triton", "bf16", *load_catalogue()))


# Ops that are wrong


@pytest.mark.parametrize(
    ("prove", "words"),
    [
        (wrong, "FAILED: backward 2.5e-01 > 1.0e-06"),
        (unsure, "FAILED: forward nan > 1.0e-06"),
        (raising, "FAILED: RuntimeError: illegal memory access"),
        (lambda device: [], "FAILED: nothing was compared"),
    ],
)
def test_a_wrong_op_is_said_loudly(
    ops: dict[str, Op], prove: Callable[[torch.device], list[Proof]], words: str
) -> None:
    ops["bad"] = op("bad", prove)
    report = fusestep.doctor()
    assert not report.ok
    page = str(report)
    assert words in page
    assert "WRONG RESULTS: bad on " in page
    assert report.as_dict()["ok"] is False
    json.dumps(report.as_dict(), allow_nan=False)
    support = report.requirements["bad"]
    assert not support.ok
    assert words in support.reason


def test_the_proof_nearest_to_its_tolerance_is_shown() -> None:
    proofs = (Proof("forward", 1e-7, 1e-6), Proof("backward", 9e-4, 1e-3), Proof("exact", 0.0, 0.0))
    found = OpReport("op", "", "cuda:0", "triton", "why", False, proofs, None)
    assert found.verdict == "ok in 3 comparisons: error 9.0e-04 of 1.0e-03 (backward)"


# Other machines


def test_each_gpu_gets_its_own_answer(ops: dict[str, Op], two_gpus: None) -> None:
    report = fusestep.doctor()
    assert [(o.device, o.implementation, o.is_fallback) for o in report.ops] == [
        ("cuda:0", "triton", False),
        ("cuda:1", "torch", True),
        ("cpu", "torch", True),
    ]
    page = str(report)
    assert "Hopper, capability 9.0, 132 SMs, 80.0 GiB, 10.0 GiB free" in page
    assert "native: FP8 tensor cores (compute capability 9.0)" in page
    assert "emulated: compute capability 7.5; FP8 tensor cores came with 8.9" in page
    assert "emulated: compute capability 9.0; MXFP8 tensor cores came with 10.0" in page
    assert "FP8 products are native on cuda:0." in page
    assert "ok in 2 comparisons: error 5.0e-07 of 1.0e-06 (backward)" in page
    assert "ok, the reference itself" in page
    assert "1 run Triton kernels, 2 fall back" in page


def test_a_product_is_native_or_emulated(ops: dict[str, Op], two_gpus: None) -> None:
    ops["product"] = Op("product", "for a test", right, list, is_product=True)
    report = fusestep.doctor()
    assert [(o.device, o.implementation, o.is_fallback) for o in report.ops if o.op == "product"] == [
        ("cuda:0", "native", False),
        ("cuda:1", "emulated", True),
        ("cpu", "emulated", True),
    ]
    held = report.requirements["product"]
    assert held.reason == "cuda:1: it is emulated: compute capability 7.5; FP8 tensor cores came with 8.9"


def test_a_requirement_holds_for_every_gpu_or_not_at_all(ops: dict[str, Op], two_gpus: None) -> None:
    held = fusestep.doctor().requirements
    assert held["cuda"].ok
    for name in ("triton", "bf16", "fp8", "good"):
        assert not held[name].ok
        assert held[name].reason.startswith("cuda:1: ")


def test_asking_for_torch_shows_and_fails_the_requirement(
    monkeypatch: pytest.MonkeyPatch, ops: dict[str, Op], two_gpus: None
) -> None:
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    report = fusestep.doctor()
    assert {(o.implementation, o.is_fallback) for o in report.ops} == {("torch", False)}
    assert report.requirements["triton"] == Support(False, "cuda:0: FUSESTEP_IMPL=torch")
    assert "every op: FUSESTEP_IMPL=torch" in str(report)


def test_strict_shows_what_would_be_refused(monkeypatch: pytest.MonkeyPatch, ops: dict[str, Op]) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    report = fusestep.doctor()
    assert report.ok
    assert "refused under FUSESTEP_STRICT=1, since " in report.ops[-1].reason
    assert str(report).endswith("FUSESTEP_STRICT=1 refuses what falls back.")


def test_a_wrong_setting_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, ops: dict[str, Op]) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "maybe")
    told: list[str] = []
    with pytest.raises(UserError, match="FUSESTEP_STRICT"):
        fusestep.doctor(progress=told.append)
    assert told == []


def test_missing_parts_are_told(monkeypatch: pytest.MonkeyPatch, ops: dict[str, Op]) -> None:
    told = Support(False, "there is no C compiler on PATH")
    monkeypatch.setitem(examine.PARTS, "compiler", ("C compiler", lambda: told))
    report = fusestep.doctor()
    assert "C compiler      NO: there is no C compiler on PATH" in str(report)
    assert not report.requirements["compiler"].ok


def test_set_variables_are_shown(monkeypatch: pytest.MonkeyPatch, ops: dict[str, Op]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    report: Report = fusestep.doctor()
    assert report.environment.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "(set, and empty)" in str(report)
