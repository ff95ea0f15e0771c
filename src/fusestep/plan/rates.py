"""The figures that a plan divides by: how fast products, copies and launches were measured, and what is assumed.

`rates.json` is written by tools/plan_rates.py from benchmarks/results/. What one GPU cannot tell is assumed here, each
with its source, and every plan shows which figures it used.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fusestep.errors import UserError

SCHEMA = 2

#: The source of a figure that a person gave.
GIVEN = "given on the command line"

#: (value, unit, source) of what has not been measured by us. Bandwidths are each way, as one GPU reaches them.
ASSUMED: dict[str, tuple[float, str, str]] = {
    "attention": (0.5, "of the rate of large products", "assumed: fused kernels on long sequences"),
    "link": (360e9, "B/s", "assumed: 80 % of the 450 GB/s each way that NVLink gives an H200"),
    "network": (40e9, "B/s", "assumed: 80 % of a 400 Gb/s port for each GPU"),
    "hop": (10e-6, "s", "assumed: start of a collective, for each doubling of the ranks"),
    "storage": (1e9, "B/s a node", "assumed: 2 TB/s for 2,048 nodes, as in arXiv:2407.21783, section 3.3.1"),
    "failures": (
        54 * 24 * 16384 / 419,
        "GPU hours a failure",
        "assumed: 419 unexpected stops of 16,384 GPUs in 54 days, arXiv:2407.21783, section 3.3.4",
    ),
    "restart": (900.0, "s", "assumed: time-out, new processes, compiling, reading the checkpoint"),
    "workspace": (32 * 2**20, "B", "what cuBLAS takes on this chip"),
}


@dataclass(frozen=True)
class Figure:
    """A figure: its value in base units (FLOP/s, B/s, s), the unit in words, and where it is from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Rates:
    """All figures.

    Attributes:
        gpu, date: of the measurements.
        memory: bytes of the GPU.
        products: by precision, (smaller side of the weight, FLOP/s) in growing order of the side; by "head" those of a
            head and its logits in BF16, where they were measured.
        attention: (tokens of a sequence, elements of a head, FLOP/s) of causal attention in 16 bits, forward and
            backward, in growing order; empty where it was not measured, and a share of products' rate is assumed.
        norms: (width, share of a copy's rate that a fused norm reaches between its kernels' starts and ends, forward
            and backward together).
        host_layer: seconds that the host needs to launch a block forward and backward, and the file that they are
            from, by "form/precision".
        sources: of products, norms and attention, the file that they are from; "products:head" and the like where it
            is another.
        figures: all else by name.
    """

    gpu: str
    date: str
    memory: float
    products: Mapping[str, Sequence[tuple[float, float]]]
    attention: Sequence[tuple[float, float, float]]
    norms: Sequence[tuple[float, float]]
    host_layer: Mapping[str, tuple[float, str]]
    sources: Mapping[str, str]
    figures: Mapping[str, Figure]

    @classmethod
    def read(cls, text: str) -> Rates:
        """From the text of a rates file. Raises: UserError for a newer schema."""
        data = json.loads(text)
        if data["schema"] > SCHEMA:
            raise UserError(f"the rates have schema {data['schema']}, and this fusestep reads {SCHEMA}; upgrade it.")
        assumed = {name: Figure(*values) for name, values in ASSUMED.items()}
        measured = {name: Figure(**values) for name, values in data["figures"].items()}
        return cls(
            data["gpu"],
            data["date"],
            data["memory"],
            {name: [(side, rate) for side, rate in pairs] for name, pairs in data["products"].items()},
            [(length, size, rate) for length, size, rate in data["attention"]],
            [(width, share) for width, share in data["norms"]],
            {name: (seconds, source) for name, (seconds, source) in data["host_layer"].items()},
            data["sources"],
            {**assumed, **measured},
        )

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    @property
    def is_product_given(self) -> bool:
        """Whether a person gave the rate of products."""
        return self.sources["products"] == GIVEN

    def product(self, precision: str, side: float) -> float:
        """FLOP/s of products with a weight whose smaller side is `side`, between the measured ones."""
        return between(self.products["bf16" if precision == "fp16" else precision], side)

    def head(self, precision: str) -> str:
        """The name in `products` of the rate of the head's, in a precision between products."""
        return "head" if "head" in self.products and precision in ("bf16", "fp16") else precision

    def attend(self, length: float, size: float) -> float:
        """FLOP/s of attention over so many tokens, of each length measured with the heads nearest in size."""
        by_length: dict[float, tuple[float, float]] = {}
        for tokens, elements, rate in self.attention:
            away = abs(math.log(elements / size))
            by_length[tokens] = min((away, rate), by_length.get(tokens, (math.inf, 0.0)))
        return between([(tokens, rate) for tokens, (_, rate) in by_length.items()], length)

    def norm(self, width: float) -> float:
        """The share of a copy's rate that passes of our kernels reach."""
        return between(self.norms, width)

    def host(self, form: str, precision: str) -> float:
        """Seconds on the host for a block, forward and backward, one launch at a time."""
        return self.host_layer[f"{form}/{'bf16' if precision == 'fp16' else precision}"][0]

    def with_changes(
        self, changes: Mapping[str, float | None], *, product: float | None = None, memory: float | None = None
    ) -> Rates:
        """These figures with a person's own in the place of some, in base units; None changes nothing.

        Args:
            product: FLOP/s of products in the precision that is planned, whatever their size.
            memory: bytes of the GPU.
        Raises: UserError for one that is no number above 0.
        """
        own = {name: value for name, value in changes.items() if value is not None}
        for name, value in {**own, "products": product, "memory": memory}.items():
            if value is None:
                continue
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"the figure given for {name} is {value:g}; pass a number above 0.")
        figures = dict(self.figures)
        # Measured attention goes with measured products; a person's own rate of either is over both.
        attention = () if product is not None or "attention" in own else self.attention
        for name, value in own.items():
            figures[name] = Figure(value, figures[name].unit, GIVEN)
        if product is None:
            return dataclasses.replace(self, figures=figures, attention=attention, memory=memory or self.memory)
        products = {name: [(1.0, product)] for name in self.products}
        sources = {name: one for name, one in self.sources.items() if not name.startswith("products")}
        sources["products"] = GIVEN
        return dataclasses.replace(
            self,
            figures=figures,
            products=products,
            attention=attention,
            sources=sources,
            memory=memory or self.memory,
        )

    def as_dict(self, used: Sequence[str]) -> dict[str, Any]:
        """The figures of these names, as plain values."""
        return {"gpu": self.gpu, "date": self.date, **{name: self.described(name) for name in used}}

    def described(self, name: str) -> dict[str, Any]:
        """Value, unit and source of a figure."""
        kind, _, key = name.partition(":")
        if kind == "products":
            pairs = list(self.products["bf16" if key == "fp16" else key])
            source = self.sources.get(name, self.sources[kind])
            return {"value": pairs, "unit": "(smaller side, FLOP/s)", "source": source}
        if kind == "attention" and self.attention:
            unit = "(tokens, head, FLOP/s)"
            return {"value": list(self.attention), "unit": unit, "source": self.sources[kind]}
        if kind == "norms":
            return {"value": list(self.norms), "unit": "(width, share of a copy's rate)", "source": self.sources[kind]}
        if kind == "host_layer":
            value, source = self.host_layer[key]
            return {"value": value, "unit": "s a block", "source": source}
        return dataclasses.asdict(self.figures[name])


def between(pairs: Sequence[tuple[float, float]], at: float) -> float:
    """The value at a place: linear in the logarithm between neighbours, constant beyond the ends."""
    if at <= pairs[0][0]:
        return pairs[0][1]
    for (low, first), (high, second) in itertools.pairwise(pairs):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return first + share * (second - first)
    return pairs[-1][1]


def measured_rates() -> Rates:
    """What comes with the package, measured on one H200."""
    return Rates.read(files("fusestep.plan").joinpath("rates.json").read_text(encoding="utf-8"))
