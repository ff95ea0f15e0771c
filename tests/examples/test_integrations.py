"""The examples with other libraries, with few steps; each is skipped where its library is not installed."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: In this process, so that the libraries are imported once; what they warn about is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize(
    ("script", "library", "arguments", "norm"),
    [
        ("plain_loop", "torch", (), None),
        ("hugging_face_trainer", "transformers", ("--steps", "24"), "LlamaRMSNorm"),
        ("hugging_face_trainer", "transformers", ("--steps", "8", "--fp8"), "LlamaRMSNorm"),
        ("accelerate_loop", "accelerate", ("--steps", "24"), "LayerNorm"),
        ("lightning_module", "lightning", ("--steps", "60"), "LayerNorm"),
    ],
)
def test_the_example_converts_learns_and_undoes(
    script: str,
    library: str,
    arguments: tuple[str, ...],
    norm: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (the extra `integrations`)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    out = capsys.readouterr().out
    if norm is None:
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    else:
        assert f"undone: {norm}\n" in out
        assert re.search(r"\nswapped: [1-9]", out)
        assert ("FP8Linear" in out) == ("--fp8" in arguments)
        (both,) = re.findall(r"^loss (\S+) -> (\S+)$", out, re.MULTILINE)
        losses = [float(loss) for loss in both]
    assert losses[-1] < 0.8 * losses[0]
    assert not list(tmp_path.iterdir())
