"""The inner loop of each packed format: one unit of 16 rows of weights times a tile of M rows of activations.

`unit_function(name, M)` returns a function for Numba with the signature

    unit(sums, weights, columns, stride, records) -> sums

    sums            FloatTile(M), one float32 per row of weights and row of activations
    weights         address of the unit (see `packed.py`)
    columns         address of the first activation of the unit: int8 (or float32 for float formats)
    records         address of the first block record; unused by float formats
    stride          bytes from one row of activations to the next; the same for both

Integer sums are exact. Float sums are taken unit by unit in order, so the result of a row is fixed by the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from headrace.kernels import level as _level
from headrace.kernels.packed import PACKED
from headrace.kernels.tiles import (
    accumulate,
    add_broadcast,
    add_ints,
    add_tiles,
    dot4_narrow,
    dot4_narrow_ordered,
    dot4_signed,
    dot4_unsigned,
    finish_signed,
    scale_ints,
    subtract_broadcast,
    subtract_offset,
    subtract_scaled_sums,
    widen,
    zero_floats,
    zero_ints,
    zero_narrow,
)
from headrace.kernels.vectors import (
    add_to_ints,
    ints_to_floats,
    load_bf16,
    load_bytes,
    load_f16,
    load_floats,
    load_i8_ints,
    load_u8_ints,
    mask_bytes,
    mask_ints,
    shift_bytes_left,
    shift_bytes_right,
    shift_ints_left,
    shift_ints_right,
    splat_int,
)

inline = njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inline
def _high_to_bit4(high: Any, j: int) -> Any:
    """Bit j of each byte moved to bit 4."""
    if j == 0:
        return mask_bytes(shift_bytes_left(high, 4), 16)
    if j == 1:
        return mask_bytes(shift_bytes_left(high, 3), 16)
    if j == 2:
        return mask_bytes(shift_bytes_left(high, 2), 16)
    if j == 3:
        return mask_bytes(shift_bytes_left(high, 1), 16)
    if j == 4:
        return mask_bytes(high, 16)
    if j == 5:
        return mask_bytes(shift_bytes_right(high, 1), 16)
    if j == 6:
        return mask_bytes(shift_bytes_right(high, 2), 16)
    return mask_bytes(shift_bytes_right(high, 3), 16)


@inline
def _field2(pairs: Any, i: int) -> Any:
    """The i-th 2-bit field of each byte, in the low bits."""
    if i == 0:
        return mask_bytes(pairs, 3)
    if i == 1:
        return mask_bytes(shift_bytes_right(pairs, 2), 3)
    if i == 2:
        return mask_bytes(shift_bytes_right(pairs, 4), 3)
    return shift_bytes_right(pairs, 6)


@inline
def _scale6(scales: int, b: int) -> Any:
    """The 6-bit scale of sub-block b of a Q4_K or Q5_K unit, for 16 rows."""
    if b < 4:
        return mask_ints(load_u8_ints(scales + 16 * b), 63)
    low = mask_ints(load_u8_ints(scales + 16 * (b + 4)), 15)
    return low | shift_ints_left(shift_ints_right(load_u8_ints(scales + 16 * (b - 4)), 6), 4)


@inline
def _minimum6(scales: int, b: int) -> Any:
    """The 6-bit minimum of sub-block b of a Q4_K or Q5_K unit, for 16 rows."""
    if b < 4:
        return mask_ints(load_u8_ints(scales + 16 * (b + 4)), 63)
    low = shift_ints_right(load_u8_ints(scales + 16 * (b + 4)), 4)
    return low | shift_ints_left(shift_ints_right(load_u8_ints(scales + 16 * b), 6), 4)


@inline
def _scale3(scales: int, i: int) -> Any:
    """The signed scale of 16 columns, number i of 16, of a Q3_K unit, for 16 rows."""
    low = load_u8_ints(scales + 16 * (i % 8))
    low = mask_ints(low >> splat_int(4 * (i // 8)), 15)
    high = mask_ints(load_u8_ints(scales + 16 * (8 + i % 4)) >> splat_int(2 * (i // 4)), 3)
    return add_to_ints(low | shift_ints_left(high, 4), -32)


@inline
def _step4(total: Any, weights: int, x: int, stride: int, j: int) -> Any:
    """8 columns of 4-bit weights: one vector of nibbles."""
    nibbles = load_bytes(weights + 64 * j)
    total = dot4_narrow(total, mask_bytes(nibbles, 15), x + 4 * j, stride)
    return dot4_narrow(total, shift_bytes_right(nibbles, 4), x + 16 + 4 * j, stride)


@inline
def _low5(weights: int, high: Any, j: int) -> Any:
    """5-bit weights of columns 4j.. of a sub-block of 32."""
    return mask_bytes(load_bytes(weights + 64 * j), 15) | _high_to_bit4(high, j)


@inline
def _top5(weights: int, high: Any, j: int) -> Any:
    """5-bit weights of columns 16 + 4j.. ."""
    return shift_bytes_right(load_bytes(weights + 64 * j), 4) | _high_to_bit4(high, j + 4)


@inline
def _step5(total: Any, weights: int, high: Any, x: int, stride: int, j: int) -> Any:
    """8 columns of 5-bit weights, where sums are wide."""
    total = dot4_narrow(total, _low5(weights, high, j), x + 4 * j, stride)
    return dot4_narrow(total, _top5(weights, high, j), x + 16 + 4 * j, stride)


@inline
def _step5_apart(first: Any, second: Any, weights: int, high: Any, x: int, stride: int, j: int) -> Any:
    """The same into two sums, where a narrow one holds only 4 products."""
    first = dot4_narrow_ordered(first, _low5(weights, high, j), x + 4 * j, stride)
    return first, dot4_narrow_ordered(second, _top5(weights, high, j), x + 16 + 4 * j, stride)


@inline
def _low6(weights: int, pairs: Any, j: int) -> Any:
    """6-bit weights of columns 4j.. of a sub-block."""
    return mask_bytes(load_bytes(weights + 64 * j), 15) | shift_bytes_left(_field2(pairs, j), 4)


@inline
def _top6(weights: int, pairs: Any, j: int) -> Any:
    """6-bit weights of columns 16 + 4j.. ."""
    return shift_bytes_right(load_bytes(weights + 64 * j), 4) | shift_bytes_left(_field2(pairs, j), 4)


@inline
def _step6(first: Any, second: Any, weights: int, low_pairs: Any, high_pairs: Any, x: int, stride: int, j: int) -> Any:
    """8 columns of 6-bit weights."""
    first = dot4_unsigned(first, _low6(weights, low_pairs, j), x + 4 * j, stride)
    second = dot4_unsigned(second, _top6(weights, high_pairs, j), x + 16 + 4 * j, stride)
    return first, second


@inline
def _step3(first: Any, second: Any, low_pairs: Any, high_pairs: Any, high: Any, x: int, stride: int, j: int) -> Any:
    """8 columns of 3-bit weights."""
    low = _field2(low_pairs, j) | shift_bytes_right(_high_to_bit4(high, j), 2)
    first = dot4_narrow(first, low, x + 4 * j, stride)
    top = _field2(high_pairs, j) | shift_bytes_right(_high_to_bit4(high, j + 4), 2)
    second = dot4_narrow(second, top, x + 16 + 4 * j, stride)
    return first, second


def _block_function(rows: int, five_bits: bool) -> Callable[..., Any]:
    """The integer sums of 32 columns of 4- or 5-bit weights. Steps are written out: their shifts are constants."""

    @inline
    def four(weights: int, high_bits: int, x: int, stride: int) -> Any:
        total = _step4(zero_narrow(rows), weights, x, stride, 0)
        total = _step4(total, weights, x, stride, 1)
        total = _step4(total, weights, x, stride, 2)
        return widen(_step4(total, weights, x, stride, 3))

    @inline
    def five(weights: int, high_bits: int, x: int, stride: int) -> Any:
        high = load_bytes(high_bits)
        total = _step5(zero_narrow(rows), weights, high, x, stride, 0)
        total = _step5(total, weights, high, x, stride, 1)
        total = _step5(total, weights, high, x, stride, 2)
        return widen(_step5(total, weights, high, x, stride, 3))

    @inline
    def five_in_halves(weights: int, high_bits: int, x: int, stride: int) -> Any:
        # a narrow sum holds 4 products; one half after the other keeps only one sum of each row in registers
        high = load_bytes(high_bits)
        first = dot4_narrow(zero_narrow(rows), _low5(weights, high, 0), x, stride)
        first = dot4_narrow(first, _low5(weights, high, 1), x + 4, stride)
        first = dot4_narrow(first, _low5(weights, high, 2), x + 8, stride)
        first = dot4_narrow(first, _low5(weights, high, 3), x + 12, stride)
        ints = widen(first)
        second = dot4_narrow(zero_narrow(rows), _top5(weights, high, 0), x + 16, stride)
        second = dot4_narrow(second, _top5(weights, high, 1), x + 20, stride)
        second = dot4_narrow(second, _top5(weights, high, 2), x + 24, stride)
        second = dot4_narrow(second, _top5(weights, high, 3), x + 28, stride)
        return add_ints(ints, widen(second))

    @inline
    def five_by_turns(weights: int, high_bits: int, x: int, stride: int) -> Any:
        # one row has registers for both sums, so that each vector of nibbles is loaded once
        high = load_bytes(high_bits)
        first, second = _step5_apart(zero_narrow(rows), zero_narrow(rows), weights, high, x, stride, 0)
        first, second = _step5_apart(first, second, weights, high, x, stride, 1)
        first, second = _step5_apart(first, second, weights, high, x, stride, 2)
        first, second = _step5_apart(first, second, weights, high, x, stride, 3)
        return add_ints(widen(first), widen(second))

    if not five_bits:
        return four
    if _level.current().name != "avx2":
        return five
    return five_by_turns if rows == 1 else five_in_halves


def _nibble_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q4_0, Q4_1, Q5_0, Q5_1: 32 columns, one scale, an offset or a minimum."""
    layout = PACKED[name]
    d_at = layout.offset("d")
    has_minimum = name in ("Q4_1", "Q5_1")
    m_at = layout.offset("m") if has_minimum else 0
    five_bits = name in ("Q5_0", "Q5_1")
    high_at = layout.offset("high1") if five_bits else 0
    offset = 16 if five_bits else 8
    block = _block_function(rows, five_bits)

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        ints = block(weights, weights + high_at, columns, stride)
        if has_minimum:
            sums = accumulate(sums, ints, load_f16(weights + d_at), records, stride)
            return add_broadcast(sums, load_f16(weights + m_at), records + 4, stride)
        ints = subtract_offset(ints, offset, records + 8, stride)
        return accumulate(sums, ints, load_f16(weights + d_at), records, stride)

    return unit


def _q8_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q8_0: 32 columns of signed bytes, one scale."""
    d_at = PACKED[name].offset("d")

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        ints = zero_ints(rows)
        for j in range(8):
            ints = dot4_signed(ints, load_bytes(weights + 64 * j), columns + 4 * j, stride)
        ints = finish_signed(ints, 0, records + 8, stride)
        return accumulate(sums, ints, load_f16(weights + d_at), records, stride)

    return unit


def _k45_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q4_K, Q5_K: 8 sub-blocks of 32 columns with 6-bit scales and minimums."""
    layout = PACKED[name]
    scales_at, d_at, m_at = layout.offset("scales"), layout.offset("d"), layout.offset("m")
    five_bits = name == "Q5_K"
    high_at = layout.offset("high1") if five_bits else 0
    block = _block_function(rows, five_bits)

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        d = load_f16(weights + d_at)
        m = load_f16(weights + m_at)
        for b in range(8):
            ints = block(weights + 256 * b, weights + high_at + 64 * b, columns + 32 * b, stride)
            ints = scale_ints(ints, _scale6(weights + scales_at, b))
            sums = accumulate(sums, ints, d, records + 16 * b, stride)
            minimum = m * ints_to_floats(_minimum6(weights + scales_at, b))
            sums = subtract_broadcast(sums, minimum, records + 16 * b + 4, stride)
        return sums

    return unit


def _k6_sums(rows: int) -> Callable[..., Any]:
    """The integer sums of the two halves of 32 columns of 6-bit weights."""

    @inline
    def together(w: int, low: Any, high: Any, x: int, stride: int) -> Any:
        first, second = _step6(zero_ints(rows), zero_ints(rows), w, low, high, x, stride, 0)
        first, second = _step6(first, second, w, low, high, x, stride, 1)
        first, second = _step6(first, second, w, low, high, x, stride, 2)
        return _step6(first, second, w, low, high, x, stride, 3)

    @inline
    def one_after_the_other(w: int, low: Any, high: Any, x: int, stride: int) -> Any:
        # a narrow sum holds 2 products of 6-bit weights; only one sum of each row is in registers at a time
        one = dot4_narrow(zero_narrow(rows), _low6(w, low, 0), x, stride)
        one = widen(dot4_narrow(one, _low6(w, low, 1), x + 4, stride))
        two = dot4_narrow(zero_narrow(rows), _low6(w, low, 2), x + 8, stride)
        first = add_ints(one, widen(dot4_narrow(two, _low6(w, low, 3), x + 12, stride)))
        one = dot4_narrow(zero_narrow(rows), _top6(w, high, 0), x + 16, stride)
        one = widen(dot4_narrow(one, _top6(w, high, 1), x + 20, stride))
        two = dot4_narrow(zero_narrow(rows), _top6(w, high, 2), x + 24, stride)
        return first, add_ints(one, widen(dot4_narrow(two, _top6(w, high, 3), x + 28, stride)))

    return one_after_the_other if _level.current().name == "avx2" and rows > 1 else together


def _k6_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q6_K: 16 signed 8-bit scales, each for 16 columns."""
    layout = PACKED[name]
    pairs_at, scales_at, d_at = layout.offset("pairs"), layout.offset("scales"), layout.offset("d")
    both = _k6_sums(rows)

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        d = load_f16(weights + d_at)
        for b in range(8):
            w, x, record, scales = weights + 256 * b, columns + 32 * b, records + 16 * b, weights + scales_at + 32 * b
            low = load_bytes(weights + pairs_at + 128 * b)
            high = load_bytes(weights + pairs_at + 128 * b + 64)
            first, second = both(w, low, high, x, stride)
            first = subtract_offset(first, 32, record + 12, stride)
            second = subtract_offset(subtract_offset(second, 32, record + 8, stride), -32, record + 12, stride)
            first = scale_ints(first, load_i8_ints(scales))
            second = scale_ints(second, load_i8_ints(scales + 16))
            sums = accumulate(sums, add_ints(first, second), d, record, stride)
        return sums

    return unit


def _k3_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q3_K: 2 low bits, 1 high bit, 16 signed 6-bit scales."""
    layout = PACKED[name]
    high_at, scales_at, d_at = layout.offset("high1"), layout.offset("scales"), layout.offset("d")

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        d = load_f16(weights + d_at)
        for b in range(8):
            x, record = columns + 32 * b, records + 16 * b
            low = load_bytes(weights + 128 * b)
            top = load_bytes(weights + 128 * b + 64)
            high = load_bytes(weights + high_at + 64 * b)
            first, second = _step3(zero_narrow(rows), zero_narrow(rows), low, top, high, x, stride, 0)
            first, second = _step3(first, second, low, top, high, x, stride, 1)
            first, second = _step3(first, second, low, top, high, x, stride, 2)
            first, second = _step3(first, second, low, top, high, x, stride, 3)
            one = subtract_offset(widen(first), 4, record + 12, stride)
            two = subtract_offset(subtract_offset(widen(second), 4, record + 8, stride), -4, record + 12, stride)
            one = scale_ints(one, _scale3(weights + scales_at, 2 * b))
            two = scale_ints(two, _scale3(weights + scales_at, 2 * b + 1))
            sums = accumulate(sums, add_ints(one, two), d, record, stride)
        return sums

    return unit


def _k2_unit(rows: int, name: str) -> Callable[..., Any]:
    """Q2_K: 16 columns share a 4-bit scale and a 4-bit minimum."""
    layout = PACKED[name]
    scales_at, d_at, m_at = layout.offset("scales"), layout.offset("d"), layout.offset("m")

    @inline
    def step(first: Any, second: Any, low: Any, top: Any, x: int, stride: int, j: int) -> Any:
        first = dot4_narrow(first, _field2(low, j), x + 4 * j, stride)
        return first, dot4_narrow(second, _field2(top, j), x + 16 + 4 * j, stride)

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        d = load_f16(weights + d_at)
        m = load_f16(weights + m_at)
        for b in range(8):
            x, record = columns + 32 * b, records + 16 * b
            low = load_bytes(weights + 128 * b)
            top = load_bytes(weights + 128 * b + 64)
            first, second = step(zero_narrow(rows), zero_narrow(rows), low, top, x, stride, 0)
            first, second = step(first, second, low, top, x, stride, 1)
            first, second = step(first, second, low, top, x, stride, 2)
            first, second = step(first, second, low, top, x, stride, 3)
            one = load_u8_ints(weights + scales_at + 32 * b)
            two = load_u8_ints(weights + scales_at + 32 * b + 16)
            ints = scale_ints(widen(first), mask_ints(one, 15))
            ints = add_ints(ints, scale_ints(widen(second), mask_ints(two, 15)))
            sums = accumulate(sums, ints, d, record, stride)
            one = shift_ints_right(one, 4)
            two = shift_ints_right(two, 4)
            # minus the first minimum times the first half's sum, minus the second times what is left of the sum
            minimums = subtract_scaled_sums(zero_ints(rows), two, record + 8, stride)
            minimums = subtract_scaled_sums(minimums, one - two, record + 12, stride)
            sums = accumulate(sums, minimums, m, record, stride)
        return sums

    return unit


def _float_unit(rows: int, name: str) -> Callable[..., Any]:
    """F32, F16, BF16: weights widened to float32, activations float32."""
    load = {"F32": load_floats, "F16": load_f16, "BF16": load_bf16}[name]
    step = 64 if name == "F32" else 32

    @inline
    def unit(sums: Any, weights: int, columns: int, stride: int, records: int) -> Any:
        # even and odd columns apart: two chains of sums keep up with memory, one does not
        odd = zero_floats(rows)
        for c in range(0, 32, 2):
            sums = add_broadcast(sums, load(weights + step * c), columns + 4 * c, stride)
            odd = add_broadcast(odd, load(weights + step * c + step), columns + 4 * c + 4, stride)
        return add_tiles(sums, odd)

    return unit


_MAKERS: dict[str, Callable[[int, str], Callable[..., Any]]] = {
    "F32": _float_unit,
    "F16": _float_unit,
    "BF16": _float_unit,
    "Q4_0": _nibble_unit,
    "Q4_1": _nibble_unit,
    "Q5_0": _nibble_unit,
    "Q5_1": _nibble_unit,
    "Q8_0": _q8_unit,
    "Q2_K": _k2_unit,
    "Q3_K": _k3_unit,
    "Q4_K": _k45_unit,
    "Q5_K": _k45_unit,
    "Q6_K": _k6_unit,
}


# What is left over after the largest tiles is one tile, or four rows and then one. A level that is there to run anywhere
# is not worth the time that these take to compile.
_SMALL_TILES = (4, 3, 2, 1)
_TWO_SUMS = ("Q2_K", "Q3_K", "F32", "F16", "BF16")


def tile_sizes(name: str) -> tuple[int, ...]:
    """Rows of activations in the tiles of a format, largest first: fewer where each row needs two sums in registers."""
    level = _level.current()
    two_sums = name in _TWO_SUMS or (name == "Q6_K" and level.name != "avx2")
    most = level.tile_tokens_two_sums if two_sums else level.tile_tokens
    if level.name == "portable":
        return most, 1
    return (most, *(rows for rows in _SMALL_TILES if rows < most))


def unit_function(name: str, rows: int) -> Callable[..., Any]:
    """The unit of a packed format for tiles of `rows` rows of activations; see the module's docstring."""
    return _MAKERS[name](rows, name)
