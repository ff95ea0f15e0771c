"""`fusestep generate`."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusestep.cli import main
from fusestep.data import TextFiles, TokenFile, arithmetic_sequences, write_token_file
from fusestep.fp8 import DelayedScaling, fp8_autocast
from fusestep.models import GPT, GPTConfig, generate
from fusestep.train import TrainConfig, checkpoint, train

CONTEXT = 12


def small(symbols: int) -> GPTConfig:
    return GPTConfig(width=32, heads=2, layers=1, ffn_width=48, context=CONTEXT, form="plain").with_vocabulary(symbols)


def save(run: Path, model: GPT, data: dict[str, Any]) -> Path:
    config = model.config.to_dict()
    checkpoint.save(run, 7, model.state_dict(), {}, config={}, model=config, data=data)
    return run


@pytest.fixture(scope="module")
def arithmetic_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to keep the stride of sequences mod 12."""
    source = arithmetic_sequences(12, seed=3)
    torch.manual_seed(0)
    model = GPT(small(12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(150):
        inputs, targets = source.batch(32 * step, 32, CONTEXT)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(tmp_path_factory.mktemp("arithmetic"), model, source.describe())


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus.txt").write_text("some text")
    torch.manual_seed(0)
    run = save(folder / "run", GPT(small(256)), TextFiles(folder / "corpus.txt").describe())
    # Generation needs no corpus.
    (folder / "corpus.txt").unlink()
    return run


@pytest.fixture(scope="module")
def token_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_token_file(folder / "ids", range(50), 1500)
    torch.manual_seed(0)
    return save(folder / "run", GPT(small(1500)), TokenFile(folder / "ids").describe())


@pytest.fixture
def fusestep(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `fusestep generate` in this process; gives exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["generate", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def test_without_a_prompt_held_out_sequences_are_continued_and_keep_their_stride(
    fusestep: Any, arithmetic_run: Path
) -> None:
    status, out, err = fusestep(arithmetic_run, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert (answer["schema"], answer["step"]) == (1, 7)
    held_out = {tuple(row) for row in arithmetic_sequences(12).batch(0, 500, 8, held_out=True)[0].tolist()}
    prompts = [tuple(sample["prompt"]) for sample in answer["samples"]]
    assert len(prompts) == len(set(prompts)) == 8
    assert set(prompts) <= held_out
    for sample in answer["samples"]:
        assert len(sample["continuation"]) == 24
        ids = sample["prompt"] + sample["continuation"]
        assert sample["strides"] == [(b - a) % 12 for a, b in itertools.pairwise(ids)]
        assert sample["constant_stride"] == (len(set(sample["strides"])) == 1)
    kept = sum(sample["constant_stride"] for sample in answer["samples"])
    assert kept >= 6
    status, out, _ = fusestep(arithmetic_run)
    assert out.count("step differences:") == 8
    assert out.rstrip().endswith(f"constant stride: {kept} of 8")


def test_a_changing_stride_is_said(fusestep: Any, arithmetic_run: Path) -> None:
    _, out, _ = fusestep(arithmetic_run, "--prompt", "1", "--prompt", "1, 2, 4", "--tokens", 1)
    first, second = (re.search(rf"{prompt} \| (\d+)$", out, re.MULTILINE) for prompt in ("1", "1 2 4"))
    assert first is not None
    assert second is not None
    assert out.splitlines() == [
        f"prompt + generation: 1 | {first[1]}",
        f"step differences:    {(int(first[1]) - 1) % 12} <- constant stride",
        "",
        f"prompt + generation: 1 2 4 | {second[1]}",
        f"step differences:    1 2 {(int(second[1]) - 4) % 12} <- the stride changes",
        "",
        "constant stride: 1 of 2",
    ]


def test_of_a_prompt_alone_no_stride_is_told(fusestep: Any, arithmetic_run: Path) -> None:
    _, out, _ = fusestep(arithmetic_run, "--prompt", "1 2 3", "--tokens", 0)
    assert out == "prompt + generation: 1 2 3 | \n"
    _, out, _ = fusestep(arithmetic_run, "--prompt", "1 2 3", "--tokens", 0, "--json")
    assert json.loads(out)["samples"] == [{"prompt": [1, 2, 3], "continuation": []}]


def test_text_is_continued_as_text(fusestep: Any, text_run: Path) -> None:
    status, out, _ = fusestep(text_run, "--prompt", "naïve", "--tokens", 30)
    assert status == 0
    assert out.startswith("naïve")
    answer = json.loads(fusestep(text_run, "--prompt", "naïve", "--tokens", 30, "--json")[1])
    (sample,) = answer["samples"]
    assert sample["prompt"] == list("naïve".encode())
    assert len(sample["continuation"]) == 30
    assert sample["text"] == bytes(sample["prompt"] + sample["continuation"]).decode(errors="replace")
    model, _ = checkpoint.load_model(text_run)
    assert sample["continuation"] == generate(model, [sample["prompt"]], 30)[0].tolist()[6:]


def test_several_texts_are_told_apart(fusestep: Any, text_run: Path) -> None:
    _, out, _ = fusestep(text_run, "--prompt", "one", "--prompt", "two", "--tokens", 0)
    assert out == "--- prompt 1 of 2\none\n\n--- prompt 2 of 2\ntwo\n"


def test_text_without_a_prompt_begins_after_a_newline(fusestep: Any, text_run: Path) -> None:
    for arguments in ([], ["--prompt", ""]):
        answer = json.loads(fusestep(text_run, "--json", "--tokens", 3, *arguments)[1])
        assert [sample["prompt"] for sample in answer["samples"]] == [[10]]
    assert len(json.loads(fusestep(text_run, "--json")[1])["samples"][0]["continuation"]) == 200


def test_a_terminal_gets_no_control_characters(fusestep: Any, text_run: Path) -> None:
    status, out, _ = fusestep(text_run, "--prompt", "a\x1b[2Jb\tc\n\x07", "--tokens", 0)
    assert (status, out) == (0, "a\N{REPLACEMENT CHARACTER}[2Jb\tc\n\N{REPLACEMENT CHARACTER}\n")


def test_prompts_and_generations_beyond_the_context(fusestep: Any, text_run: Path) -> None:
    prompt = "a long prompt, longer than the context"
    answer = json.loads(fusestep(text_run, "--prompt", prompt, "--prompt", "b", "--tokens", 30, "--json")[1])
    assert [len(sample["continuation"]) for sample in answer["samples"]] == [30, 30]


def test_sampling_follows_its_seed_and_greedy_ignores_it(fusestep: Any, text_run: Path) -> None:
    def ids(*arguments: object) -> list[int]:
        return json.loads(fusestep(text_run, "--json", "--tokens", 40, *arguments)[1])["samples"][0]["continuation"]

    assert ids("--temperature", 1, "--seed", 1) == ids("--temperature", 1, "--seed", 1)
    assert ids("--temperature", 1, "--seed", 1) != ids("--temperature", 1, "--seed", 2)
    assert ids("--seed", 1) == ids("--seed", 2)
    assert ids("--temperature", 1, "--top-k", 1) == ids()
    assert ids("--temperature", 1, "--top-k", 10**6, "--seed", 3) == ids("--temperature", 1, "--seed", 3)


def test_numbers_stay_below_the_unpadded_vocabulary(fusestep: Any, token_run: Path) -> None:
    answer = json.loads(fusestep(token_run, "--prompt", "3 5 1499", "--temperature", 50, "--tokens", 300, "--json")[1])
    (sample,) = answer["samples"]
    assert sample["prompt"] == [3, 5, 1499]
    assert len(sample["continuation"]) == 300
    assert max(sample["continuation"]) < 1500
    assert "strides" not in sample


@pytest.mark.parametrize(
    ("run", "arguments", "words"),
    [
        ("token_run", [], "--prompt is missing or empty; give ids below 1500"),
        ("token_run", ["--prompt", ""], "--prompt is missing or empty"),
        ("token_run", ["--prompt", "hello"], "'hello' is not a token id"),
        ("token_run", ["--prompt", "1500"], "'1500' is not a token id"),
        ("text_run", ["--top-k", 0], "top_k is 0; give at least 1"),
        ("text_run", ["--temperature", -1], "temperature is -1.0"),
        ("text_run", ["--temperature", "nan"], "temperature is nan"),
        ("text_run", ["--tokens", -1], "tokens is -1"),
        ("text_run", ["--tokens", 10**23], f"tokens is {10**23}; give 0 to 16777216"),
        ("text_run", ["--device", "tpu"], "--device"),
    ],
)
def test_what_a_person_can_mend_is_one_sentence_and_status_2(
    fusestep: Any, request: pytest.FixtureRequest, run: str, arguments: list[object], words: str
) -> None:
    status, out, err = fusestep(request.getfixturevalue(run), *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert err.startswith("fusestep generate: ")
    assert err.count("\n") == 1


def test_a_run_that_is_not_there_is_one_sentence(fusestep: Any, tmp_path: Path) -> None:
    status, out, err = fusestep(tmp_path / "nowhere")
    assert (status, out) == (2, "")
    assert (
        err
        == f"fusestep generate: {tmp_path / 'nowhere'} does not exist; name a run's folder or one of its checkpoints.\n"
    )


def test_weights_that_are_not_numbers_are_said_with_their_place(fusestep: Any, tmp_path: Path) -> None:
    model = GPT(small(256))
    with torch.no_grad():
        model.head.weight[3, 5] = torch.nan
    save(tmp_path / "run", model, {"source": "text", "vocab_size": 256, "seed": 0})
    status, out, err = fusestep(tmp_path / "run", "--prompt", "abc")
    assert (status, out) == (2, "")
    assert "logits of prompt 0 are not finite at token 3" in err


def test_data_of_a_kind_from_the_future_is_named(fusestep: Any, tmp_path: Path) -> None:
    save(tmp_path / "run", GPT(small(96)), {"source": "pictures"})
    status, _, err = fusestep(tmp_path / "run")
    assert status == 2
    assert "was trained on 'pictures'" in err


def test_a_process_of_its_own_prints_json_on_stdout_alone(arithmetic_run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusestep", "generate", str(arithmetic_run), "--prompt", "3 5", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"][0]["prompt"] == [3, 5]


@pytest.fixture(scope="module")
def fp8_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained in FP8 for a few steps."""
    run = tmp_path_factory.mktemp("fp8") / "run"
    model = {"width": 32, "heads": 2, "layers": 2, "ffn_width": 48, "context": CONTEXT}
    train(
        TrainConfig(
            preset="tiny",
            model=model,
            precision="fp8",
            amax_history=4,
            steps=6,
            batch=4,
            lr=1e-2,
            device="cpu",
            out=str(run),
        )
    )
    return run


def logits(run: Path, monkeypatch: pytest.MonkeyPatch, fusestep: Any, *arguments: str) -> torch.Tensor:
    """The logits that the first new token of a command is chosen from."""
    seen: list[torch.Tensor] = []
    module = sys.modules["fusestep.models.generate"]
    original = module._next_logits

    def watching(*given: Any) -> torch.Tensor:
        seen.append(original(*given))
        return seen[-1]

    with monkeypatch.context() as patched:
        patched.setattr(module, "_next_logits", watching)
        status, _, err = fusestep(run, "--prompt", "3 5 7", "--tokens", "1", *arguments)
    assert status == 0, err
    return seen[0]


def test_a_model_generates_in_the_precision_that_it_was_trained_in(
    fusestep: Any, fp8_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = checkpoint.load_model(fp8_run)
    recipe = DelayedScaling(amax_history_len=4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), fp8_autocast(recipe=recipe):
        expected = model(torch.tensor([[3, 5, 7]]))[:, -1].float()
    assert found.config["precision"] == "fp8"
    assert torch.equal(logits(fp8_run, monkeypatch, fusestep), expected)
    assert torch.equal(logits(fp8_run, monkeypatch, fusestep, "--precision", "fp8", "--recipe", "delayed"), expected)
    others = (("--precision", "fp32"), ("--precision", "bf16"), ("--recipe", "current"), ("--recipe", "block"))
    for arguments in others:
        other = logits(fp8_run, monkeypatch, fusestep, *arguments)
        assert not torch.equal(other, expected), arguments
        torch.testing.assert_close(other, expected, rtol=0.2, atol=0.2)
    assert json.loads(fusestep(fp8_run, "--json", "--tokens", "1")[1])["precision"] == "fp8"


def test_a_model_trained_otherwise_generates_in_fp8_too(
    fusestep: Any, arithmetic_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(arithmetic_run, monkeypatch, fusestep)
    in_fp8 = logits(arithmetic_run, monkeypatch, fusestep, "--precision", "fp8")
    assert not torch.equal(in_fp8, plain)
    status, out, _ = fusestep(arithmetic_run, "--precision", "fp8", "--json")
    assert status == 0
    assert sum(sample["constant_stride"] for sample in json.loads(out)["samples"]) >= 6


@pytest.mark.parametrize("arguments", [(), ("--precision", "bf16"), ("--recipe", "block"), ("--recipe", "mxfp8")])
def test_weights_in_fp8_halve_the_blocks(
    fusestep: Any, arithmetic_run: Path, fp8_run: Path, arguments: tuple[str, ...]
) -> None:
    for run in (arithmetic_run, fp8_run):
        precision = ("--precision", "bf16") if run is arithmetic_run and "--precision" not in arguments else ()
        status, out, _ = fusestep(run, "--fp8-weights", "--json", "--tokens", "1", *precision, *arguments)
        assert status == 0
        weights = json.loads(out)["weights"]
        model, _ = checkpoint.load_model(run)
        assert weights["bytes_in_bfloat16"] == 2 * model.parameter_count()
        in_fp8 = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks"))
        scales = weights["bytes"] - (weights["bytes_in_bfloat16"] - in_fp8)
        assert 0 < scales <= in_fp8 / 8


def test_weights_in_fp8_are_told_in_words_and_keep_what_was_learnt(fusestep: Any, arithmetic_run: Path) -> None:
    status, out, err = fusestep(arithmetic_run, "--fp8-weights", "--precision", "fp8")
    assert status == 0
    assert "weights: 0.0 MiB with the blocks' in FP8, 0.0 MiB all in bfloat16" in err
    kept = int(out.rsplit("constant stride: ", 1)[1].split()[0])
    assert kept >= 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seed", "-1"], "--seed is -1; give an integer from 0 to 2^63 - 1."),
        (["--precision", "int8"], "--precision is 'int8'; choose one of auto, fp32, bf16, fp16, fp8"),
        (["--recipe", "delay", "--precision", "fp8"], "--recipe is 'delay'; choose one of delayed, current"),
        (["--fp8-format", "e5m2", "--precision", "fp8"], "--fp8-format is 'e5m2'; choose one of auto, hybrid, e4m3"),
        (["--recipe", "block"], "--recipe is block and the precision is fp32; pass --precision fp8 or --fp8-weights"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(
    fusestep: Any, arithmetic_run: Path, arguments: list[str], sentence: str
) -> None:
    status, out, err = fusestep(arithmetic_run, *arguments)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.gpu
def test_weights_in_fp8_take_half_of_the_gpu(fusestep: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPTConfig(width=2048, heads=16, layers=2, ffn_width=8192, context=CONTEXT)
    run = save(tmp_path, GPT(config), arithmetic_sequences(96).describe())

    def held(*arguments: str) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        status, _, err = fusestep(run, "--device", "cuda", "--tokens", "1", *arguments)
        assert status == 0, err
        return torch.cuda.max_memory_allocated() - before

    assert held("--precision", "fp8", "--fp8-weights") < 0.35 * held("--precision", "bf16")
