"""Pages of keys and values in compressed formats: how their numbers are read, and the kernels that make them.

Layouts are those of `page_formats.py`. Numbers come in pairs, of two dimensions of keys or two tokens of values, which is
how attention takes them: 16 lanes of the even one, 16 of the odd one. What scales and minimums do to them is left to the
caller, who applies them to the other side of a product, where there is less to multiply.

`narrow` turns one page into one of a smaller format. All of its arithmetic is float32, rounded to nearest even after
every operation, so its twin gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from headrace.kernels.dots import inline
from headrace.kernels.fields.pages import BLOCK_HEADS, HEADS, PAGE_TOKENS, SOURCE, TARGET, WIDTH
from headrace.kernels.page_formats import F16, FORMAT_BITS, Q4, Q8, head_bytes, key_bytes, used_bytes, value_group_width
from headrace.kernels.vectors import (
    absolute,
    floats_to_ints,
    ints_to_floats,
    lane,
    load_f16,
    load_f16_scalar,
    load_f32,
    load_floats,
    load_i8_ints,
    load_i64,
    load_short_floats,
    load_u8_ints,
    mask_ints,
    max_lanes,
    maximum,
    round_even,
    shift_ints_left,
    shift_ints_right,
    splat_float,
    splat_int,
    store_f16,
    store_f32,
    store_floats,
    store_ints_as_i8,
    store_short_floats_up,
    zero_unless_greater,
)

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LARGEST_F16 = np.float32(65504.0)
_LARGEST_BYTE = np.float32(127.0)
_LARGEST_NIBBLE = np.float32(15.0)
_ZERO_PARTS = np.float32(16.0)
_LARGEST_ZERO = np.float32(255.0)

for _function in (value_group_width, key_bytes, used_bytes, head_bytes):
    register_jitable(forceinline=True, error_model="numpy")(_function)


# ---- reading ----


@inline
def _even_f16(at: int) -> Any:
    return load_f16(at)


@inline
def _odd_f16(at: int) -> Any:
    return load_f16(at + 32)


@inline
def _even_q8(at: int) -> Any:
    return ints_to_floats(load_i8_ints(at))


@inline
def _odd_q8(at: int) -> Any:
    return ints_to_floats(load_i8_ints(at + 16))


@inline
def _even_q4(at: int) -> Any:
    return ints_to_floats(mask_ints(load_u8_ints(at), 15))


@inline
def _odd_q4(at: int) -> Any:
    return ints_to_floats(shift_ints_right(load_u8_ints(at), 4))


PAIRS: dict[int, tuple[Callable[[int], Any], Callable[[int], Any], int]] = {
    F16: (_even_f16, _odd_f16, 64),
    Q8: (_even_q8, _odd_q8, 32),
    Q4: (_even_q4, _odd_q4, 16),
}
"""By format: the even and the odd half of a pair at an address, as float32, and the bytes of a pair."""


# ---- narrowing ----


@inline
def _limit(x: Any, low: Any, high: Any) -> Any:
    """Into [low, high]; not-a-number becomes `low`."""
    negative = maximum(splat_float(_ZERO) - maximum(x, splat_float(low)), splat_float(-high))
    return splat_float(_ZERO) - negative


@inline
def _load_finite(at: int) -> Any:
    """float16 values, clamped to finite ones."""
    return _limit(load_f16(at), -_LARGEST_F16, _LARGEST_F16)


@inline
def _inverse(step: Any) -> Any:
    """1 / step, 0 for 0."""
    return zero_unless_greater(step, splat_float(_ZERO), splat_float(_ONE) / step)


@inline
def _numbers(x: Any, largest: Any) -> Any:
    """Whole numbers nearest to x, in [-largest, largest] or, for `largest` = 15, in [0, 15]."""
    low = _ZERO if largest == _LARGEST_NIBBLE else -largest
    return floats_to_ints(_limit(round_even(x), low, largest))


@inline
def _narrow_keys_q8(source: int, target: int, width: int, page_tokens: int, scratch: int) -> None:
    for d in range(width):
        top = splat_float(_ZERO)
        for panel in range(page_tokens // 16):
            top = maximum(absolute(_load_finite(source + 32 * (panel * width + d))), top)
        store_f32(scratch + 4 * d, max_lanes(top))
    for i in range(width // 16):
        store_short_floats_up(target + 16 * i, load_floats(scratch + 64 * i) / splat_float(_LARGEST_BYTE))
        store_floats(scratch + 64 * i, _inverse(load_short_floats(target + 16 * i)))
    out = target + width
    for _ in range(page_tokens // 16):
        for d in range(width):
            number = _load_finite(source) * splat_float(load_f32(scratch + 4 * d))
            store_ints_as_i8(out, _numbers(number, _LARGEST_BYTE))
            source += 32
            out += 16


@inline
def _narrow_keys_q4(source: int, target: int, width: int, page_tokens: int, scratch: int) -> None:
    lows, inverses = scratch, scratch + 4 * width
    for d in range(width):
        top, depth = splat_float(-_LARGEST_F16), splat_float(-_LARGEST_F16)
        for panel in range(page_tokens // 16):
            key = _load_finite(source + 32 * (panel * width + d))
            top, depth = maximum(key, top), maximum(splat_float(_ZERO) - key, depth)
        low = _ZERO - max_lanes(depth)
        store_f32(lows + 4 * d, low)
        store_f32(inverses + 4 * d, (max_lanes(top) - low) / _LARGEST_NIBBLE)
    steps = target + 2 * width
    for i in range(width // 16):
        store_f16(target + 32 * i, load_floats(lows + 64 * i))
        store_short_floats_up(steps + 16 * i, load_floats(inverses + 64 * i))
        store_floats(inverses + 64 * i, _inverse(load_short_floats(steps + 16 * i)))
    out = steps + width
    for _ in range(page_tokens // 16):
        for pair in range(width // 2):
            low, inverse = lows + 8 * pair, inverses + 8 * pair
            even = (_load_finite(source) - splat_float(load_f32(low))) * splat_float(load_f32(inverse))
            odd = (_load_finite(source + 32) - splat_float(load_f32(low + 4))) * splat_float(load_f32(inverse + 4))
            both = _numbers(even, _LARGEST_NIBBLE) | shift_ints_left(_numbers(odd, _LARGEST_NIBBLE), 4)
            store_ints_as_i8(out, both)
            source += 64
            out += 16


@inline
def _narrow_values_q8(source: int, target: int, width: int, page_tokens: int, scratch: int) -> None:
    strips = value_group_width(width) // 16
    groups = width // 16 // strips
    out = target + 2 * page_tokens * groups
    for group in range(groups):
        scales = target + 2 * page_tokens * group
        for t in range(page_tokens):
            top = splat_float(_ZERO)
            for strip in range(strips):
                top = maximum(absolute(_load_finite(source + 32 * (strip * page_tokens + t))), top)
            store_f32(scratch + 4 * t, max_lanes(top))
        for i in range(page_tokens // 16):
            store_f16(scales + 32 * i, load_floats(scratch + 64 * i) / splat_float(_LARGEST_BYTE))
            store_floats(scratch + 64 * i, _inverse(load_f16(scales + 32 * i)))
        for _ in range(strips):
            for t in range(page_tokens):
                number = _load_finite(source) * splat_float(load_f32(scratch + 4 * t))
                store_ints_as_i8(out, _numbers(number, _LARGEST_BYTE))
                source += 32
                out += 16


@inline
def _narrow_values_q4(source: int, target: int, width: int, page_tokens: int, scratch: int) -> None:
    strips = value_group_width(width) // 16
    groups = width // 16 // strips
    depths, inverses = scratch, scratch + 4 * page_tokens
    out = target + 2 * page_tokens * groups
    for group in range(groups):
        steps = target + page_tokens * group
        zeros = steps + page_tokens * groups
        for t in range(page_tokens):
            top, depth = splat_float(_ZERO), splat_float(_ZERO)
            for strip in range(strips):
                value = _load_finite(source + 32 * (strip * page_tokens + t))
                top, depth = maximum(value, top), maximum(splat_float(_ZERO) - value, depth)
            store_f32(depths + 4 * t, max_lanes(depth))
            store_f32(inverses + 4 * t, (max_lanes(top) + max_lanes(depth)) / _LARGEST_NIBBLE)
        for i in range(page_tokens // 16):
            store_short_floats_up(steps + 16 * i, load_floats(inverses + 64 * i))
            inverse = _inverse(load_short_floats(steps + 16 * i))
            store_floats(inverses + 64 * i, inverse)
            zero = round_even(load_floats(depths + 64 * i) * inverse * splat_float(_ZERO_PARTS))
            zero = _limit(zero, _ZERO, _LARGEST_ZERO)
            store_ints_as_i8(zeros + 16 * i, floats_to_ints(zero))
            store_floats(depths + 64 * i, zero / splat_float(_ZERO_PARTS))
        for _ in range(strips):
            for pair in range(page_tokens // 2):
                zero, inverse = depths + 8 * pair, inverses + 8 * pair
                even = _load_finite(source) * splat_float(load_f32(inverse)) + splat_float(load_f32(zero))
                odd = _load_finite(source + 32) * splat_float(load_f32(inverse + 4)) + splat_float(load_f32(zero + 4))
                both = _numbers(even, _LARGEST_NIBBLE) | shift_ints_left(_numbers(odd, _LARGEST_NIBBLE), 4)
                store_ints_as_i8(out, both)
                source += 64
                out += 16


@inline
def _widen_q8(source: int, target: int, width: int, page_tokens: int) -> None:
    """A head of q8 as one of f16, for narrowing it further."""
    at = source + width
    for _ in range(page_tokens // 16):
        for d in range(width):
            # one step for 16 tokens: taken out of the vector that holds its neighbours'
            step = splat_float(lane(load_short_floats(source + d // 16 * 16), d % 16))
            store_f16(target, _even_q8(at) * step)
            at += 16
            target += 32
    strips = value_group_width(width) // 16
    groups = width // 16 // strips
    scales = at
    at += 2 * page_tokens * groups
    for strip in range(width // 16):
        for t in range(page_tokens):
            scale = load_f16_scalar(scales + 2 * (strip // strips * page_tokens + t))
            store_f16(target, _even_q8(at) * splat_float(scale))
            at += 16
            target += 32


def narrow_function(page_format: int) -> Callable[[int, int, int], None]:
    """The kernel that turns heads of a page into q8 or q4; q4 takes q8, too.

    Block b writes heads [b, b + 1) * BLOCK_HEADS of all layers' heads. Scratch: a head of f16, then what two float32 rows
    of D or P take.
    """
    narrow_keys, narrow_values = {
        Q8: (_narrow_keys_q8, _narrow_values_q8),
        Q4: (_narrow_keys_q4, _narrow_values_q4),
    }[page_format]

    def narrow(op: int, block: int, scratch: int) -> None:
        width, page_tokens = load_i64(op + WIDTH), load_i64(op + PAGE_TOKENS)
        source_format = load_i64(op + SOURCE) & FORMAT_BITS
        first = block * load_i64(op + BLOCK_HEADS)
        rows = scratch + head_bytes(F16, width, page_tokens)
        for head in range(first, min(first + load_i64(op + BLOCK_HEADS), load_i64(op + HEADS))):
            source = load_i64(op + SOURCE) - source_format + head * head_bytes(source_format, width, page_tokens)
            target = load_i64(op + TARGET) + head * head_bytes(page_format, width, page_tokens)
            if page_format == Q4 and source_format == Q8:
                _widen_q8(source, scratch, width, page_tokens)
                source = scratch
            narrow_keys(source, target, width, page_tokens, rows)
            values = key_bytes(page_format, width, page_tokens)
            narrow_values(source + 2 * width * page_tokens, target + values, width, page_tokens, rows)
            used = used_bytes(page_format, width, page_tokens)
            for at in range(used, head_bytes(page_format, width, page_tokens), 16):
                store_ints_as_i8(target + at, splat_int(0))

    return narrow
