"""The sizes of a decoder-only transformer, and its parameters by where they stand.

A plan needs no model, so it knows shapes that fusestep's own GPT has not: gated MLPs, grouped keys and values,
RMSNorm, rotary positions, as fusestep.nn.TransformerLayer builds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusestep.errors import UserError
from fusestep.models import PRESETS, GPTConfig
from fusestep.tables import counted

#: More than any model; what exceeds it is a slip of the keyboard.
LARGEST = 2**31


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        vocab_size, width, heads, layers, ffn_width, context: as of `fusestep.models.GPTConfig`.
        kv_heads: groups of keys and values; None for one each head.
        tied_head: the head's weight is the embedding's.
        gated: the MLP's first layer makes ffn_width features twice, of which one half gates the other.
        biases: whether linear layers have them, and norms (LayerNorm; else RMSNorm).
        positions: whether there is a table of positions to learn; else they are rotated, or none.

    Raises: UserError for sizes that cannot be.
    """

    vocab_size: int = 96
    width: int = 768
    heads: int = 12
    layers: int = 4
    ffn_width: int = 3072
    context: int = 256
    kv_heads: int | None = None
    tied_head: bool = False
    gated: bool = False
    biases: bool = True
    positions: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise UserError(f"the model's {field.name} is {value!r}; give true or false.")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"the model's {field.name} is {value!r}; give a whole number.")
            elif value is not None and not 1 <= value <= LARGEST:
                raise UserError(f"the model's {field.name} is {value}; give 1 to {LARGEST}.")
        if self.width % self.heads:
            raise UserError(
                f"the model's width {self.width} is not a multiple of its {self.heads} heads; "
                "choose a width that the heads divide."
            )
        if self.heads % self.groups:
            raise UserError(
                f"the model's {self.heads} heads are no multiple of {self.groups} kv_heads; choose a divisor of heads."
            )

    @classmethod
    def of(cls, config: GPTConfig) -> Shape:
        """The shape of a GPT of ours."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in config.to_dict().items() if name in names})

    def changed(self, changes: Mapping[str, Any]) -> Shape:
        """This shape with other sizes. Raises: UserError for a name that a shape has not."""
        names = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in names:
                raise UserError(f"the model table has {name!r}; it may set {', '.join(sorted(names))}.")
        return dataclasses.replace(self, **changes)

    @property
    def groups(self) -> int:
        """Groups of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kv_width(self) -> int:
        """Features of all keys."""
        return self.width // self.heads * self.groups

    @property
    def hidden(self) -> int:
        """Features that the MLP's first layer makes."""
        return 2 * self.ffn_width if self.gated else self.ffn_width

    @property
    def products(self) -> tuple[tuple[str, int, int, bool], ...]:
        """A block's weights: name, rows (features out), columns (features in), and whether ranks share the rows."""
        return (
            ("qkv", self.width + 2 * self.kv_width, self.width, True),
            ("proj", self.width, self.width, False),
            ("fc1", self.hidden, self.width, True),
            ("fc2", self.width, self.ffn_width, False),
        )

    @property
    def block_matrices(self) -> int:
        """Elements of a block's weights."""
        return sum(rows * columns for _, rows, columns, _ in self.products)

    def block_on(self, ranks: int) -> float:
        """Elements of a block on each of `ranks` that share its products; norms, and biases of sums, are whole."""
        own = self.block_matrices / ranks + 2 * self.norm
        if self.biases:
            own += sum(rows / ranks if by_rows else rows for _, rows, _, by_rows in self.products)
        return own

    def outside_on(self, ranks: int) -> float:
        """Elements in no block that each holds: ranks that share products share the tables of symbols too."""
        return self.table / ranks + self.outside - self.table

    @property
    def norm(self) -> int:
        """Elements of a norm: its weight, and its bias where there is one."""
        return (2 if self.biases else 1) * self.width

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head where it has its own."""
        return (1 if self.tied_head else 2) * self.vocab_size * self.width

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return round(self.layers * self.block_on(1)) + self.outside

    @property
    def outside(self) -> int:
        """Elements that stand in no block: tables, positions, the final norm."""
        return self.table + (self.context * self.width if self.positions else 0) + self.norm

    def describe(self) -> str:
        """The sizes in one line."""
        kv = "" if self.groups == self.heads else f" over {self.groups} keys and values"
        kind = ("gated, " if self.gated else "") + ("" if self.biases else "no biases, ")
        return (
            f"{self.parameters / 1e6:,.1f} M parameters | {counted(self.layers, 'layer')} × {self.width} wide, "
            f"{counted(self.heads, 'head')}{kv}, feed-forward {self.ffn_width}, {kind}"
            f"context {self.context}, vocabulary {self.vocab_size}"
        )


#: Presets of `fusestep train`, and shapes that only a plan knows: those of Llama 3 (Grattafiori et al. 2024,
#: arXiv:2407.21783, table 3).
SHAPES: dict[str, Shape] = {
    **{name: Shape.of(config) for name, config in PRESETS.items()},
    "llama-8b": Shape(128256, 4096, 32, 32, 14336, 8192, 8, gated=True, biases=False, positions=False),
    "llama-70b": Shape(128256, 8192, 64, 80, 28672, 8192, 8, gated=True, biases=False, positions=False),
}
