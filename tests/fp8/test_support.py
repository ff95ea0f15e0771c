"""Which recipes a device multiplies itself, and the reason."""

from __future__ import annotations

import pytest
import torch

from fusestep import fp8, hardware, precision
from fusestep.errors import UserError
from fusestep.fp8.recipes import Recipe
from fusestep.hardware import Device, Support
from fusestep.precision import Scaling

RECIPES: dict[str, Recipe] = {
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "block": fp8.Float8BlockScaling(),
    "mx": fp8.MXFP8BlockScaling(),
}


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One GPU of the capability that the test is for, whose products come out right."""
    capability, cuda = request.param
    device = Device(0, "Test GPU", capability, 80 << 30, 132)
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(True, "1 CUDA device"))
    monkeypatch.setattr(hardware, "devices", lambda: (device,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def told(index: int, scaling: Scaling = "tensor") -> Support:
        return precision.fp8_by_capability(device, cuda, scaling)

    monkeypatch.setattr(precision, "fp8_support", told)
    monkeypatch.setattr(precision, "reset", lambda: None)


@pytest.mark.parametrize(
    ("chip", "native"),
    [
        (((7, 5), "13.0"), ""),
        (((8, 0), "13.0"), ""),
        (((8, 6), "13.0"), ""),
        (((8, 9), "12.6"), "delayed current"),
        (((8, 9), "13.0"), "delayed current"),
        (((9, 0), "12.8"), "delayed current"),
        (((9, 0), "12.9"), "delayed current block"),
        (((9, 0), "13.0"), "delayed current block"),
        (((10, 0), "12.6"), ""),
        (((10, 0), "12.8"), "delayed current mx"),
        (((10, 3), "13.0"), "delayed current mx"),
        (((11, 0), "13.0"), "delayed current mx"),
        (((12, 0), "13.0"), "delayed current"),
        (((9, 0), None), ""),
    ],
    indirect=["chip"],
)
def test_the_table_of_recipes_and_chips(chip: None, native: str) -> None:
    answers = {name: fp8.support(recipe=recipe) for name, recipe in RECIPES.items()}
    assert {name for name, (ok, _) in answers.items() if ok} == set(native.split())
    assert fp8.support() == fp8.support(0) == fp8.support("cuda:0") == answers["delayed"]
    assert all(reason for _, reason in answers.values())


@pytest.mark.parametrize(
    ("chip", "recipe", "words"),
    [
        (((8, 6), "13.0"), "delayed", "compute capability 8.6; FP8 tensor cores came with 8.9"),
        (((8, 9), "13.0"), "block", "fp32 scales of blocks came with 9.0"),
        (((9, 0), "12.8"), "block", "needs a torch built for CUDA 12.9 or newer, this one is built for 12.8"),
        (((9, 0), "13.0"), "mx", "compute capability 9.0; MXFP8 tensor cores came with 10.0"),
        (((12, 0), "13.0"), "mx", "compute capability 12.0; MXFP8 products run on 10.x and 11.x"),
        (((10, 0), "13.0"), "block", "run on Hopper (9.0) alone"),
    ],
    indirect=["chip"],
)
def test_the_reason_names_what_is_missing(chip: None, recipe: str, words: str) -> None:
    ok, reason = fp8.support(recipe=RECIPES[recipe])
    assert not ok
    assert words in reason


def test_a_cpu_emulates() -> None:
    ok, reason = fp8.support("cpu")
    assert not ok
    assert "these tensors are on cpu" in reason


def test_without_a_gpu_the_reason_is_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.setattr(hardware, "cuda_support", lambda: Support(False, "no driver"))
    assert fp8.support() == (False, "no driver")


def test_the_reference_is_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    assert fp8.support() == (False, "FUSESTEP_IMPL=torch")


def test_what_is_no_device_or_recipe_is_refused() -> None:
    with pytest.raises(UserError, match="device is 'gpu'; pass"):
        fp8.support("gpu")
    with pytest.raises(UserError, match="recipe is 'delayed'; pass an object"):
        fp8.support(recipe="delayed")  # type: ignore[arg-type]


@pytest.mark.parametrize("chip", [((9, 0), "13.0")], indirect=True)
def test_a_device_that_is_not_there_is_refused(chip: None) -> None:
    with pytest.raises(UserError, match=r"device is cuda:1, but there is 1 CUDA device; choose one of cuda:0"):
        fp8.support(1)


@pytest.mark.gpu
def test_what_is_told_of_this_gpu_holds() -> None:
    ok, _ = fp8.support()
    assert ok is (torch.cuda.get_device_capability() >= (8, 9))
