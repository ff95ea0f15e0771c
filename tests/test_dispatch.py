"""Which implementation a call gets: the reason, the one announcement, the refusal."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from fusestep import dispatch, hardware, language
from fusestep.dispatch import Choice, StrictFallbackError, explain_choice, uses_triton
from fusestep.errors import UserError
from fusestep.hardware import Support

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSESTEP_IMPL", raising=False)
    monkeypatch.delenv("FUSESTEP_STRICT", raising=False)


@pytest.fixture
def gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on cuda:0 and nowhere else."""

    def support(device_type: str, index: int | None) -> Support:
        return (
            Support(True, "Triton on a GPU") if device_type == "cuda" else Support(False, f"tensors on {device_type}")
        )

    monkeypatch.setattr(hardware, "triton_support", support)


def test_each_call_follows_its_tensors_device(gpu_works: None) -> None:
    assert uses_triton("op", CUDA)
    assert not uses_triton("op", CPU)
    assert uses_triton("op", CUDA)
    assert explain_choice("op", "cuda", 0) == Choice("triton", "Triton on a GPU")
    assert explain_choice("op", "cpu", None) == Choice("torch", "tensors on cpu", is_fallback=True)


def test_cpu_tensors_get_the_reference_with_triton_importable() -> None:
    assert not uses_triton("op", CPU)
    choice = explain_choice("op", "cpu", None)
    assert choice.is_fallback
    expected = "on cpu" if language.TRITON_IMPORT_ERROR is None else "Triton"
    assert expected in choice.reason


def test_a_reason_is_announced_once(caplog: pytest.LogCaptureFixture, gpu_works: None) -> None:
    for op in ("first", "second", "first"):
        for _ in range(3):
            uses_triton(op, CPU)
    uses_triton("third", torch.device("meta"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("first runs as its PyTorch reference")
    assert "tensors on cpu" in said[0]
    assert "tensors on meta" in said[1]


def test_threads_announce_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(device_type: str, index: int | None) -> Support:
        time.sleep(0.02)
        return Support(False, "slow to tell")

    monkeypatch.setattr(hardware, "triton_support", slow)
    threads = [threading.Thread(target=uses_triton, args=(f"op{i}", CPU)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


def test_unsupported_arguments_fall_back_by_themselves(caplog: pytest.LogCaptureFixture, gpu_works: None) -> None:
    for _ in range(2):
        assert not uses_triton("op", CUDA, "complex tensors have no kernel")
        assert uses_triton("op", CUDA)
    assert [record.getMessage() for record in caplog.records] == [
        "op runs as its PyTorch reference, as does every op that meets the same: op: complex tensors have no kernel"
    ]


def test_strict_refuses_every_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu_works: None
) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    for _ in range(2):
        with pytest.raises(StrictFallbackError, match="op cannot run its Triton kernel: tensors on cpu; unset"):
            uses_triton("op", CPU)
        with pytest.raises(StrictFallbackError, match="too wide"):
            uses_triton("op", CUDA, "too wide")
    assert uses_triton("op", CUDA)
    assert caplog.records == []


def test_asking_for_torch_is_no_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu_works: None
) -> None:
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    for device in (CPU, CUDA):
        assert not uses_triton("op", device)
        assert explain_choice("op", device.type, device.index) == Choice("torch", "FUSESTEP_IMPL=torch")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("variable", "value", "mend"),
    [("FUSESTEP_IMPL", "triton", "set it to torch"), ("FUSESTEP_STRICT", "yes", "set it to 1 or 0")],
)
def test_wrong_settings_are_told(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, mend: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"{variable} is '{value}'; {mend}"):
        uses_triton("op", CPU)


@pytest.mark.parametrize("value", ["", "0"])
def test_strict_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FUSESTEP_STRICT", value)
    assert not uses_triton("op", CPU)


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch, gpu_works: None) -> None:
    assert uses_triton("op", CUDA)
    monkeypatch.setenv("FUSESTEP_IMPL", "torch")
    assert uses_triton("op", CUDA)
    assert uses_triton("another op", CUDA)
    dispatch.asked_for_torch.cache_clear()
    dispatch.explain_choice.cache_clear()
    dispatch._chosen.clear()
    assert not uses_triton("op", CUDA)


def test_an_examination_neither_announces_nor_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu_works: None
) -> None:
    with dispatch.examination():
        assert not uses_triton("op", CPU)
    assert caplog.records == []
    uses_triton("op", CPU)
    assert len(caplog.records) == 1
    dispatch.strict.cache_clear()
    monkeypatch.setenv("FUSESTEP_STRICT", "1")
    with dispatch.examination():
        assert not uses_triton("other", CPU)
    with pytest.raises(StrictFallbackError):
        uses_triton("other", CPU)


def test_a_known_answer_is_cheap() -> None:
    uses_triton("op", CPU)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            uses_triton("op", CPU)
        best = min(best, time.perf_counter() - start)
    # Measured 0.2 µs; the rest is room for a slow, busy machine.
    assert best / 1000 < 2e-6


def test_one_device_names_the_odd_one_out() -> None:
    x, weight = torch.empty(2), torch.empty(2, device="meta")
    assert dispatch.one_device("op", x=x, weight=None, bias=x) == CPU
    with pytest.raises(UserError, match="op: weight is on meta and x on cpu; move them to one device"):
        dispatch.one_device("op", x=x, residual=None, weight=weight)
