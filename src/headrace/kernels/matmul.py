"""Matrix products: a packed matrix times one or many rows of activations.

    out[t, n] = sum over k of weights[n, k] * activations[t, k]        t in tokens, n in rows of the matrix

A block is some groups of 16 rows for some tokens. For each group the tokens are taken in tiles, so its weights are
read once from memory and again from the nearest cache; what is left over is taken in smaller tiles, with the same bits.

With an activation function the matrix holds groups of gate rows and up rows in turn, and out[t, n] is
f(gate[t, n]) * up[t, n], with half as many columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.kernels.dots import inline, tile_sizes, unit_function
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
    unit_bytes = PACKED[name].unit_bytes
    all_rows = _no_rows
    for rows in reversed(tile_sizes(name)):
        all_rows = _in_tiles(rows, _tile_function(name, rows), all_rows)
    multiply = all_rows

    def compute(op: int, block: int, scratch: int) -> None:
        g0, g1, t0, t1 = block_range(op, block)
        units = load_i64(op + UNITS)
        stride = load_i64(op + INPUT_STRIDE)
        records = load_i64(op + RECORDS)
        x = load_i64(op + INPUT) + t0 * stride
        weights = load_i64(op + WEIGHTS) + g0 * units * unit_bytes
        row_bytes = (g1 - g0) * 64
        for g in range(g1 - g0):
            multiply(weights, units, x, stride, records, scratch + 64 * g, row_bytes, t1 - t0, 1)
            weights += units * unit_bytes
        activation = load_i64(op + ACTIVATION)
        if activation != NONE:
            _gate(scratch, (t1 - t0) * (g1 - g0) // 2, activation)

    return compute


def _tile_function(name: str, rows: int) -> Callable[..., None]:
    """A group of weights times one tile of `rows` rows of activations."""
    layout = PACKED[name]
    unit = unit_function(name, rows)
    unit_bytes = layout.unit_bytes
    lines = unit_bytes // 64 + 1
    column_step = layout.unit_columns * (1 if layout.integer_activations else 4)
    record_step = layout.unit_columns // 32 * 16 if layout.integer_activations else 0
    always_ahead = rows < 4  # the first tile, or the last one after many: not worth a second loop in machine code

    @inline
    def one_tile(weights: int, units: int, x: int, stride: int, records: int, out: int, out_stride: int, ahead: int) -> None:
        sums = zero_floats(rows)
        for _ in range(units):
            if always_ahead or ahead != 0:
                for line in range(lines):
                    prefetch(weights + PREFETCH_BYTES + 64 * line)
            sums = unit(sums, weights, x, stride, records)
            weights += unit_bytes
            x += column_step
            records += record_step
        store_tile(sums, out, out_stride)

    return one_tile


@inline
def _no_rows(
    weights: int, units: int, x: int, stride: int, records: int, out: int, out_stride: int, left: int, ahead: int
) -> None:
    """What follows the smallest tile, which has one row."""


def _in_tiles(rows: int, one_tile: Callable[..., None], smaller: Callable[..., None]) -> Callable[..., None]:
    """A group of weights times `left` rows of activations: tiles of `rows` rows, the rest in smaller ones.

    Only the first tile asks for weights ahead: for the others they are in the cache.
    """

    @inline
    def multiply(
        weights: int, units: int, x: int, stride: int, records: int, out: int, out_stride: int, left: int, ahead: int
    ) -> None:
        while left >= rows:
            one_tile(weights, units, x, stride, x + records, out, out_stride, ahead)
            x += rows * stride
            out += rows * out_stride
            left -= rows
            ahead = 0
        smaller(weights, units, x, stride, records, out, out_stride, left, ahead)

    return multiply


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
