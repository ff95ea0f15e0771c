"""Generation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusestep.errors import UserError
from fusestep.models import GPT, GPTConfig, generate
from fusestep.models.config import Form

CONTEXT = 16


@pytest.fixture
def model() -> GPT:
    """Weights large enough that the likeliest token stands out and changes from place to place."""
    return build("fused")


def build(form: Form, **changes: object) -> GPT:
    config = GPTConfig(vocab_size=31, width=24, heads=3, layers=2, ffn_width=40, context=CONTEXT, form="plain")
    torch.manual_seed(1)
    source = GPT(dataclasses.replace(config, **changes))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(12 if parameter.dim() == 2 else 1)
    model = GPT(dataclasses.replace(config, form=form, **changes))
    model.load_state_dict(source.state_dict())
    return model


def one_by_one(model: GPT, prompt: list[int], tokens: int) -> list[int]:
    """Greedy generation as the tutorial writes it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model.eval()(torch.tensor([ids[-CONTEXT:]], device=model.embedding.weight.device))
            ids.append(int(logits[0, -1].argmax()))
    return ids


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 31, (length,)).tolist()


@pytest.mark.parametrize("form", ["seed", "plain", "fused"])
@pytest.mark.parametrize(("length", "tokens"), [(1, 5), (10, 30), (16, 3), (40, 6), (15, 1), (16, 1), (17, 1)])
def test_greedy_generation_is_the_likeliest_token_of_a_sliding_window(
    form: Form, length: int, tokens: int, device: torch.device
) -> None:
    model, prompt = build(form).to(device), prompt_of(length)
    (row,) = generate(model, [prompt], tokens)
    assert row.dtype == torch.int64
    assert row.device == model.embedding.weight.device
    assert row.tolist() == one_by_one(model, prompt, tokens)
    assert len(set(row.tolist())) > 1


def test_prompts_of_different_lengths_do_not_disturb_each_other(model: GPT) -> None:
    prompts = [prompt_of(length) for length in (3, 40, 1, 16, 17)]
    rows = generate(model, prompts, 20)
    assert [row.tolist() for row in rows] == [one_by_one(model, prompt, 20) for prompt in prompts]


def test_prompts_may_be_tensors_of_any_integer_type(model: GPT) -> None:
    prompt = prompt_of(5)
    expected = generate(model, [prompt], 4)[0]
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert torch.equal(generate(model, [torch.tensor(prompt, dtype=dtype)], 4)[0], expected)
    assert torch.equal(generate(model, iter([tuple(prompt)]), 4)[0], expected)


def test_no_new_tokens_give_the_prompt_back(model: GPT) -> None:
    for options in ({}, {"temperature": 1.0, "top_k": 3}):
        assert [row.tolist() for row in generate(model, [[3, 4], [5]], 0, **options)] == [[3, 4], [5]]
    assert generate(model, [], 5) == []


def test_one_seed_gives_one_continuation(model: GPT) -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, [[3, 4]], 30, temperature=3.0, generator=generator)[0].tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    torch.manual_seed(5)
    first = generate(model, [[3, 4]], 30, temperature=3.0)[0]
    torch.manual_seed(5)
    assert torch.equal(generate(model, [[3, 4]], 30, temperature=3.0)[0], first)


@pytest.mark.parametrize(("temperature", "top_k"), [(2.0, None), (1.0, 5), (4.0, 3)])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(
    model: GPT, temperature: float, top_k: int | None
) -> None:
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[3]]))[0, 0].double() / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    expected = logits.softmax(0)
    generator = torch.Generator().manual_seed(1)
    draws = 4000
    rows = generate(model, [[3]] * draws, 1, temperature=temperature, top_k=top_k, generator=generator)
    drawn = torch.bincount(torch.stack(rows)[:, 1], minlength=31) / draws
    # Five standard deviations of each count.
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()


def test_one_candidate_and_a_tiny_temperature_are_greedy(model: GPT) -> None:
    prompt = prompt_of(6)
    greedy = generate(model, [prompt], 20)[0]
    assert torch.equal(generate(model, [prompt], 20, temperature=5.0, top_k=1)[0], greedy)
    assert torch.equal(generate(model, [prompt], 20, temperature=1e-300)[0], greedy)


def test_more_candidates_than_the_vocabulary_mean_all(model: GPT) -> None:
    def draw(top_k: int | None) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        return generate(model, [[3]], 20, temperature=2.0, top_k=top_k, generator=generator)[0].tolist()

    assert draw(10**6) == draw(31) == draw(None)


def test_ids_that_pad_the_vocabulary_are_never_generated() -> None:
    model = build("fused", vocab_size=64, padded_from=31)
    with torch.no_grad():
        # Padding that is likelier than everything else.
        model.head.weight[31:] = model.head.weight[:31].repeat(2, 1)[:33] * 50
    for temperature in (0.0, 5.0):
        rows = generate(model, [[3, 4], [5]], 60, temperature=temperature)
        assert max(int(row.max()) for row in rows) < 31


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_named_by_their_place(model: GPT, temperature: float, value: float) -> None:
    with torch.no_grad():
        model.position.weight[6] = value
    # The seventh token is the first whose place is spoilt; it would yield token 7.
    with pytest.raises(UserError, match=r"logits of prompt 0 are not finite at token 7; the weights hold NaN"):
        generate(model, [[1, 2, 3, 4]], 10, temperature=temperature)
    assert len(generate(model, [[1, 2, 3, 4]], 3, temperature=temperature)[0]) == 7


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 has shape .*; give at least one token id"),
        ([[[1, 2]]], {}, "in one dimension"),
        ([[1.5]], {}, r"prompt 0 holds torch\.float32; give integer"),
        ([[1, 31]], {}, "prompt 0 holds id 31, outside the vocabulary of 31; give ids from 0 to 30"),
        ([[1, -1]], {}, "prompt 0 holds id -1"),
        ([[1]], {"tokens": -1}, "tokens is -1"),
        ([[1]], {"temperature": -0.5}, r"temperature is -0\.5"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"temperature": float("inf")}, "temperature is inf"),
        ([[1]], {"top_k": 0}, "top_k is 0; give at least 1"),
        ([[1]], {"top_k": -3}, "top_k is -3"),
    ],
)
def test_wrong_arguments_are_refused(
    model: GPT, prompts: list[list[int]], options: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **{"tokens": 3, **options})


def test_the_models_mode_and_dropout_are_left_as_they_were() -> None:
    model = build("fused", dropout=0.5)
    for mode in (True, False):
        model.train(mode)
        rows = [generate(model, [[3, 4]], 20)[0] for _ in range(2)]
        assert torch.equal(*rows), "dropout acts while generating"
        assert all(module.training == mode for module in model.modules())
    model.train()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        generate(model, [[3]], 1)
    assert model.training


def test_generation_records_no_gradient(model: GPT) -> None:
    assert not generate(model, [[3]], 3)[0].requires_grad
    assert torch.is_grad_enabled()


# Dynamo looks at autograd functions in a way that torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_generates_the_same(model: GPT) -> None:
    prompt = prompt_of(5)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    assert torch.equal(generate(compiled, [prompt], 5)[0], generate(model, [prompt], 5)[0])
