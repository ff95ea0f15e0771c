"""GPTConfig and the presets."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fusestep.errors import UserError
from fusestep.models import GPT, PRESETS, GPTConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 100, "heads": 12}, "width 100 is not a multiple of heads 12"),
        ({"layers": 0}, "layers is 0; give an integer of at least 1"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"context": 2.5}, "context is 2.5"),
        ({"heads": True}, "heads is True"),
        ({"dropout": 1.0}, r"dropout is 1\.0; give a probability"),
        ({"dropout": -0.1}, r"dropout is -0\.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"dropout": "0.1"}, r"dropout is '0\.1'"),
        ({"tied_head": 1}, "tied_head is 1"),
        ({"form": "fast"}, "form is 'fast'; choose seed, plain or fused"),
        ({"norm": "apex"}, "norm is 'apex'; choose torch or fused"),
        ({"form": "fused", "norm": "torch"}, "choose form 'plain', or norm 'fused'"),
        ({"padded_from": 97}, "padded_from 97 exceeds vocab_size 96"),
        ({"padded_from": 0}, "padded_from is 0"),
    ],
)
def test_impossible_values_are_refused_in_a_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPTConfig(**changes)


def test_configs_go_to_plain_values_and_back() -> None:
    for config in (*PRESETS.values(), GPTConfig(dropout=0.1, form="seed", norm="fused")):
        assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert GPTConfig.from_dict({"layers": 2}) == GPTConfig(layers=2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"GPTConfig has no depth, n_heads; it has context, dropout"):
        GPTConfig.from_dict({"n_heads": 2, "depth": 3, "layers": 1})


def test_configs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig().width = 3


def test_the_norm_follows_the_form_unless_it_is_named() -> None:
    assert GPTConfig(form="fused").has_fused_norm
    assert not GPTConfig(form="plain").has_fused_norm
    assert GPTConfig(form="seed", norm="fused").has_fused_norm
    assert GPTConfig(form="fused", norm="fused").has_fused_norm
    assert not dataclasses.replace(GPTConfig(form="fused"), form="plain").has_fused_norm


@pytest.mark.parametrize(
    ("symbols", "padded"), [(2, 2), (96, 96), (1000, 1000), (1024, 1024), (1025, 1088), (50257, 50304)]
)
def test_the_vocabulary_follows_the_data(symbols: int, padded: int) -> None:
    config = PRESETS["gpt2"].with_vocabulary(symbols)
    assert (config.symbols, config.vocab_size) == (symbols, padded)
    assert config.width == PRESETS["gpt2"].width
    assert config.with_vocabulary(300).symbols == 300


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.429), ("mini", 28.70), ("scaleup", 605.2), ("gpt2", 124.5)])
def test_presets_have_the_stated_sizes(name: str, millions: float) -> None:
    model = GPT(PRESETS[name], device="meta")
    assert model.parameter_count() / 1e6 == pytest.approx(millions, rel=2e-3)
    assert f"{millions:.1f} M parameters" in model.describe()


def test_gpt2_is_gpt2_small() -> None:
    config = PRESETS["gpt2"]
    assert (config.symbols, config.vocab_size, config.context, config.tied_head) == (50257, 50304, 1024, True)
    # GPT-2's own 124,439,808, and the 47 rows that pad its vocabulary.
    assert GPT(config, device="meta").parameter_count() == 124_439_808 + 47 * 768
