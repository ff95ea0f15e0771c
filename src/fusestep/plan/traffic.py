"""What is sent: each kind of collective, its bytes in a step and its time.

A ring over n ranks sends (n − 1) / n of a message of S bytes from each rank to gather or to reduce and scatter it, and
twice that to reduce it to all. Each rank sends over the link inside a machine; where a group spans machines, the m of
its ranks in one share their network ports, so that a message leaves at m ports' rate, or the link's if that is less.

Source of the volumes: Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusestep.plan.line import Line, short
from fusestep.plan.memory import held, wire_bytes
from fusestep.plan.rates import Rates
from fusestep.plan.work import Group, Work


@dataclass(frozen=True)
class Message:
    """A collective of a step.

    Attributes:
        name: what is sent.
        passes: how often a message crosses the ring: 1 to gather or to scatter, 2 to reduce to all.
        size: bytes of the whole message.
        calls: how often a step.
        group: who sends to each other.
        hides: what it can run beside: "forward" or "backward" of other blocks, or "" for nothing.
        words, symbols: where its size is from.
    """

    name: str
    passes: int
    size: float
    calls: float
    group: Group
    hides: str
    words: str
    symbols: str

    def sent(self) -> float:
        """Bytes that a rank sends in one call."""
        n = self.group.size
        return self.passes * (n - 1) / n * self.size

    def seconds(self, rates: Rates) -> float:
        """Of one call."""
        return self.sent() / bandwidth(self.group, rates) + math.ceil(math.log2(self.group.size)) * rates["hop"]

    def line(self, rates: Rates) -> Line:
        """Its time in a step, were it alone."""
        n, where = self.group.size, "link" if self.group.is_within_node else "network"
        return Line(
            self.name,
            self.calls * self.seconds(rates),
            f"{self.words}; {'twice ' if self.passes == 2 else ''}(n − 1) / n of it / bandwidth, and hop · log₂ n",
            f"{self.symbols}, S {short(self.size)}B, n {n} ({self.group.in_node} in a node), calls {self.calls:,.0f}, "
            f"{short(bandwidth(self.group, rates))}B/s",
            (where, "hop") if where == "link" else ("link", "network", "hop"),
            self.calls * self.sent(),
        )


def bandwidth(group: Group, rates: Rates) -> float:
    """Bytes a second that leave a rank in a ring over the group."""
    return rates["link"] if group.is_within_node else min(rates["link"], group.in_node * rates["network"])


def messages(work: Work) -> tuple[Message, ...]:
    """All collectives of a step but those of a few numbers (the norm, amaxes, the loss)."""
    found = [*_sharded(work), *_averaged(work), *_tensor(work), *_context(work)]
    return tuple(one for one in found if one.group.size > 1)


def _sharded(work: Work) -> list[Message]:
    shape, layout, group = work.shape, work.layout, work.layout.group("shard")
    L, A, t, c = shape.layers, work.accumulate, layout.tensor, wire_bytes(work)
    block = shape.block_on(t)
    root = shape.outside_on(t)
    of = f"c {c:g}, N {short(block)}"
    words = "bytes of a travelling weight · elements of a block"
    return [
        Message("gather weights, forward", 1, c * block, L * A, group, "forward", words, f"S = c · N: {of}"),
        Message("gather weights, backward", 1, c * block, L * A, group, "backward", words, f"S = c · N: {of}"),
        Message(
            "gather tables",
            1,
            work.weight * root,
            A,
            group,
            "",
            "bytes of a weight · elements outside of blocks",
            f"S = w · R: w {work.weight}, R {short(root)}",
        ),
        Message(
            "reduce and scatter gradients",
            1,
            4 * block,
            L,
            group,
            "last backward",
            "4 bytes · elements of a block, after the last micro-batch",
            f"S = 4 · N: N {short(block)}",
        ),
        Message(
            "reduce and scatter those of tables",
            1,
            4 * root,
            1,
            group,
            "",
            "4 bytes · elements outside of blocks",
            f"S = 4 · R: R {short(root)}",
        ),
    ]


def _averaged(work: Work) -> list[Message]:
    """Gradients of ranks that hold the same, which are averaged."""
    shape, layout = work.shape, work.layout
    P, s, L = held(shape, layout.tensor), layout.shards, shape.layers
    g = 4 if s > 1 or work.weight == 4 or work.accumulate > 1 else 2
    words = "bytes of a gradient · parameters / shards / layers, for each layer as backward passes it"
    symbols = f"S = g · P / s / L: g {g}, P {short(P)}, s {s}, L {L}"
    # DDP knows nothing of DTensors and of fp32 sums: those are averaged after backward.
    hides = "" if s == 1 and (layout.tensor > 1 or (work.weight == 2 and work.accumulate > 1)) else "last backward"
    return [Message("average gradients", 2, g * P / s / L, L, layout.group("replica"), hides, words, symbols)]


def _tensor(work: Work) -> list[Message]:
    shape, layout, group = work.shape, work.layout, work.layout.group("tensor")
    L, A, M, W, t = shape.layers, work.accumulate, work.micro_tokens, shape.width, layout.tensor
    b, r, again = work.element, work.residual, 1 if work.activation_checkpointing else 0
    # Each of the two pairs of layers in a block takes its input from the residual stream and gives a branch; a block is
    # computed again up to its last branch.
    if layout.by_sequence:
        name, passes, there, back = "gather and scatter", 1, 4 + again, 4 + 2 * again
        words = "· tokens · width: twice a block forward (again where it is recomputed), twice backward"
    else:
        name, passes, there, back = "reduce", 2, 2 + again, 2
        words = "· tokens · width: twice a block"
    of = f"M {short(M)}, W {W}"
    trade = shape.products[0][1] * shape.products[0][2] / t
    c = wire_bytes(work) if layout.shards > 1 else work.weight
    return [
        Message(
            f"{name} branches of blocks",
            passes,
            b * M * W,
            there * L * A,
            group,
            "",
            f"bytes of a number {words}",
            f"S = b · M · W: b {b}, {of}",
        ),
        Message(
            f"{name} {'inputs of blocks' if layout.by_sequence else 'gradients of inputs of blocks'}",
            passes,
            r * M * W,
            back * L * A,
            group,
            "",
            f"bytes of the residual stream {words}",
            f"S = r · M · W: r {r}, {of}",
        ),
        Message(
            f"{name} those of embedding and head",
            passes,
            r * M * W,
            (2 if passes == 2 else 4) * A,
            group,
            "",
            "bytes of the residual stream · tokens · width: of the embedding, and of the head's input",
            f"S = r · M · W: r {r}, {of}",
        ),
        Message(
            "trade rows of queries, keys and values",
            1,
            c * trade,
            (2 + again) * L * A,
            group,
            "",
            "bytes of a travelling weight · a rank's part of that weight, forward and backward",
            f"S = c · W · Q / t: c {c:g}, t {t}",
        ),
    ]


def _context(work: Work) -> list[Message]:
    shape, layout, group = work.shape, work.layout, work.layout.group("context")
    tokens = work.micro_tokens * layout.context
    size = 2 * work.element * tokens * shape.kv_width / layout.tensor
    return [
        Message(
            "gather keys and values, scatter their gradients",
            1,
            size,
            (3 + (1 if work.activation_checkpointing else 0)) * shape.layers * work.accumulate,
            group,
            "",
            "two · bytes of a number · tokens of whole sequences · width of keys: gathered forward and backward, and "
            "their gradients scattered",
            f"S = 2 · b · M · K / t: M {short(tokens)}, K {shape.kv_width}, t {layout.tensor}",
        )
    ]
