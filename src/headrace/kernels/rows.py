"""Operations on whole rows of activations: residual sum, RMS norm, quantisation to signed bytes.

    sum[t]  = input[t] + addend[t]                     addend optional; optionally normed by itself first
              or f(input[t]) * addend[t]               f = SiLU or GELU, where gate and up come from two matrices
    norm[t] = sum[t] / sqrt(mean(sum[t]^2) + epsilon) * weight      without a weight: norm = sum
    out[t]  = norm[t], quantised per 32 columns and, if asked, as float32 behind it

A row of `out` is the quantised row (see `packed.py`), padded to 64 bytes, then the float32 row if there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.rows import (
    ADDEND,
    ADDEND_NORM,
    ADDEND_STRIDE,
    BLOCK_TOKENS,
    COLUMNS,
    COMBINE,
    EPSILON,
    FLOATS,
    INPUT,
    INPUT_STRIDE,
    OUTPUT,
    OUTPUT_STRIDE,
    QUANTISED,
    ROW_TABLE,
    SUM,
    SUM_STRIDE,
    TOKENS,
    WEIGHT,
)
from headrace.kernels.math import gelu, silu
from headrace.kernels.program import NONE, SILU
from headrace.kernels.tiles import sum_bytes
from headrace.kernels.vectors import (
    absolute,
    floats_to_ints,
    fma,
    int_lane,
    load_bytes,
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    round_even,
    splat_float,
    store_f32,
    store_floats,
    store_i32,
    store_ints_as_i8,
    sum_lanes,
    sum_quads,
)

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LARGEST_BYTE = np.float32(127.0)


@inline
def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copies a multiple of 64 bytes."""
    for i in range(num_bytes // 64):
        store_floats(target + 64 * i, load_floats(source + 64 * i))


@inline
def root_mean_square(row: int, columns: int, epsilon: Any) -> Any:
    """1 / sqrt(mean(row^2) + epsilon), summed in 16 lanes and then in one fixed tree."""
    total = splat_float(_ZERO)
    for i in range(columns // 16):
        value = load_floats(row + 64 * i)
        total = fma(value, value, total)
    mean = sum_lanes(total) / np.float32(columns)
    return _ONE / np.float32(np.sqrt(mean + epsilon))


@inline
def quantise_row(row: int, columns: int, out: int) -> None:
    """float32 [columns] to signed bytes with a record per 32 columns. Not-a-number makes every scale of the row one."""
    poison = splat_float(_ZERO)
    for b in range(columns // 32):
        low = load_floats(row + 128 * b)
        high = load_floats(row + 128 * b + 64)
        largest = max_lanes(maximum(absolute(low), absolute(high)))
        both = low + high
        # zero, or not-a-number if any value is infinite or not a number
        poison = poison + (both - both)
        inverse = _ZERO
        if largest > _ZERO:
            inverse = _LARGEST_BYTE / largest
        if not (inverse < np.float32(3.0e38)):
            inverse = _ZERO
        store_ints_as_i8(out + 32 * b, floats_to_ints(round_even(low * splat_float(inverse))))
        store_ints_as_i8(out + 32 * b + 16, floats_to_ints(round_even(high * splat_float(inverse))))
        store_f32(out + columns + 16 * b, largest / _LARGEST_BYTE)
    _sum_records(columns, out, sum_lanes(poison))


@inline
def _sum_records(columns: int, out: int, poison: Any) -> None:
    """Fills in the sums of a quantised row's records, two blocks at a time, and spreads not-a-number."""
    blocks = columns // 32
    for pair in range((blocks + 1) // 2):
        # lanes 0, 4, 8, 12: sums of 16 columns each; past an odd last block they are of no use
        sums = sum_quads(sum_bytes(load_bytes(out + 64 * pair)))
        for i in range(min(2, blocks - 2 * pair)):
            record = out + columns + 32 * pair + 16 * i
            first = int_lane(sums, 8 * i)
            total = first + int_lane(sums, 8 * i + 4)
            scale = load_f32(record) + poison
            store_f32(record, scale)
            store_f32(record + 4, scale * np.float32(total))
            store_i32(record + 8, total)
            store_i32(record + 12, first)


@inline
def _token_range(op: int, block: int) -> Any:
    tokens = load_i64(op + TOKENS)
    block_tokens = load_i64(op + BLOCK_TOKENS)
    t0 = min(block * block_tokens, tokens)
    return t0, min(t0 + block_tokens, tokens)


@inline
def _row_sum(op: int, t: int, total: int) -> None:
    """input[t] + addend[t], into `total`."""
    columns = load_i64(op + COLUMNS)
    source = load_i64(op + INPUT)
    table = load_i64(op + ROW_TABLE)
    row = t
    if table != 0:
        row = load_i64(table + 8 * t)
    source += row * load_i64(op + INPUT_STRIDE)
    addend = load_i64(op + ADDEND)
    if addend == 0:
        for i in range(columns // 16):
            store_floats(total + 64 * i, load_floats(source + 64 * i))
        return
    addend += row * load_i64(op + ADDEND_STRIDE)
    combine = load_i64(op + COMBINE)
    if combine != NONE:
        for i in range(columns // 16):
            gate = load_floats(source + 64 * i)
            gate = silu(gate) if combine == SILU else gelu(gate)
            store_floats(total + 64 * i, gate * load_floats(addend + 64 * i))
        return
    norm = load_i64(op + ADDEND_NORM)
    if norm == 0:
        for i in range(columns // 16):
            store_floats(total + 64 * i, load_floats(source + 64 * i) + load_floats(addend + 64 * i))
        return
    factor = splat_float(root_mean_square(addend, columns, load_f32(op + EPSILON)))
    for i in range(columns // 16):
        normed = load_floats(addend + 64 * i) * factor * load_floats(norm + 64 * i)
        store_floats(total + 64 * i, load_floats(source + 64 * i) + normed)


def compute(op: int, block: int, scratch: int) -> None:
    """Per token, scratch holds the sum row, then the output row."""
    t0, t1 = _token_range(op, block)
    columns = load_i64(op + COLUMNS)
    quantised = load_i64(op + QUANTISED)
    floats = load_i64(op + FLOATS)
    stride = load_i64(op + OUTPUT_STRIDE)
    weight = load_i64(op + WEIGHT)
    normed = scratch + (t1 - t0) * (4 * columns + stride)
    for t in range(t1 - t0):
        total = scratch + t * (4 * columns + stride)
        out = total + 4 * columns
        _row_sum(op, t0 + t, total)
        result = total
        if weight != 0:
            factor = splat_float(root_mean_square(total, columns, load_f32(op + EPSILON)))
            result = normed
            for i in range(columns // 16):
                store_floats(normed + 64 * i, load_floats(total + 64 * i) * factor * load_floats(weight + 64 * i))
        if quantised != 0:
            quantise_row(result, columns, out)
        if floats != 0:
            copy_bytes(out + quantised, result, 4 * columns)


def commit(op: int, block: int, scratch: int) -> None:
    """Copies the sum rows and the output rows."""
    t0, t1 = _token_range(op, block)
    columns = load_i64(op + COLUMNS)
    stride = load_i64(op + OUTPUT_STRIDE)
    sums = load_i64(op + SUM)
    for t in range(t1 - t0):
        total = scratch + t * (4 * columns + stride)
        if sums != 0:
            copy_bytes(sums + (t0 + t) * load_i64(op + SUM_STRIDE), total, 4 * columns)
        num_bytes = load_i64(op + QUANTISED) + load_i64(op + FLOATS)
        copy_bytes(load_i64(op + OUTPUT) + (t0 + t) * stride, total + 4 * columns, num_bytes)
