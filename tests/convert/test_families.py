"""Six model families of Hugging Face's library, small and random: they convert, agree, train alike, and come back.

Skipped where the library is not installed (it is an extra, `integrations`).
"""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert.deferred import DeferredLogits
from fusestep.convert.linears import FP8Linear
from fusestep.fp8 import Float8CurrentScaling
from fusestep.optim import FusedAdam

pytestmark = [
    # What the library says about itself, and what its code still asks of torch.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SHAPE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SHAPE | {"head_dim": 8, "sliding_window": 6}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SHAPE | {"head_dim": 8, "num_key_value_heads": 1}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 56,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
#: Beside the six: logits that are capped, or scaled, before the loss.
CHANGED_LOGITS = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SHAPE | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "cohere": ("CohereForCausalLM", "CohereConfig", SHAPE | {"logit_scale": 0.0625}),
}
#: Modules that are swapped in the small models: norms, MLPs or activations, attention that rotates, blocks, and the
#: model with its loss and without a mask.
SWAPPED = {"llama": 13, "qwen3": 17, "mistral": 13, "gemma": 13, "t5": 17, "gpt2": 11}
#: Residual adds that are done in the next norm, in a forward.
ADDS = {"llama": 2, "qwen3": 2, "mistral": 2, "gemma": 2, "t5": 0, "gpt2": 2}


@pytest.fixture(scope="module")
def library() -> Any:
    """The library, without its chatter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("transformers", reason="the extra `integrations` is not installed")
        found.logging.set_verbosity_error()
        return found


def build(library: Any, family: str, seed: int = 0) -> nn.Module:
    """A model from its configuration, with norms and biases away from 1 and 0."""
    model_name, config_name, options = (FAMILIES | CHANGED_LOGITS)[family]
    torch.manual_seed(seed)
    model: nn.Module = getattr(library, model_name)(getattr(library, config_name)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05))
    return model


def batch(device: Any = "cpu", rows: int = 4, length: int = 11) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (rows, length), device=device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def results(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, logits and all gradients, in float64."""
    model.zero_grad()
    torch.manual_seed(4)  # dropout
    out = model(**given)
    out.loss.backward()
    found = {"loss": out.loss, "logits": out.logits}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().double().clone() for name, tensor in found.items()}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fp32_agrees_and_undo_gives_back_the_same_bits(
    library: Any, family: str, adds: list[int], turned: list[Tensor]
) -> None:
    model = build(library, family)
    classes = [type(module) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = batch()
    for training in (True, False):  # with dropout, where the family has it, and without
        model.train(training)
        before = results(model, given)
        report = convert(model)
        assert len(report.swapped) == SWAPPED[family], str(report)
        rotates = family not in ("t5", "gpt2")
        assert {row.kind.endswith("Attention") for row in report.left} == ({True} - {rotates}), str(report)
        adds.clear()
        turned.clear()
        after = results(model, given)
        # What the report says does run as the library calls it.
        assert len(adds) == ADDS[family]
        assert len(turned) == (4 if rotates else 0)
        assert after.keys() == before.keys()
        worst = max(distance(after[name], before[name]) for name in before)
        assert worst < 1e-5, {name: distance(after[name], before[name]) for name in before}
        assert list(model.state_dict()) == list(state)
        report.undo()
        assert [type(module) for module in model.modules()] == classes
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        undone = results(model, given)
        assert all(torch.equal(undone[name], before[name]) for name in before)


@pytest.fixture
def searched(library: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Positions that the library has looked in for packed sequences, for which a host waits for its device."""
    masks = importlib.import_module("transformers.masking_utils")
    search, found = masks.find_packed_sequence_indices, list[Tensor]()

    def looked(position_ids: Tensor) -> Any:
        found.append(position_ids)
        return search(position_ids)

    monkeypatch.setattr(masks, "find_packed_sequence_indices", looked)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt2"])
def test_whole_sequences_need_no_mask_in_training_and_all_others_have_theirs(
    library: Any, family: str, searched: list[Tensor]
) -> None:
    model: Any = build(library, family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    config, saved = model.config, model.config.to_dict()
    tokens = batch(rows=3, length=12)
    padded, packed = torch.ones(3, 12, dtype=torch.long), torch.arange(12).repeat(3, 1)
    padded[1, 8:], packed[:, 5:] = 0, packed[:, :7]
    plain = {"use_cache": False}
    # Whether positions are searched in the model as it is, and in the converted one.
    calls = {
        "whole": (tokens | plain, True, False),
        "whole, with a cache of its own": (tokens | {"use_cache": True}, False, False),
        "whole, and how many tokens count": (tokens | plain | {"num_items_in_batch": torch.tensor(33)}, True, False),
        "padded": (tokens | plain | {"attention_mask": padded}, False, False),
        "packed": (tokens | plain | {"position_ids": packed}, True, True),
    }
    convert(model)
    for name, (given, *are_searched) in calls.items():
        searched.clear()
        wanted = results(twin, given)
        looks = [bool(searched)]
        searched.clear()
        found = results(model, given)
        assert [*looks, bool(searched)] == are_searched, name
        worst = max(distance(found[one], wanted[one]) for one in wanted)
        assert worst < 1e-5, name
    base = model.get_decoder()
    assert all(one.config is config for one in (model, base))
    assert config.to_dict() == saved
    # Whole sequences give one loss with a cache and without; what masks and positions say does change it.
    assert len({round(float(results(twin, given)["loss"]), 6) for given, *_ in calls.values()}) == 3
    model.eval()
    searched.clear()
    model(input_ids=tokens["input_ids"], use_cache=False)
    assert len(searched) == 1


@pytest.mark.parametrize(("window", "is_masked"), [(12, True), (13, False)])
def test_windows_that_do_not_reach_the_first_token_keep_their_mask(
    library: Any, searched: list[Tensor], window: int, is_masked: bool
) -> None:
    model = library.MistralForCausalLM(library.MistralConfig(**SHAPE, sliding_window=window))
    twin = copy.deepcopy(model)
    convert(model)
    given = batch(rows=2, length=12) | {"use_cache": False}
    searched.clear()
    found = results(model, given)
    assert bool(searched) is is_masked
    wanted = results(twin, given)
    assert max(distance(found[one], wanted[one]) for one in wanted) < 1e-5


def test_a_model_that_fails_has_its_configuration_again(library: Any) -> None:
    model: Any = build(library, "llama")
    convert(model)
    base = model.get_decoder()
    with pytest.raises(ValueError, match="exactly one"):
        base(input_ids=None, inputs_embeds=None)
    assert base.config is model.config
    assert base.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_bf16_is_no_farther_from_fp32_than_the_original(library: Any, family: str) -> None:
    wide = build(library, family).bfloat16().float().eval()  # the same numbers
    model = copy.deepcopy(wide).bfloat16()
    given = batch(rows=12, length=16)
    truth, before = results(wide, given), results(model, given)
    report = convert(model)
    assert len(report.swapped) == SWAPPED[family], str(report)
    after = results(model, given)
    for what in ("logits", "all gradients"):
        names = ["logits"] if what == "logits" else [name for name in truth if name not in ("logits", "loss")]
        whole = [torch.cat([found[name].flatten() for name in names]) for found in (after, before, truth)]
        assert distance(whole[0], whole[2]) <= 1.02 * distance(whole[1], whole[2]), what


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ten_steps_train_alike(library: Any, family: str) -> None:
    """With dropout where the family has it, the optimizer of each kind, and taken back in the end."""
    losses, states = [], []
    for converts in (False, True):
        model = build(library, family).train()
        report = convert(model) if converts else None
        optimizer = (
            torch.optim.AdamW(model.parameters(), 1e-3)
            if not converts
            else FusedAdam(model.parameters(), 1e-3, weight_decay=1e-2)
        )
        rows = []
        torch.manual_seed(8)
        given = batch()
        for _ in range(10):
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(loss.item())
        if report is not None:
            report.undo()
        losses.append(rows)
        states.append(torch.cat([p.detach().flatten().double() for p in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    assert losses[0][-1] < losses[0][0]
    assert distance(states[1], states[0]) < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *CHANGED_LOGITS])
def test_training_with_labels_holds_no_logits(library: Any, family: str) -> None:
    """Loss and gradients as before, as Trainer calls it too; the logits for those who ask."""
    model = build(library, family).train()
    plain = copy.deepcopy(model)
    assert convert(model).rows[0].became == "FusedCausalLM"
    given = batch()
    given["labels"][0, 2:5] = -100
    options: list[dict[str, Any]] = [{}] if family == "t5" else [{}, {"num_items_in_batch": torch.tensor(50)}]
    for more in options:
        outputs = []
        for one in (plain, model):
            torch.manual_seed(4)  # dropout
            outputs.append(one(**given, **more))
        assert isinstance(outputs[1].logits, DeferredLogits)
        assert outputs[1].logits.losses == 1
        torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-5, atol=0)
        gradients = [torch.autograd.grad(out.loss, list(one.parameters()), retain_graph=True, allow_unused=True)
                     for one, out in zip((plain, model), outputs, strict=True)]  # fmt: skip
        whole = [torch.cat([g.flatten() for g in found if g is not None]) for found in gradients]
        assert distance(whole[1], whole[0]) < 1e-5
        assert distance(outputs[1].logits.tensor().detach(), outputs[0].logits.detach()) < 1e-5
    with torch.no_grad():
        assert isinstance(model.eval()(**given).logits, Tensor)


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_generation_checkpointing_and_saved_models_go_on(library: Any, family: str, tmp_path: Path) -> None:
    model = build(library, family).eval()
    given = batch(rows=2)
    prompt = {"input_ids": given["input_ids"][:, :5], "max_new_tokens": 4, "do_sample": False}
    plain, wanted = results(model, given), model.generate(**prompt)
    states = model(**given, output_hidden_states=True)
    convert(model)
    assert torch.equal(model.generate(**prompt), wanted)
    again = model(**given, output_hidden_states=True)
    hidden = "decoder_hidden_states" if family == "t5" else "hidden_states"
    assert len(again[hidden]) == len(states[hidden]) == 3
    assert all(distance(a.detach(), b.detach()) < 1e-5 for a, b in zip(again[hidden], states[hidden], strict=True))

    model.gradient_checkpointing_enable()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    model.config.attention_dropout = 0.0
    checkpointed = results(model, given)
    if family == "llama":
        assert max(distance(checkpointed[name], plain[name]) for name in plain) < 1e-5

    model.save_pretrained(tmp_path / "converted")
    loaded = type(build(library, family)).from_pretrained(tmp_path / "converted")
    assert loaded.config.architectures == [FAMILIES[family][0]]
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert {type(module).__module__.partition(".")[0] for module in loaded.modules()} <= {"transformers", "torch"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_fp8_the_blocks_multiply_and_the_head_does_not(library: Any, family: str) -> None:
    model = build(library, family).train()
    report = convert(model, fp8=Float8CurrentScaling(), fp8_keep_blocks=(1, 0))
    in_fp8 = [path for path, module in model.named_modules() if isinstance(module, FP8Linear)]
    assert len(in_fp8) == (7 if family == "llama" else 4)
    assert all(".1." in path for path in in_fp8)
    assert {row.reason for row in report.left} >= {"fp8_keep_blocks keeps the first block"}
    optimizer = FusedAdam(model.parameters(), 3e-3)
    given = batch()
    losses = []
    for _ in range(6):
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    report.undo()
    assert not any("fusestep" in type(module).__module__ for module in model.modules())


def test_bert_ends_its_sublayers_with_one_kernel(library: Any, adds: list[int]) -> None:
    options = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = library.BertModel(library.BertConfig(vocab_size=VOCABULARY, **options)).train()
    tokens = torch.randint(3, VOCABULARY, (3, 9))
    torch.manual_seed(1)
    before = model(tokens).last_hidden_state
    report = convert(model)
    ends = [row for row in report.swapped if row.became == "FusedPostNorm"]
    assert len(ends) == 4
    adds.clear()
    torch.manual_seed(1)
    torch.testing.assert_close(model(tokens).last_hidden_state, before, rtol=1e-4, atol=1e-5)
    assert len(adds) == 4


def test_the_classes_that_the_tests_stand_for_are_still_named_so(library: Any) -> None:
    """What fusestep recognises by name exists in the library."""
    for path, names in {
        "pytorch_utils": ["Conv1D"],
        "activations": ["NewGELUActivation", "QuickGELUActivation"],
        "models.llama.modeling_llama": ["LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer"],
    }.items():
        module = importlib.import_module(f"transformers.{path}")
        assert all(hasattr(module, name) for name in names)
