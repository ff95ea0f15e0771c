"""What kernels share that cast to FP8: scales from slots, amaxes, and bytes, one by one or in words.

Before 13.3 the assembler can write foreign bytes where a pair that one instruction casts is used twice, in a word and
by itself (triton#11111). It joins two pairs in the instruction that casts the second one, and takes the first pair back
from there, though it was to go in; zeros that a mask leaves are pairs that all are one. So pairs are joined by shifting
here, which costs next to nothing, and only words of four bytes are used.
"""

from __future__ import annotations

import torch

from fusestep import hardware
from fusestep.language import interpreted, tl, triton
from fusestep.ops.roll_scales import LARGEST_SCALE
from fusestep.precision import FP8_CAPABILITY

#: The same bounds as in roll_scales.py: within them a scale and its inverse are both normal numbers of fp32.
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_SMALLEST_SCALE = tl.constexpr(1.0 / LARGEST_SCALE)

_PAIRS = (
    "{{ .reg .b16 a, b; .reg .b32 c, d; cvt.rn.satfinite.{0}.f32 a, $2, $1; cvt.rn.satfinite.{0}.f32 b, $4, $3; "
    "cvt.u32.u16 c, a; cvt.u32.u16 d, b; shl.b32 d, d, 16; or.b32 $0, c, d; }}"
)
#: Four fp32 to the bytes of one word; the instruction saturates, infinities too, so that `scaled_values` leaves none.
_E4M3_WORD = tl.constexpr(_PAIRS.format("e4m3x2"))
_E5M2_WORD = tl.constexpr(_PAIRS.format("e5m2x2"))

#: Instructions that round fp32 to FP8 at once came with Hopper; before it Triton goes through fp16 and rounds twice.
CAST_CAPABILITY = (9, 0)


def has_fp8_cast(device: torch.device) -> bool:
    """Whether a device rounds fp32 to FP8 itself; else kernels do it with integers, to the same bytes."""
    return not interpreted() and hardware.devices()[device.index or 0].capability >= CAST_CAPABILITY


def has_fp8_type(device: torch.device) -> bool:
    """Whether Triton takes pointers to E4M3 on a device."""
    return interpreted() or hardware.devices()[device.index or 0].capability >= FP8_CAPABILITY


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr, MARGIN: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale that an amax calls for, as scale_reference of roll_scales.py; rounded down to a power of two if so."""
    is_usable = (amax > 0.0) & (amax < float("inf"))
    scale = tl.div_rn(tl.full([], LARGEST, tl.float32), tl.where(is_usable, amax, 1.0))
    scale = scale * (0.5**MARGIN)
    scale = tl.minimum(tl.maximum(scale, _SMALLEST_SCALE), _LARGEST_SCALE)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(is_usable, scale, 1.0)


@triton.jit
def slot_scale(slots_ptr, index, LARGEST: tl.constexpr, MARGIN: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a slot; where it has none yet, the one that its amax calls for."""
    scale = tl.load(slots_ptr + index * 4)
    amax = tl.load(slots_ptr + index * 4 + 1)
    return tl.where(scale != 0.0, scale, scale_from_amax(amax, LARGEST, MARGIN, POWER_OF_TWO))


@triton.jit
def magnitude_bits(values):
    """The bits of |values|, which are ordered as the magnitudes are, NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_amax_bits(slots_ptr, index, bits):
    """Raise a slot's amax to the largest of these `magnitude_bits`; the same whatever the order of programs."""
    place = (slots_ptr + index * 4 + 1).to(tl.pointer_type(tl.int32), bitcast=True)
    largest = tl.max(bits)
    # An old value that is read here costs an atomic that changes nothing; few programs need one.
    tl.atomic_max(place, largest, mask=largest > tl.load(place), sem="relaxed")  # integer maximum


@triton.jit
def scaled_values(values, scale):
    """values · scale in fp32, as it is cast: NaN where the value is infinite. What overflows in the product saturates.

    One multiply-add more; the sign of zero stays, since both products have it. Of a value that is scaled twice, the
    compiler would keep `values * 0.0` in between, in registers; of this it cannot.
    """
    return tl.fma(values, 0.0, values * scale)


@triton.jit
def fp8_code(scaled, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """The bytes (uint8) of `scaled_values` in E4M3, else E5M2: saturated, to nearest, ties to even; NaN is 0x7F."""
    if HARDWARE_CAST:
        code = tl.inline_asm_elementwise(
            _E4M3_WORD if E4M3 else _E5M2_WORD,
            "=r,r,r,r,r",
            [scaled],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        SHIFT: tl.constexpr = 20 if E4M3 else 21  # bits of mantissa that are lost
        EXPONENT: tl.constexpr = 121 if E4M3 else 113  # of the smallest normal number, biased as in fp32
        LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # 448 or 57344
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        magnitude = tl.where(magnitude > LARGEST, LARGEST, magnitude)
        odd = (magnitude >> SHIFT) & 1
        normal = ((magnitude + odd + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((EXPONENT - 1) << (23 - SHIFT))
        # Adding a number whose last place is the format's smallest one rounds a subnormal number.
        SMALL: tl.constexpr = (EXPONENT + SHIFT) << 23
        anchor = (magnitude & 0 | SMALL).to(tl.float32, bitcast=True)
        tiny = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - SMALL
        code = tl.where(magnitude < (EXPONENT << 23), tiny, normal)
        code = tl.where(is_nan, 0x7F, code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def fp8_words(scaled, E4M3: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """`fp8_code` of a tile (rows, columns), four columns a word: int32 (rows, columns / 4)."""
    even, odd = tl.split(tl.reshape(scaled, [scaled.shape[0], scaled.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if HARDWARE_CAST:
        words = tl.inline_asm_elementwise(
            _E4M3_WORD if E4M3 else _E5M2_WORD,
            "=r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = fp8_code(first, E4M3, False).to(tl.int32)
        words |= fp8_code(second, E4M3, False).to(tl.int32) << 8
        words |= fp8_code(third, E4M3, False).to(tl.int32) << 16
        words |= fp8_code(fourth, E4M3, False).to(tl.int32) << 24
    return words


@triton.jit
def _mixed_words(a, b, SELECTOR: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Bytes of a (numbers 0 to 3) and b (4 to 7) by the selector's hexadecimal digits, the last one for byte 0."""
    if IN_HARDWARE:
        mixed = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, " + SELECTOR + ";", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    elif SELECTOR == "0x5140":
        mixed = (a & 0xFF) | ((b & 0xFF) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)
    elif SELECTOR == "0x7362":
        mixed = ((a >> 16) & 0xFF) | ((b >> 8) & 0xFF00) | ((a >> 8) & 0xFF0000) | (b & ~0xFFFFFF)
    elif SELECTOR == "0x5410":
        mixed = (a & 0xFFFF) | (b << 16)
    else:
        tl.static_assert(SELECTOR == "0x7632")
        mixed = ((a >> 16) & 0xFFFF) | (b & ~0xFFFF)
    return mixed


@triton.jit
def transposed_words(a, b, c, d, IN_HARDWARE: tl.constexpr):
    """Of a tile's rows 4i, 4i + 1, 4i + 2 and 4i + 3, each (rows / 4, columns / 4) words of four columns, the transpose
    (columns, rows / 4) in words of four rows."""
    low = _mixed_words(a, b, "0x5140", IN_HARDWARE)
    high = _mixed_words(a, b, "0x7362", IN_HARDWARE)
    low_too = _mixed_words(c, d, "0x5140", IN_HARDWARE)
    high_too = _mixed_words(c, d, "0x7362", IN_HARDWARE)
    even = tl.join(
        _mixed_words(low, low_too, "0x5410", IN_HARDWARE), _mixed_words(high, high_too, "0x5410", IN_HARDWARE)
    )
    odd = tl.join(
        _mixed_words(low, low_too, "0x7632", IN_HARDWARE), _mixed_words(high, high_too, "0x7632", IN_HARDWARE)
    )
    return tl.reshape(tl.permute(tl.join(even, odd), [1, 2, 3, 0]), [a.shape[1] * 4, a.shape[0]])


@triton.jit
def turned(values, PARTS: tl.constexpr):
    """Values (rows, columns) with their rows in PARTS groups: (PARTS · columns, rows / PARTS / 2) of even and odd rows.

    A split wants its pairs within threads, so that each column goes to one warp, through shared memory, with no two
    threads at one bank. A reduction over rows that lie in several warps would have 8 or 16 of them there.
    """
    ROWS: tl.constexpr = values.shape[0] // PARTS
    COLUMNS: tl.constexpr = values.shape[1]
    values = tl.permute(tl.reshape(values, [PARTS, ROWS, COLUMNS]), [0, 2, 1])
    return tl.split(tl.reshape(values, [PARTS * COLUMNS, ROWS // 2, 2]))


@triton.jit
def sums_of_columns(values):
    """The sums over the rows of (rows, columns), always in the same order."""
    if values.shape[0] == 1:
        sums = tl.sum(values, axis=0)
    else:
        even, odd = turned(values, 1)
        sums = tl.sum(even + odd, axis=1)
    return sums


@triton.jit
def count_cast(counts_ptr, index, values, scaled, E4M3: tl.constexpr):
    """Count what saturates, and what is flushed to zero: from half of the format's smallest value down.

    Told from the values, not the bytes, whose assembly can take for ever.
    """
    LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000  # 448 or 57344
    HALF: tl.constexpr = 0x3A800000 if E4M3 else 0x37000000  # 2^-10 or 2^-17
    bits = magnitude_bits(scaled)
    saturated = tl.sum(((bits > LARGEST) & (bits <= 0x7F800000)).to(tl.int32)).to(tl.int64)
    flushed = tl.sum(((magnitude_bits(values) != 0) & (bits <= HALF)).to(tl.int32)).to(tl.int64)
    tl.atomic_add(counts_ptr + index * 3 + 1, saturated, mask=saturated > 0, sem="relaxed")  # integer count
    tl.atomic_add(counts_ptr + index * 3 + 2, flushed, mask=flushed > 0, sem="relaxed")  # integer count
