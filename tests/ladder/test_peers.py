"""Other libraries beside the rungs, with packages that stand in for them.

Apex and Transformer Engine are copies of fusestep's own shims in another folder, which have their names and arguments;
the others are a few lines each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusestep.compat.install import SHIMS
from fusestep.ladder import Ladder, LadderConfig, ladder, peers, report
from fusestep.ladder.words import peer_in_words, remarks_of

LIGER_NORM = """
from torch import nn
class LigerLayerNorm(nn.LayerNorm):
    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__(hidden_size, eps=eps)
"""
LIGER_LOSS = """
import torch
from torch.nn import functional as F
chunks = []
def liger_fused_linear_cross_entropy(input, weight, target, bias=None, chunk_mem_const=1):
    assert not torch.is_autocast_enabled("cpu")
    # The chunk that Liger makes of its constant.
    pieces = -(-weight.shape[0] // (chunk_mem_const * input.shape[1]))
    chunks.append(min(1 << (-(-input.shape[0] // pieces) - 1).bit_length(), input.shape[0]))
    return F.cross_entropy((input @ weight.t()).float(), target)
"""
TORCHAO = """
converted = []
class Float8LinearConfig:
    @classmethod
    def from_recipe_name(cls, name):
        return name
def convert_to_float8_training(model, *, config, module_filter_fn):
    from torch import nn
    assert config == "tensorwise"
    converted.extend(p for p, m in model.named_modules() if isinstance(m, nn.Linear) and module_filter_fn(m, p))
    return model
"""
QUACK_NORM = """
import torch
def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dtype == bias.dtype == torch.float32
    assert return_rstd and return_mean
    wide = x.float()
    mean = wide.mean(1)
    rstd = (wide.var(1, unbiased=False) + eps).rsqrt()
    return ((wide - mean[:, None]) * rstd[:, None] * weight + bias).to(x.dtype), rstd, mean
def layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True):
    assert has_bias and dy.is_contiguous()
    hat = (x.float() - mean[:, None]) * rstd[:, None]
    g = dy.float() * weight
    dx = (g - g.mean(1, keepdim=True) - hat * (g * hat).mean(1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * hat).sum(0), dy.float().sum(0)
"""
QUACK_LOSS = """
from torch.nn import functional as F
from quack.gemm_runtime import identity
identity.semantic_value_key(object())  # kernels' values are named as the module is imported
def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean"):
    assert chunk_size % 128 == 0
    return F.cross_entropy((x @ weight.t()).float(), target, reduction=reduction)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with a stand-in for each library."""
    folder = tmp_path_factory.mktemp("site") / "packages"
    shutil.copytree(SHIMS, folder, ignore=shutil.ignore_patterns("__pycache__", "*.dist-info"))
    for file, text in {
        "liger_kernel/transformers/layer_norm.py": LIGER_NORM,
        "liger_kernel/transformers/functional.py": LIGER_LOSS,
        "torchao/float8/__init__.py": TORCHAO,
        "quack/rmsnorm.py": QUACK_NORM,
        "quack/linear_cross_entropy.py": QUACK_LOSS,
        "quack/gemm_runtime/identity.py": "def semantic_value_key(value, seen=None):\n    raise TypeError\n",
    }.items():
        path = folder / file
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent).mkdir(exist_ok=True, parents=True)
            (folder / parent / "__init__.py").touch()
        path.write_text(text)
    (folder / "quack_kernels-0.6.5.dist-info").mkdir()
    (folder / "quack_kernels-0.6.5.dist-info" / "METADATA").write_text("Name: quack-kernels\nVersion: 0.6.5\n")
    return folder


TRAIN = """
import json, sys
from dataclasses import replace
import torch
from fusestep.ladder.contenders import PEERS, contenders_of_peer
from fusestep.ladder.peer_steps import peer_step
from fusestep.ladder.subject import BuiltIn
from fusestep.ladder.torch_step import native_step
from fusestep.ladder.contenders import native
from fusestep.models import GPTConfig
cpu = torch.device("cpu")
config = GPTConfig(vocab_size=48, width=32, heads=2, layers=2, ffn_width=80, context=16)
subject = BuiltIn(config, "random", 3, 5)
found = {}
batch = next(subject.batches(cpu))
def losses(step):
    return [float(step(*batch)) for _ in range(5)]  # the same tokens again, so that there is something to learn
eager = replace(native("native-fp32", cpu, compiled=False).attempts[0], lr=3e-3)
found["native"] = losses(native_step(eager, subject, cpu, 7))
for peer in PEERS:
    for contender in contenders_of_peer(peer, cpu):
        step = peer_step(replace(contender.attempts[-1], compiled=False, lr=3e-3), subject, cpu, 7)
        found[contender.name] = losses(step)
        found[contender.name + " is"] = step.optimizer_in_words()
import apex, torchao.float8, quack.gemm_runtime.identity as identity
found["files"] = [apex.__file__, torchao.float8.__file__]
found["converted"] = torchao.float8.converted
found["opaque"] = identity.semantic_value_key(object())
from liger_kernel.transformers.functional import chunks
from fusestep.ladder.peer_functions import liger_loss, quack_layer_norm, quack_loss
x, weight, bias = torch.randn(6, 4, 40, requires_grad=True), torch.rand(40, requires_grad=True), torch.randn(40)
bias.requires_grad_()
given = [quack_layer_norm(x, weight, bias, 1e-3), torch.layer_norm(x, [40], weight, bias, 1e-3)]
dy = torch.randn(4, 6, 40).transpose(0, 1)
pairs = [given, *zip(*(torch.autograd.grad(y, (x, weight, bias), dy) for y in given))]
found["quack norm"] = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
target = torch.randint(500, (10000,))
x, weight = torch.randn(10000, 6), torch.randn(500, 6)
chunks.clear()
values = [liger_loss(x, weight, target), liger_loss(x, weight, target, chunk=None), quack_loss(x, weight, target)]
found["losses"] = [float(one) for one in (*values, torch.nn.functional.cross_entropy(x @ weight.t(), target))]
found["chunks"] = chunks
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trained(installed: Path) -> dict[str, Any]:
    """The first losses of every peer's step, from one process whose path has fusestep's shims first."""
    path = os.pathsep.join([str(SHIMS), str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "within"),
    [("apex", 1e-3), ("apex-seed", 1e-3), ("te-fp8", 1e-2), ("liger", 1e-3), ("torchao", 1e-3), ("quack", 1e-3)],
)
def test_a_peer_starts_from_the_rungs_weights_and_trains_as_they_do(
    trained: dict[str, Any], name: str, within: float
) -> None:
    assert trained[name] == pytest.approx(trained["native"], rel=within)
    assert trained["native"][4] < trained["native"][0] - 0.05  # it does train


def test_peers_are_what_is_installed_and_never_fusesteps_own_shims(trained: dict[str, Any], installed: Path) -> None:
    assert all(file.startswith(str(installed)) for file in trained["files"])
    assert trained["apex is"] == "apex.optimizers.FusedAdam"
    assert "transformer_engine FusedAdam" in trained["te-fp8 is"]
    layers = ("attention.qkv", "attention.proj", "up", "down")
    assert trained["converted"] == [f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers]
    assert trained["opaque"][0] == "opaque"


def test_functions_of_other_libraries_compute_what_torch_does(trained: dict[str, Any]) -> None:
    assert len(trained["quack norm"]) == 4
    assert max(trained["quack norm"]) < 1e-5
    *values, wanted = trained["losses"]
    assert values == pytest.approx([wanted] * 3, rel=1e-5)
    assert trained["chunks"] == [4096, 128]  # the second is Liger's own choice


def test_where_a_peer_is_and_its_version(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SHIMS), str(SHIMS / ".." / "shims")])
    assert peers.place_of("apex") is None  # but for the shims, which are none
    monkeypatch.setattr(sys, "path", [str(SHIMS), str(installed)])
    assert peers.place_of("apex") == str(installed / "apex")
    assert peers.version_of("quack") == "0.6.5"
    assert peers.version_of("liger") is None


@pytest.fixture(scope="module")
def beside(installed: Path) -> Ladder:
    """A ladder beside a peer that runs, one whose import fails and one that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        broken = installed.parent / "broken"
        (broken / "torchao").mkdir(parents=True, exist_ok=True)
        (broken / "torchao" / "__init__.py").write_text("raise ImportError('built for another torch')\n")
        path = [str(broken), str(installed)]
        patch.setattr(sys, "path", [*path, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]))
        found = peers.place_of
        patch.setattr("fusestep.ladder.beside.place_of", lambda name: None if name == "te" else found(name))
        config = LadderConfig("tiny", "adam", rounds=1, steps=12, gate_steps=4, batch=2, device="cpu", natives="none")
        return ladder(LadderConfig(**{**vars(config), "peers": "apex,te,torchao"}))


def test_a_peer_that_cannot_run_is_a_sentence_in_its_column_and_the_rest_is_measured(beside: Ladder) -> None:
    states = {one.contender.name: one for one in beside.contenders}
    assert states["apex"].failure is None, states["apex"].log
    assert states["apex"].check is not None
    assert states["apex"].check.passed, states["apex"].check.reason
    assert len(states["apex"].rounds) == len(beside.rungs[0].rounds) == 1
    assert states["te-fp8"].absent == "not installed"
    assert states["torchao"].failure is not None
    assert "ImportError: built for another torch" in states["torchao"].failure
    assert "Traceback" in states["torchao"].log
    rung = beside.rungs[0]
    assert peer_in_words(rung, beside, "torchao") == "did not run"
    assert peer_in_words(rung, beside, "te") == "not installed"
    assert "×" in peer_in_words(rung, beside, "apex")
    assert any(line.startswith("torchao: did not run: ") for line in remarks_of(beside))
    plain = report.as_dict(beside)
    assert plain["rungs"][0]["apex"] in ("apex", "apex-seed")
    assert plain["rungs"][0]["torchao"] is None
    assert plain["contenders"][0]["rounds"][0]["parts"][0]["implementation"] == "apex"
