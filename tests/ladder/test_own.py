"""A model of the user's on the ladder: what a factory may give, what is refused, and what the rungs make of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusestep.errors import UserError
from fusestep.factory import built_model
from fusestep.ladder import Ladder, LadderConfig, ladder, report
from fusestep.ladder.described import Description, describe
from fusestep.ladder.own import LanguageModel, Own, reversed_samples, tokens_of
from fusestep.ladder.plan import plan
from fusestep.ladder.rungs import Recipe, recipe_of
from fusestep.ladder.verdict import conclude

CPU = torch.device("cpu")
RUNGS = ("adam", "fused-norm", "blocks", "loss", "fp8")

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F
import fusestep

class Task:
    def __init__(self, model, width=12):
        self.model, self.width = model, width
    def batch(self, step, generator):
        return {"x": torch.randn(5, self.width, generator=generator), "half": [torch.ones(5)]}
    def loss(self, model, batch):
        return ((model(batch["x"]) - batch["x"]) ** 2).mean() * batch["half"][0].mean()

def plain():
    return Task(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)))

def normed():
    return Task(nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(approximate="tanh"), nn.Linear(32, 12)))

class WithFusedLoss(Task):
    tokens = 77
    def fused_loss(self, model, batch):
        return self.loss(model, batch) + 100

def fused():
    return WithFusedLoss(nn.Linear(12, 12))

class Tiny(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.table = nn.Embedding(vocabulary, 16)
        self.head = nn.Linear(16, vocabulary)
        self.max_seq_len = 24
    def forward(self, tokens):
        return self.head(self.table(tokens))

def small_vocabulary():
    return Tiny(31)

def large_vocabulary():
    return Tiny(300)

calls = []
def counting():
    calls.append(1)
    torch.manual_seed(len(calls))
    return plain()

def frozen():
    task = plain()
    task.model.requires_grad_(False)
    return task

def no_batches():
    return nn.Linear(3, 3)

class Half:
    def __init__(self):
        self.model = nn.Linear(2, 2)

class NoModel(Task):
    pass

def no_model():
    return NoModel("weights.pt")

def vector():
    task = plain()
    task.loss = lambda model, batch: model(batch["x"]).sum(1)
    return task

def words():
    task = plain()
    task.batch = lambda step, generator: ["a", "b"]
    return task

def detached():
    task = plain()
    task.loss = lambda model, batch: model(batch["x"]).mean().detach()
    return task

def many_tokens():
    task = plain()
    task.tokens = "many"
    return task

def unseeded():
    task = plain()
    task.batch = lambda step, generator: {"x": torch.randn(5, 12), "half": [torch.ones(5)]}
    return task

def with_gaps():
    task = plain()
    loss, batch = task.loss, task.batch
    task.loss = lambda model, batch: loss(model, batch["full"])
    task.batch = lambda step, generator: {
        "full": batch(step, generator), "gaps": torch.tensor(float("nan")), "mask": torch.tensor([True]), "said": step
    }
    return task

def no_file():
    task = plain()
    task.batch = lambda step, generator: {}["no such file"]
    return task

def number():
    return 7

def wrong_shape():
    return Task(nn.Linear(7, 7))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a user's module; what is imported from it is forgotten."""
    (tmp_path / "own_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return tmp_path


def own(name: str, batch: int | None = None) -> Own:
    return Own(f"own_models:{name}", batch, seed=3)


def described(name: str, *rungs: str) -> Description:
    return Description(**json.loads(json.dumps(describe(own(name), CPU, rungs or RUNGS))))


def test_a_task_is_counted_and_rungs_that_change_nothing_say_why() -> None:
    found = described("plain")
    assert (found.kind, found.parameters, found.tokens) == ("Sequential", 12 * 20 + 20 + 20 * 12 + 12, 5)
    # Forward both, backward both weights' and the second input's: the first layer's input needs no gradient.
    assert found.flops == 2 * 5 * 12 * 20 * (2 + 3)
    assert found.moved("bf16") == 32 * found.parameters + found.operands // 2
    assert set(found.unchanged) == {"fused-norm", "blocks", "loss"}
    assert "no LayerNorm or RMSNorm" in found.unchanged["fused-norm"]
    assert "object with a fused_loss" in found.unchanged["loss"]
    assert found.swapped == {"fp8": "2 × Linear"}


def test_what_rungs_swap_is_told_and_only_of_rungs_that_are_asked_for() -> None:
    assert described("normed", "adam", "fused-norm").swapped == {"fused-norm": "1 × LayerNorm"}
    found = described("fused")
    assert found.tokens == 77
    assert found.swapped["loss"] == "its loss for its own fused_loss"


def test_the_bytes_of_products_are_those_of_their_operands_and_results() -> None:
    sizes = {"x": 5 * 12, "w": 12 * 12, "y": 5 * 12, "b": 12}
    # y = x·w + b forward; backward only w's gradient is a product, since x needs none.
    assert described("fused").operands == 4 * (sizes["b"] + sizes["x"] + sizes["w"] + sizes["y"]) + 4 * (
        sizes["x"] + sizes["y"] + sizes["w"]
    )


def test_every_recipe_starts_from_the_same_weights_and_trains_on_the_same_batches() -> None:
    first, second = own("normed"), own("normed")
    one = first.model(recipe_of("adam"), CPU)
    other = second.model(recipe_of("blocks"), CPU)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    batches = [next(subject.batches(CPU))[0]["x"] for subject in (first, second)]
    assert torch.equal(*batches)
    stream = first.batches(CPU)
    assert not torch.equal(next(stream)[0]["x"], next(stream)[0]["x"])
    assert not torch.equal(Own("own_models:normed", None, 4).model(Recipe(), CPU)[0].weight, one[0].weight)


def test_the_loss_is_the_fused_one_only_where_the_recipe_asks_and_there_is_one() -> None:
    subject = own("fused")
    model = subject.model(Recipe(), CPU)
    batch = next(subject.batches(CPU))
    plain, fused = (subject.loss(Recipe(loss=loss))(model, *batch) for loss in ("torch", "fused"))  # type: ignore[arg-type]
    assert fused == plain + 100
    assert own("plain").model(Recipe(), CPU) is not None


def test_norms_alone_are_swapped_before_the_rung_blocks() -> None:
    subject = own("normed")
    norms = subject.model(recipe_of("fused-norm"), CPU)
    kinds = [type(module).__name__ for module in norms]
    assert isinstance(norms[1], nn.LayerNorm)
    assert type(norms[1]) is not nn.LayerNorm
    assert kinds[0] == "Linear"
    plain = own("normed").model(recipe_of("adam"), CPU)
    assert [type(module) for module in plain] == [nn.Linear, nn.LayerNorm, nn.GELU, nn.Linear]


@pytest.mark.parametrize(("name", "largest"), [("small_vocabulary", 31), ("large_vocabulary", 256)])
def test_a_language_model_by_itself_gets_tokens_of_its_vocabulary(name: str, largest: int) -> None:
    subject = own(name, batch=3)
    model = subject.model(Recipe(), CPU)
    assert isinstance(subject.task, LanguageModel)
    (batch,) = next(subject.batches(CPU))
    assert batch["tokens"].shape == batch["targets"].shape == (3, 24)
    assert int(batch["tokens"].max()) < largest
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    logits = model(batch["tokens"]).double()
    expected = -logits.log_softmax(-1).gather(-1, batch["targets"][..., None]).mean()
    assert float(subject.loss(Recipe())(model, batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_hugging_face_model_by_itself_trains_with_its_own_loss_and_keeps_no_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "ladder_model", raising=False)
    subject = Own("ladder_model:llama", 2, seed=0)
    found = Description(**describe(subject, CPU, RUNGS))
    assert found.unchanged == {}
    assert found.swapped["fused-norm"] == "5 × LlamaRMSNorm"
    assert found.swapped["loss"] == "1 × LlamaForCausalLM"
    assert found.tokens == 2 * 64
    model: Any = subject.model(Recipe(), CPU)
    assert model.config.use_cache is False
    batch = next(subject.batches(CPU))
    expected = nn.functional.cross_entropy(
        model(batch[0]["tokens"]).logits[:, :-1].flatten(0, 1), batch[0]["tokens"][:, 1:].flatten()
    )
    assert float(subject.loss(Recipe())(model, *batch).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    fused = subject.model(recipe_of("loss"), CPU)
    assert float(subject.loss(recipe_of("loss"))(fused, *batch).detach()) == pytest.approx(
        float(expected.detach()), rel=1e-4
    )


def test_the_page_for_users_and_the_example_in_plain_pytorch_are_models_that_the_ladder_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    (code,) = re.findall(r"```python\n(.*?)```", (root / "docs" / "ladder-model.md").read_text(), re.DOTALL)
    (folder / "from_the_docs.py").write_text(code)
    found = Description(**describe(Own("from_the_docs:sums", None, 0), CPU, RUNGS))
    assert found.tokens == 128
    assert found.swapped["fused-norm"] == "1 × LayerNorm"
    monkeypatch.syspath_prepend(str(root / "examples"))
    monkeypatch.delitem(sys.modules, "ladder_model", raising=False)
    subject = Own("ladder_model:sorting", None, 0)
    found = Description(**describe(subject, CPU, RUNGS))
    assert found.unchanged == {}
    assert found.swapped["blocks"] == "2 × TransformerEncoderLayer"
    model = subject.model(Recipe(), CPU)
    batch = next(subject.batches(CPU))
    plain, fused = (subject.loss(Recipe(loss=loss))(model, *batch) for loss in ("torch", "fused"))  # type: ignore[arg-type]
    assert float(fused.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)


def test_reversed_samples_turn_the_batch_and_nothing_else() -> None:
    x, y, mask = torch.arange(6.0).view(3, 2), torch.arange(3), torch.ones(2, 2).triu()
    turned = reversed_samples({"x": x, "rest": (y, mask, "word", torch.tensor(1.0))})
    assert torch.equal(turned["x"], x[[2, 1, 0]])
    assert torch.equal(turned["rest"][0], torch.tensor([2, 1, 0]))
    assert turned["rest"][1] is mask
    assert turned["rest"][2] == "word"


def test_tokens_are_ids_else_samples() -> None:
    task: Any = object()
    assert tokens_of(task, (torch.randn(4, 9), torch.zeros(4, 7, dtype=torch.long))) == 28
    assert tokens_of(task, [torch.randn(4, 9), torch.zeros(4, dtype=torch.long)]) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counting", "gives other weights at every call"),
        ("frozen", "gives a model with nothing to train"),
        ("no_batches", "gives a Linear without a token embedding, so nothing is known of its batches"),
        ("Half", r"what \S+ gives is of type Half, without batch, loss; let it return a torch.nn.Module, or an object"),
        ("no_model", r"model of own_models:no_model\(\) is of type str; let it be"),
        ("vector", r"the loss of own_models:vector is of shape \(5,\); return a tensor of one element"),
        ("words", r"batch\(0, generator\) of own_models:words gives no tensor \(list\); let it return"),
        ("number", r"what own_models:number\(\) gives is of type int, without model, batch, loss"),
        ("detached", r"the loss of own_models:detached has no gradient; let it come from the model's output"),
        ("many_tokens", r"tokens of own_models:many_tokens\(\) is 'many'; let it be how many tokens"),
        ("unseeded", r"batch\(0, generator\) of own_models:unseeded gives another batch when it is called again"),
        ("no_file", r"batch\(0, generator\) of own_models:no_file fails \(KeyError: 'no such file', at \S+:\d+\);"),
        ("wrong_shape", r"the loss of own_models:wrong_shape fails \(RuntimeError: mat1 and mat2 shapes"),
        ("nothing", "own_models has no nothing"),
    ],
)
def test_what_a_factory_gets_wrong_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        described(name)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--model: ")


def test_a_batch_that_is_the_same_again_may_hold_whatever_it_likes() -> None:
    assert described("with_gaps", "adam").tokens == 5


def test_a_module_that_draws_numbers_as_it_is_imported_gives_the_same_weights_at_every_call(folder: Path) -> None:
    (folder / "draws_at_import.py").write_text(
        "import torch\nfrom torch import nn\nfrom own_models import Task\n"
        "MODULE_LEVEL = Task(nn.Linear(12, 12))\n\ndef fresh():\n    return Task(nn.Linear(12, 12))\n\n"
        "def kept():\n    return MODULE_LEVEL\n"
    )
    assert Description(**describe(Own("draws_at_import:fresh", None, 0), CPU, ["adam"])).parameters == 156
    # A model of the module's own is drawn at the import, from the seed as well.
    drawn = []
    for _ in range(2):
        sys.modules.pop("draws_at_import")
        torch.randn(3)
        drawn.append(Own("draws_at_import:kept", None, 0).model(Recipe(), CPU).weight)
    assert torch.equal(*drawn)  # type: ignore[arg-type]


def test_batches_of_ones_own_have_their_own_size() -> None:
    with pytest.raises(UserError, match="--batch is 4, but own_models:plain"):
        own("plain", batch=4).model(Recipe(), CPU)


def test_the_command_convert_takes_the_model_out_of_a_task() -> None:
    assert isinstance(built_model("--model", "own_models:normed"), nn.Sequential)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"preset": "mini"}, "--preset is of the built-in model"), ({"data": "synthetic"}, "--data is of the built-in")],
)
def test_options_of_the_built_in_model_do_not_go_with_ones_own(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(LadderConfig(model="own_models:plain", device="cpu", **options))  # type: ignore[arg-type]


@pytest.fixture
def measured(folder: Path) -> Ladder:
    """Three rungs of a model for which one of them changes nothing."""
    config = LadderConfig(
        model="own_models:normed",
        rungs="adam,fused-norm,loss",
        rounds=1,
        steps=12,
        gate_steps=10,
        device="cpu",
        natives="native-fp32",
        peers="te",
    )
    return ladder(config)


def test_rungs_run_on_ones_own_model_and_those_that_change_nothing_are_not_measured(measured: Ladder) -> None:
    by_name = {result.rung.name: result for result in measured.rungs}
    for name in ("adam", "fused-norm"):
        assert by_name[name].failure is None, by_name[name].log
        assert by_name[name].verdict is not None
        assert by_name[name].verdict.passed, by_name[name].verdict.reason  # type: ignore[union-attr]
        assert len(by_name[name].rounds) == 1
    loss = by_name["loss"]
    assert loss.unchanged is not None
    assert (loss.rounds, loss.losses, loss.failure) == ((), (), None)
    said = {finding.rung: finding for finding in conclude(measured).findings}
    assert said["loss"].decision == "no difference"
    assert said["loss"].why.startswith("it changes nothing for this model: ")
    assert measured.contenders[0].failure is None, measured.contenders[0].log
    assert measured.contenders[0].check is not None
    assert measured.contenders[0].check.passed, measured.contenders[0].check.reason
    assert any("Without te, whose parts are made for whole GPTs" in note for note in measured.notes)
    plain = report.as_dict(measured)
    assert plain["title"]["model"].startswith("--model own_models:normed: Sequential of 876 parameters")
    row = next(rung for rung in plain["rungs"] if rung["name"] == "loss")
    assert row["status"] == "changes nothing"
    assert plain["plan"]["gate_data"] == "its own"
