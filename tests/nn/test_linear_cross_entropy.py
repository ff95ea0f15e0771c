"""LinearCrossEntropy: nn.Linear and its loss in one module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusestep import explain
from fusestep.errors import UserError
from fusestep.nn import LinearCrossEntropy


def test_it_has_the_parameters_and_the_state_of_a_linear(device: torch.device) -> None:
    plain = nn.Linear(12, 31, device=device)
    head = LinearCrossEntropy(12, 31, device=device)
    head.load_state_dict(plain.state_dict())
    x = torch.randn(4, 7, 12, device=device)
    target = torch.randint(31, (4, 7), device=device)
    wanted = F.cross_entropy(plain(x).flatten(0, 1), target.flatten())
    torch.testing.assert_close(head(x, target), wanted)
    torch.testing.assert_close(head.logits(x), plain(x))
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias"]


def test_options_reach_the_loss(device: torch.device) -> None:
    options = {"ignore_index": 3, "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0, "reduction": "none"}
    head = LinearCrossEntropy(5, 9, False, device, torch.float64, **options)
    x = torch.randn(40, 5, device=device, dtype=torch.float64)
    target = torch.arange(40, device=device) % 9
    weights = torch.rand(40, device=device)
    y = 2.0 * torch.tanh(x @ head.weight.t() / 2.0)
    torch.testing.assert_close(head.logits(x), y)
    wanted = F.cross_entropy(y, target, label_smoothing=0.2, reduction="none") + 1e-2 * y.logsumexp(1).square()
    wanted = torch.where(target == 3, 0.0, wanted * weights)
    torch.testing.assert_close(head(x, target, weights), wanted)
    for said in ("in_features=5", "ignore_index=3", "label_smoothing=0.2", "z_loss=0.01", "softcap=2.0", "'none'"):
        assert said in repr(head)


def test_a_tied_head_shares_its_embedding(device: torch.device) -> None:
    embedding = nn.Embedding(19, 8, device=device)
    head = LinearCrossEntropy(8, 19, bias=False, device=device)
    head.weight = embedding.weight
    tokens, target = torch.randint(19, (2, 6), device=device), torch.randint(19, (2, 6), device=device)
    head(embedding(tokens), target).backward()
    found = embedding.weight.grad
    embedding.weight.grad = None
    F.cross_entropy(F.linear(embedding(tokens), embedding.weight).flatten(0, 1), target.flatten()).backward()
    torch.testing.assert_close(found, embedding.weight.grad)


def test_it_says_what_it_runs_as() -> None:
    (found,) = explain(LinearCrossEntropy(4, 5)).modules
    assert (found.is_ours, found.implementation, found.is_fallback) == (True, "torch", True)
    assert "these tensors are on cpu" in found.reason


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(UserError, match="label_smoothing is 3"):
        LinearCrossEntropy(4, 5, label_smoothing=3)(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


def test_the_snippet_of_the_page_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "loss.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(compile(snippet, str(page), "exec"), names)
    assert names["logits"].shape == (2, 1000)
    assert names["x"].grad is not None
