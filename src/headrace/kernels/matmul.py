"""Matrix products: a packed matrix times one or many rows of activations.

    out[t, n] = sum over k of weights[n, k] * activations[t, k]        t in tokens, n in rows of the matrix

A block is some groups of 16 rows for some tokens. For each group the tokens are taken in tiles, so its weights are
read once from memory and again from the nearest cache; what is left over is taken row by row, with the same bits.

With an activation function the matrix holds groups of gate rows and up rows in turn, and out[t, n] is
f(gate[t, n]) * up[t, n], with half as many columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.kernels.dots import inline, tile_rows, unit_function
from headrace.kernels.fields.matmul import (
    ACTIVATION,
    BLOCK_GROUPS,
    BLOCK_TOKENS,
    GROUPS,
    INPUT,
    INPUT_STRIDE,
    OUTPUT,
    OUTPUT_STRIDE,
    RECORDS,
    TOKENS,
    UNITS,
    WEIGHTS,
)
from headrace.kernels.math import gelu, silu
from headrace.kernels.packed import PACKED
from headrace.kernels.program import NONE, SILU
from headrace.kernels.tiles import store_tile, zero_floats
from headrace.kernels.vectors import load_floats, load_i64, prefetch, store_floats

PREFETCH_BYTES = 4096


@inline
def block_range(op: int, block: int) -> Any:
    """(first group, end group, first token, end token) of a block; clamped, whatever the block's number."""
    groups = load_i64(op + GROUPS)
    tokens = load_i64(op + TOKENS)
    block_groups = load_i64(op + BLOCK_GROUPS)
    block_tokens = load_i64(op + BLOCK_TOKENS)
    per_row = (tokens + block_tokens - 1) // block_tokens
    g0 = min((block // per_row) * block_groups, groups)
    t0 = (block % per_row) * block_tokens
    return g0, min(g0 + block_groups, groups), t0, min(t0 + block_tokens, tokens)


def compute_function(name: str) -> Callable[[int, int, int], None]:
    """The compute function for one packed format."""
    layout = PACKED[name]
    tile = tile_rows(name)
    one_row, more_rows = unit_function(name, 1), unit_function(name, tile)
    unit_bytes = layout.unit_bytes
    lines = min(unit_bytes // 64, 16) + 1
    column_step = layout.unit_columns * (1 if layout.integer_activations else 4)
    record_step = layout.unit_columns // 32 * 16 if layout.integer_activations else 0

    @inline
    def one(weights: int, units: int, x: int, records: int, out: int) -> None:
        sums = zero_floats(1)
        for _ in range(units):
            for line in range(lines):
                prefetch(weights + PREFETCH_BYTES + 64 * line)
            sums = one_row(sums, weights, x, 0, records)
            weights += unit_bytes
            x += column_step
            records += record_step
        store_tile(sums, out, 0)

    @inline
    def many(weights: int, units: int, x: int, stride: int, records: int, out: int, out_stride: int) -> None:
        sums = zero_floats(tile)
        for _ in range(units):
            sums = more_rows(sums, weights, x, stride, records)
            weights += unit_bytes
            x += column_step
            records += record_step
        store_tile(sums, out, out_stride)

    def compute(op: int, block: int, scratch: int) -> None:
        g0, g1, t0, t1 = block_range(op, block)
        units = load_i64(op + UNITS)
        stride = load_i64(op + INPUT_STRIDE)
        records = load_i64(op + RECORDS)
        first = load_i64(op + INPUT) + t0 * stride
        weights = load_i64(op + WEIGHTS) + g0 * units * unit_bytes
        row_bytes = (g1 - g0) * 64
        for g in range(g1 - g0):
            x = first
            out = scratch + 64 * g
            left = t1 - t0
            while left >= tile:
                many(weights, units, x, stride, x + records, out, row_bytes)
                x += tile * stride
                out += tile * row_bytes
                left -= tile
            while left > 0:
                one(weights, units, x, x + records, out)
                x += stride
                out += row_bytes
                left -= 1
            weights += units * unit_bytes
        activation = load_i64(op + ACTIVATION)
        if activation != NONE:
            _gate(scratch, (t1 - t0) * (g1 - g0) // 2, activation)

    return compute


@inline
def _gate(scratch: int, pairs: int, activation: int) -> None:
    """Pairs of (gate, up) vectors become f(gate) * up, packed to the front."""
    for i in range(pairs):
        gate = load_floats(scratch + 128 * i)
        up = load_floats(scratch + 128 * i + 64)
        if activation == SILU:
            store_floats(scratch + 64 * i, silu(gate) * up)
        else:
            store_floats(scratch + 64 * i, gelu(gate) * up)


def commit(op: int, block: int, scratch: int) -> None:
    """Copies a block's rows from scratch to the result."""
    g0, g1, t0, t1 = block_range(op, block)
    shift = 0 if load_i64(op + ACTIVATION) == NONE else 1
    out_stride = load_i64(op + OUTPUT_STRIDE)
    width = (g1 - g0) >> shift
    out = load_i64(op + OUTPUT) + t0 * out_stride + 64 * (g0 >> shift)
    for t in range(t1 - t0):
        for g in range(width):
            store_floats(out + t * out_stride + 64 * g, load_floats(scratch + 64 * (t * width + g)))
