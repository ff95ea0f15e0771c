"""Head and loss of language models at once: the loss of the old forward, and logits for those who look at them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusestep import convert
from fusestep.convert import causal_loss
from fusestep.convert.causal_loss import FusedCausalLM
from fusestep.convert.deferred import DeferredLogits, _Step, form_of
from fusestep.errors import UserError
from fusestep.fp8 import Float8CurrentScaling
from fusestep.optim import FusedAdam

VOCABULARY, WIDTH = 53, 24
Wrap = Callable[[Tensor], Tensor]


class Output(dict[str, Any]):
    """As the libraries': by name and by key, without what is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class State(NamedTuple):
    last_hidden_state: Tensor


class CausalLM(nn.Module):
    """Called as Hugging Face's language models are; `change` is done to the logits before the loss."""

    def __init__(self, change: Wrap | None = None, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = Trunk(self.embedding)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.change = change

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Output:
        hidden = self.trunk(input_ids=input_ids, inputs_embeds=inputs_embeds).last_hidden_state
        logits = self.lm_head(hidden)
        if self.change is not None:
            logits = self.change(logits)
        if labels is None:
            return Output(logits=logits)
        items = kwargs.get("num_items_in_batch")
        flat = logits.float()[..., :-1, :].contiguous().view(-1, VOCABULARY)
        loss = F.cross_entropy(flat, labels[..., 1:].reshape(-1), reduction="mean" if items is None else "sum")
        return Output(loss=loss if items is None else loss / items, logits=logits)


class Trunk(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Any:
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        return State(self.norm(x + x.roll(1, 1)))


def made(change: Wrap | None = None, device: Any = "cpu", **options: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(change, **options).to(device).train()


def batch(device: Any = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 11), device=device)
    labels = tokens.clone()
    labels[0, 4:7] = -100
    return {"input_ids": tokens, "labels": labels}


def row(report: Any) -> Any:
    return next(row for row in report.rows if row.path == "")


def in_float64(model: CausalLM, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The loss of the unconverted model and its gradients."""
    wide = copy.deepcopy(model).double()
    hidden = wide.trunk(input_ids=given["input_ids"]).last_hidden_state
    logits = wide.lm_head(hidden)
    if wide.change is not None:
        logits = wide.change(logits)
    logits, labels = logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()
    rows = (labels != -100).nonzero()[:, 0]
    losses = -logits.log_softmax(-1)[rows, labels[rows]]
    loss = losses.sum() / given.get("num_items_in_batch", len(rows))
    return loss, list(torch.autograd.grad(loss, list(wide.parameters())))


CHANGES: dict[str, Wrap | None] = {
    "none": None,
    "softcap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "softcap in place of names": lambda x: 2.5 * (x / 2.5).tanh(),
    "a power of two": lambda x: x * 0.25,
    "scaled and capped": lambda x: torch.mul(torch.tanh(torch.div(x / 0.5, 7.0)), 7.0),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("options", [{}, {"bias": True, "tied": False}], ids=["tied", "bias"])
def test_loss_and_gradients_are_the_old_ones(change: str, options: dict[str, Any], device: Any) -> None:
    model = made(CHANGES[change], device, **options)
    for given in (batch(device), batch(device) | {"num_items_in_batch": torch.tensor(50, device=device)}):
        report = convert(model)
        assert row(report).became == "FusedCausalLM", str(report)
        assert row(report).agreement.error < 1e-5
        output = model(**given)
        loss, gradients = in_float64(model, given)
        assert isinstance(output.logits, DeferredLogits)
        assert output.logits.losses == 1
        torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=1e-6)
        found = torch.autograd.grad(output.loss, list(model.parameters()))
        for mine, true in zip(found, gradients, strict=True):
            assert float((mine.double() - true).norm() / true.norm()) < (2e-6 if device.type == "cpu" else 1e-5)
        report.undo()
        assert type(model) is CausalLM


def test_the_product_waits_until_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CHANGES["softcap"])
    given = batch()
    wanted = model(**given).logits
    convert(model, skip=["trunk"])
    calls: list[int] = []
    real = nn.Linear.forward
    output = model(**given)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (calls.append(1), real(self, x))[1])
    logits = output.logits
    told = (logits.shape, logits.dtype, logits.device, logits.size(-1), logits.dim(), logits.numel(), len(logits))
    assert told == (wanted.shape, wanted.dtype, wanted.device, VOCABULARY, 3, wanted.numel(), 3)
    assert "not computed" in repr(logits)
    assert not hasattr(logits, "items")  # as libraries probe for dicts
    assert logits.float().contiguous().view(-1, VOCABULARY).shape == (33, VOCABULARY)
    assert not calls
    assert torch.equal(logits.tensor(), wanted)
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    assert len(calls) == 1  # once for all
    # With the gradient that the old ones have.
    upstream = torch.randn_like(wanted)
    (found,) = torch.autograd.grad(logits.tensor(), model.lm_head.weight, upstream)
    model(**given)
    (true,) = torch.autograd.grad(wanted, model.lm_head.weight, upstream)
    assert torch.equal(found, true)


USES: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: 1.5 - x,
    lambda x: x * 3,
    lambda x: 3 * x,
    lambda x: x / 3 - x,
    lambda x: torch.arange(VOCABULARY) * x,
    lambda x: x * torch.arange(VOCABULARY),
    lambda x: -x @ torch.ones(VOCABULARY),
    lambda x: x[0],
    lambda x: x[:, -1],
    lambda x: x[..., 2:5],
    lambda x: x[:, 1:, :],
    lambda x: x[..., -1, :],
    lambda x: x[x > 0.5],
    lambda x: x[None],
    lambda x: x.view(-1),
    lambda x: x.view(-1, VOCABULARY),
    lambda x: x.reshape((11, 3, VOCABULARY)),
    lambda x: x.reshape(VOCABULARY, 33),
    lambda x: x.view(torch.int32),
    lambda x: x.to(torch.float64),
    lambda x: x.bfloat16(),
    lambda x: x.softmax(-1),
    lambda x: x.tanh(),
    lambda x: torch.tanh(x),
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack((x, x)).sum(),
    lambda x: F.log_softmax(x, dim=-1),
    lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(3, 11, dtype=torch.int64)),
    lambda x: F.cross_entropy(x[0], torch.softmax(torch.ones(11, VOCABULARY), -1)),
    lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.ones(33, dtype=torch.int64), torch.rand(VOCABULARY)),
    lambda x: torch.from_numpy(np.asarray(x.detach())),
    lambda x: torch.stack([one.sum() for one in x]),
    lambda x: pickle.loads(pickle.dumps(x.detach())),
    lambda x: x.sum().backward() or x.grad_fn is None,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: str(USES.index(use)))
def test_whatever_is_done_with_logits_gives_what_it_gave(use: Callable[[Any], Any]) -> None:
    model, given = made(), batch()
    results = []
    for converts in (False, True):
        if converts:
            convert(model, skip=["trunk"])
        output = model(**given)
        assert isinstance(output.logits, DeferredLogits) is converts
        torch.manual_seed(3)
        results.append(use(output.logits))
    if isinstance(results[1], DeferredLogits):
        results[1] = results[1].tensor()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert type(results[1]) is type(results[0])


def test_a_second_loss_on_the_logits_is_computed_at_once_too() -> None:
    """As Trainer's own losses do it, outside of the forward and of its autocast."""
    model, given = made(bias=True), batch()
    convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**given)
    assert output.logits.dtype is torch.bfloat16
    wanted = F.cross_entropy(output.logits.tensor()[:, :-1].flatten(0, 1).float(), given["labels"][:, 1:].flatten(),
                             ignore_index=-100, label_smoothing=0.1)  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        fresh = model(**given).logits
    loss = F.cross_entropy(fresh.float()[..., :-1, :].reshape(-1, VOCABULARY), given["labels"][:, 1:].flatten(),
                           label_smoothing=0.1)  # fmt: skip
    assert fresh.losses == 2
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)


def test_only_training_with_labels_defers() -> None:
    model, given = made(), batch()
    convert(model)
    assert isinstance(model(given["input_ids"], None, given["labels"]).logits, DeferredLogits)  # by position
    assert isinstance(model(given["input_ids"]).logits, Tensor)
    assert isinstance(model(given["input_ids"], labels=None).logits, Tensor)
    with torch.no_grad():
        assert isinstance(model(**given).logits, Tensor)
    assert isinstance(model.eval()(**given).logits, Tensor)
    assert isinstance(model.lm_head, nn.Linear)
    assert list(model.state_dict()) == list(made().state_dict())
    assert not any(isinstance(value, nn.Module) for value in model.__dict__.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{"ignore_index": 7}, {"label_smoothing": 0.3}, {"reduction": "none"}, {"reduction": "sum", "ignore_index": 0}],
    ids=str,
)
def test_the_loss_has_the_options_and_the_dtype_of_torchs(dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(4)
    head = nn.Linear(WIDTH, VOCABULARY).to(dtype)
    hidden, target = torch.randn(40, WIDTH, dtype=dtype), torch.arange(40) % 9
    deferred = DeferredLogits.of(hidden, head)
    loss = F.cross_entropy(deferred, target, **options)  # type: ignore[arg-type]
    assert deferred.losses == 1
    wanted = F.cross_entropy(head(hidden), target, **options)
    assert loss.dtype is wanted.dtype
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)


def test_what_the_head_cannot_multiply_raises_as_ever() -> None:
    model, given = made(tied=False), batch()
    model.lm_head.bfloat16()  # without autocast, for hidden states in fp32
    with pytest.raises(RuntimeError) as theirs:
        model(**given)
    model.lm_head.float()
    convert(model)
    assert isinstance(model(**given).logits, DeferredLogits)
    model.lm_head.bfloat16()
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        model(**given)


def test_replicas_and_weights_from_inference_mode_have_logits_as_ever() -> None:
    model, given = made(), batch()
    wanted = model(**given).loss
    convert(model)
    model._is_replica = True  # as nn.DataParallel marks its copies, whose outputs it gathers
    assert isinstance(model(**given).logits, Tensor)
    model = made().requires_grad_(False)
    convert(model)
    assert isinstance(model(**given).logits, DeferredLogits)
    with torch.inference_mode():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    output = model(**given)
    assert isinstance(output.logits, Tensor)
    torch.testing.assert_close(output.loss, wanted.detach(), rtol=1e-6, atol=1e-6)


def test_hooks_on_the_head_are_called_and_a_failing_forward_leaves_no_trace() -> None:
    model, given = made(), batch()
    convert(model)
    seen: list[Any] = []
    handle = model.lm_head.register_forward_hook(lambda *got: seen.append(got[2]))
    assert isinstance(model(**given).logits, Tensor)
    assert len(seen) == 1
    handle.remove()
    with pytest.raises(UserError, match="target 99 is outside of the 53 classes"):
        model(given["input_ids"], labels=torch.full_like(given["labels"], 99))
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model(**given).logits, DeferredLogits)


def test_logits_of_a_weight_that_was_written_since_are_refused() -> None:
    model, given = made(), batch()
    convert(model)
    optimizer = FusedAdam(model.parameters(), 1e-2)
    early, late = model(**given), model(**given)
    kept = early.logits.tensor()
    late.loss.backward()
    optimizer.step()
    assert early.logits.tensor() is kept
    with pytest.raises(UserError, match=r"the head's weight or its input was written .* fused_loss=False"):
        late.logits.argmax(-1)
    sharded = model(**given).logits
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[:9])  # as fully_shard does after backward
    with pytest.raises(UserError, match=r"sharded again; use them before backward"):
        sharded.argmax(-1)


def test_ten_steps_train_alike_and_undo_is_exact() -> None:
    runs = []
    for converts in (False, True):
        model = made(CHANGES["softcap"])
        report = convert(model) if converts else None
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        losses = []
        for _ in range(10):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if report is not None:
            report.undo()
            assert set(vars(model)) == set(vars(made()))
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert runs[0][-1] < runs[0][0]


def test_what_is_not_known_is_left_and_told() -> None:
    def why(model: nn.Module, **options: Any) -> Any:
        found = [row for row in convert(model, **options).rows if row.path == ""]
        return found[0].reason if found else None

    assert "before the loss is not known" in why(made(lambda x: x * 0.3))
    assert "before the loss is not known" in why(made(lambda x: x - x.mean()))
    assert why(made(), fused_loss=False) is None
    hooked = made()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert "its head, a Linear, is more than a product, or has hooks" in why(hooked)
    deeper = made()
    deeper.lm_head = nn.Sequential(deeper.lm_head)
    deeper.get_output_embeddings = lambda: deeper.lm_head[0]  # type: ignore[method-assign, index]
    assert "inside of another module" in why(deeper)
    replaced = made()
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    assert "replaced on the object itself" in why(replaced)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_copies_pickles_and_compiled_models_go_on() -> None:
    model, given = made(), batch()
    plain = model(**given)
    convert(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, FusedCausalLM)
        output = other(**given)
        assert isinstance(output.logits, DeferredLogits)
        torch.testing.assert_close(output.loss, plain.loss, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    output = compiled(**given)
    assert isinstance(output["logits"], Tensor)
    torch.testing.assert_close(output["loss"], plain.loss, rtol=1e-6, atol=1e-6)


def test_meta_models_and_models_in_fp8_are_converted_too() -> None:
    with torch.device("meta"):
        model = CausalLM(tied=False)
    report = convert(model)
    assert row(report).became == "FusedCausalLM"
    model = made(tied=False)
    model.trunk.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    report = convert(model, fp8=Float8CurrentScaling())
    assert [row.became for row in report.rows if row.path == ""] == ["FusedCausalLM", "FP8Forward"]
    assert isinstance(model(**batch()).logits, DeferredLogits)
    report.undo()
    assert type(model) is CausalLM


def test_of_a_large_head_a_part_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin of a whole one, in several dtypes and with its gradients, might not fit where the model does."""
    widths: list[int] = []
    real = DeferredLogits.of
    monkeypatch.setattr(
        DeferredLogits, "of", classmethod(lambda cls, x, head: (widths.append(x.shape[-1]), real(x, head))[1])
    )
    monkeypatch.setattr(causal_loss, "MOST_TRIED", 10 * VOCABULARY)
    model = made(bias=True, tied=False)
    report = convert(model)
    assert row(report).became == "FusedCausalLM"
    assert set(widths) == {10}
    model(**batch()).loss.backward()
    assert widths[-1] == WIDTH
    assert model.lm_head.weight.shape == model.lm_head.weight.grad.shape == (VOCABULARY, WIDTH)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([], (1.0, None)),
        ([("widen", 0)], (1.0, None)),
        ([("multiply", 0.5), ("divide", 16)], (1 / 32, None)),
        ([("divide", 30.0), ("tanh", 0), ("multiply", 30.0)], (1.0, 30.0)),
        ([("divide", 32.0), ("tanh", 0), ("multiply", 32.0)], (1.0, 32.0)),
        ([("divide", 30.0), ("widen", 0), ("tanh", 0), ("multiply", 30.0)], (1.0, 30.0)),
        ([("divide", 30.0), ("tanh", 0), ("multiply", 31.0)], None),
        ([("divide", 30.0), ("tanh", 0)], None),
        ([("tanh", 0), ("multiply", 2.0)], None),
        ([("divide", -2.0), ("tanh", 0), ("multiply", -2.0)], None),
        ([("multiply", 3.0)], None),
        ([("multiply", -2.0)], None),
        ([("divide", 0.0)], None),
        ([("divide", 30.0), ("tanh", 0), ("multiply", 30.0), ("multiply", 2.0)], None),
    ],
)
def test_the_form_of_steps_is_known_where_it_is_exact(steps: list[Any], wanted: Any) -> None:
    assert form_of([_Step(*step) for step in steps]) == wanted
