"""Autoregressive generation: greedy or sampled, for prompts of any lengths, beyond the context too.

Each new token comes from the last `context` tokens at most. Past that length the window slides by one token at a time
and its first token is read at position 0, as every training sequence's is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusestep.errors import UserError
from fusestep.models.gpt import GPT

#: New tokens in one call; more is a slip of the keyboard.
MAXIMUM_TOKENS = 2**24


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Iterable[Sequence[int] | Tensor],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Continue each prompt by `tokens` tokens.

    The model generates in evaluation mode and is left in the mode that it was in. Ids that only pad the vocabulary
    are never generated.

    Args:
        model: on any device.
        prompts: of any lengths, each of at least one id below the model's `config.symbols`.
        tokens: how many to add; 0 returns the prompts.
        temperature: divides the logits before sampling; 0 takes the likeliest token.
        top_k: sample among this many likeliest tokens; more than there are means all.
        generator: the source of randomness, on any device; None is the default one of the model's device.

    Returns: for each prompt, prompt and continuation, 1-D int64 on the model's device.
    Raises: UserError for arguments that cannot be, and for logits that are not finite, naming prompt and position.
    """
    _check_options(tokens, temperature, top_k)
    device = model.embedding.weight.device
    rows = [_as_ids(prompt, number, model.config.symbols) for number, prompt in enumerate(prompts)]
    if not rows or tokens == 0:
        return [row.to(device) for row in rows]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    # What follows a row's own tokens is never seen by them, since attention is causal: 0 serves.
    sequence = torch.zeros(len(rows), int(lengths.max()) + tokens, dtype=torch.int64, device=device)
    for number, row in enumerate(rows):
        sequence[number, : len(row)] = row.to(device)
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            logits = _next_logits(model, sequence, lengths)
            _check_finite(logits, lengths)
            chosen = _choose(logits, temperature, top_k, generator)
            sequence.scatter_(1, lengths[:, None], chosen.to(device))
            lengths += 1
    finally:
        model.train(was_training)
    return [row[:length].clone() for row, length in zip(sequence, lengths.tolist(), strict=True)]


def _next_logits(model: GPT, sequence: Tensor, lengths: Tensor) -> Tensor:
    """(B, symbols) fp32 logits of the token after each row's last one."""
    window = min(int(lengths.max()), model.config.context)
    starts = (lengths - window).clamp(min=0)
    columns = starts[:, None] + torch.arange(window, device=sequence.device)
    logits: Tensor = model(sequence.gather(1, columns))
    last = logits[torch.arange(len(sequence), device=sequence.device), lengths - 1 - starts]
    return last[:, : model.config.symbols].float()


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """(B, 1) ids."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if generator is not None:
        logits = logits.to(generator.device)
    # Below the maximum, so that a tiny temperature sends the others to zero probability and nothing to infinity.
    scores, ids = torch.topk(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = torch.softmax((scores - scores[:, :1]).double() / temperature, -1)
    return ids.gather(1, torch.multinomial(probabilities, 1, generator=generator))


def _check_options(tokens: int, temperature: float, top_k: int | None) -> None:
    if not 0 <= tokens <= MAXIMUM_TOKENS:
        raise UserError(f"tokens is {tokens}; give 0 to {MAXIMUM_TOKENS}.")
    if not (temperature >= 0.0 and math.isfinite(temperature)):
        raise UserError(f"temperature is {temperature}; give 0 for the likeliest token, or more to sample.")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}; give at least 1, or leave it out to sample among all tokens.")


def _as_ids(prompt: Sequence[int] | Tensor, number: int, symbols: int) -> Tensor:
    """A prompt as 1-D int64 on the CPU, checked."""
    ids = torch.as_tensor(prompt, device="cpu")
    if ids.dim() != 1 or ids.numel() == 0:
        raise UserError(f"prompt {number} has shape {tuple(ids.shape)}; give at least one token id in one dimension.")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"prompt {number} holds {ids.dtype}; give integer token ids.")
    outside = ids[(ids < 0) | (ids >= symbols)]
    if outside.numel():
        raise UserError(
            f"prompt {number} holds id {int(outside[0])}, outside the vocabulary of {symbols}; "
            f"give ids from 0 to {symbols - 1}."
        )
    return ids.to(torch.int64)


def _check_finite(logits: Tensor, lengths: Tensor) -> None:
    is_finite = torch.isfinite(logits).all(-1)
    if not is_finite.all():
        number = int((~is_finite).nonzero()[0])
        raise UserError(
            f"the logits of prompt {number} are not finite at token {int(lengths[number])}; the weights hold "
            "NaN or infinity or overflow in their precision, so load an earlier checkpoint or a wider dtype."
        )
