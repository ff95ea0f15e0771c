"""The gradients of the embedding: sums of rows by their ids, in an order that ids and shapes alone decide.

A token's key is its id above its number, so keys are distinct and their order keeps that of the tokens. Four launches,
whose grids follow from shapes:

1. keys of each chunk of tokens are put in order, by counting for each the smaller ones; beside that, by other programs
   of the same launch, the weight's gradient is filled with zeros, and the gradient of positions is summed;
2. a key's place among all is the sum of its places in the chunks, each found by halving;
3. a block of tokens that follow each other in that order is added up, id by id. An id whose tokens all lie in the block
   is done; of others the block's part is kept;
4. the parts of an id are added up, block after block.

So no chain of additions is longer than a block, however often an id occurs. Tokens of padding_idx, and of ids that the
table does not have, get an id behind all others, and are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusestep.ops.dtypes import SHORT_NAMES
from fusestep.ops.embedding_gradient_kernel import begin_kernel, join_kernel, order_kernel, sums_kernel
from fusestep.ops.launch import PreparedLaunch
from fusestep.ops.registry import Compilation

#: Tokens that a program ranks, and at most as many chunks as are ranked by halving; above that torch sorts the keys.
RANKED, MOST_CHUNKS = 64, 128
#: Tokens that a program of the second launch places, and the chunks that it looks into at once.
PLACED, LOOKED_AT = 16, 32
#: Elements of zeros that a program writes; sequences that it adds up at once, and columns of them.
FILL, SEQUENCES, POSITION_COLUMNS = 4096, 16, 256
#: Rows that are summed in one chain, and loaded together.
BLOCK, TOGETHER = 32, 16
#: Parts of an id that are added at once, and columns of them.
PARTS, PART_COLUMNS = 32, 128


@dataclass(frozen=True)
class _Plan:
    """Launches for one set of shapes, and what they write in between."""

    begin: PreparedLaunch
    order: PreparedLaunch | None
    sums: PreparedLaunch | None
    join: PreparedLaunch | None
    keys: int
    blocks: int
    is_sorted_by_torch: bool


def chunk_of(tokens: int) -> int:
    """Tokens of a chunk that is ranked in one launch; 0 where there would be too many chunks."""
    if tokens <= RANKED:
        return RANKED
    chunk = 512 if tokens <= 1 << 15 else 1024
    return chunk if tokens <= chunk * MOST_CHUNKS else 0


def columns_of(width: int, most: int) -> int:
    """Columns of a program, not far beyond the width."""
    return min(most, max(16, 1 << max(width - 1, 0).bit_length()))


@functools.lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    tokens: int,
    length: int,
    shape: tuple[int, int],
    dy_stride: int,
    padding: int,
    places: int | None,
    has_weight: bool,
) -> _Plan:
    rows, width = shape
    chunk = chunk_of(tokens)
    chunks = -(-tokens // chunk) if chunk else 0
    keys = chunks * chunk if chunk else tokens
    shift = max(keys - 1, 1).bit_length()
    ranking = -(-keys // RANKED) if has_weight else 0
    summing = 0 if places is None else places * -(-width // columns_of(width, POSITION_COLUMNS))
    filling = -(-rows * width // FILL) if has_weight else 0
    begin = PreparedLaunch(
        begin_kernel,
        (ranking + summing + filling,),
        device,
        (tokens, rows, padding, shift, length, tokens // length, ranking, summing, width, dy_stride, rows * width),
        RANKED=RANKED,
        CHUNK=chunk,
        SEQUENCES=SEQUENCES,
        COLUMNS=columns_of(width, POSITION_COLUMNS),
        FILL=FILL,
        num_warps=4,
    )
    order = sums = join = None
    blocks = -(-tokens // BLOCK)
    if has_weight:
        if chunks > 1:
            order = PreparedLaunch(
                order_kernel,
                (keys // PLACED,),
                device,
                (tokens, chunks, shift),
                PLACED=PLACED,
                LOOKED_AT=LOOKED_AT,
                STEPS=chunk.bit_length() - 1,
                num_warps=4,
            )
        wide = columns_of(width, sum_columns(dtypes[1]))
        sums = PreparedLaunch(
            sums_kernel,
            (blocks * -(-width // wide),),
            device,
            (tokens, rows, shift, blocks, width, dy_stride),
            BLOCK=BLOCK,
            TOGETHER=TOGETHER,
            COLUMNS=wide,
            num_warps=1,
        )
        if blocks > 1:
            wide = columns_of(width, PART_COLUMNS)
            join = PreparedLaunch(
                join_kernel,
                ((blocks - 1) * -(-width // wide),),
                device,
                (rows, shift, blocks, width),
                BLOCK=BLOCK,
                PARTS=PARTS,
                COLUMNS=wide,
                num_warps=4,
            )
    return _Plan(begin, order, sums, join, keys, blocks, chunk == 0)


def sum_columns(dtype: torch.dtype | None) -> int:
    """Columns of a program of the third launch: 16 bytes a thread of its one warp."""
    return 128 if dtype is torch.float32 else 256


def gradients(
    ids: Tensor,
    dy: Tensor,
    length: int,
    padding: int,
    dw: Tensor | None,
    dp: Tensor | None,
) -> None:
    """Write the gradients of the weight and of the positions, where they are not None.

    Args:
        ids: (tokens,) contiguous, at least one. dy: (tokens, width), rows any distance apart. length: of a sequence.
        padding: the id that gets no gradient, or -1.
        dw: (rows, width), dp: (places, width), contiguous.
    """
    if dw is None and dp is None:
        return
    tokens, width = dy.shape
    dtypes = tuple(None if one is None else one.dtype for one in (ids, dy, dw, dp))
    shape = (0 if dw is None else dw.shape[0], width)
    places = None if dp is None else dp.shape[0]
    plan = _plan(ids.device, dtypes, tokens, length, shape, dy.stride(0), padding, places, dw is not None)
    if dw is None:
        plan.begin(ids, dy, None, None, dp)
        return
    keys = torch.empty(plan.keys, dtype=torch.int64, device=ids.device)
    plan.begin(ids, dy, keys, dw, dp)
    if plan.is_sorted_by_torch:
        keys = torch.sort(keys).values
    elif plan.order is not None:
        ordered = torch.empty(tokens, dtype=torch.int64, device=ids.device)
        plan.order(keys, ordered)
        keys = ordered
    assert plan.sums is not None
    parts = torch.empty((2, plan.blocks, width), dtype=torch.float32, device=ids.device)
    plan.sums(keys, dy, dw, parts)
    if plan.join is not None:
        plan.join(keys, parts, dw)


def compilations() -> Iterator[Compilation]:
    """Every kernel, in the dtypes that differ in their code."""
    for dtype, has_weight, has_positions, chunk in (
        (torch.float32, True, True, 512),
        (torch.bfloat16, True, False, 1024),
        (torch.bfloat16, True, True, 0),
        (torch.float16, True, True, RANKED),
        (torch.float32, False, True, 512),
    ):
        element = SHORT_NAMES[dtype]
        pointers = {"ids_ptr": "*i64", "dy_ptr": f"*{element}"}
        constants: dict[str, Any] = {
            "RANKED": RANKED,
            "CHUNK": chunk,
            "SEQUENCES": SEQUENCES,
            "COLUMNS": POSITION_COLUMNS,
            "FILL": FILL,
        }
        for name, kind, there in (
            ("keys_ptr", "*i64", has_weight),
            ("dw_ptr", f"*{element}", has_weight),
            ("dp_ptr", f"*{element}", has_positions),
        ):
            if there:
                pointers[name] = kind
            else:
                constants[name] = None
        numbers = ("tokens", "rows", "padding", "shift", "length", "sequences", "ranking", "summing")
        sizes = ("width", "dy_stride", "elements")
        yield Compilation(
            begin_kernel,
            f"gradient, first launch, {element}, chunks of {chunk}{'' if has_weight else ', positions alone'}",
            pointers | dict.fromkeys((*numbers, *sizes), "i32") | dict.fromkeys(constants, "constexpr"),
            constants,
            num_warps=4,
            divisible_by_16=frozenset({*pointers, *sizes}),
        )
    for steps in (9, 10):
        constants = {"PLACED": PLACED, "LOOKED_AT": LOOKED_AT, "STEPS": steps}
        yield Compilation(
            order_kernel,
            f"gradient, order of chunks of {1 << steps}",
            {"keys_ptr": "*i64", "ordered_ptr": "*i64"}
            | dict.fromkeys(("tokens", "chunks", "shift"), "i32")
            | dict.fromkeys(constants, "constexpr"),
            constants,
            num_warps=4,
            divisible_by_16=frozenset({"keys_ptr", "ordered_ptr"}),
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        element = SHORT_NAMES[dtype]
        pointers = {"ordered_ptr": "*i64", "dy_ptr": f"*{element}", "dw_ptr": f"*{element}", "parts_ptr": "*fp32"}
        constants = {"BLOCK": BLOCK, "TOGETHER": TOGETHER, "COLUMNS": sum_columns(dtype)}
        yield Compilation(
            sums_kernel,
            f"gradient, sums of blocks, {element}",
            pointers
            | dict.fromkeys(("tokens", "rows", "shift", "blocks", "width", "dy_stride"), "i32")
            | dict.fromkeys(constants, "constexpr"),
            constants,
            num_warps=1,
            divisible_by_16=frozenset({*pointers, "width", "dy_stride"}),
        )
        pointers = {"ordered_ptr": "*i64", "parts_ptr": "*fp32", "dw_ptr": f"*{element}"}
        constants = {"BLOCK": BLOCK, "PARTS": PARTS, "COLUMNS": PART_COLUMNS}
        yield Compilation(
            join_kernel,
            f"gradient, parts of blocks, {element}",
            pointers
            | dict.fromkeys(("rows", "shift", "blocks", "width"), "i32")
            | dict.fromkeys(constants, "constexpr"),
            constants,
            num_warps=4,
            divisible_by_16=frozenset({*pointers, "width"}),
        )
