"""`fusestep run`: a script is what it is under Python, its apex is ours, in what it starts too, and a line says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHIMS = Path(__file__).resolve().parents[2] / "src" / "fusestep" / "compat" / "shims"
FUSESTEP = [str(Path(sys.executable).with_name("fusestep")), "run"]
MODULE = [sys.executable, "-m", "fusestep.run"]
NOTHING = "fusestep run: no name of Apex or Transformer Engine was used\n"


def environment(**changes: str) -> dict[str, str]:
    dropped = ("PYTHONPATH", "RANK", "FUSESTEP_TE_LAYOUT", "FUSESTEP_RUN_FOLDER", "FUSESTEP_IMPL", "FUSESTEP_STRICT")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "OMP_NUM_THREADS": "1", **changes}


def start(command: list[str], where: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=where, env=environment(**changes), capture_output=True, text=True, check=False, timeout=120
    )


#: Prints all that a script can see of how it was started.
LOOK = """
import os, sys
print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name, __doc__, os.getcwd())
print(sys.path[0], [entry for entry in sys.path if "compat/shims" not in entry], sys.flags)
print(sorted(globals()), __builtins__, type(__loader__), __cached__)
print(sys.modules["__main__"].__dict__ is globals())
"""

FAIL = """
import atexit
def inner():
    raise ValueError("from the script")
atexit.register(print, "at exit")
try:
    inner()
except ValueError as error:
    raise RuntimeError("and from this") from error
"""

PROGRAMS = {
    "look.py": LOOK,
    "fail.py": FAIL,
    "leave.py": "import sys; print('out'); sys.exit(3)",
    "say.py": "import sys; sys.exit('a sentence')",
    "syntax.py": "def f(:\n",
    "interrupt.py": "import sys; print('so far', flush=True); raise KeyboardInterrupt",
    "usererror.py": "from fusestep.errors import UserError; raise UserError('of the script')",
    "hook.py": "import sys; sys.excepthook = lambda *args: print('hook', args[0].__name__); 1 / 0",
    "package/__init__.py": "",
    "package/__main__.py": LOOK,
    "package/failing.py": FAIL,
    "broken/__init__.py": "1 / 0",
    "folder/__main__.py": LOOK,
}

CASES = [
    *(["look.py", "-m", "--help", "--", "--report", "x"], ["./folder", "y"], ["fail.py"], ["leave.py"], ["say.py"]),
    *(["syntax.py"], ["interrupt.py"], ["usererror.py"], ["hook.py"]),
    *(["-m", "package", "--report", "--", "-m", "x"], ["-mpackage", "--", "x"], ["-m", "package.failing"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in PROGRAMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link.py").symlink_to(folder / "package" / "failing.py")
    return folder


@pytest.mark.parametrize("arguments", [*CASES, ["link.py"]], ids=" ".join)
def test_a_script_is_what_it_is_under_python(scripts: Path, arguments: list[str]) -> None:
    plain = start([sys.executable, *arguments], scripts)
    ours = start([*(MODULE if len(arguments) % 2 else FUSESTEP), *arguments], scripts)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    # Python itself shows two frames of its own where it runs a module.
    wanted = [line for line in plain.stderr.splitlines(keepends=True) if "<frozen runpy>" not in line]
    assert ours.stderr == "".join(wanted) + NOTHING
    if arguments[0] == "interrupt.py":
        assert ours.returncode == -signal.SIGINT


def test_a_module_whose_package_raises_shows_where(scripts: Path) -> None:
    ours = start([*MODULE, "-m", "broken.part"], scripts)
    assert ours.returncode == 1
    assert f'File "{scripts}/broken/__init__.py", line 1, in <module>' in ours.stderr
    assert "fusestep/compat" not in ours.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.py"], "there is no file none.py; name a script, or -m and a module."),
        (["package"], None),
        (["."], "is a folder without a __main__.py"),
        (["-m", "there.is.none"], "there is no module there.is.none that can be run"),
        (["--te-layout", "thd", "look.py"], "--te-layout is 'thd'; choose bshd (batch first)"),
        (["--report", "/no/such/folder/x.json", "look.py"], "--report is /no/such/folder/x.json, which cannot be"),
        ([], "name a SCRIPT, or -m MODULE"),
        (["-m"], "name a SCRIPT, or -m MODULE"),
        (["--report"], "expected one argument"),
        (["--reprot", "x", "look.py"], "unrecognized arguments: --reprot"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_status_2(
    scripts: Path, arguments: list[str], sentence: str | None
) -> None:
    if sentence is None:  # a folder with a __main__, which Python runs too
        assert start([*FUSESTEP, *arguments], scripts).returncode == 0
        return
    ours = start([*FUSESTEP, *arguments], scripts)
    assert ours.returncode == 2
    assert ours.stdout == ""
    assert sentence in ours.stderr
    assert "Traceback" not in ours.stderr


#: The recipe of an Apex tutorial: Adam, then FusedAdam, then FusedLayerNorm, then torch.amp; with a probe first.
RECIPE = """
import multiprocessing, subprocess, sys, time
import torch
from torch import nn
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
try:
    import amp_C, fused_layer_norm_cuda
    native = True
except ImportError:
    native = False

class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))

def train(optimizer_class, norm, amp, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), Block(64, norm), Block(64, norm), nn.Linear(64, 32)).to(device)
    optimizer = optimizer_class(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 32, (8, 24), device=device)
    losses = []
    for _ in range(8):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def worker():
    from apex.mlp import MLP
    MLP([4, 4])(torch.randn(2, 4))

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert native == (device == "cuda")
    rungs = [(torch.optim.Adam, nn.LayerNorm, False), (FusedAdam, nn.LayerNorm, False),
             (FusedAdam, FusedLayerNorm, False), (FusedAdam, FusedLayerNorm, True)]
    curves = [train(*rung, device) for rung in rungs]
    for curve in curves:
        assert curve[-1] < 0.9 * curve[0], curve
        assert all(abs(a - b) < 0.02 * b for a, b in zip(curve, curves[0])), (curve, curves[0])
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join()
    assert process.exitcode == 0
    code = "import os, apex_C, torch; apex_C.flatten([torch.ones(2)]); print(os.environ['FUSESTEP_TE_LAYOUT'])"
    layout = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    print("trained", layout.strip())
"""


def test_the_four_steps_of_a_tutorial_run_unchanged_and_all_its_processes_report(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    command = [*FUSESTEP, "--te-layout", "bshd", "--report", "served.json", "recipe.py", "--flag"]
    answer = start(command, tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "trained bshd\n"
    last = answer.stderr.splitlines()[-1]
    found = json.loads((tmp_path / "served.json").read_text())
    assert last.startswith("fusestep run: ")
    for name, by in (
        ("apex.optimizers.FusedAdam", "fusestep.optim.FusedAdam, "),
        ("apex.normalization.FusedLayerNorm", "fusestep.nn.functional.layer_norm, "),
        ("apex.mlp.MLP", "torch.nn.functional.linear"),
        ("apex_C.flatten", "torch._utils._flatten_dense_tensors"),
    ):
        (served_by,) = found["served"][name]
        assert served_by.startswith(by)
        assert f"{name} by {served_by}" in last
    assert found["schema"] == 1
    assert (found["target"], found["arguments"], found["is_module"]) == ("recipe.py", ["--flag"], False)
    assert found["te_layout"] == "bshd"
    assert found["packages"]["apex"][0].startswith("fusestep ")


def test_each_rank_that_torchrun_starts_has_a_report_and_the_first_speaks(scripts: Path) -> None:
    for rank in "01":
        answer = start([*MODULE, "--report", "served.json", "leave.py"], scripts, RANK=rank)
        assert answer.stderr == (NOTHING if rank == "0" else "")
    assert (scripts / "served.json").exists()
    assert (scripts / "served.rank1.json").exists()


def test_a_run_within_a_run_speaks_once(scripts: Path) -> None:
    (scripts / "outer.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'fusestep.run', 'leave.py'])\n"
    )
    answer = start([*MODULE, "outer.py"], scripts)
    assert answer.stderr == NOTHING


def test_pip_and_metadata_take_both_for_installed(tmp_path: Path) -> None:
    wanted = ["apex", "transformer_engine[pytorch]"]
    answer = start([*MODULE, "-m", "pip", "install", "--no-index", *wanted], tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Requirement already satisfied") == 2
    (tmp_path / "versions.py").write_text(
        "from importlib.metadata import version\nprint(version('apex'), version('transformer_engine'))\n"
    )
    answer = start([*MODULE, "versions.py"], tmp_path)
    assert all(one.endswith("+fusestep") for one in answer.stdout.split())


@pytest.fixture
def real_apex(tmp_path: Path) -> Path:
    """A folder of installed packages with an `apex` of its own."""
    site = tmp_path / "site"
    (site / "apex").mkdir(parents=True)
    (site / "apex" / "__init__.py").write_text("mark = 'the real one'\n")
    (site / "apex-0.9.dist-info").mkdir()
    (site / "apex-0.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n")
    return site


def test_where_the_real_one_is_installed_the_line_says_which_is_used(tmp_path: Path, real_apex: Path) -> None:
    (tmp_path / "which.py").write_text("import apex; print(getattr(apex, 'mark', 'fusestep'))\n")
    plain = start([sys.executable, "which.py"], tmp_path, PYTHONPATH=str(real_apex))
    assert plain.stdout == "the real one\n"
    ours = start([*MODULE, "which.py"], tmp_path, PYTHONPATH=str(real_apex))
    assert ours.stdout == "fusestep\n"
    assert f"apex 0.9 is installed too, in {real_apex}/apex, and not used\n" in ours.stderr


def test_an_apex_beside_the_script_is_its_own_and_the_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "apex.py").write_text("")
    (tmp_path / "script.py").write_text("import apex\n")
    ours = start([*MODULE, "script.py"], tmp_path)
    assert f"fusestep run: apex: the script's own in {tmp_path}/apex.py, not fusestep\n" in ours.stderr


NOTEBOOK = """
import os, subprocess, sys
import apex
real = apex
assert apex.mark == "the real one"
import fusestep
fusestep.install_shims(te_layout="bshd")
fusestep.install_shims()
from apex.normalization import FusedLayerNorm
from importlib.metadata import version
import apex
assert not hasattr(apex, "mark") and version("apex") == "0.1+fusestep"
assert os.environ["FUSESTEP_TE_LAYOUT"] == "bshd"
code = "import sys; sys.modules['torch'] = None\\ntry: import apex\\nexcept ImportError: print('ours')"
assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "ours\\n"
import torch
norm = FusedLayerNorm(4)
fusestep.uninstall_shims()
fusestep.uninstall_shims()
import apex
assert apex is real and version("apex") == "0.9"
assert "FUSESTEP_TE_LAYOUT" not in os.environ
assert not [name for name in sys.modules if name.startswith("apex.")]
assert os.environ["PYTHONPATH"] == sys.argv[1] and not any("compat/shims" in entry for entry in sys.path)
try:
    import apex.RNN
except ImportError as error:
    assert "fusestep" not in str(error)
norm(torch.randn(2, 4))  # what was made goes on working
try:
    fusestep.install_shims("sideways")
except ValueError as error:
    print(error)
"""


def test_notebooks_put_the_shims_on_and_off_again(tmp_path: Path, real_apex: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    answer = start([sys.executable, "notebook.py", str(real_apex)], tmp_path, PYTHONPATH=str(real_apex))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("install_shims: te_layout is 'sideways'; choose bshd")


def test_the_command_needs_no_extra_and_does_not_import_torch_by_itself(scripts: Path) -> None:
    (scripts / "light.py").write_text("import sys; print({'torch', 'typer', 'rich', 'click'} & set(sys.modules))")
    for command in (MODULE, FUSESTEP):
        assert start([*command, "light.py"], scripts).stdout == "set()\n"


def test_nothing_is_left_behind(scripts: Path, tmp_path: Path) -> None:
    for script in ("leave.py", "fail.py", "none.py"):
        start([*MODULE, script], scripts, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
