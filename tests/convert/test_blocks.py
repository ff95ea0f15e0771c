"""Blocks whose residual add goes into a norm: what they do with arguments that no trial knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert


def test_arguments_that_attention_has_another_name_for_go_to_the_old_forward(
    models: SimpleNamespace, adds: list[int]
) -> None:
    class Renaming(models.DecoderLayer):  # type: ignore[misc, name-defined]
        def forward(
            self, hidden_states: Tensor, position_embeddings: Any = None, mask: Any = None, scale: float = 1.0
        ) -> Tensor:
            return super().forward(scale * hidden_states, mask, position_embeddings)  # type: ignore[no-any-return]

    layer, x, angles = Renaming(32, 4, 56), torch.randn(2, 7, 32), torch.randn(2, 7, 8)
    rotation = (angles.cos(), angles.sin())
    calls: list[dict[str, Any]] = [
        {"hidden_states": x, "position_embeddings": rotation},
        {"hidden_states": x, "position_embeddings": rotation, "mask": torch.randn(2, 1, 7, 7)},
        {"hidden_states": x, "position_embeddings": rotation, "scale": 0.5},
        {"hidden_states": x, "position_embeddings": rotation, "mask": None},
    ]
    wanted = [layer(**call) for call in calls]
    assert len({y.sum().item() for y in wanted}) == 3
    assert [row.path for row in convert(nn.Sequential(layer)).rows if row.became is None] == []
    adds.clear()
    for call, y in zip(calls, wanted, strict=True):
        torch.testing.assert_close(layer(**call), y, rtol=1e-4, atol=1e-5)
    assert len(adds) == 2  # the first call, and the last, whose mask is none


def test_a_block_may_name_its_input_as_it_likes(models: SimpleNamespace, adds: list[int]) -> None:
    class Named(models.DecoderLayer):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor, position_embeddings: Any = None) -> Tensor:
            return super().forward(x, None, position_embeddings)  # type: ignore[no-any-return]

    layer, x, angles = Named(32, 4, 56), torch.randn(2, 7, 32), torch.randn(2, 7, 8)
    rotation = (angles.cos(), angles.sin())
    wanted = layer(x, position_embeddings=rotation)
    convert(nn.Sequential(layer))
    adds.clear()
    torch.testing.assert_close(layer(x, position_embeddings=rotation), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x=x, position_embeddings=rotation), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x, rotation), wanted, rtol=1e-4, atol=1e-5)
    assert len(adds) == 3


class Crossing(nn.Module):
    """As GPT-2's block without a second attention, which refuses what that would attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(8), Itself(), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("there is no second attention")
        hidden = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask, use_cache)[0]
        return hidden + self.mlp(self.ln_2(hidden))  # type: ignore[no-any-return]


class Itself(nn.Module):
    def forward(self, hidden_states: Tensor, attention_mask: Any = None, use_cache: bool = False) -> tuple[Tensor]:  # noqa: ARG002
        return (hidden_states.roll(1, 1),)


def test_what_a_second_attention_would_attend_to_is_not_dropped(adds: list[int]) -> None:
    block, x = Crossing(), torch.randn(2, 5, 8)
    wanted = block(x)
    convert(nn.Sequential(block))
    adds.clear()
    torch.testing.assert_close(block(x), wanted, rtol=1e-5, atol=1e-6)
    assert adds == [1]
    with pytest.raises(ValueError, match="no second attention"):
        block(x, encoder_hidden_states=x)


class Ending(nn.Module):
    """As BERT ends its sublayers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)  # type: ignore[no-any-return]


def test_arguments_by_name_may_come_in_any_order(adds: list[int]) -> None:
    module = Ending()
    hidden, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    wanted = module(hidden, residual)
    report = convert(nn.Sequential(module))
    assert "FusedPostNorm" in {row.became for row in report.swapped}
    adds.clear()
    torch.testing.assert_close(module(input_tensor=residual, hidden_states=hidden), wanted)
    assert adds == []
    torch.testing.assert_close(module(hidden, residual), wanted)
    assert adds == [1]
