"""Rotary embedding in attention of other libraries: the function of its file, replaced where it is called alone."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert import rotary
from fusestep.convert.rotary import FusedRotaryAttention, recognised

WIDTH, HEADS, KEY_HEADS = 32, 4, 2


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def renamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As a library that has renamed an argument: the old name is taken too."""

    @functools.wraps(forward)
    def taking_both(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "memory" in kwargs:
            kwargs["cache"] = kwargs.pop("memory")
        return forward(self, *args, **kwargs)

    return taking_both


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * self.head_dim)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * self.head_dim)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @renamed
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: list[Any] | None = None,
    ) -> tuple[Tensor, None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (one(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in projections)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if cache is not None:
            cache.append(k)
        return self._attended(q, k, v, attention_mask), None


def inputs(batch: int = 3, length: int = 7, device: Any = "cpu") -> dict[str, Any]:
    torch.manual_seed(2)
    angles = torch.randn(batch, length, WIDTH // HEADS, device=device)
    return {
        "hidden_states": torch.randn(batch, length, WIDTH, device=device, requires_grad=True),
        "position_embeddings": (angles.cos(), angles.sin()),
    }


def test_queries_and_keys_are_rotated_by_ours_and_undone(turned: list[Tensor], device: Any) -> None:
    torch.manual_seed(0)
    module, given = Attention().to(device), inputs(device=device)
    wanted = module(**given)[0]
    want = torch.autograd.grad(wanted.square().sum(), [given["hidden_states"], *module.parameters()])
    report = convert(module)
    (row,) = report.rows
    assert (row.became, row.agreement.error < 1e-6) == ("FusedRotaryAttention", True), str(report)
    assert isinstance(module, FusedRotaryAttention)
    assert type(module).__name__ == "Attention"
    turned.clear()
    found = module(**given)[0]
    assert [tuple(t.shape) for t in turned] == [(3, 4, 7, 8), (3, 2, 7, 8)]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(found.square().sum(), [given["hidden_states"], *module.parameters()])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(**given)[0], found)
    report.undo()
    turned.clear()
    assert torch.equal(module(**given)[0], wanted)
    assert not turned


def test_decorators_of_the_forward_still_do_their_work(turned: list[Tensor]) -> None:
    module, given = Attention(), inputs()
    convert(module)
    turned.clear()
    kept: list[Tensor] = []
    module(**given, memory=kept)
    assert len(kept) == 1
    assert len(turned) == 2


def test_a_function_that_somebody_has_put_there_since_is_called(
    turned: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = Attention(), inputs()
    convert(module)
    turned.clear()
    seen: list[Tensor] = []

    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(cos)
        return q + sin[:, None], k

    monkeypatch.setattr(sys.modules[__name__], "apply_rotary_pos_emb", other)
    module(**given)
    assert len(seen) == 1
    assert not turned


def test_tables_that_want_a_gradient_and_fp64_take_the_old_function(turned: list[Tensor]) -> None:
    module, given = Attention(), inputs()
    convert(module)
    turned.clear()
    cos, sin = given["position_embeddings"]
    module(given["hidden_states"], (cos.requires_grad_(), sin))[0].sum().backward()
    assert cos.grad is not None
    given = inputs()
    wide = [t.double() for t in (given["hidden_states"], *given["position_embeddings"])]
    module.double()(wide[0], (wide[1], wide[2]))
    assert not turned


def test_tables_that_are_not_of_these_positions_take_the_old_function(turned: list[Tensor]) -> None:
    """Whatever it does with them: broadcasts a column, spreads over another dimension, or raises."""
    ours = rotary._Rotation({rotary.NAME: apply_rotary_pos_emb})
    q, k, angles = torch.randn(4, 3, 3, 8), torch.randn(4, 1, 3, 8), torch.randn(4, 3, 8)
    tables = angles.cos(), angles.sin()
    for options in ({}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}):
        keys = k if options.get("unsqueeze_dim") != 2 else k.transpose(1, 2)
        for given in ((q, keys, *tables), (q, keys, *(one[..., :1] for one in tables))):
            for found, wanted in zip(ours(*given, **options), apply_rotary_pos_emb(*given, **options), strict=True):
                torch.testing.assert_close(found, wanted)
    assert len(turned) == 2  # in the first of these calls alone
    for wrong in ((q, k, *(one[:2] for one in tables)), (q, k, *(one[:, :2] for one in tables))):
        with pytest.raises(RuntimeError) as theirs:
            apply_rotary_pos_emb(*wrong)
        with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            ours(*wrong)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_attention_traces_the_old_function(turned: list[Tensor]) -> None:
    module, given = Attention(), inputs()
    wanted = module(**given)[0]
    convert(module)
    turned.clear()
    found = torch.compile(module, backend="eager", fullgraph=True)(**given)[0]
    torch.testing.assert_close(found, wanted)
    assert not turned


def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def partner(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    return tuple(x * cos[:, None] + partner(x) * sin[:, None] for x in (q, k))


def test_only_the_rotation_of_halves_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recognised(apply_rotary_pos_emb)
    assert not recognised(neighbours)
    assert not recognised(lambda q, k, cos, sin: (q * cos[:, None] - rotate_half(q) * sin[:, None], k))
    assert not recognised(lambda q, k: (q, k))
    assert not recognised(None)
    monkeypatch.setattr(sys.modules[__name__], "apply_rotary_pos_emb", neighbours)
    (row,) = convert(Attention()).rows
    assert row.reason == "our kernel does not know how it rotates queries and keys"


def test_a_forward_that_is_wrapped_out_of_sight_is_left() -> None:
    class Hidden(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.config = None

        forward = functools.wraps(Attention.forward)(lambda self, *args, **kwargs: HOLDER[0](self, *args, **kwargs))

    (row,) = convert(Hidden()).rows
    assert row.reason == "its forward is wrapped in a way that is not known"


HOLDER = [Attention.forward]
