"""What an import costs and leaves alone, and that a broken Triton, compiler or GPU leaves a working library.

Each test is a process of its own, as a user's is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = ("FUSESTEP_IMPL", "FUSESTEP_STRICT", "TRITON_INTERPRET", "CC")

# Trains one step with our norm and optimizer, and compares the norm with torch's.
USE = """
import torch, fusestep
norm, theirs = fusestep.nn.FusedLayerNorm(37), torch.nn.LayerNorm(37)
x = torch.randn(5, 37)
torch.testing.assert_close(norm(x), theirs(x))
optimizer = fusestep.optim.FusedAdam(norm.parameters(), lr=0.1)
norm(x).square().sum().backward()
optimizer.step()
assert not torch.equal(norm.weight, theirs.weight)
print(fusestep.explain(norm).modules[0].reason)
"""


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with these settings and no others of ours."""
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", script],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def fake_triton(folder: Path, body: str) -> str:
    """A package `triton` with this body, to be found before the real one; returns what PYTHONPATH must be."""
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text(body)
    return str(folder)


def test_import_is_quick_and_touches_nothing() -> None:
    answer = python(
        "import time, sys\n"
        "start = time.process_time()\n"
        "import fusestep\n"
        "own = time.process_time() - start\n"
        "assert own < 0.3, own\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "numpy_by_torch = 'numpy' in sys.modules\n"
        "start = time.process_time()\n"
        "import fusestep.nn, fusestep.optim, fusestep.models, fusestep.data\n"
        "parts = time.process_time() - start\n"
        # Most of it is Triton's own import.
        "assert parts < 1.5, parts\n"
        "extras = {'typer', 'rich', 'safetensors', 'psutil', 'jinja2', 'matplotlib'} & set(sys.modules)\n"
        "assert not extras, extras\n"
        "assert ('numpy' in sys.modules) == numpy_by_torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_import_launches_and_compiles_nothing(tmp_path: Path) -> None:
    """Not even with no compiler, no PATH and nowhere to write."""
    answer = python(
        "import subprocess, sys\n"
        "def never(*args, **options): raise AssertionError(args)\n"
        "subprocess.Popen.__init__ = never\n"
        "import fusestep.nn, fusestep.optim, fusestep.ops.registry as registry\n"
        "assert registry.load_catalogue()",
        PATH="",
        CC="/no/such/compiler",
        TRITON_CACHE_DIR=str(tmp_path / "kernels"),
    )
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')", "Triton is not installed"),
        ("raise RuntimeError('0 active drivers')", "Triton cannot be imported (RuntimeError: 0 active drivers)"),
    ],
    ids=["missing", "raising"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_without_a_working_triton_everything_runs_and_says_why(tmp_path: Path, body: str, words: str) -> None:
    answer = python(USE, PYTHONPATH=fake_triton(tmp_path, body))
    assert answer.returncode == 0, answer.stderr
    assert words in answer.stdout
    # Announced once, though two ops fell back for it.
    assert answer.stderr.count("runs as its PyTorch reference") == 1
    assert words in answer.stderr


def test_the_doctor_names_a_broken_triton_and_the_rest_works(tmp_path: Path) -> None:
    answer = python(
        "from fusestep.cli import main; main(['doctor', '--require', 'triton'])",
        PYTHONPATH=fake_triton(tmp_path, "raise ImportError('libtriton.so: undefined symbol')"),
        CC="/no/such/compiler",
        CUDA_VISIBLE_DEVICES="",
    )
    assert answer.returncode == 1
    assert "C compiler      NO: CC is '/no/such/compiler'" in answer.stdout
    assert "as its PyTorch reference; no Triton kernel runs here" in answer.stdout
    assert answer.stderr == (
        "fusestep doctor: triton is required: Triton cannot be imported (ImportError: libtriton.so: undefined symbol)\n"
    )


def test_without_a_visible_gpu_everything_runs() -> None:
    answer = python(USE, CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("runs as its PyTorch reference") == 1


def test_asking_for_torch_is_silent_even_in_strict_mode() -> None:
    answer = python(USE, FUSESTEP_IMPL="torch", FUSESTEP_STRICT="1")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "FUSESTEP_IMPL=torch\n"
    assert answer.stderr == ""


def test_strict_mode_refuses_cpu_tensors() -> None:
    answer = python(USE, FUSESTEP_STRICT="1")
    assert answer.returncode == 1
    assert "StrictFallbackError: layer_norm cannot run its Triton kernel" in answer.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["compiler", "cache"])
def test_a_gpu_without_what_the_first_launch_needs_falls_back(tmp_path: Path, missing: str) -> None:
    (tmp_path / "file").touch()
    settings = {
        "compiler": {"CC": "/no/such/compiler", "TRITON_CACHE_DIR": str(tmp_path / "kernels")},
        "cache": {"TRITON_CACHE_DIR": str(tmp_path / "file" / "kernels")},
    }[missing]
    answer = python(f"import torch; torch.set_default_device('cuda')\n{USE}", **settings)
    assert answer.returncode == 0, answer.stderr
    words = {"compiler": "CC is '/no/such/compiler'", "cache": "cannot be written (Not a directory)"}[missing]
    assert "Triton's first launch failed: " in answer.stdout
    assert words in answer.stdout
    assert answer.stderr.count("runs as its PyTorch reference") == 1
