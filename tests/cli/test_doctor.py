"""`fusestep doctor`: page, JSON, requirements and exit status."""

from __future__ import annotations

import json

import pytest

from fusestep import examine
from fusestep.cli import main
from fusestep.hardware import Support
from fusestep.ops.registry import Op, Proof


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.delenv("FUSESTEP_STRICT", raising=False)
    found("compiler", True, "/usr/bin/gcc", monkeypatch)
    found("cache", True, "/cache", monkeypatch)


def found(part: str, ok: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor find this, whatever the machine has; kernels go on being built with what it has."""
    title, _ = examine.PARTS[part]
    monkeypatch.setitem(examine.PARTS, part, (title, lambda: Support(ok, reason)))


def doctor(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments])
    return int(left.value.code or 0)


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    out, err = capsys.readouterr()
    assert out.startswith("fusestep ")
    assert "layer_norm" in out
    assert "adam" in out
    assert err == ""


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    assert content["requirements"]["compiler"] == {"ok": True, "reason": "/usr/bin/gcc"}


def test_a_requirement_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--require", "compiler, cache") == 0
    assert capsys.readouterr().err == ""


def test_requirements_that_do_not_hold_are_each_given_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found("compiler", False, "there is no C compiler on PATH", monkeypatch)
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    assert doctor("--json", "--require", "cache,compiler,layer_norm") == 1
    out, err = capsys.readouterr()
    json.loads(out)
    compiler, layer_norm = err.splitlines()
    assert compiler == "fusestep doctor: compiler is required: there is no C compiler on PATH"
    assert layer_norm.startswith("fusestep doctor: layer_norm is required: ")
    assert layer_norm.endswith(": it runs as its PyTorch reference: FUSESTEP_IMPL=torch")


def test_an_unknown_requirement_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--require", "compiler,tritn") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fusestep doctor: --require 'tritn' is unknown; known are cuda, triton, bf16, fp8, compiler,")
    assert "layer_norm" in err


def test_a_wrong_op_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Op("bad", "for a test", lambda device: [Proof("forward", 0.5, 1e-6)], list)
    monkeypatch.setattr(examine, "load_catalogue", lambda: {"bad": bad})
    assert doctor() == 1
    assert "WRONG RESULTS: bad on " in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--device", "cpu"), ("--timeout", "30")])
def test_options_of_several_ranks_are_refused_for_one_machine(
    capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert doctor(*option) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "fusestep doctor: --device and --timeout are of --distributed; pass it too, or leave them out.\n"
