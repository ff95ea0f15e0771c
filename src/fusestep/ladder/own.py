"""A model of the user's on the ladder: what a factory gives, and what each rung makes of it.

A factory returns an object with

    model                     a torch.nn.Module
    batch(step, generator)    the batch of a step: a tensor, or tuples, lists and dicts of tensors; random numbers come
                              from the generator, which depends on the seed and the step alone
    loss(model, batch)        the loss of a batch, of one element
    fused_loss(model, batch)  optional: the same through fusestep.linear_cross_entropy, for the rung `loss`
    tokens                    optional: what counts as a token of a batch, in number

or a language model by itself: then batches are text of the standard library, bytes as token ids, and the loss is that
of the next token. docs/ladder-model.md is the page for users.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fusestep.convert import Report, convert, norms
from fusestep.convert.classes import release
from fusestep.convert.patterns import is_a
from fusestep.data import arithmetic_sequences, open_source
from fusestep.errors import UserError
from fusestep.factory import built, guarded
from fusestep.fp8.recipes import recipe_named
from fusestep.ladder.rungs import Recipe
from fusestep.ladder.subject import Loss

#: Sequences a step and tokens of each, of a language model that comes without batches.
BATCH, LONGEST = 8, 256

#: Where models keep how long a sequence they take.
_CONTEXTS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "block_size",
    "context",
    "context_length",
    "max_seq_len",
)


class Task(Protocol):
    """What a factory gives, or what is made of the language model that it gives; see the head of this file."""

    model: nn.Module

    def batch(self, step: int, generator: torch.Generator) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...


class Own:
    """A user's model as a `fusestep.ladder.subject.Subject`.

    Args:
        name: "pkg.mod:factory".
        batch: sequences a step of a language model that comes without batches; None for `BATCH`.
        seed: of the weights and the batches.
    """

    def __init__(self, name: str, batch: int | None, seed: int) -> None:
        self.name, self._batch, self._seed = name, batch, seed
        self.task: Task | None = None
        self.report: Report | None = None

    def model(self, recipe: Recipe, device: torch.device) -> nn.Module:
        """Called anew for each recipe: the factory runs, from the same seeds."""
        self.task = self._made()
        model = self.task.model.to(device).train()
        self.report = converted(model, recipe)
        return model

    def loss(self, recipe: Recipe) -> Loss:
        task = self._task()
        chosen: Loss = getattr(task, "fused_loss", task.loss) if recipe.loss == "fused" else task.loss
        return chosen

    def batches(self, device: torch.device, *, reverse: bool = False) -> Iterator[tuple[Any, ...]]:
        if self.task is None:
            self.task = self._made()
        for step in itertools.count():
            batch = self.sample(step)
            yield (tree_map_only(Tensor, lambda one: one.to(device), reversed_samples(batch) if reverse else batch),)

    def sample(self, step: int) -> Any:
        """The batch of a step."""
        # A product with a large odd number spreads neighbouring steps over the generator's states.
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step * 2_654_435_761) % 2**63)
        task = self._task()
        batch = guarded(f"--model: batch({step}, generator) of {self.name} fails", lambda: task.batch(step, generator))
        if not any(isinstance(one, Tensor) for one in tree_leaves(batch)):
            raise UserError(
                f"--model: batch({step}, generator) of {self.name} gives no tensor ({type(batch).__name__}); let "
                "it return tensors, or tuples, lists or dicts of them."
            )
        return batch

    def check_batches(self) -> None:
        """Raises: UserError where a step's batch does not depend on the step and its generator alone."""
        one, other = (tree_leaves(self.sample(0)) for _ in range(2))
        if len(one) != len(other) or not all(map(_is_same, one, other)):
            raise UserError(
                f"--model: batch(0, generator) of {self.name} gives another batch when it is called again, so rungs "
                "would train on different data; let its random numbers come from the generator, and the rest from the "
                "step."
            )

    def _task(self) -> Task:
        if self.task is None:
            raise RuntimeError("Own: the model is made before its loss and batches are asked for.")
        return self.task

    def _seed_all(self) -> None:
        random.seed(self._seed)
        torch.manual_seed(self._seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self._seed % 2**32)

    def _made(self) -> Task:
        # Before the import for a model that the module itself makes, and after it since only the first call imports.
        self._seed_all()
        made = built("--model", self.name, before_call=self._seed_all)
        if isinstance(made, nn.Module):
            return LanguageModel(self.name, made, self._batch, self._seed)
        lacking = [name for name in ("model", "batch", "loss") if not hasattr(made, name)]
        if lacking:
            raise UserError(
                f"--model: what {self.name}() gives is of type {type(made).__name__}, without {', '.join(lacking)}; "
                "let it return a torch.nn.Module, or an object with model, batch(step, generator) and loss(model, "
                "batch)."
            )
        if not isinstance(made.model, nn.Module):
            raise UserError(
                f"--model: model of {self.name}() is of type {type(made.model).__name__}; let it be a torch.nn.Module."
            )
        if self._batch is not None:
            raise UserError(f"--batch is {self._batch}, but {self.name}() makes its own batches; leave --batch out.")
        stated = getattr(made, "tokens", None)
        if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int) or stated < 1):
            raise UserError(
                f"--model: tokens of {self.name}() is {stated!r}; let it be how many tokens a batch counts as, a whole "
                "number of at least 1, or leave it out."
            )
        task: Task = made
        return task


class LanguageModel:
    """The task of a language model that comes by itself: the next byte of the standard library's text.

    Text is learnt slowly enough to tell two runs apart. A vocabulary of fewer than 256 ids gets arithmetic sequences.

    Raises: UserError for a model that has no token embedding.
    """

    def __init__(self, name: str, model: nn.Module, batch: int | None, seed: int) -> None:
        self.model, self._count, self._name = model, batch or BATCH, name
        vocabulary = _vocabulary(model)
        if vocabulary is None:
            raise UserError(
                f"--model: {name}() gives a {type(model).__name__} without a token embedding, so nothing is known of "
                "its batches; let it return an object with model, batch(step, generator) and loss(model, batch)."
            )
        config: Any = getattr(model, "config", None)
        self._context = min(LONGEST, _context(config) or _context(model) or LONGEST // 2)
        self._source = (
            open_source("text:stdlib", seed=seed) if vocabulary >= 256 else arithmetic_sequences(vocabulary, seed=seed)
        )
        # Models of Hugging Face's shift their labels themselves, and keep keys and values unless they are told not to.
        self._has_labels = hasattr(config, "use_cache")
        if self._has_labels:
            config.use_cache = False

    def batch(self, step: int, generator: torch.Generator) -> dict[str, Tensor]:  # noqa: ARG002
        """(B, T) tokens and the token after each."""
        tokens, targets = self._source.batch(step * self._count, self._count, self._context)
        return {"tokens": tokens, "targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross entropy of the next token."""
        if self._has_labels:
            loss: Tensor = model(batch["tokens"], labels=batch["tokens"]).loss
            return loss
        output = model(batch["tokens"])
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())


def _is_same(one: object, other: object) -> bool:
    """Whether two tensors hold the same bits, NaN among them; what else is in a batch is not looked at."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.layout is not torch.strided:
        return True
    bits = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def _vocabulary(model: nn.Module) -> int | None:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(vocabulary, int):
        return vocabulary
    return next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)


def _context(holder: object) -> int | None:
    values = (getattr(holder, name, None) for name in _CONTEXTS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def converted(model: nn.Module, recipe: Recipe) -> Report | None:
    """Swap in a model what a recipe asks for: norms alone, or all that `fusestep.convert` knows; None where nothing."""
    if recipe.norm == "torch" and recipe.form == "seed" and recipe.precision != "fp8":
        return None
    if recipe.peer or recipe.optimizer == "torch-fused":  # a contender gets the model as it is
        return None
    fp8 = recipe_named(recipe.scaling, recipe.fp8_format, recipe.amax_history) if recipe.precision == "fp8" else None
    report = convert(model, fp8=fp8, fused_loss=recipe.loss == "fused")
    if recipe.form == "seed":
        # What is swapped besides belongs to a later rung.
        for row in reversed(report.swapped):
            module = model.get_submodule(row.path)
            if not is_norm(module):
                release(module)
    return report


def is_norm(module: nn.Module) -> bool:
    """Whether `fusestep.convert` swapped a norm there."""
    return any(is_a(module, pattern.becomes) for pattern in norms.PATTERNS)


def reversed_samples(batch: Any) -> Any:
    """A batch with its samples in reverse order, which changes the order of sums and nothing else.

    Tensors whose first dimension is the batch's, the commonest among its tensors, are turned; others stay.
    """
    sizes = [one.shape[0] for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim() > 0]
    if not sizes:
        return batch
    count = max(sizes, key=sizes.count)
    return tree_map_only(Tensor, lambda one: one.flip(0) if one.dim() and one.shape[0] == count else one, batch)


def tokens_of(task: Task, batch: Any) -> int:
    """What a batch counts as: the task's `tokens`, else the size of its first tensor of whole numbers with two or more
    dimensions, else its samples.
    """
    stated: int | None = getattr(task, "tokens", None)
    if stated is not None:
        return stated
    tensors = [one for one in tree_leaves(batch) if isinstance(one, Tensor)]
    whole = [one for one in tensors if one.dim() > 1 and not one.is_floating_point()]
    return whole[0].numel() if whole else max((one.shape[0] for one in tensors if one.dim()), default=1)
