"""What each module of a model runs as."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import fusestep
from fusestep.dispatch import Choice
from fusestep.errors import UserError
from fusestep.explain import Explanation, ModuleChoice, explain


class OurNorm(nn.Module):
    """Stands for a module of the package, which it names as its origin."""

    __module__ = "fusestep.nn.test"

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.choice = choice

    def implementation(self) -> Choice:
        return self.choice


class Derived(OurNorm):
    """A user's class on top of ours."""

    __module__ = "user.code"


class Foreign(nn.Module):
    """Has an attribute of that name by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.implementation = nn.Linear(2, 2)


class Block(nn.Module):
    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.norm = OurNorm(choice)
        self.attention = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


KERNEL = Choice("triton", "Triton on a GPU")
FALLBACK = Choice("torch", "no GPU", is_fallback=True)


def model(*choices: Choice) -> nn.Module:
    whole = nn.Module()
    whole.embedding = nn.Embedding(5, 4)
    whole.blocks = nn.ModuleList(Block(choice) for choice in choices)
    whole.final_norm = Derived(KERNEL)
    return whole


def lines(explanation: Explanation) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in str(explanation).splitlines()]


def test_each_module_is_listed_with_its_reason() -> None:
    found = {m.path: m for m in explain(model(KERNEL, FALLBACK)).modules}
    assert found["blocks.0.norm"] == ModuleChoice("blocks.0.norm", "OurNorm", True, "triton", "Triton on a GPU", False)
    assert found["blocks.1.norm"].is_fallback
    assert found["final_norm"].is_ours
    assert found["embedding"].reason == "PyTorch's own"
    # It has a child, and a parameter of its own beside it.
    assert "blocks.0.attention" in found
    assert "blocks" not in found
    assert "blocks.0.mlp" not in found


def test_repeated_modules_share_a_line() -> None:
    rows = lines(explain(model(KERNEL, KERNEL, KERNEL, FALLBACK, KERNEL)))
    assert rows[0][:2] == ["module", "class"]
    paths = [row[0] for row in rows if row]
    assert "blocks.0–2,4.norm" in paths
    assert "blocks.3.norm" in paths
    assert "blocks.0–4.mlp.0,2" in paths
    assert "blocks.0–4.mlp.1" in paths
    assert paths.index("embedding") < paths.index("blocks.0–2,4.norm") < paths.index("final_norm")


def test_the_page_counts_kernels_fallbacks_and_torchs_own() -> None:
    page = str(explain(model(KERNEL, FALLBACK)))
    assert "torch (fallback)" in page
    assert page.endswith(
        "Triton kernels: 2 of 14 modules; fallbacks: 1; ours on PyTorch's kernels by intent: 0; PyTorch's own: 11."
    )


def test_the_counts_of_the_page_add_up() -> None:
    """A choice that is no fallback and no kernel of ours, such as PyTorch's product, counts too."""
    page = str(explain(model(KERNEL, FALLBACK, Choice("torch", "PyTorch's own product"), Choice("native", "FP8"))))
    kernels, modules, fallbacks, intended, foreign = map(int, re.findall(r"\d+", page.splitlines()[-1]))
    assert (kernels, fallbacks, intended) == (2, 1, 2)
    assert kernels + fallbacks + intended + foreign == modules
    assert "0 of 1 module;" in str(explain(nn.Linear(2, 2)))


def test_a_single_module_is_a_model() -> None:
    assert "(the model)  Linear" in str(explain(nn.Linear(2, 2)))


def test_a_module_that_occurs_twice_is_listed_once() -> None:
    shared = nn.Linear(2, 2)
    assert len(explain(nn.Sequential(shared, nn.ReLU(), shared)).modules) == 2


def test_a_foreign_attribute_of_that_name_is_no_answer() -> None:
    assert [m.kind for m in explain(Foreign()).modules] == ["Linear"]


def test_a_model_without_modules_is_said_to_compute_nothing() -> None:
    assert str(explain(nn.Sequential(nn.ModuleList()))).startswith("no module")


def test_as_dict_is_plain_and_numbered() -> None:
    content = json.loads(json.dumps(explain(model(KERNEL)).as_dict()))
    assert content["schema"] == 1
    assert content["modules"][0] == {
        "path": "embedding",
        "kind": "Embedding",
        "is_ours": False,
        "implementation": "torch",
        "reason": "PyTorch's own",
        "is_fallback": False,
    }


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"explain: str is no torch\.nn\.Module; pass the model itself"):
        explain("gpt2")  # type: ignore[arg-type]


def test_our_own_model_names_every_norm_product_and_attention() -> None:
    config = fusestep.models.PRESETS["tiny"]
    built = fusestep.models.GPT(config)
    explanation = fusestep.explain(built)
    ours = [m for m in explanation.modules if m.is_ours]
    # Of a block a norm with its product, attention, a product, and a norm with an MLP; the last norm, two embeddings.
    assert len(ours) == 4 * config.layers + 3
    assert {m.implementation for m in ours} == {"torch"}
    assert sum(m.is_fallback for m in ours) == 2 * config.layers + 3
