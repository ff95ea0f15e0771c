"""The sizes and the form of a GPT, and the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fusestep.errors import UserError

#: Whose code the blocks are, and whose layer norms they use; see GPTConfig.
Form = Literal["seed", "plain", "fused"]
Norm = Literal["torch", "fused"]


@dataclass(frozen=True)
class GPTConfig:
    """A pre-norm GPT with learned positions; checked when it is made.

    The three forms compute the same function from the same state dict:

    - `seed`: nn.MultiheadAttention with an additive mask, nn.LayerNorm and an nn.Sequential MLP;
    - `plain`: one product for q, k and v, causal scaled_dot_product_attention, norms and adds apart;
    - `fused`: fusestep.nn.TransformerLayer, whose norms take the residual add in, and whose products are FP8 inside
      fusestep.fp8.fp8_autocast.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        width: of the residual stream; a multiple of heads.
        heads, layers, ffn_width, context: as named; context is the longest sequence, in tokens.
        dropout: probability, of embeddings, attention weights and both branches, while training.
        tied_head: the head's weight is the embedding's.
        form: see above.
        norm: whose layer norm; None means fused for the form fused and torch's for the others.
        padded_from: the vocabulary before padding, None if it is not padded. Ids from there up to vocab_size have rows
            in the tables, so that products have round sizes, but never occur in data and are never generated.

    Raises: UserError for a size that cannot be.
    """

    vocab_size: int = 96
    width: int = 768
    heads: int = 12
    layers: int = 4
    ffn_width: int = 3072
    context: int = 256
    dropout: float = 0.0
    tied_head: bool = False
    form: Form = "fused"
    norm: Norm | None = None
    padded_from: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "heads", "layers", "ffn_width", "context"):
            _check_positive_integer(name, getattr(self, name))
        if self.width % self.heads != 0:
            raise UserError(
                f"GPTConfig: width {self.width} is not a multiple of heads {self.heads}; "
                "choose a width that the heads divide."
            )
        if not isinstance(self.dropout, int | float) or not 0.0 <= self.dropout < 1.0:
            raise UserError(
                f"GPTConfig: dropout is {self.dropout!r}; give a probability from 0 up to, not including, 1."
            )
        if not isinstance(self.tied_head, bool):
            raise UserError(f"GPTConfig: tied_head is {self.tied_head!r}; give true or false.")
        if self.form not in get_args(Form):
            raise UserError(f"GPTConfig: form is {self.form!r}; choose seed, plain or fused.")
        if self.norm is not None and self.norm not in get_args(Norm):
            raise UserError(f"GPTConfig: norm is {self.norm!r}; choose torch or fused, or leave it out.")
        if self.form == "fused" and self.norm == "torch":
            raise UserError(
                "GPTConfig: form 'fused' takes the residual add into the norm, which norm 'torch' cannot do; "
                "choose form 'plain', or norm 'fused'."
            )
        if self.padded_from is not None:
            _check_positive_integer("padded_from", self.padded_from)
            if self.padded_from > self.vocab_size:
                raise UserError(
                    f"GPTConfig: padded_from {self.padded_from} exceeds vocab_size {self.vocab_size}; "
                    "it is the vocabulary before padding."
                )

    @property
    def symbols(self) -> int:
        """How many token ids may occur: 0 to symbols - 1."""
        return self.vocab_size if self.padded_from is None else self.padded_from

    @property
    def has_fused_norm(self) -> bool:
        """Whether layer norms are fusestep's own."""
        return self.norm == "fused" or (self.norm is None and self.form == "fused")

    def with_vocabulary(self, symbols: int) -> GPTConfig:
        """This config for data with `symbols` token ids, padded to a multiple of 64 from 1,024 ids on.

        Matrix units want round sizes (50257 becomes 50304); a small vocabulary is left as it is.
        """
        _check_positive_integer("vocabulary", symbols)
        padded = -(-symbols // 64) * 64 if symbols >= 1024 else symbols
        return dataclasses.replace(self, vocab_size=padded, padded_from=symbols if padded > symbols else None)

    def to_dict(self) -> dict[str, Any]:
        """Plain names and values, fit for JSON; `from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTConfig:
        """The config of these names and values; a name left out has its default.

        Raises: UserError for a name that a GPTConfig does not have, or a value that cannot be.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"GPTConfig has no {', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}.")
        return cls(**values)


def _check_positive_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"GPTConfig: {name} is {value!r}; give an integer of at least 1.")


#: Named sizes: `tiny` trains on a CPU in seconds; `mini` is the tutorial's model and `scaleup` its larger one;
#: `gpt2` has GPT-2 small's 124 M parameters, `gpt2-untied` a head of its own besides (163 M), and `long` is a wide and
#: deep model on long sequences (1.4 billion).
PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(vocab_size=96, width=128, heads=4, layers=2, ffn_width=512, context=64),
    "mini": GPTConfig(vocab_size=96, width=768, heads=12, layers=4, ffn_width=3072, context=256),
    "scaleup": GPTConfig(vocab_size=96, width=2048, heads=16, layers=12, ffn_width=8192, context=256),
    "gpt2": GPTConfig(
        vocab_size=50304,
        width=768,
        heads=12,
        layers=12,
        ffn_width=3072,
        context=1024,
        tied_head=True,
        padded_from=50257,
    ),
    "gpt2-untied": GPTConfig(vocab_size=50304, width=768, heads=12, layers=12, ffn_width=3072, context=1024),
    "long": GPTConfig(vocab_size=50304, width=2048, heads=16, layers=24, ffn_width=8192, context=2048),
}
