"""The kernels of the embedding's gradients; embedding_gradient.py says what each launch does."""

from __future__ import annotations

from fusestep.language import tl, triton


@triton.jit
def _key(ids_ptr, place, tokens, rows, padding, shift):
    """Keys of tokens: ids that get no gradient come after the others, and places beyond the tokens after those."""
    row = tl.load(ids_ptr + place, mask=place < tokens, other=0).to(tl.int64)
    row = tl.where((row < 0) | (row >= rows) | (row == padding), rows, row)
    row = tl.where(place < tokens, row, rows + 1)
    return (row << shift) | place


@triton.jit(do_not_specialize=["tokens", "rows", "padding", "shift", "length", "sequences", "ranking", "summing"])
def begin_kernel(
    ids_ptr,  # (tokens,)
    dy_ptr,  # (tokens, width), dy_stride apart
    keys_ptr,  # (chunks, CHUNK) int64, or None for no gradient of the weight
    dw_ptr,  # (rows, width), or None likewise
    dp_ptr,  # the gradient of positions, rows of `width`, or None
    tokens,
    rows,
    padding,
    shift,
    length,
    sequences,
    ranking,  # programs that rank
    summing,  # programs that sum positions
    width,
    dy_stride,
    elements,  # of dw
    RANKED: tl.constexpr,
    CHUNK: tl.constexpr,  # 0: keys stay in the order of the tokens
    SEQUENCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FILL: tl.constexpr,
):
    """The first launch: programs that rank, then those that sum positions, then those that write zeros."""
    program = tl.program_id(0).to(tl.int64)
    if keys_ptr is not None:  # noqa: SIM102 — known as it compiles
        if program < ranking:
            place = program * RANKED + tl.arange(0, RANKED)
            mine = _key(ids_ptr, place, tokens, rows, padding, shift)
            if CHUNK == 0:
                tl.store(keys_ptr + place, mine, mask=place < tokens)
            else:
                chunk = program * RANKED // CHUNK * CHUNK
                smaller = tl.zeros([RANKED, RANKED], tl.int32)
                for first in range(0, CHUNK, RANKED):
                    other = _key(ids_ptr, chunk + first + tl.arange(0, RANKED), tokens, rows, padding, shift)
                    smaller += (other[None, :] < mine[:, None]).to(tl.int32)
                tl.store(keys_ptr + chunk + tl.sum(smaller, 1), mine)
    if dp_ptr is not None:  # noqa: SIM102
        if (program >= ranking) & (program < ranking + summing):
            across = (width - 1) // COLUMNS + 1
            place = (program - ranking) // across
            column = ((program - ranking) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
            total = tl.zeros([SEQUENCES, COLUMNS], tl.float32)
            # Positions beyond the sequences' length get zeros.
            for first in range(0, tl.where(place < length, sequences, 0), SEQUENCES):
                sequence = (first + tl.arange(0, SEQUENCES).to(tl.int64))[:, None]
                row = dy_ptr + (sequence * length + place) * dy_stride
                mask = (sequence < sequences) & (column < width)
                total += tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
            inside = (program - ranking) % across * COLUMNS + tl.arange(0, COLUMNS)
            tl.store(dp_ptr + place * width + inside, tl.sum(total, 0), mask=inside < width)
    if dw_ptr is not None:  # noqa: SIM102
        if program >= ranking + summing:
            element = (program - ranking - summing) * FILL + tl.arange(0, FILL)
            tl.store(dw_ptr + element, tl.zeros([FILL], tl.float32), mask=element < elements)


@triton.jit(do_not_specialize=["tokens", "chunks", "shift"])
def order_kernel(
    keys_ptr,  # (chunks, 2 ** STEPS) int64, each chunk in order
    ordered_ptr,  # (tokens,) int64: all in order
    tokens,
    chunks,
    shift,
    PLACED: tl.constexpr,
    LOOKED_AT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The second launch: PLACED keys a program, which are neighbours in a chunk and so look at the same places."""
    key = tl.load(keys_ptr + tl.program_id(0).to(tl.int64) * PLACED + tl.arange(0, PLACED))
    place = tl.zeros([PLACED, LOOKED_AT], tl.int32)
    for first in range(0, chunks, LOOKED_AT):
        chunk = first + tl.arange(0, LOOKED_AT)
        inside = (chunk < chunks)[None, :]
        begin = keys_ptr + (chunk.to(tl.int64) << STEPS)[None, :]
        smaller = tl.zeros([PLACED, LOOKED_AT], tl.int32)
        for step in tl.static_range(STEPS):
            half = 1 << (STEPS - 1 - step)
            is_smaller = tl.load(begin + smaller + (half - 1), mask=inside, other=0) < key[:, None]
            smaller += tl.where(is_smaller, half, 0)
        smaller += (tl.load(begin + smaller, mask=inside, other=0) < key[:, None]).to(tl.int32)
        place += tl.where(inside, smaller, 0)
    token = key & ((1 << shift.to(tl.int64)) - 1)
    tl.store(ordered_ptr + tl.sum(place, 1), key, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "rows", "shift", "blocks"])
def sums_kernel(
    ordered_ptr,  # (tokens,) int64 keys
    dy_ptr,  # (tokens, width), dy_stride apart
    dw_ptr,  # (rows, width), zeros
    parts_ptr,  # (2, blocks, width) fp32
    tokens,
    rows,
    shift,
    blocks,
    width,
    dy_stride,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The third launch. Parts are, of each block, that of an id from blocks before it, and that of one that begins
    here and goes on."""
    across = (width - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    block = (program // across).to(tl.int64)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    begin = block * BLOCK
    low = (1 << shift.to(tl.int64)) - 1
    none = (rows + 1).to(tl.int64) << shift
    here = tl.load(ordered_ptr + begin)
    before = tl.load(ordered_ptr + begin - 1, mask=begin > 0, other=-1)
    goes_on = (here >> shift) == (before >> shift)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, BLOCK, TOGETHER):
        # All loads before the first addition, so that they are under way together.
        keys = (here,)
        for i in tl.static_range(1, TOGETHER + 1):
            place = begin + first + i
            keys = keys + (tl.load(ordered_ptr + place, mask=place < tokens, other=none),)  # type: ignore[assignment]  # noqa: RUF005
        gradients = (total,)
        for i in tl.static_range(TOGETHER):
            mask = column < tl.where((keys[i] >> shift) < rows, width, 0)
            row = dy_ptr + (keys[i] & low) * dy_stride + column
            gradients = gradients + (tl.load(row, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(TOGETHER):
            total += gradients[i + 1]
            row = keys[i] >> shift
            is_end = row != (keys[i + 1] >> shift)
            is_last = first + i == BLOCK - 1
            is_whole = is_end & (goes_on == 0) & (row < rows)
            tl.store(dw_ptr + row * width + column, total, mask=column < tl.where(is_whole, width, 0))
            half = tl.where(goes_on, 0, blocks).to(tl.int64)
            is_part = (goes_on & (is_end | is_last)) | ((goes_on == 0) & is_last & (is_end == 0))
            tl.store(parts_ptr + (half + block) * width + column, total, mask=column < tl.where(is_part, width, 0))
            total = tl.where(is_end, 0.0, total)
            goes_on = goes_on & (is_end == 0)
        here = keys[TOGETHER]


@triton.jit(do_not_specialize=["rows", "shift", "blocks"])
def join_kernel(
    ordered_ptr,  # (tokens,) int64 keys
    parts_ptr,  # (2, blocks, width) fp32
    dw_ptr,  # (rows, width)
    rows,
    shift,
    blocks,
    width,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The fourth launch: a program for each block but the last, idle where no id begins that goes on."""
    across = (width - 1) // COLUMNS + 1
    program = tl.program_id(0)  # widened later
    block = (program // across).to(tl.int64)
    begin = block * BLOCK
    row = tl.load(ordered_ptr + begin + BLOCK - 1) >> shift
    next_row = tl.load(ordered_ptr + begin + BLOCK) >> shift
    first_row = tl.load(ordered_ptr + begin) >> shift
    row_before = tl.load(ordered_ptr + begin - 1, mask=begin > 0, other=-1) >> shift
    if (row == next_row) & (row < rows) & ((first_row != row) | (row_before != row)):
        column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
        in_width = column < width
        total = tl.zeros([PARTS, COLUMNS], tl.float32)
        following = block + 1
        found = PARTS
        while found == PARTS:
            other = following + tl.arange(0, PARTS)
            inside = other < blocks
            is_same = inside & ((tl.load(ordered_ptr + other * BLOCK, mask=inside, other=-1) >> shift) == row)
            part = parts_ptr + other[:, None] * width + column[None, :]
            total += tl.load(part, mask=is_same[:, None] & in_width[None, :], other=0.0)
            found = tl.sum(is_same.to(tl.int32), 0)
            following += PARTS
        opening = tl.load(parts_ptr + (blocks + block) * width + column, mask=in_width, other=0.0)
        tl.store(dw_ptr + row * width + column, opening + tl.sum(total, 0), mask=in_width)
