"""The most likely token, inside a step: so that the next step can follow without anybody's help.

Blocks of the first operation each find the largest of their logits, the second picks the best of them and writes its
id where the next token's embedding is looked up. Of equal logits the lowest id wins, as everywhere.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.choose import CHOSEN, COUNT, LOGITS, NEXT, NUM_PARTS, PART, PART_BYTES, PARTS
from headrace.kernels.vectors import (
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    splat_float,
    store_f32,
    store_i64,
    sum_lanes,
)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@inline
def _first_at(values: int, count: int, wanted: np.float32) -> int:
    """The index of the first value that equals `wanted`; 0 if none does (then something is not finite)."""
    for i in range(count // 16):
        if max_lanes(load_floats(values + 64 * i)) == wanted:
            for j in range(16):
                if load_f32(values + 64 * i + 4 * j) == wanted:
                    return 16 * i + j
    for i in range(count // 16 * 16, count):
        if load_f32(values + 4 * i) == wanted:
            return i
    return 0


def find(op: int, block: int, scratch: int) -> None:
    """The largest logit of a block, and its id."""
    part, count = load_i64(op + PART), load_i64(op + COUNT)
    start = min(block * part, count)
    size = min(part, count - start)
    values = load_i64(op + LOGITS) + 4 * start
    top = splat_float(_NEGATIVE_INFINITY)
    spread = splat_float(_ZERO)
    for i in range(size // 16):
        value = load_floats(values + 64 * i)
        top = maximum(value, top)
        spread = spread + (value - value)
    largest, poison = max_lanes(top), sum_lanes(spread)
    for i in range(size // 16 * 16, size):
        value = load_f32(values + 4 * i)
        largest = value if value > largest else largest
        poison += value - value
    store_f32(scratch, largest)
    store_f32(scratch + 4, poison)
    store_i64(scratch + 8, start + _first_at(values, size, largest))


def commit_find(op: int, block: int, scratch: int) -> None:
    """Copies a block's record."""
    record = load_i64(op + PARTS) + PART_BYTES * block
    store_i64(record, load_i64(scratch))
    store_i64(record + 8, load_i64(scratch + 8))


def choose(op: int, block: int, scratch: int) -> None:
    """The id of the largest of all blocks."""
    parts = load_i64(op + PARTS)
    best, poison, token = _NEGATIVE_INFINITY, _ZERO, -1
    for i in range(load_i64(op + NUM_PARTS)):
        record = parts + PART_BYTES * i
        value = load_f32(record)
        poison += load_f32(record + 4)
        if value > best:
            best = value
            token = load_i64(record + 8)
    if not (poison == _ZERO):
        token = -1
    store_i64(scratch, token)


def commit_choose(op: int, block: int, scratch: int) -> None:
    """Tells the caller, and the next token's embedding."""
    token = load_i64(scratch)
    store_i64(load_i64(op + CHOSEN), token)
    if load_i64(op + NEXT) != 0:
        # a step that follows a damaged one still has to read within the matrix
        store_i64(load_i64(op + NEXT), max(token, 0))
